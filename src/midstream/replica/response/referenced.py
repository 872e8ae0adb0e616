"""The records of one response as columns, on their way into a file.

Owns: what is kept of each generated token until the response ends, and the Parquet file that is made of it.
Always holds: the file has what the response would have had inline, number for number. The event loop keeps each record, and a
thread makes columns of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice, takewhile
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from midstream.core.errors import EngineFailed, InvalidRequest, RecordsNotStored
from midstream.core.record_files import (
    ABOUT_KEY,
    COLUMNS,
    COLUMNS_BYTES_MAX,
    GROUP_TOKENS,
    MASK,
    MASKS_BYTES_MAX,
    ROUTE,
    ROUTE_GAPS,
    ROUTER_WEIGHTS,
    ROW_BYTES,
    ChoiceAbout,
    FileAbout,
    groups_of,
)
from midstream.core.references import (
    FORMAT,
    InFiles,
    LeftOut,
    RecordReference,
    ReferencedRows,
    SharedFile,
)
from midstream.core.route_gaps import gaps_of
from midstream.core.traces import WITH_ROUTES, RecordsKept
from midstream.core.types import GenerateRequest, ModelInfo, TokenRecord
from midstream.replica.record_files import PARAM, Encoded, RecordFiles
from midstream.replica.request.checked import MASKS, ROUTES, Checked, Prompt
from midstream.replica.response.answer import ResponseHead
from midstream.replica.response.choice import Choice
from midstream.replica.response.records import LOGPROB_MIN
from midstream.replica.response.shapes import earlier_spans, spans
from midstream.replica.shared_rows import FILES_MAX, ROWS, ChoicePlaces, RowsPlace, SharedColumns, keys_of

if TYPE_CHECKING:
    import pyarrow as pa

#: Records whose values one call takes, as none lets the event loop run meanwhile.
RECORDS_AT_A_TIME = 4096


class _Rows:
    """Of one choice. lead: tokens of the prompt that are shown and have no row. prompt: how many of `records`, the first
    ones, are of its other tokens."""

    def __init__(self) -> None:
        self.lead, self.prompt = list[int](), 0
        self.records = list[TokenRecord]()

    def take_prompt(self, records: Iterable[TokenRecord]) -> None:
        """Nothing was before the first token of a prompt, so it has no route and no row."""
        for record in records:
            if record.route is None:
                self.lead.append(record.token_id)
            else:
                self.records.append(record)
                self.prompt += 1

    def drop(self, count: int) -> None:
        """The first ones exist already."""
        del self.records[:count]
        self.prompt -= count


class ReferencedRecords:
    """Of one response. files: where the file goes. shared: what the request wants of it in Fireworks' form; None: it wants our
    own reference."""

    def __init__(
        self,
        files: RecordFiles,
        checked: Checked,
        head: ResponseHead,
        prompts: Sequence[Prompt],
        shared: SharedColumns | None = None,
    ) -> None:
        self._files = files
        self._head = head
        self._routes, self._masks = checked.routes, checked.masks
        # The answer has them beside a file of Fireworks' form.
        self._router_weights = checked.router_weights and shared is None
        # The place of an expert says which weight is its own, wherever the weights are.
        self._in_order = checked.router_weights
        if shared is not None:
            self._routes, self._masks = shared.routes, shared.masks
        self._n = checked.n
        self._prompts = prompts
        self._shared = shared
        self._rows = [_Rows() for _ in range(checked.n * len(prompts))]
        #: By choice, where its rows are; and of new rows that may be referred to, the places by key.
        self._places = list[ChoicePlaces]()
        self._new: dict[bytes, int] = {}
        #: When the file may go, and by digest whether earlier ones are there.
        self._until, self._seen = 0.0, dict[str, bool]()

    def columns(self, kept: RecordsKept) -> list[LeftOut]:
        """Of those that a turn's record has, too."""
        found: list[LeftOut] = ["logprob", "sampling_logprob"]
        if kept not in WITH_ROUTES:
            return found
        own: dict[LeftOut, bool] = {
            "route": self._routes,
            "router_weights": self._router_weights,
            "sampling_mask": self._masks,
        }
        return found + [column for column, has in own.items() if has]

    def take(self, choice: int, record: TokenRecord) -> None:
        """A generated token, in its order."""
        self._rows[choice].records.append(record)

    def take_prompt(self, choice: int, records: Iterable[TokenRecord]) -> None:
        """Those that the choice shows, before its first generated token."""
        if self._shared is not None and self._routes:
            self._rows[choice].take_prompt(records)

    async def stored(self, choices: Sequence[Choice]) -> RecordReference:
        """To be called once, when all choices have ended. Raises RecordsNotStored, EngineFailed."""
        return await self._files.put(partial(self._encoded, choices))

    def in_files(self, reference: RecordReference) -> list[InFiles]:
        """By choice, what the response says of the columns that it leaves to files, when these are stored."""
        if self._shared is None:
            return []
        file = SharedFile(
            store_id=self._files.store_id,
            file=reference.file,
            sha256=reference.sha256,
            bytes=reference.bytes,
            row_count=reference.rows,
        )
        self._files.written.add(self._new, file, self._until)
        return [place.in_files(file, self._shared) for place in self._places]

    def _place(self, choices: Sequence[Choice], shared: SharedColumns) -> None:
        """Finds the rows of prompts that exist, and leaves them out."""
        start, until = 0, self._files.stays_until(shared.stay_s)
        self._until = self._files.stays_until()
        for choice in choices:
            rows, salt = self._rows[choice.index], shared.salts[choice.index // self._n]
            earlier, keys = list[RowsPlace](), list[bytes]()
            if rows.lead and self._routes:
                ids = [record.token_id for record in rows.records]
                keys = list(keys_of((salt, self._in_order), rows.lead, ids, _bytes(rows.records, "route")))
                earlier = self._files.written.leading(keys[: rows.prompt // ROWS], self._new, until)
                if len({place.file for place in earlier}) > FILES_MAX:
                    # All rows are written again, and the next choice finds them in one file.
                    earlier = []
                # Somebody else may have removed a file.
                earlier = list(takewhile(lambda place: self._is_there(place.file), earlier))
                rows.drop(len(earlier) * ROWS)
            for at, key in enumerate(keys[len(earlier) :]):
                self._new.setdefault(key, start + at * ROWS)
            count = len(rows.records)
            self._places.append(
                ChoicePlaces(len(rows.lead), earlier, start, count, sampled=count - rows.prompt)
            )
            start += count

    def _is_there(self, file: SharedFile | None) -> bool:
        """Asks the store once for each file. None: the one that is being written."""
        if file is None:
            return True
        if file.sha256 not in self._seen:
            self._seen[file.sha256] = self._files.is_there(file)
        return self._seen[file.sha256]

    def _encoded(self, choices: Sequence[Choice]) -> Encoded:
        if self._shared is not None:
            self._place(choices, self._shared)
        about = self._about(choices)
        table = self._table(choices, about)
        if table.nbytes > COLUMNS_BYTES_MAX:
            message = f"{PARAM}: records of {table.nbytes} bytes, at most {COLUMNS_BYTES_MAX} fit a file"
            raise RecordsNotStored(message, param=PARAM)
        return Encoded(
            _parquet(table, about),
            table.num_rows,
            [ReferencedRows(c.index, c.start, c.count) for c in about.choices],
        )

    def _about(self, choices: Sequence[Choice]) -> FileAbout:
        found, start = list[ChoiceAbout](), 0
        for choice in choices:
            rows = self._rows[choice.index]
            count = len(rows.records)
            found.append(
                ChoiceAbout(
                    index=choice.index,
                    start=start,
                    count=count,
                    prompt_tokens=len(self._prompts[choice.index // self._n].token_ids),
                    prompt_rows=rows.prompt,
                    kv_snapshots=spans(choice.kv),
                    earlier_kv_snapshots=earlier_spans(choice.earlier_kv),
                )
            )
            start += count
        return FileAbout(
            format=FORMAT,
            id=self._head.id,
            model=self._head.model,
            route_shape=self._head.route_shape if self._routes else (0, 0),
            route_dtype="uint16" if self._head.wide_routes else "uint8",
            choices=found,
            group_tokens=GROUP_TOKENS,
        )

    def _table(self, choices: Sequence[Choice], about: FileAbout) -> pa.Table:
        import pyarrow as pa

        rows = [self._rows[choice.index] for choice in choices]
        parts = [self._columns(part, about) for part in _in_parts(one.records for one in rows)]
        parts = parts or [self._columns([], about)]
        columns = {name: pa.chunked_array([part[name] for part in parts]) for name in parts[0]}
        columns["snapshot"] = _snapshots(choices, rows)
        size = columns[MASK].nbytes if self._masks else 0
        if size > MASKS_BYTES_MAX:
            message = f"{PARAM}: sampling masks of {size} bytes, at most {MASKS_BYTES_MAX} fit a file"
            raise RecordsNotStored(message, param=PARAM)
        names = dict.fromkeys([*COLUMNS, *columns])
        fields = [pa.field(name, columns[name].type, name == "sampling_logprob") for name in names]
        return pa.Table.from_arrays([columns[name] for name in names], schema=pa.schema(fields))

    def _columns(self, records: list[TokenRecord], about: FileAbout) -> dict[str, Any]:
        """All but the snapshots, of some rows. Raises EngineFailed."""
        import pyarrow as pa

        logprobs = np.array([record.logprob for record in records], np.float64)
        sampling = np.array([record.sampling_logprob for record in records], np.float64)
        if np.isnan(logprobs).any():
            raise EngineFailed("the model produced NaN; the serving snapshot's weights are not usable")
        near_ties = bytes([record.near_tie for record in records])
        constrained = bytes([record.constrained for record in records])
        columns: dict[str, Any] = {
            "token_id": pa.array(np.array([record.token_id for record in records], np.int32)),
            "logprob": pa.array(np.maximum(logprobs, LOGPROB_MIN)),
            # Of one that is no number, the engine does not know it.
            "sampling_logprob": pa.array(np.maximum(sampling, LOGPROB_MIN), from_pandas=True),
            "near_tie": pa.array(np.frombuffer(near_ties, np.uint8)),
            "constrained": pa.array(np.frombuffer(constrained, np.bool_)),
        }
        assert {*columns, "snapshot"} == COLUMNS.keys()
        if self._routes:
            routes = _fixed(records, "route", about.route_bytes)
            columns |= {ROUTE: routes} if self._in_order else {ROUTE_GAPS: _gaps(routes, about)}
        if self._router_weights:
            columns[ROUTER_WEIGHTS] = _fixed(records, "router_weights", about.weights_bytes)
        if self._masks:
            # No token of a prompt was drawn from one.
            columns[MASK] = pa.array([record.mask or b"" for record in records], pa.binary())
        return columns


def split(
    checked: Checked, requests: Sequence[GenerateRequest], stay_s: float
) -> tuple[SharedColumns | None, Checked]:
    """What goes into a file in Fireworks' form, and what the response has beside the file. stay_s: as in SharedColumns."""
    if not checked.stored:
        return None, replace(checked, logprobs=None, routes=False, router_weights=False, masks=False)
    routes, masks = ROUTES in checked.stored, MASKS in checked.stored
    inline = replace(checked, routes=checked.routes and not routes, masks=checked.masks and not masks)
    return SharedColumns(routes, masks, stay_s, [request.salt for request in requests]), inline


def check_rows(requests: Sequence[GenerateRequest], info: ModelInfo, checked: Checked) -> None:
    """Raises InvalidRequest for more rows than a file may have."""
    of_expert = (2 if info.num_experts > 256 else 1) * checked.routes + 4 * checked.router_weights
    width = info.moe_layers * info.top_k * of_expert
    rows = sum(request.n * (request.sampling.max_tokens + request.prompt_records) for request in requests)
    if rows * (ROW_BYTES + width) > COLUMNS_BYTES_MAX:
        message = (
            f"{PARAM}: {rows} tokens of {ROW_BYTES + width} bytes may be written, more than the {COLUMNS_BYTES_MAX} bytes "
            "of a file: lower n or max_tokens"
        )
        raise InvalidRequest(message, param=PARAM)


def _in_parts(given: Iterable[list[TokenRecord]]) -> Iterator[list[TokenRecord]]:
    """Of all that is given, one behind the other."""
    records = chain.from_iterable(given)
    while part := list(islice(records, RECORDS_AT_A_TIME)):
        yield part


def _bytes(records: Sequence[TokenRecord], name: Literal["route", "router_weights"]) -> list[bytes]:
    values = [record.route for record in records]
    if name == "router_weights":
        values = [record.router_weights for record in records]
    found = [value for value in values if value is not None]
    if len(found) != len(records):
        raise EngineFailed(f"the engine returned a token without its {name.replace('_', ' ')}")
    return found


def _fixed(
    records: Sequence[TokenRecord], name: Literal["route", "router_weights"], width: int
) -> pa.FixedSizeBinaryArray:
    """A column of values of equal width."""
    joined, count = b"".join(_bytes(records, name)), len(records)
    if len(joined) != width * count:
        raise EngineFailed(f"the engine returned {len(joined)} bytes of {name} for {count} tokens")
    return _fixed_array(joined, count, width)


def _fixed_array(data: Any, count: int, width: int) -> pa.FixedSizeBinaryArray:
    import pyarrow as pa

    return pa.Array.from_buffers(pa.binary(width), count, [None, pa.py_buffer(data)])


def _gaps(routes: pa.FixedSizeBinaryArray, about: FileAbout) -> pa.FixedSizeBinaryArray:
    """A column of routes, as gaps."""
    dtype = np.dtype("<u2" if about.route_dtype == "uint16" else "u1")
    experts = np.frombuffer(routes.buffers()[1], dtype).reshape(len(routes), *about.route_shape)
    return _fixed_array(gaps_of(experts), len(routes), about.route_bytes)


def _snapshots(choices: Sequence[Choice], rows: Sequence[_Rows]) -> pa.Array:
    """rows: by place in `choices`."""
    import pyarrow as pa

    runs = list[tuple[str, int]]()
    for choice, own in zip(choices, rows, strict=True):
        shown = [record.snapshot for record in own.records[: own.prompt]]
        runs += [(name, len(list(same))) for name, same in groupby(shown)]
        runs += [(name, end - start) for name, start, end in choice.spans]
    names = list(dict.fromkeys(name for name, _ in runs))
    numbers = {name: number for number, name in enumerate(names)}
    codes = np.repeat(np.asarray([numbers[name] for name, _ in runs], np.int32), [count for _, count in runs])
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string()))


#: Columns that are small without zstd are not given to it: each costs as much as a few hundred rows.
_COMPRESSED = ("token_id", "logprob", "sampling_logprob", ROUTE, ROUTE_GAPS, ROUTER_WEIGHTS, MASK)
#: Such that other readers of Parquet know, too: several of them split streams of floating-point columns alone (duckdb#17114).
_ENCODINGS = {
    "logprob": "BYTE_STREAM_SPLIT",
    "sampling_logprob": "BYTE_STREAM_SPLIT",
    MASK: "DELTA_LENGTH_BYTE_ARRAY",
}


def _parquet(table: pa.Table, about: FileAbout) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out, compressed = pa.BufferOutputStream(), [name for name in table.column_names if name in _COMPRESSED]
    options: dict[str, Any] = {
        "compression": dict.fromkeys(compressed, "zstd"),
        "compression_level": dict.fromkeys(compressed, 1),
        "use_dictionary": ["snapshot", "near_tie"],
        "column_encoding": {name: _ENCODINGS[name] for name in table.column_names if name in _ENCODINGS},
    }
    with pq.ParquetWriter(out, table.schema, write_statistics=False, store_schema=False, **options) as writer:
        writer.add_key_value_metadata({ABOUT_KEY: msgspec.json.encode(about)})
        for choice in about.choices:
            for start, end in groups_of(choice, about.group_tokens):
                writer.write_table(table.slice(start, end - start), row_group_size=end - start)
    data: bytes = out.getvalue().to_pybytes()
    return data
