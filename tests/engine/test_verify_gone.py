"""`midstream verify` and `midstream explain` where a record file is gone: its turn is counted, and all others are computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from explained import World
from families import write_model

from midstream.cli import main

DIGEST = "ab" * 32
FILE = f"record-files/d/{DIGEST}.parquet"
REFERENCE = {
    "reference": {
        "format": "midstream_records_v1",
        "file": FILE,
        "sha256": DIGEST,
        "bytes": 1000,
        "rows": 8,
        "choices": [{"index": 0, "start": 0, "count": 8}],
    },
    "choice": 0,
    "columns": ["logprob", "sampling_logprob", "sampling_mask"],
}


def leave_to_a_file(turn: dict[str, Any]) -> None:
    for name in ("logprobs", "sampling_logprobs", "sampling_masks"):
        turn[name] = None
    turn["record_reference"] = REFERENCE


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Records of two turns and of the snapshot that made them. The first one's file is gone."""
    model = write_model("llama", tmp_path / "model", 0)
    world = World({"step-1": model})
    world.turn("step-1", tokens=8)
    world.turn("step-1", tokens=8)
    rows = [
        {"session": one["session"], "turn": 1, "logprobs": world.train(one["turn"], "step-1").tolist()}
        for one in world.records
    ]
    (tmp_path / "trainer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    leave_to_a_file(world.records[0]["turn"])
    where = tmp_path / "kept" / "records" / "d"
    where.mkdir(parents=True)
    (where / "1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in world.records))
    shutil.copytree(model, tmp_path / "bucket" / "step-1")
    return tmp_path


def test_they_say_what_they_could_not_do_and_exit_with_a_code_of_its_own(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = ("--bucket", (place / "bucket").as_uri())
    verify = ["verify", str(place / "kept"), *bucket]
    assert main([*verify, "--out", str(place / "statement.json")]) == 3
    said = capsys.readouterr()
    assert "1 turns could not be verified: file gone" in said.out
    assert "1 turns, 8 tokens verified" in said.out
    assert "1 record file is gone, so 1 turns, " in said.err
    assert FILE in said.err
    statement = json.loads((place / "statement.json").read_text())
    assert statement["result"] == "clean"
    assert statement["not_verified"] == {"file gone": 1}
    assert statement["record_files_gone"]["files"] == {FILE: 1}
    assert statement["record_files_gone"]["oldest"] == 1.0
    assert main([*verify, "--allow-gone"]) == 0
    explain = ["explain", str(place / "kept"), str(place / "trainer.jsonl"), *bucket]
    capsys.readouterr()
    assert main(explain) == 3
    said = capsys.readouterr()
    assert "1 turns not split: file gone" in said.out
    assert FILE in said.err
    assert main([*explain, "--allow-gone"]) == 0


def test_a_difference_outweighs_a_gap(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [segment] = (place / "kept").rglob("*.jsonl")
    first, second = map(json.loads, segment.read_text().splitlines())
    second["turn"]["logprobs"][3] -= 0.5
    segment.write_text("".join(json.dumps(one) + "\n" for one in (first, second)))
    assert main(["verify", str(place / "kept"), "--bucket", (place / "bucket").as_uri(), "--allow-gone"]) == 1
    assert "moved logprob" in capsys.readouterr().out
