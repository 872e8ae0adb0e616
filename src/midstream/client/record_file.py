"""A record file with the bytes that its reference says, as columns (docs/records.md).

Always holds: nothing of a file is used before its bytes have the size and the SHA-256 of the reference, and its schema and the
sizes that it declares are those that a server writes. Nothing is unpickled. What is wrong is a RecordFileError that names the
file, and the row group where there is one.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from midstream.client.decode import Routes
from midstream.client.errors import RecordFileError, RecordFileGone
from midstream.core.decoding import NOT_JSON
from midstream.core.errors import SnapshotError, SnapshotMissing
from midstream.core.record_files import (
    ABOUT_KEY,
    COLUMNS,
    DIRECTORY,
    MASK,
    MASKS_BYTES_MAX,
    ROUTE,
    ROUTE_GAPS,
    ROUTER_WEIGHTS,
    ROW_BYTES,
    ChoiceAbout,
    FileAbout,
    groups_of,
    is_file_name,
)
from midstream.core.references import RecordReference, ReferencedRows, SharedFile
from midstream.core.route_gaps import routes_of
from midstream.snapshots.store.upload import read_file

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

#: By name, an Arrow array of each column.
Columns = dict[str, Any]
#: What the footer of a file may make a reader allocate.
_FOOTER_STRING_MAX, _FOOTER_ENTRIES_MAX = 64 * 2**20, 1_000_000


def _check_name(file: str, sha256: str) -> None:
    directory, _, rest = file.partition("/")
    deployment, _, name = rest.partition("/")
    if directory != DIRECTORY or deployment in ("", ".", "..") or not is_file_name(name):
        raise RecordFileError(f"{file!r} is no name of a record file")
    if name.partition(".")[0] != sha256:
        raise RecordFileError(f"{file}: the reference has another sha256, {sha256}")


def _fetched(url: str, reference: RecordReference | SharedFile, bytes_max: int) -> bytes:
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


class RecordFile:
    """A file with the right bytes, at a reference of either form. url, bytes_max: as in `read_reference`. Raises
    RecordFileError."""

    def __init__(self, url: str, reference: RecordReference | SharedFile, bytes_max: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._name = reference.file
        _check_name(reference.file, reference.sha256)
        data = _fetched(url, reference, bytes_max)
        #: Arrow's reader is for one thread at a time.
        self._reading = threading.Lock()
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
        rows = reference.rows if isinstance(reference, RecordReference) else reference.row_count
        self._about = self._read_about(rows)
        self._check_schema()
        self._groups = self._check_groups(rows, bytes_max)

    def _wrong(self, what: str) -> RecordFileError:
        return RecordFileError(f"{self._name}: {what}")

    def _read_about(self, rows: int) -> FileAbout:
        given = self._parquet.metadata.metadata or {}
        if given.keys() != {ABOUT_KEY}:
            raise self._wrong(f"its metadata has {sorted(given)}, not {ABOUT_KEY!r} alone")
        try:
            about = msgspec.json.decode(given[ABOUT_KEY], type=FileAbout)
        except NOT_JSON as error:
            raise self._wrong(f"its metadata is not that of a record file: {error}") from error
        at = 0
        for one in about.choices:
            if one.start != at or one.prompt_rows > min(one.count, one.prompt_tokens):
                raise self._wrong(f"its metadata has other rows of choice {one.index} than can be")
            at += one.count
        if at != rows:
            raise self._wrong("it has other rows of choices than the reference says")
        return about

    def _check_schema(self) -> None:
        expected = dict(COLUMNS) | {"snapshot": "dictionary<values=string, indices=int32, ordered=0>"}
        names = [field.name for field in self._schema]
        if ROUTE in names or ROUTE_GAPS in names:
            # Both is one too many.
            expected[self._route_column] = f"fixed_size_binary[{self._about.route_bytes}]"
        if ROUTER_WEIGHTS in names:
            expected[ROUTER_WEIGHTS] = f"fixed_size_binary[{self._about.weights_bytes}]"
        if MASK in names:
            expected[MASK] = "binary"
        found = {field.name: str(field.type) for field in self._schema}
        if found != expected or len(names) != len(expected):
            raise self._wrong(f"its columns are {found}, not {expected}")

    def _check_groups(self, rows: int, bytes_max: int) -> list[tuple[int, int]]:
        """First row and end of each row group. rows: of the reference."""
        metadata = self._parquet.metadata
        if metadata.num_rows != rows:
            raise self._wrong(f"it declares {metadata.num_rows} rows, not {rows}")
        weights = self._about.weights_bytes if ROUTER_WEIGHTS in self._schema.names else 0
        size = rows * (ROW_BYTES + self._about.route_bytes + weights)
        if size > bytes_max:
            raise self._wrong(f"its rows take {size} bytes, more than bytes_max, {bytes_max}")
        group_tokens = self._about.group_tokens
        expected = sum(_group_count(one, group_tokens) for one in self._about.choices)
        if metadata.num_row_groups != expected:
            raise self._wrong(f"it has {metadata.num_row_groups} row groups, not {expected}")
        groups = [group for choice in self._about.choices for group in groups_of(choice, group_tokens)]
        declared = 0
        for number, (start, end) in enumerate(groups):
            group = metadata.row_group(number)
            if group.num_rows != end - start:
                raise self._wrong(f"row group {number} declares {group.num_rows} rows, not {end - start}")
            declared += group.total_byte_size
            if group.total_byte_size < 0 or declared > bytes_max:
                raise self._wrong(f"row group {number} declares more bytes than bytes_max, {bytes_max}")
        return groups

    def choices(self, expected: Sequence[ReferencedRows]) -> Iterator[ChoiceRows]:
        """Each choice. expected: the rows of its choices, as the reference has them."""
        rows = [(one.index, one.start, one.count) for one in self._about.choices]
        if rows != [(one.index, one.start, one.count) for one in expected]:
            raise self._wrong("it has other rows of choices than the reference says")
        number = 0
        for choice in self._about.choices:
            count = _group_count(choice, self._about.group_tokens)
            yield ChoiceRows(self, choice, range(number, number + count))
            number += count

    def has(self, name: str) -> bool:
        """It has this column."""
        return name in self._schema.names

    def all_routes(self) -> Routes:
        """Of all rows."""
        return self._routes(self._checked(range(len(self._groups)), [self._route_column]))

    def all_masks(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Of all rows: token ids, and masks as in `masks_in`."""
        table = self._checked(range(len(self._groups)), ["token_id", MASK])
        return _one_array(table.column("token_id")).to_numpy(), *masks_in(self._masks(table))

    def read(self, choice: ChoiceAbout, groups: range, names: Sequence[str]) -> pa.Table:
        """Columns of a choice's sampled tokens. groups: the choice's."""
        return self._checked(groups, names).slice(choice.prompt_rows)

    def _checked(self, groups: range, names: Sequence[str]) -> pa.Table:
        for name in names:
            if not self.has(name):
                raise self._wrong(f"it has no column {name}")
        if not groups:
            return self._schema.empty_table().select(names)
        rows = self._groups[groups[-1]][1] - self._groups[groups[0]][0]
        table = self._read([*groups], names)
        if isinstance(table, str) or _problem_of(table, rows):
            # One of the groups is at fault. Each for itself says which.
            for number in groups:
                start, end = self._groups[number]
                one = self._read([number], names)
                problem = one if isinstance(one, str) else _problem_of(one, end - start)
                if problem:
                    raise self._wrong(f"row group {number} {problem}")
            raise self._wrong(table if isinstance(table, str) else _problem_of(table, rows))
        return table

    def _read(self, groups: list[int], names: Sequence[str]) -> pa.Table | str:
        """Why it cannot be read, if it cannot."""
        try:
            with self._reading:
                table = self._parquet.read_row_groups(groups, columns=[*names], use_threads=False)
            table.validate(full=True)
        except self._errors as error:
            return f"cannot be read: {error}"
        return table.select(names)

    def _masks(self, table: pa.Table) -> pa.BinaryArray:
        column = table.column(MASK)
        if column.nbytes > MASKS_BYTES_MAX:
            raise self._wrong(f"it has masks of more than {MASKS_BYTES_MAX} bytes")
        return _one_array(column)

    @property
    def _route_column(self) -> str:
        return ROUTE_GAPS if self.has(ROUTE_GAPS) else ROUTE

    def _routes(self, table: pa.Table) -> Routes:
        dtype = np.dtype("<u2" if self._about.route_dtype == "uint16" else "u1")
        width, column = self._about.route_bytes, table.column(self._route_column)
        if self._route_column == ROUTE or not len(column):
            experts: Routes = self._of_experts(_one_array(column), dtype, width)
            return experts
        try:
            return routes_of([self._of_experts(part, dtype, width) for part in column.chunks])
        except ValueError as error:
            raise self._wrong(f"{ROUTE_GAPS}: {error}") from error

    def _of_experts(self, column: pa.FixedSizeBinaryArray, dtype: np.dtype[Any], width: int) -> Any:
        data = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, column.offset * width)
        return data.view(dtype).reshape(len(column), *self._about.route_shape)


class ChoiceRows:
    """A choice's sampled tokens. A call decodes a column, or raises RecordFileError; under `decoding`, once for all threads."""

    def __init__(self, file: RecordFile, about: ChoiceAbout, groups: range) -> None:
        self._file, self.about, self._groups, self.decoding = file, about, groups, threading.Lock()

    def small(self) -> Columns:
        """By name, an array of each column that every file has."""
        table = self._file.read(self.about, self._groups, [*COLUMNS])
        return {name: _one_array(table.column(name)) for name in COLUMNS}

    def lacking(self) -> set[str]:
        """Those of the methods below that return None."""
        has, routes = self._file.has, self._file._route_column
        columns = {"routes": routes, "router_weights": ROUTER_WEIGHTS, "masks": MASK}
        return {name for name, column in columns.items() if not has(column)}

    def routes(self) -> Routes | None:
        """None: it has none."""
        name = self._file._route_column
        return self._file._routes(self._of(name)) if self._file.has(name) else None

    def router_weights(self) -> npt.NDArray[np.float32] | None:
        """Each at the place of its expert in the route. None: it has none."""
        if not self._file.has(ROUTER_WEIGHTS):
            return None
        column = _one_array(self._of(ROUTER_WEIGHTS).column(ROUTER_WEIGHTS))
        weights: npt.NDArray[np.float32]
        weights = self._file._of_experts(column, np.dtype("<f4"), self._file._about.weights_bytes)
        return weights

    def masks(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]] | None:
        """As of `masks_in`. None: it has none."""
        return masks_in(self._file._masks(self._of(MASK))) if self._file.has(MASK) else None

    def _of(self, name: str) -> pa.Table:
        return self._file.read(self.about, self._groups, [name])


def masks_in(column: pa.BinaryArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Bytes of all rows behind each other; those of row j are `data[offsets[j]:offsets[j + 1]]`."""
    _, ends, values = column.buffers()
    offsets = np.frombuffer(ends, np.int32, len(column) + 1, 4 * column.offset)
    return np.frombuffer(b"" if values is None else values, np.uint8), offsets


def _group_count(choice: ChoiceAbout, group_tokens: int) -> int:
    """How many row groups it has, without a list of them."""
    if not choice.count:
        return 0
    last = choice.position + choice.count - 1
    return last // group_tokens - choice.position // group_tokens + 1


def _problem_of(table: pa.Table, rows: int) -> str:
    """What makes it no table of so many rows; "": nothing."""
    if table.num_rows != rows:
        return f"has {table.num_rows} rows, not {rows}"
    for name in table.column_names:
        if name != "sampling_logprob" and table.column(name).null_count:
            return f"lacks values of {name}"
    return ""


def _one_array(column: pa.ChunkedArray) -> Any:
    import pyarrow as pa

    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return column.combine_chunks()
