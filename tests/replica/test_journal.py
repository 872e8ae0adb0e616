"""Records on disk: nothing that was synced is lost or comes twice, and nobody who adds one waits."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import Running, running
from test_turns_api import SESSION, USER, an_engine, trace, turn

from midstream.client.journal import gaps_in, read_records, traces_of
from midstream.client.records import sequences_of
from midstream.replica.journal import Journal


def until(holds: Any, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.01)


def a_journal(tmp_path: Path, **more: Any) -> Journal:
    url = (tmp_path / "bucket").as_uri() + "/records/d"
    return Journal(tmp_path / "waiting", url, "replica-0", {"deployment": "d"}, **more)


def read(tmp_path: Path) -> list[dict[str, Any]]:
    return list(read_records((tmp_path / "bucket").as_uri()))


def added(journal: Journal, *values: int) -> None:
    for value in values:
        journal.add(lambda value=value: {"kind": "turn", "value": value})  # type: ignore[misc]


def test_records_come_back_in_order_out_of_many_segments(tmp_path: Path) -> None:
    journal = a_journal(tmp_path, segment_bytes=200)
    journal.start()
    for value in range(40):
        added(journal, value)
        until(lambda value=value: journal.stats().durable == value + 1)
    journal.close()
    journal.close()
    records = read(tmp_path)
    assert [record["value"] for record in records] == [*range(40)]
    assert [record["n"] for record in records] == [*range(1, 41)]
    assert len({record["segment"] for record in records}) > 5
    assert (journal.stats().waiting_bytes, list((tmp_path / "waiting").iterdir())) == (0, [])


def test_a_reader_that_goes_on_later_misses_no_replica(tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()

    def write(name: str, value: int) -> None:
        journal = Journal(tmp_path / name, f"{url}/records/d", name, {"deployment": "d"})
        journal.start()
        added(journal, value)
        journal.close()

    write("replica-0", 1)
    write("replica-1", 2)
    first = read(tmp_path)
    # The name of its segment sorts before that of replica-1's.
    write("replica-0", 3)
    seen = {record["segment"] for record in first}
    assert [record["value"] for record in first] == [1, 2]
    assert [record["value"] for record in read_records(url, seen=seen)] == [3]


def test_an_old_segment_goes_without_a_further_record(tmp_path: Path) -> None:
    journal = a_journal(tmp_path, segment_age_s=0.05)
    journal.start()
    added(journal, 1)
    until(lambda: journal.stats().durable == 1 and journal.stats().waiting_bytes == 0)
    assert [record["value"] for record in read(tmp_path)] == [1]
    journal.close()


WRITER = """
import sys, time
from pathlib import Path
from midstream.replica.journal import Journal
journal = Journal(Path(sys.argv[1]), sys.argv[2], "replica-0", {"deployment": "d"}, segment_bytes=2000)
journal.start()
for value in range(100_000):
    journal.add(lambda value=value: {"kind": "turn", "value": value})
    while value % 50 == 49 and journal.stats().durable <= value:
        time.sleep(0)
    if value % 50 == 49:
        print(value, flush=True)
"""


@pytest.mark.parametrize("after", [3, 30])
def test_a_killed_writer_loses_nothing_that_it_said_was_durable(tmp_path: Path, after: int) -> None:
    arguments = (str(tmp_path / "waiting"), (tmp_path / "bucket").as_uri() + "/records/d")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for _ in range(after):
            told = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.wait()
        rest = child.stdout.read().split()
    told = int(rest[-1]) if rest else told
    # A crash within a write leaves a part of a line.
    left = sorted((tmp_path / "waiting").iterdir())
    if left:
        with left[-1].open("ab") as file:
            file.write(b'{"n": 1, "replica": "rep')
    journal = a_journal(tmp_path)
    journal.start()
    added(journal, -1)
    journal.close()
    values = [record["value"] for record in read(tmp_path)]
    assert values[-1] == -1
    assert values[:-1] == [*range(len(values) - 1)]
    assert len(values) > told


def test_a_segment_that_was_put_and_not_removed_does_not_come_twice(tmp_path: Path) -> None:
    journal = a_journal(tmp_path)
    journal.start()
    added(journal, 1, 2)
    journal.close()
    (put,) = (tmp_path / "bucket" / "records" / "d").iterdir()
    shutil.copy(put, tmp_path / "waiting" / put.name)
    again = a_journal(tmp_path)
    again.start()
    again.close()
    # And a copy under another name, as a tool that moves buckets may make.
    shutil.copy(put, put.with_name(put.name.replace("00000001", "00000002")))
    assert [record["value"] for record in read(tmp_path)] == [1, 2]


def test_a_full_disk_loses_records_aloud_and_says_so_in_the_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bucket").write_text("no directory")
    journal = a_journal(tmp_path, bytes_max=600, segment_bytes=100)
    journal.start()
    with caplog.at_level(logging.WARNING):
        for value in range(30):
            added(journal, value)
            until(lambda value=value: journal.stats().durable + journal.stats().lost == value + 1)
        kept, lost = journal.stats().durable, journal.stats().lost
        assert 0 < kept < 30
        assert sum(path.stat().st_size for path in (tmp_path / "waiting").iterdir()) <= 600
        (tmp_path / "bucket").unlink()
        until(lambda: journal.stats().waiting_bytes == 0)
        added(journal, 100)
        until(lambda: journal.stats().durable == kept + 1)
        journal.close()
    records = read(tmp_path)
    assert [record.get("value") for record in records] == [*range(kept), None, 100]
    assert gaps_in(records) == lost == 30 - kept
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2
    assert "records are being lost" in said[0]
    assert f"{lost} were lost" in said[1]


def test_a_disk_that_fails_within_a_write_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, real, fails = a_journal(tmp_path), os.write, threading.Event()

    def write(file: int, data: Any) -> int:
        if not fails.is_set():
            return real(file, data)
        real(file, bytes(data)[:7])
        raise OSError(28, "No space left on device")

    journal.start()
    added(journal, 1)
    until(lambda: journal.stats().durable == 1)
    monkeypatch.setattr(os, "write", write)
    fails.set()
    added(journal, 2)
    until(lambda: journal.stats().lost == 1)
    fails.clear()
    added(journal, 3)
    journal.close()
    assert [(record["kind"], record.get("value")) for record in read(tmp_path)] == [
        ("turn", 1),
        ("gap", None),
        ("turn", 3),
    ]


def test_a_replica_with_a_journal_keeps_each_turn_and_reward_as_its_trace_tells_them(tmp_path: Path) -> None:
    journal = a_journal(tmp_path)

    async def main() -> Any:
        journal.start()
        async with running(tmp_path, an_engine(), journal=journal) as here:
            return await rollouts(here)

    async def rollouts(here: Running) -> Any:
        answer = await turn(here, [USER])
        await turn(here, [USER, answer["choices"][0]["message"], USER])
        await turn(here, [USER], headers={"x-midstream-records": "none"})
        asked = {"tenant": "", "key": "s", "given": {"reward": 2.0}, "look": False}
        assert (await here.http.post("/replica/reward", json=asked)).json()["taken"]
        told = await trace(here)
        assert (await here.http.get("/replica/report")).json()["records"]["lost"] == 0
        # Turns of one name, in another tree.
        await here.http.post("/replica/sessions/close", json={"tenant": "", "key": "s"})
        await turn(here, [USER], headers={**SESSION, "x-midstream-tenant": "b"})
        await turn(here, [USER])
        return told

    told = asyncio.run(main())
    journal.close()
    first, other = traces_of(read(tmp_path), ["s"])
    assert (first["tenant"], other["tenant"]) == ("", "b")
    # The turn that wanted no records is in the trace alone.
    assert first["traces"][0]["turns"] == told["turns"][:2]
    assert first["traces"][0]["rewards"] == told["rewards"]
    assert [len(one["turns"]) for one in first["traces"]] == [2, 1]
    whole, again = sequences_of(first)
    assert (whole.reward, again.reward) == (2.0, None)
    assert sum(whole.loss_mask) == 12


def test_turns_behind_a_gap_are_told_and_not_guessed() -> None:
    records = [
        {
            "kind": kind,
            "n": n,
            "replica": "r",
            "boot": "b",
            "deployment": "d",
            "tenant": "",
            "session": "s",
            **more,
        }
        for n, (kind, more) in enumerate(
            [
                ("turn", {"tree": 1, "turn": {"turn": 1, "parent": 0}}),
                ("gap", {"lost": 1}),
                ("turn", {"tree": 1, "turn": {"turn": 3, "parent": 2}}),
                ("turn", {"tree": 1, "turn": {"turn": 4, "parent": 3}}),
                ("turn", {"tree": 1, "turn": {"turn": 5, "parent": 1}}),
            ],
            1,
        )
    ]
    (found,) = traces_of(records)
    (one,) = found["traces"]
    assert ([turn["turn"] for turn in one["turns"]], one["orphans"]) == ([1, 5], [3, 4])


A_TURN = {"n": 1, "replica": "r", "boot": "b", "kind": "turn"}
ABOUT = {"deployment": "d", "tenant": "", "session": "s", "tree": 1}


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"{",
        b"[" * 2000,
        json.dumps(A_TURN | {"n": "2"}).encode(),
        json.dumps(A_TURN | {"replica": []}).encode(),
        json.dumps({"n": 1, "replica": "r", "boot": "b"}).encode(),
    ],
)
def test_a_line_that_is_no_record_is_refused_with_its_file(tmp_path: Path, line: bytes) -> None:
    folder = tmp_path / "bucket" / "records" / "d"
    folder.mkdir(parents=True)
    (folder / "r-1.jsonl").write_bytes(json.dumps(A_TURN).encode() + b"\n" + line)
    with pytest.raises(ValueError, match=r"r-1\.jsonl: line \d+ is no record"):
        read(tmp_path)


@pytest.mark.parametrize(
    "more",
    [
        {},
        ABOUT | {"turn": 1},
        ABOUT | {"turn": {"turn": 1}},
        ABOUT | {"turn": {"turn": [], "parent": 0}},
        ABOUT | {"session": {}, "turn": {"turn": 1, "parent": 0}},
        ABOUT | {"kind": "reward"},
        ABOUT | {"kind": "reward", "reward": {"turn": {}, "name": "x"}},
    ],
)
def test_a_record_without_what_a_trace_needs_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="record 1 of r"):
        list(traces_of([A_TURN | more]))


def test_a_gap_that_does_not_say_how_many_are_lost_is_refused() -> None:
    with pytest.raises(ValueError, match="record 1 of r"):
        gaps_in([A_TURN | {"kind": "gap"}])
