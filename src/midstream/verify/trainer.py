"""A trainer's own log-probabilities, from a file: JSON lines, NumPy's .npz, or Parquet where pyarrow is installed.

Owns: the three forms, and which turn a row is of.
Always holds: a turn has numbers once. Each number is finite and at most rounding above 0, or minus infinity. Nothing is
unpickled. What is wrong is a ValueError with the file, the row and the field.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.lib.format as npy

from midstream.core.decoding import NOT_JSON
from midstream.core.extras import advice
from midstream.verify.claims import Claim
from midstream.verify.compare import LOGPROB_MIN

#: Rounding of a token that is nearly certain.
ABOVE_ZERO_MAX = 1e-2
#: Ids that arrays of 64 bits have.
_IDS_END = 2**31
#: Rows of a Parquet file that are read at a time.
_ROWS = 1024


class TrainerTurn(msgspec.Struct, frozen=True):
    """logprobs: in nats, of each token of `token_ids`; None: of those that the server sampled. prompt_ids: all before them."""

    logprobs: list[float]
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None


#: A trainer: of a turn its log-probabilities; None: it did not compute this one.
Trainer = Callable[[Claim], TrainerTurn | Sequence[float] | None]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """One turn."""

    session: str
    turn: int
    logprobs: list[float | None]
    replica: str = ""
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None


class _SpanRow(msgspec.Struct):
    turn: int
    start: int
    end: int


class _SequenceRow(msgspec.Struct):
    """A line of `midstream export`, and the trainer's numbers beside it."""

    session: str
    replica: str
    turns: list[_SpanRow]
    token_ids: list[int]
    loss_mask: list[int]
    trainer_logprobs: list[float | None]


class TrainerTable:
    """The numbers of a file, of the turns that they were matched with."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, int, str], TrainerTurn] = {}
        self._where: dict[tuple[str, int, str], str] = {}
        self._matched: dict[Claim, TrainerTurn] = {}
        #: Rows of turns that are not in the records.
        self.unmatched: list[str] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __call__(self, claim: Claim) -> TrainerTurn | None:
        return self._matched.get(claim)

    def add(self, key: tuple[str, int, str], where: str, turn: TrainerTurn) -> None:
        if key in self._turns:
            raise ValueError(
                f"{where}: turn {key[1]} of session {key[0]!r} comes twice, first {self._where[key]}"
            )
        self._turns[key], self._where[key] = turn, where

    def match(self, claims: Iterable[Claim]) -> None:
        """Give each row to its turn. Raises ValueError for a row that may be of several turns."""
        found: dict[tuple[str, int, str], list[Claim]] = {}
        for claim in claims:
            place = claim.place
            keys = ((place.session, place.turn, replica) for replica in (place.replica, ""))
            key = next((key for key in keys if key in self._turns), None)
            if key is not None:
                found.setdefault(key, []).append(claim)
        for key, some in found.items():
            turn = self._turns[key]
            # A replica that was started again counts the turns of its sessions from 1 on.
            own = [claim for claim in some if claim.turn.token_ids == turn.token_ids] if some[1:] else some
            if len(own) != 1:
                ambiguous = f"{self._where[key]}: may be of {some[0].place} and of {some[1].place}"
                raise ValueError(f"{ambiguous}; `replica` or `token_ids` of the row say which")
            self._matched[own[0]] = turn
        self.unmatched = [where for key, where in self._where.items() if key not in found]


def read_trainer(path: Path) -> TrainerTable:
    """Raises ValueError that names file, row and field; OSError."""
    table = TrainerTable()
    read = {".npz": _npz, ".parquet": _parquet}.get(path.suffix, _lines)
    for where, row in read(path):
        try:
            _take(table, f"{path}, {where}", row)
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}, {where}: {error}") from error
    if not len(table):
        raise ValueError(f"{path}: has no log-probabilities of any turn")
    return table


def _take(table: TrainerTable, where: str, row: Any) -> None:
    if isinstance(row, dict) and "trainer_logprobs" in row:
        for key, turn in _turns_of(where, msgspec.convert(row, _SequenceRow)):
            table.add(key, where, turn)
        return
    one = msgspec.convert(row, _Row)
    # A trainer may leave out whole turns.
    if one.logprobs and all(value is None for value in one.logprobs):
        return
    made = _checked(where, one.logprobs, one.token_ids, one.prompt_ids)
    table.add((one.session, one.turn, one.replica), where, made)


def _turns_of(where: str, row: _SequenceRow) -> Iterator[tuple[tuple[str, int, str], TrainerTurn]]:
    sizes = {name: len(getattr(row, name)) for name in ("token_ids", "loss_mask", "trainer_logprobs")}
    if len({*sizes.values()}) > 1:
        raise ValueError(f"{where}: " + ", ".join(f"{size} {name}" for name, size in sizes.items()))
    for span in row.turns:
        turn, start, end = span.turn, span.start, span.end
        if not 0 <= start <= end <= sizes["token_ids"]:
            raise ValueError(f"{where}: turn {turn} has tokens {start} to {end} of {sizes['token_ids']}")
        own = row.trainer_logprobs[start:end]
        # Where paths share a turn, the first of them has it.
        if any(row.loss_mask[start:end]) and any(value is not None for value in own):
            ids = row.token_ids
            yield (row.session, turn, row.replica), _checked(where, own, ids[start:end], ids[:start])


def _checked(
    where: str, logprobs: Sequence[float | None], ids: list[int] | None, prompt: list[int] | None
) -> TrainerTurn:
    if ids is not None and len(ids) != len(logprobs):
        raise ValueError(f"{where}: {len(ids)} token_ids and {len(logprobs)} logprobs")
    if prompt is not None and not prompt:
        raise ValueError(f"{where}: prompt_ids: lacks a token before the first log-probability")
    for name, given in (("token_ids", ids), ("prompt_ids", prompt)):
        wrong = next((one for one in given or () if not 0 <= one < _IDS_END), None)
        if wrong is not None:
            raise ValueError(f"{where}: {name}: {wrong} is no token id")
    return TrainerTurn([_logprob(where, at, value) for at, value in enumerate(logprobs)], ids, prompt)


def _logprob(where: str, at: int, value: float | None) -> float:
    # It fails for NaN, too.
    if value is None or not value <= ABOVE_ZERO_MAX:
        raise ValueError(f"{where}: logprobs: token {at} must have a number of at most 0, got {value}")
    return max(float(value), LOGPROB_MIN)


def as_turn(given: TrainerTurn | Sequence[float] | None, where: str) -> TrainerTurn | None:
    """What a callback gave. Raises ValueError."""
    if given is None:
        return None
    if isinstance(given, TrainerTurn):
        return _checked(where, given.logprobs, given.token_ids, given.prompt_ids)
    return _checked(where, [float(value) for value in given], None, None)


# -- the three forms: each row as a dict, and where it stands


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", msgspec.json.decode(line)
            except NOT_JSON as error:
                raise ValueError(f"{path}, line {number}: is no JSON: {error}") from error


def _npz(path: Path) -> Iterator[tuple[str, Any]]:
    """session, turn, lengths: of each turn. logprobs, token_ids: those of all turns, one behind the other."""
    columns: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    columns[name.removesuffix(".npy")] = npy.read_array(file)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ValueError(f"{path}: is no .npz file of numbers and text: {error}") from error
    needed = {"session": "UT", "turn": "iu", "lengths": "iu", "logprobs": "f"}
    for name, kinds in {**needed, "replica": "UT", "token_ids": "iu"}.items():
        if name not in columns and name in needed:
            raise ValueError(f"{path}: lacks the array {name}")
        if name in columns and (columns[name].dtype.kind not in kinds or columns[name].ndim != 1):
            raise ValueError(f"{path}: {name}: must be one dimension, not {columns[name].dtype}")
    lengths = columns["lengths"].tolist()
    for name in ("session", "turn", "replica"):
        if name in columns and len(columns[name]) != len(lengths):
            raise ValueError(f"{path}: {name}: has {len(columns[name])} entries, lengths {len(lengths)}")
    for name in ("logprobs", "token_ids"):
        if name in columns and (min(lengths, default=0) < 0 or len(columns[name]) != sum(lengths)):
            raise ValueError(f"{path}: {name}: has {len(columns[name])} entries, lengths say {sum(lengths)}")
    at = 0
    for number, length in enumerate(lengths):
        row: dict[str, Any] = {
            name: columns[name][number].item() for name in ("session", "turn", "replica") if name in columns
        }
        for name in ("logprobs", "token_ids"):
            if name in columns:
                row[name] = columns[name][at : at + length].tolist()
        at += length
        yield f"entry {number}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """The columns of a line."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: Parquet {advice(['pyarrow'])}") from error
    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=_ROWS):
            for row in batch.to_pylist():
                yield f"row {number}", {name: value for name, value in row.items() if value is not None}
                number += 1
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: is no Parquet file: {error}") from error
