"""Reads columns in files at references in Fireworks' form: `routing_references` and `sampling_mask_references`
(docs/records.md).

Always holds: spans cover each position once, in order. Files are checked as those of any reference (record_file.py). What is
wrong is a RecordFileError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from midstream.client.decode import Routes, SamplingMasks, masks_of_bytes
from midstream.client.errors import RecordFileError
from midstream.client.record_file import RecordFile
from midstream.core import extras
from midstream.core.decoding import NOT_JSON
from midstream.core.masks import EVERY
from midstream.core.record_files import FILE_BYTES_MAX, MASKS_BYTES_MAX
from midstream.core.references import SharedReferences

_Read = TypeVar("_Read")


class ReferencedRoutes(NamedTuple):
    """routes: [positions, moe_layers, top_k], zeros where none is known. known: of each position, whether it has a route."""

    routes: Routes
    known: npt.NDArray[np.bool_]


class ReferencedMasks(NamedTuple):
    """masks: a row for each position, as for every token where none is known. known: as of routes."""

    masks: SamplingMasks
    known: npt.NDArray[np.bool_]


class _Run(NamedTuple):
    """Positions from `start` up to `end`. row: of the first one, in file number `file`."""

    file: int
    row: int
    start: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.start)


def read_routes(
    references: Mapping[str, Any], *, url: str | None = None, bytes_max: int = FILE_BYTES_MAX
) -> ReferencedRoutes:
    """The routes of each position.

    references: of a choice, or what Fireworks' client made of them by slicing and joining: `ModelInput.routing_references`,
    `RoutingReferences.to_dict()`. url: of the bucket of records, where it is not the one that the files name. bytes_max: of a
    file. Raises RecordFileError. RuntimeError where pyarrow is not installed.
    """
    found, runs = _checked(references, bytes_max)
    files = _files(found, url, bytes_max, RecordFile.all_routes)
    if len({(one.shape[1:], one.dtype) for one in files}) > 1:
        raise RecordFileError("routing_references: their files have routes of different models")
    shape, dtype = (files[0].shape[1:], files[0].dtype) if files else ((0, 0), np.dtype("u1"))
    size = found.length * math.prod(shape) * dtype.itemsize
    if size > bytes_max:
        raise RecordFileError(f"routing_references: routes of {size} bytes, more than bytes_max, {bytes_max}")
    routes = np.zeros((found.length, *shape), dtype)
    for run in runs:
        routes[run.start : run.end] = files[run.file][run.rows]
    return ReferencedRoutes(routes, _known(found.length, runs))


def read_masks(
    references: Mapping[str, Any], *, url: str | None = None, bytes_max: int = FILE_BYTES_MAX
) -> ReferencedMasks:
    """The sampling masks of each position. Arguments and errors: as of `read_routes`."""
    found, runs = _checked(references, bytes_max // 16)
    files = _files(found, url, bytes_max, RecordFile.all_masks)
    known = _known(found.length, runs)
    sizes, tokens = np.ones(found.length, np.int64), np.zeros(found.length, np.int64)
    for run in runs:
        token_ids, _, offsets = files[run.file]
        sizes[run.start : run.end] = np.diff(offsets)[run.rows]
        tokens[run.start : run.end] = token_ids[run.rows]
    if sizes.sum() > MASKS_BYTES_MAX:
        raise RecordFileError(f"sampling_mask_references: masks of more than {MASKS_BYTES_MAX} bytes")
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    data = np.full(int(ends[-1]), EVERY[0], np.uint8)
    for run in runs:
        _, given, offsets = files[run.file]
        own = given[offsets[run.rows.start] : offsets[run.rows.stop]]
        data[ends[run.start] : ends[run.end]] = own
    try:
        return ReferencedMasks(masks_of_bytes(data, ends, tokens), known)
    except ValueError as error:
        raise RecordFileError(f"sampling_mask_references: {error}") from error


def _checked(references: Mapping[str, Any], length_max: int) -> tuple[SharedReferences, list[_Run]]:
    """Raises RecordFileError."""
    try:
        found = msgspec.convert(dict(references), SharedReferences)
    except (*NOT_JSON, TypeError) as error:
        raise RecordFileError(f"these are no references: {error}") from error
    if found.length > length_max:
        raise RecordFileError(f"references of {found.length} positions, at most {length_max} fit bytes_max")
    runs, at = list[_Run](), 0
    for span in found.spans:
        if span.input_token_start != at:
            raise RecordFileError(
                f"a span begins at {span.input_token_start}, and the one before ends at {at}"
            )
        if isinstance(span.file_index, int):
            row = span.file_row_start
            if span.file_index >= len(found.files) or not isinstance(row, int):
                raise RecordFileError(f"the span from {at} on names no row of a file")
            file = found.files[span.file_index]
            if row + span.count > file.row_count:
                raise RecordFileError(
                    f"{file.file}: it has {file.row_count} rows, and a span ends at {row + span.count}"
                )
            runs.append(_Run(span.file_index, row, at, at + span.count))
        at += span.count
    if at != found.length:
        raise RecordFileError(f"the spans have {at} positions, not {found.length}")
    return found, runs


def _files(
    found: SharedReferences, url: str | None, bytes_max: int, read: Callable[[RecordFile], _Read]
) -> list[_Read]:
    if hint := extras.advice(extras.missing(["pyarrow"])):
        raise RuntimeError(f"reading a record file {hint}")
    return [read(RecordFile(url or file.store_id, file, bytes_max)) for file in found.files]


def _known(length: int, runs: list[_Run]) -> npt.NDArray[np.bool_]:
    known = np.zeros(length, np.bool_)
    for run in runs:
        known[run.start : run.end] = True
    return known
