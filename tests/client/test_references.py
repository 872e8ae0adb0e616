"""What a reader of record files says of files that are gone, torn, of other bytes, or made to harm it."""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from midstream.client.decode import masks_of_bytes
from midstream.client.errors import RecordFileError, RecordFileGone
from midstream.client.record_file import RecordFile
from midstream.client.references import ChoiceColumns, read_reference
from midstream.client.turn_columns import TurnColumns
from midstream.core.masks import kept_ids
from midstream.core.record_files import ABOUT_KEY, GROUP_TOKENS, ChoiceAbout, FileAbout, path_of
from midstream.core.references import FORMAT, RecordReference, ReferencedRows, TurnReference

COUNT = GROUP_TOKENS + 5
Change = Callable[[dict[str, Any]], None]


def about_of(count: int, **more: Any) -> FileAbout:
    choice = ChoiceAbout(
        index=0, start=0, count=count, prompt_tokens=3, kv_snapshots=[], earlier_kv_snapshots=[]
    )
    fields: dict[str, Any] = {
        "route_shape": (3, 2),
        "route_dtype": "uint8",
        "choices": [choice],
        "group_tokens": GROUP_TOKENS,
        **more,
    }
    return FileAbout(format=FORMAT, id="cmpl-1", model="m", **fields)


def columns(count: int) -> dict[str, Any]:
    return {
        "token_id": pa.array(range(count), pa.int32()),
        "logprob": pa.array([-float(at) for at in range(count)]),
        "sampling_logprob": pa.array([None, *range(count - 1)], pa.float64()),
        "snapshot": pa.array(["base"] * count),
        "near_tie": pa.array([0] * count, pa.uint8()),
        "constrained": pa.array([False] * count),
        "route": pa.array([bytes([at % 256] * 6) for at in range(count)], pa.binary(6)),
        "sampling_mask": pa.array([b"\0"] * count, pa.binary()),
    }


#: How a server writes, in place of plain pages.
SERVED: dict[str, Any] = {
    "compression": "zstd",
    "column_encoding": {
        "logprob": "BYTE_STREAM_SPLIT",
        "sampling_logprob": "BYTE_STREAM_SPLIT",
        "sampling_mask": "DELTA_LENGTH_BYTE_ARRAY",
    },
}


def file_of(
    table: dict[str, Any], about: bytes, groups: tuple[int, ...] = (GROUP_TOKENS - 3, 8), **more: Any
) -> bytes:
    made, out, start = pa.table(table), io.BytesIO(), 0
    with pq.ParquetWriter(
        out, made.schema, store_schema=False, use_dictionary=["snapshot"], **more
    ) as writer:
        writer.add_key_value_metadata({ABOUT_KEY: about})
        for size in groups:
            writer.write_table(made.slice(start, size), row_group_size=size)
            start += size
    return out.getvalue()


def put(root: Path, data: bytes, count: int = COUNT, **more: Any) -> RecordReference:
    """The file in the bucket, and a reference with the right digest of whatever it is."""
    digest = hashlib.sha256(data).hexdigest()
    path = root / path_of("default", digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    fields: dict[str, Any] = {"rows": count, "choices": [ReferencedRows(0, 0, count)], **more}
    return RecordReference(
        format=FORMAT, file=path_of("default", digest), sha256=digest, bytes=len(data), **fields
    )


def good(root: Path) -> RecordReference:
    return put(root, file_of(columns(COUNT), msgspec.json.encode(about_of(COUNT))))


def test_a_file_is_read_as_views(tmp_path: Path) -> None:
    (found,) = read_reference(tmp_path.as_uri(), good(tmp_path))
    assert found.token_ids.tolist() == list(range(COUNT))
    assert np.isnan(found.sampling_logprobs[0])
    assert found.routes is not None
    assert found.routes.shape == (COUNT, 3, 2)
    assert found.routes[300].tolist() == [[44, 44]] * 3
    assert not found.routes.flags.owndata
    assert not found.token_ids.flags.owndata
    assert found.sampling_masks().ids.tolist() == list(range(COUNT))


def with_gaps(root: Path, gaps: list[int]) -> RecordReference:
    """Of each token the first of its three layers; the others have the experts 0 and 1."""
    table = columns(COUNT)
    del table["route"]
    table["route_gaps"] = pa.array([bytes([*gaps, 0, 1, 0, 1])] * COUNT, pa.binary(6))
    return put(root, file_of(table, msgspec.json.encode(about_of(COUNT))))


def test_files_of_older_servers_have_smaller_row_groups(tmp_path: Path) -> None:
    about = msgspec.json.decode(msgspec.json.encode(about_of(COUNT)))
    del about["group_tokens"]
    groups = (1021, 1024, 1024, 1024, COUNT - 4093)
    data = file_of(columns(COUNT), msgspec.json.encode(about), groups)
    (found,) = read_all(tmp_path, put(tmp_path, data))
    assert found.token_ids.tolist() == list(range(COUNT))
    assert found.routes is not None
    assert found.routes[COUNT - 1].tolist() == [[(COUNT - 1) % 256] * 2] * 3
    fails(
        tmp_path,
        put(tmp_path, file_of(columns(COUNT), msgspec.json.encode(about))),
        "has 2 row groups, not 5",
    )


def test_columns_that_nobody_asks_for_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routes are most of a file, and not every reader wants them."""
    asked: list[str] = []
    before = RecordFile.read

    def read(self: RecordFile, choice: Any, groups: range, names: Any) -> Any:
        asked.extend(names)
        return before(self, choice, groups, names)

    monkeypatch.setattr(RecordFile, "read", read)
    (found,) = read_reference(tmp_path.as_uri(), good(tmp_path))
    assert not {"route", "sampling_mask"} & {*asked}
    assert found.mask_offsets is not None
    assert asked.count("sampling_mask") == 1
    assert found.sampling_masks().ids.tolist() == list(range(COUNT))
    assert (asked.count("sampling_mask"), asked.count("route")) == (1, 0)


def test_the_bytes_of_a_file_go_when_its_columns_are_there(tmp_path: Path) -> None:
    """A trainer that keeps samples would keep each file beside its arrays."""
    (found,) = read_reference(tmp_path.as_uri(), good(tmp_path))
    file = weakref.ref(found._rows._file)
    assert found.routes is not None
    assert file() is not None
    assert found.mask_bytes is not None
    assert file() is None


def test_columns_can_be_sent_to_another_process(tmp_path: Path) -> None:
    (found,) = read_reference(tmp_path.as_uri(), good(tmp_path))
    sent = pickle.dumps(found)
    (tmp_path / good(tmp_path).file).unlink()
    again = pickle.loads(sent)  # noqa: S301 - its own bytes
    assert again.token_ids.tolist() == found.token_ids.tolist()
    assert again.routes.tolist() == found.routes.tolist()
    assert again.router_weights is None
    assert again.sampling_masks().ids.tolist() == found.sampling_masks().ids.tolist()


def test_two_threads_that_ask_for_one_column_get_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be most of the memory that a reader has."""
    (found,) = read_reference(tmp_path.as_uri(), good(tmp_path))
    asked: list[Any] = []
    both, before = threading.Event(), RecordFile.read

    def read(self: RecordFile, choice: Any, groups: range, names: Any) -> Any:
        asked.append(names)
        if len(asked) > 1:
            both.set()
        # The other thread comes here meanwhile, if it may.
        both.wait(0.2)
        return before(self, choice, groups, names)

    monkeypatch.setattr(RecordFile, "read", read)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: found.routes, range(2))
    assert (one is other, asked) == (True, [["route"]])


def test_a_choice_without_large_columns_can_be_sent_and_keeps_no_file(tmp_path: Path) -> None:
    table = columns(COUNT)
    del table["route"], table["sampling_mask"]
    (found,) = read_reference(
        tmp_path.as_uri(), put(tmp_path, file_of(table, msgspec.json.encode(about_of(COUNT))))
    )
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 - its own bytes
    assert again.logprobs.tolist() == found.logprobs.tolist()
    assert (again.routes, again.router_weights, again.mask_bytes) == (None, None, None)
    assert found._rows is None


def test_routes_may_be_gaps(tmp_path: Path) -> None:
    (found,) = read_reference(tmp_path.as_uri(), with_gaps(tmp_path, [250, 5]))
    assert found.routes is not None
    assert found.routes.tolist() == [[[250, 255], [0, 1], [0, 1]]] * COUNT


def read_all(root: Path, reference: Any, **more: Any) -> list[ChoiceColumns]:
    """With the columns that are decoded when they are asked for."""
    found = read_reference(root.as_uri(), reference, **more)
    for one in found:
        assert (one.routes is None, one.router_weights) == (False, None)
        assert one.mask_bytes is not None
    return found


def fails(root: Path, reference: Any, match: str, **more: Any) -> None:
    with pytest.raises(RecordFileError, match=match) as caught:
        read_all(root, reference, **more)
    file = reference.file if isinstance(reference, RecordReference) else ""
    assert file in str(caught.value)


def test_a_file_that_is_gone_or_changed_is_named(tmp_path: Path) -> None:
    reference = good(tmp_path)
    path = tmp_path / reference.file
    data = path.read_bytes()
    for at in (0, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        fails(tmp_path, reference, "its bytes have the sha256")
    path.write_bytes(data[:-1])
    fails(tmp_path, reference, "has .* bytes, and the reference says")
    path.write_bytes(data + b"1")
    fails(tmp_path, reference, "cannot be read: .*has more than")
    path.unlink()
    with pytest.raises(RecordFileGone, match=r"is gone: .*there is no"):
        read_reference(tmp_path.as_uri(), reference)
    fails(tmp_path, reference, "more than bytes_max, 10", bytes_max=10)


def test_gaps_that_are_no_route_are_refused(tmp_path: Path) -> None:
    fails(tmp_path, with_gaps(tmp_path, [250, 6]), "route_gaps: gaps of experts add up to more than 255")


def test_a_record_whose_file_has_no_routes_is_named(tmp_path: Path) -> None:
    reference = with_gaps(tmp_path, [250, 6])
    left = msgspec.to_builtins(TurnReference(reference, 0, ["route"]))
    turn = {"token_ids": [*range(COUNT)], "record_reference": left}
    with pytest.raises(RecordFileError, match=rf"^a.jsonl: line 3: {reference.file}: route_gaps"):
        TurnColumns(tmp_path.as_uri()).turn(turn, "a.jsonl: line 3")


def test_a_turn_pays_for_the_columns_that_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default these are the log-probabilities, and the file may have 100 times as much."""
    left = msgspec.to_builtins(TurnReference(good(tmp_path), 0, ["logprob", "sampling_logprob"]))
    turn = {"token_ids": [*range(COUNT)], "record_reference": left}
    asked: list[str] = []
    before = RecordFile.read

    def read(self: RecordFile, choice: Any, groups: range, names: Any) -> Any:
        asked.extend(names)
        return before(self, choice, groups, names)

    monkeypatch.setattr(RecordFile, "read", read)
    found = TurnColumns(tmp_path.as_uri()).turn(turn, "a.jsonl: line 3")
    assert found.keys() - turn.keys() == {"logprobs", "sampling_logprobs"}
    assert found["logprobs"] == [-float(at) for at in range(COUNT)]
    assert not {"route", "sampling_mask"} & {*asked}


def test_more_gaps_than_there_can_be_experts_are_refused(tmp_path: Path) -> None:
    """Of a few rows that compress to nothing they would keep the reader busy for minutes."""
    table = columns(COUNT)
    del table["route"]
    table["route_gaps"] = pa.array([bytes(257)] * COUNT, pa.binary(257))
    about = msgspec.structs.replace(about_of(COUNT), route_shape=(1, 257))
    reference = put(tmp_path, file_of(table, msgspec.json.encode(about)))
    fails(tmp_path, reference, "route_gaps: 257 experts, and their numbers tell 256 apart")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"file": "../../etc/passwd"}, "is no name of a record file"),
        ({"file": f"record-files/../{'0' * 64}.parquet"}, "is no name of a record file"),
        ({"file": f"records/default/{'0' * 64}.parquet"}, "is no name of a record file"),
        ({"file": f"record-files/default/{'0' * 64}.parquet"}, "the reference has another sha256"),
        ({"rows": COUNT + 1}, f"choices have {COUNT} rows, not {COUNT + 1}"),
        ({"choices": [ReferencedRows(0, 1, COUNT)]}, "do not begin at 0"),
        ({"choices": [ReferencedRows(1, 0, COUNT)]}, "other rows of choices"),
    ],
)
def test_a_reference_that_does_not_fit_its_file_is_refused(
    change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(RecordFileError, match=match):
        read_reference(tmp_path.as_uri(), msgspec.structs.replace(good(tmp_path), **change))


@pytest.mark.parametrize("reference", [None, {}, [], {"format": "midstream_records_v2"}, object()])
def test_what_is_no_reference_is_refused(reference: Any, tmp_path: Path) -> None:
    with pytest.raises(RecordFileError, match="no record_reference"):
        read_reference(tmp_path.as_uri(), reference)


def nested(table: dict[str, Any]) -> None:
    table["route"] = pa.array([[1, 2]] * COUNT, pa.list_(pa.uint8()))


def deep(table: dict[str, Any]) -> None:
    kind = pa.uint8()
    for _ in range(50):
        kind = pa.list_(kind)
    table["route"] = pa.nulls(COUNT, kind)


def nulls(table: dict[str, Any]) -> None:
    table["token_id"] = pa.array([None] * COUNT, pa.int32())


def wider(table: dict[str, Any]) -> None:
    table["route"] = pa.array([b"1" * 7] * COUNT, pa.binary(7))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (nested, "its columns are .*list"),
        (deep, "its columns are|is no Parquet file"),
        (nulls, "row group 0 lacks values of token_id"),
        (wider, r"its columns are .*fixed_size_binary\[7\]"),
        (lambda table: table.pop("logprob"), "its columns are"),
        (lambda table: table.update(more=table["logprob"]), "its columns are"),
        (lambda table: table.update(logprob=table["token_id"]), "its columns are"),
    ],
)
def test_a_file_of_other_columns_is_refused(change: Change, match: str, tmp_path: Path) -> None:
    table = columns(COUNT)
    change(table)
    fails(tmp_path, put(tmp_path, file_of(table, msgspec.json.encode(about_of(COUNT)))), match)


HUGE = 2**50


@pytest.mark.parametrize(
    ("about", "match"),
    [
        (b"{", "its metadata is not that of a record file"),
        (b"[" * 100_000, "its metadata is not that of a record file"),
        (msgspec.json.encode(about_of(COUNT, route_shape=(HUGE, HUGE))), "its columns are"),
        (msgspec.json.encode(about_of(COUNT, choices=[])), "other rows of choices"),
    ],
)
def test_metadata_that_lies_is_refused(about: bytes, match: str, tmp_path: Path) -> None:
    fails(tmp_path, put(tmp_path, file_of(columns(COUNT), about)), match)


def test_declared_sizes_allocate_nothing(tmp_path: Path) -> None:
    rows = {"rows": HUGE, "choices": [ReferencedRows(0, 0, HUGE)]}
    data = file_of(columns(COUNT), msgspec.json.encode(about_of(HUGE)))
    fails(tmp_path, put(tmp_path, data, **rows), f"declares {COUNT} rows, not {HUGE}")
    reference = good(tmp_path)
    fails(tmp_path, reference, "more than bytes_max", bytes_max=reference.bytes + 1)


def test_other_row_groups_are_refused(tmp_path: Path) -> None:
    about = msgspec.json.encode(about_of(COUNT))
    fails(tmp_path, put(tmp_path, file_of(columns(COUNT), about, (COUNT,))), "has 1 row groups, not 2")
    moved = file_of(columns(COUNT), about, (GROUP_TOKENS, COUNT - GROUP_TOKENS))
    fails(tmp_path, put(tmp_path, moved), f"row group 0 declares {GROUP_TOKENS} rows, not {GROUP_TOKENS - 3}")


def test_bytes_that_are_no_parquet_are_refused(tmp_path: Path) -> None:
    for data in (b"", b"PAR1", b"PAR1" * 10, b"\x80\x04]." * 1000):
        fails(tmp_path, put(tmp_path, data), "is no Parquet file")


def test_a_damaged_page_names_its_row_group(tmp_path: Path) -> None:
    data = file_of(columns(COUNT), msgspec.json.encode(about_of(COUNT)))
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(0)
    at = column.data_page_offset
    torn = data[:at] + b"\xff" * column.total_compressed_size + data[at + column.total_compressed_size :]
    fails(tmp_path, put(tmp_path, torn), "row group 1 cannot be read")


def test_a_schema_of_arrows_in_a_file_is_refused(tmp_path: Path) -> None:
    out, made = io.BytesIO(), pa.table(columns(COUNT))
    with pq.ParquetWriter(out, made.schema) as writer:
        writer.add_key_value_metadata({ABOUT_KEY: msgspec.json.encode(about_of(COUNT))})
        writer.write_table(made)
    fails(tmp_path, put(tmp_path, out.getvalue()), "its metadata has .*ARROW:schema")


def test_a_page_that_claims_two_gibibytes_allocates_none(tmp_path: Path) -> None:
    data = file_of(columns(COUNT), msgspec.json.encode(about_of(COUNT)))
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1)
    at = group.column(group.num_columns - 1).data_page_offset
    # The page's header in Thrift: its type, then the size of what it decompresses to.
    assert (data[at], data[at + 2], data[at + 3] < 128) == (0x15, 0x15, True)
    claims = data[: at + 3] + b"\xfe\xff\xff\xff\x0f" + data[at + 4 :]
    fails(tmp_path, put(tmp_path, claims), "row group 1 cannot be read")


@settings(max_examples=examples(150), deadline=None)
@given(
    at=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
    cut=st.booleans(),
    how=st.sampled_from([{}, SERVED, SERVED | {"compression": "none"}]),
)
def test_no_bytes_make_it_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, at: float, value: int, cut: bool, how: dict[str, Any]
) -> None:
    root, table = tmp_path_factory.mktemp("hostile"), columns(COUNT)
    if how:
        del table["route"]
        table["route_gaps"] = pa.array([bytes(6)] * COUNT, pa.binary(6))
    data = bytearray(file_of(table, msgspec.json.encode(about_of(COUNT)), **how))
    place = int(at * len(data))
    data[place] = value
    reference = put(root, bytes(data[:place]) if cut else bytes(data))
    try:
        (found,) = read_all(root, reference)
    except RecordFileError as error:
        told = str(error)
    else:
        told = reference.file
        assert found.routes is not None
        assert len(found.token_ids) == len(found.routes) == COUNT
    assert reference.file in told


def mask_of(kept: list[int] | None, form: int) -> bytes:
    if kept is None:
        return b"\1"
    if form == 8:
        bits = sum(1 << one for one in kept)
        return b"\x08" + bits.to_bytes(max(kept) // 8 + 1, "little")
    if form == 0:
        return b"\0"
    return bytes([form]) + b"".join(one.to_bytes(form, "little") for one in kept)


MASKS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.lists(st.integers(0, 60_000), min_size=1, max_size=6, unique=True)),
        st.sampled_from((0, 2, 4, 8)),
        st.integers(0, 5),
    ),
    max_size=8,
)


@settings(max_examples=examples(200), deadline=None)
@given(MASKS)
def test_masks_of_bytes_are_the_ids_of_each_mask(drawn: Any) -> None:
    rows, tokens, expected = [], [], []
    for kept, form, which in drawn:
        ids = None if kept is None else sorted(kept[:1] if form == 0 else kept)
        token = 7 if ids is None else ids[which % len(ids)]
        rows.append(mask_of(ids, form))
        tokens.append(token)
        expected.append(list(kept_ids(rows[-1], token) or ()))
    found = masks_of_bytes(*bytes_of(rows), np.asarray(tokens, np.int64))
    assert [found.row(at).tolist() for at in range(len(rows))] == expected


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=9), st.integers(-1, 300)), max_size=4))
def test_masks_of_bytes_refuse_what_one_mask_is_refused_for(drawn: list[tuple[bytes, int]]) -> None:
    bad = []
    for number, (mask, token) in enumerate(drawn):
        try:
            kept_ids(mask, token)
        except ValueError as error:
            bad.append(f"sampling mask of token {number}: {error}")
    arguments = (*bytes_of([mask for mask, _ in drawn]), np.asarray([token for _, token in drawn], np.int64))
    if not bad:
        masks_of_bytes(*arguments)
        return
    with pytest.raises(ValueError, match="sampling mask of token") as caught:
        masks_of_bytes(*arguments)
    assert str(caught.value) == bad[0]


def bytes_of(rows: list[bytes]) -> tuple[Any, Any]:
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return np.frombuffer(b"".join(rows), np.uint8), ends
