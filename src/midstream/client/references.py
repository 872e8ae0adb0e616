"""Reads the records of a response from the file that its `record_reference` names (docs/records.md).

Always holds: nothing of a file is used before its bytes have the size and the SHA-256 of the reference, and its schema and the
sizes that it declares are those that a server writes. Nothing is unpickled. What is wrong is a RecordFileError that names the
file, and the row group where there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from midstream.client.decode import Routes, SamplingMasks, masks_of_bytes
from midstream.client.errors import RecordFileError, RecordFileGone
from midstream.core import extras
from midstream.core.decoding import NOT_JSON
from midstream.core.errors import SnapshotError, SnapshotMissing
from midstream.core.record_files import (
    ABOUT_KEY,
    COLUMNS,
    DIRECTORY,
    FILE_BYTES_MAX,
    GROUP_TOKENS,
    MASK,
    MASKS_BYTES_MAX,
    ROUTE,
    ROW_BYTES,
    ChoiceAbout,
    FileAbout,
    groups_of,
    is_file_name,
)
from midstream.core.references import RecordReference
from midstream.core.traces import Span, TracedEarlierKv
from midstream.core.types import NEAR_TIES
from midstream.snapshots.store.upload import read_file

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

#: What the footer of a file may make a reader allocate.
_FOOTER_STRING_MAX, _FOOTER_ENTRIES_MAX = 64 * 2**20, 1_000_000


@dataclass(frozen=True, eq=False, repr=False)
class ChoiceColumns:
    """The records of one choice: arrays of a row for each generated token, views of the file's columns.

    index: of the choice. prompt_tokens: the position of the first row. sampling_logprobs: NaN where the engine does not know
    it. routes: [tokens, moe_layers, top_k]; None where the request did not ask for them. mask_bytes: the sampling masks of all
    rows behind each other, None likewise; those of row j are `mask_bytes[mask_offsets[j]:mask_offsets[j + 1]]`. near_ties:
    bits, by their place in `near_tie_names`. constrained: the `logprobs` of the row is of the tokens that a grammar allowed.
    snapshots: over the rows. kv_snapshots, earlier_kv_snapshots: as responses have them, over all positions.
    """

    index: int
    prompt_tokens: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]
    sampling_logprobs: npt.NDArray[np.float64]
    routes: Routes | None
    mask_bytes: npt.NDArray[np.uint8] | None
    mask_offsets: npt.NDArray[np.int32] | None
    near_ties: npt.NDArray[np.uint8]
    constrained: npt.NDArray[np.bool_]
    snapshots: list[Span]
    kv_snapshots: list[Span]
    earlier_kv_snapshots: list[TracedEarlierKv]
    near_tie_names: tuple[str, ...] = tuple(NEAR_TIES)

    def sampling_masks(self) -> SamplingMasks:
        """The masks as ids. Raises ValueError where the request did not ask for them, and for bytes that are no masks."""
        if self.mask_bytes is None or self.mask_offsets is None:
            raise ValueError("the records have no sampling masks: ask for return_sampling_mask")
        return masks_of_bytes(self.mask_bytes, self.mask_offsets.astype(np.int64), self.token_ids)


def read_reference(
    url: str, reference: Mapping[str, Any] | RecordReference, *, bytes_max: int = FILE_BYTES_MAX
) -> list[ChoiceColumns]:
    """The records of a response, a ChoiceColumns for each choice, in their order.

    url: of the bucket of records, as `midstream serve --records` has it. reference: `record_reference` of the response, or of
    the last chunks of a stream. bytes_max: a larger file, and one that would take more in memory, is an error.

    Raises RecordFileError, which names the file: it is gone (RecordFileGone), has other bytes than the reference says, or is no
    file of records.
    RuntimeError where pyarrow is not installed.
    """
    if hint := extras.advice(extras.missing(["pyarrow"])):
        raise RuntimeError(f"reading a record file {hint}")
    found = _checked(reference)
    data = _fetched(url, found, bytes_max)
    return list(_File(found, data, bytes_max).choices())


def _checked(reference: Mapping[str, Any] | RecordReference) -> RecordReference:
    """Raises RecordFileError."""
    try:
        found = msgspec.convert(msgspec.to_builtins(reference), RecordReference)
    except (*NOT_JSON, TypeError) as error:
        raise RecordFileError(f"this is no record_reference: {error}") from error
    directory, _, rest = found.file.partition("/")
    deployment, _, name = rest.partition("/")
    if directory != DIRECTORY or deployment in ("", ".", "..") or not is_file_name(name):
        raise RecordFileError(f"{found.file!r} is no name of a record file")
    if name.partition(".")[0] != found.sha256:
        raise RecordFileError(f"{found.file}: the reference has another sha256, {found.sha256}")
    at = 0
    for rows in found.choices:
        if rows.start != at:
            raise RecordFileError(
                f"{found.file}: the reference's rows of choice {rows.index} do not begin at {at}"
            )
        at += rows.count
    if at != found.rows:
        raise RecordFileError(f"{found.file}: the reference's choices have {at} rows, not {found.rows}")
    return found


def _fetched(url: str, reference: RecordReference, bytes_max: int) -> bytes:
    file = reference.file
    if reference.bytes > bytes_max:
        raise RecordFileError(f"{file}: has {reference.bytes} bytes, more than bytes_max, {bytes_max}")
    try:
        data = read_file(url, file, bytes_max=reference.bytes)
    except SnapshotMissing as error:
        raise RecordFileGone(f"{file}: is gone: {error}") from error
    except SnapshotError as error:
        raise RecordFileError(f"{file}: cannot be read: {error}") from error
    if len(data) != reference.bytes:
        raise RecordFileError(f"{file}: has {len(data)} bytes, and the reference says {reference.bytes}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != reference.sha256:
        raise RecordFileError(
            f"{file}: its bytes have the sha256 {digest}, so they are not those of the reference"
        )
    return data


class _File:
    """A file with the right bytes. Raises RecordFileError."""

    def __init__(self, reference: RecordReference, data: bytes, bytes_max: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._reference = reference
        self._name = reference.file
        self._errors = (pa.ArrowException, OSError, ValueError)
        try:
            self._parquet: pq.ParquetFile = pq.ParquetFile(
                pa.BufferReader(data),
                read_dictionary=["snapshot"],
                thrift_string_size_limit=_FOOTER_STRING_MAX,
                thrift_container_size_limit=_FOOTER_ENTRIES_MAX,
                schema_depth_limit=4,
                arrow_extensions_enabled=False,
            )
            self._schema: pa.Schema = self._parquet.schema_arrow
        except self._errors as error:
            raise RecordFileError(f"{self._name}: is no Parquet file: {error}") from error
        self._about = self._read_about()
        self._check_schema()
        self._groups = self._check_groups(bytes_max)

    def _wrong(self, what: str) -> RecordFileError:
        return RecordFileError(f"{self._name}: {what}")

    def _read_about(self) -> FileAbout:
        given = self._parquet.metadata.metadata or {}
        if given.keys() != {ABOUT_KEY}:
            raise self._wrong(f"its metadata has {sorted(given)}, not {ABOUT_KEY!r} alone")
        try:
            about = msgspec.json.decode(given[ABOUT_KEY], type=FileAbout)
        except NOT_JSON as error:
            raise self._wrong(f"its metadata is not that of a record file: {error}") from error
        rows = [(one.index, one.start, one.count) for one in about.choices]
        if rows != [(one.index, one.start, one.count) for one in self._reference.choices]:
            raise self._wrong("it has other rows of choices than the reference says")
        return about

    def _check_schema(self) -> None:
        expected = dict(COLUMNS) | {"snapshot": "dictionary<values=string, indices=int32, ordered=0>"}
        names = [field.name for field in self._schema]
        if ROUTE in names:
            expected[ROUTE] = f"fixed_size_binary[{self._about.route_bytes}]"
        if MASK in names:
            expected[MASK] = "binary"
        found = {field.name: str(field.type) for field in self._schema}
        if found != expected or len(names) != len(expected):
            raise self._wrong(f"its columns are {found}, not {expected}")

    def _check_groups(self, bytes_max: int) -> list[tuple[int, int]]:
        """First row and end of each row group."""
        metadata = self._parquet.metadata
        rows = self._reference.rows
        if metadata.num_rows != rows:
            raise self._wrong(f"it declares {metadata.num_rows} rows, not {rows}")
        size = rows * (ROW_BYTES + self._about.route_bytes)
        if size > bytes_max:
            raise self._wrong(f"its rows take {size} bytes, more than bytes_max, {bytes_max}")
        expected = sum(_group_count(one) for one in self._about.choices)
        if metadata.num_row_groups != expected:
            raise self._wrong(f"it has {metadata.num_row_groups} row groups, not {expected}")
        groups = [group for choice in self._about.choices for group in groups_of(choice)]
        declared = 0
        for number, (start, end) in enumerate(groups):
            group = metadata.row_group(number)
            if group.num_rows != end - start:
                raise self._wrong(f"row group {number} declares {group.num_rows} rows, not {end - start}")
            declared += group.total_byte_size
            if group.total_byte_size < 0 or declared > bytes_max:
                raise self._wrong(f"row group {number} declares more bytes than bytes_max, {bytes_max}")
        return groups

    def choices(self) -> Iterator[ChoiceColumns]:
        number = 0
        for choice in self._about.choices:
            count = _group_count(choice)
            yield self._choice(choice, [self._group(number + at) for at in range(count)])
            number += count

    def _group(self, number: int) -> pa.Table:
        start, end = self._groups[number]
        try:
            table = self._parquet.read_row_group(number, use_threads=False)
            table.validate(full=True)
        except self._errors as error:
            raise self._wrong(f"row group {number} cannot be read: {error}") from error
        if table.num_rows != end - start:
            raise self._wrong(f"row group {number} has {table.num_rows} rows, not {end - start}")
        for name in table.column_names:
            if name != "sampling_logprob" and table.column(name).null_count:
                raise self._wrong(f"row group {number} lacks values of {name}")
        return table

    def _choice(self, choice: ChoiceAbout, groups: list[pa.Table]) -> ChoiceColumns:
        import pyarrow as pa

        empty = self._schema.empty_table()
        table = pa.concat_tables([*groups]) if groups else empty
        if MASK in table.column_names and table.column(MASK).nbytes > MASKS_BYTES_MAX:
            raise self._wrong(f"choice {choice.index} has masks of more than {MASKS_BYTES_MAX} bytes")
        columns = {name: _one_array(table.column(name)) for name in table.column_names}
        token_ids = columns["token_id"].to_numpy()
        routes = columns.get(ROUTE)
        mask_bytes, mask_offsets = _masks(columns[MASK]) if MASK in columns else (None, None)
        return ChoiceColumns(
            index=choice.index,
            prompt_tokens=choice.prompt_tokens,
            token_ids=token_ids,
            logprobs=columns["logprob"].to_numpy(),
            sampling_logprobs=columns["sampling_logprob"].to_numpy(zero_copy_only=False),
            routes=None if routes is None else self._routes(routes),
            mask_bytes=mask_bytes,
            mask_offsets=mask_offsets,
            near_ties=columns["near_tie"].to_numpy(),
            constrained=columns["constrained"].to_numpy(zero_copy_only=False),
            snapshots=_spans(columns["snapshot"]),
            kv_snapshots=choice.kv_snapshots,
            earlier_kv_snapshots=choice.earlier_kv_snapshots,
        )

    def _routes(self, column: pa.FixedSizeBinaryArray) -> Routes:
        dtype = np.dtype("<u2" if self._about.route_dtype == "uint16" else "u1")
        width = self._about.route_bytes
        data = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, column.offset * width)
        routes: Routes = data.view(dtype).reshape(len(column), *self._about.route_shape)
        return routes


def _masks(column: pa.BinaryArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    _, ends, values = column.buffers()
    offsets = np.frombuffer(ends, np.int32, len(column) + 1, 4 * column.offset)
    return np.frombuffer(b"" if values is None else values, np.uint8), offsets


def _group_count(choice: ChoiceAbout) -> int:
    """How many row groups it has, without a list of them."""
    if not choice.count:
        return 0
    last = choice.prompt_tokens + choice.count - 1
    return last // GROUP_TOKENS - choice.prompt_tokens // GROUP_TOKENS + 1


def _one_array(column: pa.ChunkedArray) -> Any:
    import pyarrow as pa

    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return column.combine_chunks()


def _spans(column: pa.DictionaryArray) -> list[Span]:
    codes = column.indices.to_numpy()
    if not len(codes):
        return []
    names = column.dictionary.to_pylist()
    starts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist()]
    ends = [*starts[1:], len(codes)]
    return [Span(names[codes[start]], start, end) for start, end in zip(starts, ends, strict=True)]
