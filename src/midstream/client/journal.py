"""Reads the records that a server with `--records URL` keeps, and makes traces of them (docs/records.md).

Always holds: a record comes once, in the order in which its replica wrote it. Segments that are still on a replica's disk are
not there yet. What was lost says so: `gaps_in` counts it. A turn whose record file is gone says so in `record_gone`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from midstream.client.errors import RecordFileGone
from midstream.client.gone import GoneFiles, GoneTurn
from midstream.core.decoding import NOT_JSON
from midstream.snapshots.identity import public_url
from midstream.snapshots.store.upload import list_files, read_file

log = logging.getLogger(__name__)

Record = dict[str, Any]
#: Of a segment. A replica closes one at 8 MiB, and behind the batch of records that reached that.
SEGMENT_BYTES_MAX = 2**30


class _Head(msgspec.Struct):
    """What every record has."""

    n: int
    replica: str
    boot: str
    kind: str


class _Gap(msgspec.Struct):
    lost: int


class _About(_Head):
    """What every record of a session has."""

    deployment: str
    tenant: str
    session: str
    tree: int


class _Turn(msgspec.Struct):
    turn: int
    parent: int


class _Turned(msgspec.Struct):
    turn: _Turn


class _Reward(msgspec.Struct):
    turn: int | None
    name: str


class _Rewarded(msgspec.Struct):
    reward: _Reward


_Part = TypeVar("_Part", bound=msgspec.Struct)


def read_records(
    url: str,
    *,
    deployment: str | None = None,
    seen: Container[str] = (),
    on_segment: Callable[[str, bytes], None] | None = None,
    references: Literal["read", "require", "leave"] = "read",
    on_gone: Callable[[GoneTurn], None] | None = None,
) -> Iterator[Record]:
    """The records below `url`, which is that of `--records`; of one replica and boot they are in order.

    deployment: its bare name, or None for all. seen: segments that were read before. They never change, so they are not read
    again. on_segment: gets the path and the bytes of each segment before its records come.

    references: a turn whose response was by reference has its columns in a file. They are read from there, so that the record
    is as any other; or left, and the turn has `record_reference` alone. Of a file that is gone, a turn comes without its
    columns, and with the file's name as `record_gone`; with "require" it is an error.
    on_gone: hears of each such turn. Without it the log says at the end how many they were, which files, and how old.

    Each record has its `segment`, its `line` there from 1 on, and the fields of docs/records.md. New segments may come at any
    time, from each replica.
    Raises SnapshotMissing without records, SnapshotError, and ValueError for a file that holds something else; RecordFileError
    for a file of columns that is torn or has other bytes, and one that is gone if it is required.
    """
    root = f"{url.rstrip('/')}/records"
    gone = GoneFiles()
    hears = None if references == "require" else on_gone or gone.add
    fill = None if references == "leave" else _filler(url, hears)
    try:
        yield from _records(root, deployment, seen, on_segment, fill)
    finally:
        if gone.turns:
            log.warning("%s: %s", public_url(url), gone.summary())


def _records(
    root: str,
    deployment: str | None,
    seen: Container[str],
    on_segment: Callable[[str, bytes], None] | None,
    fill: Callable[[Record, str], Record] | None,
) -> Iterator[Record]:
    last: dict[tuple[str, str], int] = {}
    for path in list_files(root):
        if path.endswith(".jsonl") and path not in seen and deployment in (None, path.partition("/")[0]):
            data = read_file(root, path, bytes_max=SEGMENT_BYTES_MAX)
            if on_segment is not None:
                on_segment(path, data)
            for number, line in enumerate(data.splitlines(), start=1):
                try:
                    record: Record = msgspec.json.decode(line)
                    head = msgspec.convert(record, _Head)
                except NOT_JSON as error:
                    raise ValueError(f"{root}/{path}: line {number} is no record: {error}") from error
                if head.n > last.get((head.replica, head.boot), 0):
                    last[head.replica, head.boot] = head.n
                    if fill is not None and head.kind == "turn":
                        record = fill(record, f"{root}/{path}: line {number}")
                    yield {**record, "segment": path, "line": number}


def _filler(url: str, on_gone: Callable[[GoneTurn], None] | None) -> Callable[[Record, str], Record]:
    """Puts the columns into records whose turns leave them to a file. Only then it imports what reads files.

    on_gone: None: a file that is gone is an error.
    """
    filled: Any = None

    def fill(record: Record, where: str) -> Record:
        nonlocal filled
        turn = record.get("turn")
        if not isinstance(turn, dict) or turn.get("record_reference") is None:
            return record
        if filled is None:
            from midstream.client.turn_columns import TurnColumns

            filled = TurnColumns(url)
        try:
            return {**record, "turn": filled.turn(turn, where)}
        except RecordFileGone:
            if on_gone is None:
                raise
            file = turn["record_reference"]["reference"]["file"]
            on_gone(GoneTurn(file, where, str(record.get("session")), float(turn.get("created") or 0.0)))
            return {**record, "turn": {**turn, "record_gone": file}}

    return fill


def gaps_in(records: Iterable[Record]) -> int:
    """How many records replicas dropped because they had no more room on disk: the sum of what the gap records say.

    Raises ValueError on a gap record without its number.
    """
    return sum(_read(record, _Gap).lost for record in records if record["kind"] == "gap")


def traces_of(records: Iterable[Record], sessions: Container[str] | None = None) -> Iterator[dict[str, Any]]:
    """The sessions in the records as traces, such as `sequences_of` takes, in the order of their first turns.

    records: as `read_records` gives them. sessions: of these keys alone.

    A session of several replicas, or one that was restarted, has an entry in `traces` for each.
    Turns with a lost parent are left out; the entry's `orphans` are their numbers. Holds all of them in memory. Raises
    ValueError on a record that lacks what its kind has.
    """
    found: dict[tuple[str, str, str], dict[tuple[str, str, int], dict[str, Any]]] = {}
    for record in records:
        if record["kind"] == "gap":
            continue
        about = _read(record, _About)
        if sessions is not None and about.session not in sessions:
            continue
        trees = found.setdefault((about.deployment, about.tenant, about.session), {})
        empty: dict[str, Any] = {"replica": about.replica, "turns": {}, "rewards": {}, "orphans": []}
        entry = trees.setdefault((about.replica, about.boot, about.tree), empty)
        if about.kind == "turn":
            turn = _read(record, _Turned).turn
            if turn.parent == 0 or turn.parent in entry["turns"]:
                entry["turns"][turn.turn] = record["turn"]
            else:
                entry["orphans"].append(turn.turn)
        elif about.kind == "reward":
            reward = _read(record, _Rewarded).reward
            entry["rewards"][reward.turn, reward.name] = record["reward"]
    for (deployment, tenant, key), trees in found.items():
        lists = ("turns", "rewards")
        traces = [entry | {name: list(entry[name].values()) for name in lists} for entry in trees.values()]
        yield {"id": key, "tenant": tenant, "deployment": deployment, "traces": traces, "unreachable": []}


def _read(record: Record, kind: type[_Part]) -> _Part:
    """Raises ValueError."""
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"record {record['n']} of {record['replica']}: {error}") from error
