"""Segments of records in a bucket, and traces that a server answers, as `midstream export` reads them: client/journal.py and
client/records.py.

Checked: only ValueError comes out. A record comes once, in its writer's order, and none is made up. What is exported has one
entry for each token, and is JSON. A turn without log-probabilities is never in the loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from midstream.client.journal import gaps_in, read_records, traces_of
from midstream.client.records import TrainingSequence, sequences_of
from midstream.commands.export import FORMATS
from midstream.core.errors import SnapshotError
from midstream.core.text import plain
from midstream.core.traces import Reward, Span, TracedEarlierKv, TracedTurn
from targets.snapshot_files import BETWEEN, directory
from targets.target import Target, check, controlled, outcome

#: The input is the trace of a server.
TRACE = 1
LOGPROBS, UNSCORED = ("logprob", "sampling_logprob"), ("refuse", "mask")


def run(data: bytes) -> None:
    control, rest = controlled(data)
    if control & TRACE:
        try:
            trace = msgspec.json.decode(rest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        exported(control, trace)
        return
    place = directory()
    folder = place / "records" / "d"
    folder.mkdir(parents=True)
    for number, segment in enumerate(rest.split(BETWEEN)):
        (folder / f"r-{number:04}.jsonl").write_bytes(segment)
    records = read(lambda: [*read_records(place.as_uri())])
    if records is None:
        return
    last: dict[Any, Any] = {}
    for record in records:
        writer = (record["replica"], record["boot"])
        check(record["n"] > last.get(writer, 0), "a record comes twice, or out of order", record)
        last[writer] = record["n"]
    read(lambda: gaps_in(records))
    for trace in read(lambda: [*traces_of(records)]) or ():
        turns = sum(len(one["turns"]) + len(one["orphans"]) for one in trace["traces"])
        check(turns <= len(records), "turns that nobody recorded", turns)
        exported(control, trace)


def read(call: Callable[[], Any]) -> Any:
    result, refused = outcome((ValueError, SnapshotError), call)
    if refused is not None:
        check(len(plain(str(refused))) < 10_000, "a message that is no line", refused)
    return result


def exported(control: int, trace: Any) -> None:
    logprobs, unscored = LOGPROBS[control >> 1 & 1], UNSCORED[control >> 2 & 1]
    sequences: list[TrainingSequence] | None = read(
        lambda: sequences_of(trace, logprobs=logprobs, unscored=unscored)  # type: ignore[arg-type]
    )
    for one in sequences or ():
        size = len(one.token_ids)
        for name in ("loss_mask", "logprobs", "snapshots", "routes", "masks"):
            check(len(getattr(one, name)) == size, "a token without its entry", name, size)
        for counts, logprob, snapshot in zip(one.loss_mask, one.logprobs, one.snapshots, strict=True):
            check(counts in (0, 1) and (counts or logprob == 0.0), "a number of no token", counts, logprob)
            check(not counts or isinstance(snapshot, str), "a sampled token without its label", one)
            check(isinstance(logprob, float), "a log-probability that is none", logprob)
        ends = [place for span in one.turns for place in (span.start, span.end)]
        check(ends == sorted(ends) and (not ends or ends[-1] <= size), "turns that overlap", one.turns)
    if sequences is not None:
        for convert in FORMATS.values():
            # As export.py writes them.
            read(lambda c=convert: [json.dumps(one, allow_nan=False) for one in c(sequences)])  # type: ignore[misc]


def turn(number: int, parent: int, **more: Any) -> TracedTurn:
    given: dict[str, Any] = {
        "turn": number,
        "parent": parent,
        "model": "m",
        "added": [1, 2],
        "token_ids": [3],
        "loss_mask": [0, 0, 1],
        "finish_reason": "stop",
        "created": 1.0,
        "logprobs": [-0.5],
        "sampling_logprobs": [-0.25],
        "routing_matrix": ["AQI="],
        "routing_matrix_dtype": "uint8",
        "routing_matrix_shape": [1, 2],
        "sampling_masks": ["AA=="],
        "snapshots": [Span("s", 0, 1)],
        "kv_snapshots": [Span("s", 0, 3)],
    }
    return TracedTurn(**given | more)


def seeds() -> Iterator[bytes]:
    about = {"replica": "r", "boot": "b", "deployment": "d", "tenant": "", "session": "s", "tree": 1}
    reward = Reward(reward=0.5, turn=1, created=2.0, metadata={"a": 1})
    wide = turn(2, 1, routing_matrix=["AQACAA=="], routing_matrix_dtype="uint16", sampling_masks=["AgMABAA="])
    bare = turn(3, 1, logprobs=None, sampling_logprobs=[None], routing_matrix=None, routing_matrix_shape=None)
    earlier = turn(
        4,
        2,
        sampling_masks=["CAg="],
        earlier_kv_snapshots=[TracedEarlierKv(1, [Span("r", 0, 1)])],
        branch={"reason": "x"},
    )
    records: list[dict[str, Any]] = [
        *({"kind": "turn", "turn": one} for one in (turn(1, 0), wide, bare, earlier)),
        {"kind": "reward", "reward": reward},
        {"kind": "reward", "reward": Reward(reward=1.0, created=3.0, name="judge")},
    ]
    lines = [msgspec.json.encode({"n": n, **about, **one}) for n, one in enumerate(records, 1)]
    gap = msgspec.json.encode(
        {"n": 9, "replica": "r", "boot": "b", "deployment": "d", "kind": "gap", "lost": 2}
    )
    yield b"\x00" + b"\n".join(lines[:2])
    yield b"\x02" + b"\n".join((*lines[:2], lines[4], lines[5])) + b"\n"
    yield b"\x04" + b"\n".join(lines) + BETWEEN + gap
    yield b"\x00" + lines[2] + BETWEEN + lines[0]
    for control, turns in ((1, [turn(1, 0), wide]), (7, [turn(1, 0), bare])):
        traces = [{"replica": "r", "turns": turns, "rewards": [reward], "forgotten": False}]
        yield bytes([control]) + msgspec.json.encode({"id": "s", "traces": traces, "unreachable": []})


WORDS: tuple[bytes, ...] = (
    *(
        BETWEEN,
        b'{"n":',
        b'"replica":"r"',
        b'"boot":"b"',
        b'"kind":"turn"',
        b'"kind":"gap"',
        b'"kind":"reward"',
    ),
    *(
        b'"turn":{',
        b'"turn":',
        b'"parent":',
        b'"token_ids":[',
        b'"logprobs":[',
        b'"snapshots":[',
        b'"start":',
        b'"end":',
    ),
    *(
        b'"routing_matrix":["',
        b'"routing_matrix_shape":[',
        b'"uint16"',
        b'"reward":{',
        b'"lost":',
        b'"name":"reward"',
    ),
    *(
        b"null",
        b"true",
        b"[" * 32,
        b'"\\u0000"',
        b"\xff",
        b"\xe2\x80\xa8",
        b"1e308",
        b"-1",
        b"18446744073709551616",
    ),
)
TARGET = Target(run, seeds, WORDS, 4096)
