"""Which rows of a prompt exist already in record files, and where the rows of a choice are, in Fireworks' form.

Owns: an index of the rows that this replica wrote.
Always holds: rows are referred to again only under the same cache salt, behind the same tokens, with the same routes in the
same order, and in a file that stays as long as the request wants.
"""

from __future__ import annotations

import hashlib
import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from midstream.core.references import InFiles, SharedFile, SharedReferences, SharedSpan

#: Rows that are found together.
ROWS = 16
BLOCKS_MAX = 2**16
#: Earlier files that one choice refers to. Its writer asks the store for each, and a reader fetches each.
FILES_MAX = 16


class SharedColumns(NamedTuple):
    """What a request wants in files. stay_s: how long. salts: by prompt, those of its cached KV."""

    routes: bool
    masks: bool
    stay_s: float
    salts: Sequence[bytes]


class RowsPlace(NamedTuple):
    """Of ROWS rows. file: None is the file that is being written. until: when the file may go, on a steady clock."""

    file: SharedFile | None
    row: int
    until: float = math.inf


class WrittenRows:
    """Where blocks of rows are, those used last."""

    def __init__(self) -> None:
        self._places: OrderedDict[bytes, RowsPlace] = OrderedDict()
        #: Several threads write files.
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"WrittenRows({len(self._places)} blocks)"

    def leading(self, keys: Iterable[bytes], own: Mapping[bytes, int], until: float) -> list[RowsPlace]:
        """The places of the first keys, up to one that has none. own: rows of the file that is being written, by key."""
        found = list[RowsPlace]()
        with self._lock:
            for key in keys:
                place = self._places.get(key)
                if place is not None and place.until >= until:
                    self._places.move_to_end(key)
                elif key in own:
                    place = RowsPlace(None, own[key])
                else:
                    break
                found.append(place)
        return found

    def add(self, rows: Mapping[bytes, int], file: SharedFile, until: float) -> None:
        """rows: by key, the first row."""
        with self._lock:
            for key, row in rows.items():
                self._places[key] = RowsPlace(file, row, until)
                self._places.move_to_end(key)
            while len(self._places) > BLOCKS_MAX:
                self._places.popitem(last=False)


def keys_of(
    rows: tuple[bytes, bool], lead: Sequence[int], token_ids: Sequence[int], routes: Sequence[bytes]
) -> Iterator[bytes]:
    """A key for each whole block of rows, which stands for all tokens up to its end. rows: the salt of their cached KV, and
    whether their routes keep the order of experts. lead: the tokens before the first row."""
    key = hashlib.blake2b(repr((rows, *lead)).encode(), digest_size=16).digest()
    tokens = array("i", token_ids)
    for at in range(0, len(routes) - ROWS + 1, ROWS):
        digest = hashlib.blake2b(key + tokens[at : at + ROWS].tobytes(), digest_size=16)
        digest.update(b"".join(routes[at : at + ROWS]))
        key = digest.digest()
        yield key


class ChoicePlaces(NamedTuple):
    """Where the rows of one choice are. lead: shown tokens without a row. earlier: places of the first rows; the rest are
    `rows` rows of its own file from `start` on, the last `sampled` of them of sampled tokens."""

    lead: int
    earlier: list[RowsPlace]
    start: int
    rows: int
    sampled: int

    def in_files(self, file: SharedFile, columns: SharedColumns) -> InFiles:
        """file: its own."""
        runs = [(place.file or file, place.row, ROWS) for place in self.earlier]
        routes = masks = None
        if columns.routes:
            routes = _references(self.lead, [*runs, (file, self.start, self.rows)])
        if columns.masks:
            masks = _references(0, [(file, self.start + self.rows - self.sampled, self.sampled)])
        return InFiles(file.store_id, routes, masks)


def _references(lead: int, runs: Iterable[tuple[SharedFile, int, int]]) -> SharedReferences:
    """runs: file, first row and number of rows, behind each other. lead: positions without rows before them."""
    files, spans, at = list[SharedFile](), list[SharedSpan](), lead
    if lead:
        spans.append(SharedSpan(0, lead))
    for file, row, count in runs:
        if not count:
            continue
        if file not in files:
            files.append(file)
        index, last = files.index(file), spans[-1] if spans else SharedSpan(0, 1)
        begun = last.file_row_start
        if last.file_index == index and isinstance(begun, int) and begun + last.count == row:
            spans[-1] = SharedSpan(last.input_token_start, last.count + count, index, begun)
        else:
            spans.append(SharedSpan(at, count, index, row))
        at += count
    return SharedReferences(at, files, spans)
