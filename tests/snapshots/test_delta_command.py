"""`midstream delta` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from midstream.cli import main
from midstream.snapshots.content import MANIFEST_FILE, directory_content, encode_manifest


def checkpoint(directory: Path, seed: int, moved: bool) -> Path:
    directory.mkdir()
    array = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    if moved:
        array[np.random.default_rng(seed).random(array.shape) < 0.02] += 1
    save_file({"w": array, "same": np.ones(5, np.float32)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"seed": seed}))
    return directory


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "parent", 1, moved=False)
    checkpoint(tmp_path / "child", 2, moved=True)


def midstream(command: str) -> int:
    try:
        return main(["delta", *command.split()])
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.mark.parametrize("form", ["arc_v1", "ARC_V2", "xor_one_to_one_zstd"])
def test_encode_decode_verify(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert midstream(f"encode --parent parent --child child --out d --format {form}") == 0
    said = capsys.readouterr().out
    assert "wrote d: 1 of 2 tensors changed, 240.02 kB -> " in said
    assert "x smaller) in " in said
    assert midstream(f"decode --parent parent --delta d --out out --format {form} --threads 1") == 0
    assert "wrote out: 2 tensors, 240." in capsys.readouterr().out
    expected, found = load_file("child/model.safetensors"), load_file("out/model.safetensors")
    assert {k: v.tobytes() for k, v in expected.items()} == {k: v.tobytes() for k, v in found.items()}
    assert Path("out/config.json").read_text() == '{"seed": 2}'
    assert midstream(f"verify --parent parent --delta d --out child --format {form}") == 0
    assert "d fits parent; child is what it makes: " in capsys.readouterr().out


def test_a_delta_of_published_snapshots_has_no_manifest_of_theirs() -> None:
    """A signal for the delta was refused: its files are not what the child's manifest says."""
    for name in ("parent", "child"):
        files = ("config.json", "model.safetensors")
        (Path(name) / MANIFEST_FILE).write_bytes(encode_manifest(directory_content(Path(name), files)))
    assert midstream("encode --parent parent --child child --out d") == 0
    assert midstream("decode --parent parent --delta d --out out") == 0
    assert sorted(path.name for path in Path("d").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in Path("out").iterdir()) == ["config.json", "model.safetensors"]


def test_what_a_snapshot_does_wrong_is_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert midstream("encode --parent parent --child child --out d --level 19") == 0
    capsys.readouterr()
    assert midstream("verify --parent child --delta d") == 1
    assert "midstream delta verify: model.safetensors: w: checksum " in capsys.readouterr().err
    assert midstream("verify --parent parent --delta d --out parent") == 1
    assert capsys.readouterr().err == "midstream delta verify: parent: w is not what the delta makes\n"
    Path("d/model.safetensors").unlink()
    assert midstream("decode --parent parent --delta d --out out") == 1
    assert "midstream delta decode: model.safetensors: is not in the delta" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "encode --parent parent --child child --out d --format arc_v3",
            "'arc_v3' is not supported: its blobs hold pickles",
        ),
        ("encode --parent nowhere --child child --out d", "--parent nowhere: is not a directory"),
        ("encode --parent parent --child parent/config.json --out d", "--child parent/config.json: is not a"),
        ("encode --parent parent --child child --out child", "--out child: exists already"),
        ("encode --parent parent --child child --out d --level 23", "--level must be from -7 to 22, got 23"),
        ("encode --parent parent --child child --out d --level -1 --format arc_v1", "from 0 to 9, got -1"),
        ("verify --parent parent --delta child --threads 0", "--threads must be at least 1, got 0"),
        ("decode --parent parent --delta child", "required: --out"),
        ("", "required: ACTION"),
    ],
)
def test_what_was_asked_wrong_is_one_line_behind_the_usage_and_2(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert midstream(command) == 2
    error = capsys.readouterr().err
    *usage, last = error.splitlines()
    assert message in last
    # Of its own command, and only where the arguments are wrong.
    assert "".join(usage).startswith("usage: midstream delta") == ("required: " in message)
    assert usage == [] or "required: " in message
    assert sorted(p.name for p in Path().iterdir()) == ["child", "parent"]


def test_no_torch_is_imported() -> None:
    code = "import sys, midstream.commands.delta, midstream.snapshots.rebuild; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
