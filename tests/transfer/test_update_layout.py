"""Where the tensors of an update lie, and which are refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.core.errors import InvalidRequest
from midstream.core.transfer import SentTensors
from midstream.snapshots.layout import CheckpointSpec, TensorSpec, read_file_layout
from midstream.transfer.layout import ALIGNMENT, UpdateLayout, pieces

TORCH_NAMES = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8", "BOOL": "bool"}
BYTES = {"BF16": 2, "F32": 4, "U8": 1, "BOOL": 1}


def spec(tensors: dict[str, tuple[str, tuple[int, ...]]], *, tied: bool = False) -> CheckpointSpec:
    specs = {name: TensorSpec(dtype, shape, "model.safetensors") for name, (dtype, shape) in tensors.items()}
    return CheckpointSpec(specs, {"tie_word_embeddings": tied})


def sent(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> SentTensors:
    return SentTensors(
        names=tuple(tensors),
        dtype_names=tuple(TORCH_NAMES.get(dtype, dtype) for dtype, _ in tensors.values()),
        shapes=tuple(shape for _, shape in tensors.values()),
    )


MODEL: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed_tokens.weight": ("BF16", (8, 4)),
    "model.norm.weight": ("F32", (4,)),
    "lm_head.weight": ("BF16", (8, 4)),
}

one_tensor = st.tuples(st.sampled_from(sorted(BYTES)), st.lists(st.integers(0, 5), max_size=3).map(tuple))
models = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), one_tensor, min_size=1
)


@given(models, st.randoms(use_true_random=False), st.data())
def test_any_order_in_any_calls_makes_a_file_without_gaps(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    random: object,
    data: st.DataObject,
) -> None:
    tensors.pop("__metadata__", None)
    names = data.draw(st.permutations(sorted(tensors)))
    if not names:
        return
    # Untied, so that every tensor has to come.
    layout = UpdateLayout(spec(tensors))
    written, position = bytearray(layout.bytes_max), layout.data_start
    for begin, end in chunks(names, data):
        message = sent({name: tensors[name] for name in names[begin:end]})
        layout.check(message)
        ranges = layout.place(message)
        assert ranges[0][0] == position
        for (first, last), name in zip(ranges, names[begin:end], strict=True):
            dtype, shape = tensors[name]
            assert (first, last) == (position, position + math.prod(shape) * BYTES[dtype])
            written[first:last] = bytes([hash(name) % 251]) * (last - first)
            position = last
    layout.check_complete()
    assert position == layout.end == layout.bytes_max
    assert layout.sent_bytes == layout.end - layout.data_start
    written[: layout.data_start] = layout.header()
    file = tmp_path_factory.mktemp("update") / "model.safetensors"
    file.write_bytes(written)
    found = read_file_layout(file)
    assert found.data_start == layout.data_start
    assert found.data_start % ALIGNMENT == 0
    assert {name: (one.dtype, one.shape) for name, one in found.tensors.items()} == tensors
    for name, (first, last) in found.ranges.items():
        assert written[first:last] == bytes([hash(name) % 251]) * (last - first)


def chunks(names: list[str], data: st.DataObject) -> list[tuple[int, int]]:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1))) if len(names) > 1 else [])
    ends = [0, *cuts, len(names)]
    return list(itertools.pairwise(ends))


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 7))
def test_pieces_cover_each_range_once_and_only_the_last_is_shorter(sizes: list[int], piece: int) -> None:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    ranges = list(itertools.pairwise(ends))
    assert list(pieces(ranges, None)) == [(begin, end) for begin, end in ranges if begin < end]
    packed = list(pieces([(0, ends[-1])], piece))
    assert [place for begin, end in packed for place in range(begin, end)] == list(range(ends[-1]))
    assert all(end - begin == piece for begin, end in packed[:-1])


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        (SentTensors(names=(), dtype_names=(), shapes=()), "names", "no tensor is named"),
        (SentTensors(names=("model.norm.weight",), dtype_names=(), shapes=((4,),)), "dtype_names", "has 0"),
        (SentTensors(names=(), dtype_names=(), shapes=((4,),)), "shapes", "has 1 entries"),
        (sent({"norm": ("F32", (4,))}), "names", "has no tensor norm"),
        (sent({"module.model.norm.weight": ("F32", (4,))}), "names", "DistributedDataParallel"),
        (
            sent({"model.embed_tokens.weight": ("F32", (8, 4))}),
            "dtype_names",
            "has dtype float32, the served model bfloat16",
        ),
        (sent({"model.norm.weight": ("nonsense", (4,))}), "dtype_names", "has dtype nonsense"),
        (sent({"model.norm.weight": ("F32", (4, 1))}), "shapes", "has shape [4, 1], the served model [4]"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(message: SentTensors, param: str, words: str) -> None:
    layout = UpdateLayout(spec(MODEL))
    with pytest.raises(InvalidRequest) as refused:
        layout.check(message)
    assert refused.value.param == f"update_info.{param}"
    assert words in refused.value.message


def test_a_tensor_comes_once_in_an_update() -> None:
    layout = UpdateLayout(spec(MODEL))
    norm = sent({"model.norm.weight": MODEL["model.norm.weight"]})
    twice = SentTensors(names=norm.names * 2, dtype_names=norm.dtype_names * 2, shapes=norm.shapes * 2)
    with pytest.raises(InvalidRequest, match=r"sent twice in one update: model\.norm\.weight$"):
        layout.check(twice)
    layout.check(norm)
    layout.place(norm)
    with pytest.raises(InvalidRequest, match=r"sent twice in one update: model\.norm\.weight"):
        layout.check(norm)


def test_an_update_is_complete_once_every_tensor_came() -> None:
    layout = UpdateLayout(spec(MODEL))
    with pytest.raises(InvalidRequest, match=r"3 tensors were not sent: lm_head\.weight, model\.embed"):
        layout.check_complete()
    layout.place(sent({name: MODEL[name] for name in list(MODEL)[:2]}))
    with pytest.raises(InvalidRequest, match=r"1 tensor was not sent: lm_head\.weight"):
        layout.check_complete()


@pytest.mark.parametrize("shipped", [False, True])
@pytest.mark.parametrize("comes", [False, True])
def test_a_tied_head_may_come_or_not_whether_the_base_ships_it_or_not(shipped: bool, comes: bool) -> None:
    base = dict(MODEL)
    if not shipped:
        del base["lm_head.weight"]
    layout = UpdateLayout(spec(base, tied=True))
    tensors = {name: MODEL[name] for name in MODEL if comes or name != "lm_head.weight"}
    layout.check(sent(tensors))
    layout.place(sent(tensors))
    layout.check_complete()
    assert (layout.bytes_max - layout.end) == (0 if comes else 64)


def test_replicas_that_got_the_same_calls_make_equal_headers(tmp_path: Path) -> None:
    one, other = UpdateLayout(spec(MODEL)), UpdateLayout(spec(dict(reversed(MODEL.items()))))
    for layout in (one, other):
        layout.place(sent(MODEL))
    assert one.header() == other.header()
