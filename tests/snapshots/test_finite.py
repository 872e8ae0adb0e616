"""Which numbers of a snapshot's files are not finite, and how the refusal names the first of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream.core.errors import SnapshotCorrupt, SnapshotNotFinite
from midstream.snapshots import finite
from midstream.snapshots.finite import check_finite, first_bad, parts_show_finite, shows_finite
from midstream.snapshots.layout import DTYPE_BITS, read_file_layout

FILE = "model.safetensors"
#: Formats with numbers that are not finite, as torch has them.
FLOATS: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def written(
    directory: Path,
    tensors: dict[str, tuple[str, list[int], bytes]],
    file: str = FILE,
    *,
    spaces: int | None = None,
) -> Path:
    """A safetensors file of these bytes, in this order. The data begins at an odd place.

    spaces: it begins so many places behind a multiple of eight."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    if spaces is None:
        text += b" " * ((len(text) + 1) % 2)
    else:
        text += b" " * (-len(text) % 8 + spaces)
    directory.mkdir(exist_ok=True)
    (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


def check(directory: Path) -> None:
    files = {path.name: read_file_layout(path) for path in directory.glob("*.safetensors")}
    check_finite(directory, files)


@pytest.mark.parametrize("dtype", FLOATS)
@given(raw=st.binary(min_size=16, max_size=64))
def test_a_number_is_finite_where_torch_says_so(dtype: str, raw: bytes) -> None:
    data = bytearray(raw[: len(raw) // 8 * 8])
    numbers = torch.frombuffer(data, dtype=torch.uint8).view(FLOATS[dtype])
    parts = torch.view_as_real(numbers).reshape(-1) if dtype == "C64" else numbers
    bad = [i for i, number in enumerate(parts.to(torch.float64).tolist()) if not np.isfinite(number)]
    found = first_bad(dtype, np.frombuffer(data, np.uint8))
    assert (found and found[0]) == (bad[0] if bad else None)


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPE_BITS[name] <= 16])
def test_every_number_of_16_bits_or_less_is_judged_as_torch_judges_it(dtype: str) -> None:
    bits = DTYPE_BITS[dtype]
    every = np.arange(2**bits, dtype=f"<u{bits // 8}")
    finite_ones = torch.from_numpy(every.view(np.uint8).copy()).view(FLOATS[dtype]).float().isfinite()
    ours = [first_bad(dtype, every[i : i + 1].view(np.uint8)) is None for i in range(2**bits)]
    assert ours == finite_ones.tolist()


def largest(data: bytes) -> dict[int, int]:
    """Of the words of 16 and of 32 bits in a file, without their highest bit."""
    found = {}
    for bits in (16, 32):
        words = np.frombuffer(data[: len(data) // (bits // 8) * (bits // 8)], f"<u{bits // 8}")
        found[bits] = int((words & ((1 << (bits - 1)) - 1)).max(initial=0))
    return found


@given(
    dtypes=st.lists(st.sampled_from(sorted(DTYPE_BITS)), min_size=1, max_size=3),
    raw=st.binary(min_size=24, max_size=24),
    spaces=st.integers(0, 3),
)
def test_no_largest_word_hides_a_number_that_is_not_finite(
    tmp_path_factory: pytest.TempPathFactory, dtypes: list[str], raw: bytes, spaces: int
) -> None:
    whole = {f"t{i}": (dtype, [8 * 24 // DTYPE_BITS[dtype]], raw) for i, dtype in enumerate(dtypes)}
    file = written(tmp_path_factory.mktemp("file"), whole, spaces=spaces) / FILE
    if shows_finite(read_file_layout(file), largest(file.read_bytes())):
        check(file.parent)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_the_largest_words_show_that_ordinary_weights_are_finite(tmp_path: Path, dtype: str) -> None:
    weights = torch.linspace(-3.0, 3.0, 64).to(FLOATS[dtype]).view(torch.uint8).numpy().tobytes()
    # Where trainers' files begin: at a multiple of eight.
    file = written(tmp_path, {"t": (dtype, [64], weights)}, spaces=0) / FILE
    assert shows_finite(read_file_layout(file), largest(file.read_bytes()))
    assert not shows_finite(read_file_layout(file), {})


def parts_of(file: Path, part_bytes: int) -> dict[int, dict[int, int]]:
    data = file.read_bytes()
    return {at: largest(data[at : at + part_bytes]) for at in range(0, len(data), part_bytes)}


@given(
    dtypes=st.lists(st.sampled_from(sorted(DTYPE_BITS)), min_size=1, max_size=3),
    raw=st.binary(min_size=24, max_size=24),
    spaces=st.integers(0, 3),
    part_bytes=st.sampled_from([16, 64, 256, 1024]),
)
def test_no_part_hides_a_number_that_is_not_finite(
    tmp_path_factory: pytest.TempPathFactory, dtypes: list[str], raw: bytes, spaces: int, part_bytes: int
) -> None:
    whole = {f"t{i}": (dtype, [8 * 24 // DTYPE_BITS[dtype]], raw) for i, dtype in enumerate(dtypes)}
    file = written(tmp_path_factory.mktemp("file"), whole, spaces=spaces) / FILE
    if parts_show_finite(file, parts_of(file, part_bytes)):
        check(file.parent)


@pytest.mark.parametrize("part_bytes", [16, 64, 256, 1024])
def test_the_words_of_a_header_do_not_hide_that_numbers_of_f16_are_finite(
    tmp_path: Path, part_bytes: int
) -> None:
    weights = torch.linspace(-3.0, 3.0, 64).to(torch.float16)
    raw = weights.view(torch.uint8).numpy().tobytes()
    file = written(tmp_path, {"t": ("F16", [64], raw)}, spaces=0) / FILE
    parts = parts_of(file, part_bytes)
    assert not shows_finite(read_file_layout(file), largest(file.read_bytes()))
    assert parts_show_finite(file, parts)
    # One that nobody looked for.
    assert not parts_show_finite(file, {**parts, 0: {}})
    data = bytearray(file.read_bytes())
    for place in range(len(data) - len(raw), len(data), 2):
        data[place : place + 2] = (0x7C00).to_bytes(2, "little")
        file.write_bytes(data)
        assert not parts_show_finite(file, parts_of(file, part_bytes))
        data[place : place + 2] = raw[place - len(data) :][:2]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS.keys() - FLOATS.keys()))
def test_a_dtype_whose_numbers_are_all_finite_is_taken_as_it_is(tmp_path: Path, dtype: str) -> None:
    check(written(tmp_path, {"t": (dtype, [8], b"\xff" * DTYPE_BITS[dtype])}))


@pytest.mark.parametrize(
    ("dtype", "bits", "number"),
    [
        ("F32", 0x7FC00000, "NaN"),
        ("F32", 0xFFC00001, "NaN"),
        ("F32", 0x7F800000, "infinity"),
        ("F32", 0xFF800000, "-infinity"),
        ("BF16", 0x7F80, "infinity"),
        ("BF16", 0xFFC0, "NaN"),
        ("F16", 0xFC00, "-infinity"),
        ("F64", 0x7FF0 << 48, "infinity"),
        ("F8_E4M3", 0xFF, "NaN"),
        ("F8_E5M2", 0x7C, "infinity"),
        ("F8_E8M0", 0xFF, "NaN"),
    ],
)
def test_a_refusal_names_tensor_index_number_and_file(
    tmp_path: Path, dtype: str, bits: int, number: str
) -> None:
    size = DTYPE_BITS[dtype] // 8
    numbers = np.zeros((3, 5), f"<u{size}")
    numbers[1, 2] = numbers[2, 0] = bits
    tensors = {"a": ("F32", [2], bytes(8)), "b": (dtype, [3, 5], numbers.tobytes())}
    with pytest.raises(
        SnapshotNotFinite, match=rf"^tensor b is {number} at index \[1, 2\] \(model\.safetensors\)$"
    ):
        check(written(tmp_path, tensors))


def test_the_first_one_is_named_across_pieces_tensors_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "PIECE_BYTES", 64)
    monkeypatch.setattr(finite, "GROUP_BYTES", 100)
    rng = np.random.default_rng(5)
    shards = {f"model-0000{i}.safetensors": [f"t{i}.{n}" for n in range(6)] for i in (1, 2, 3)}
    clean = {
        name: rng.standard_normal((9, 7)).astype(np.float32) for names in shards.values() for name in names
    }

    def write(tensors: dict[str, np.ndarray]) -> None:
        for file, names in shards.items():
            written(tmp_path, {n: ("F32", [9, 7], tensors[n].tobytes()) for n in names}, file)

    write(clean)
    check(tmp_path)
    for _ in range(30):
        bad = {name: array.copy() for name, array in clean.items()}
        places = [(name, *np.unravel_index(rng.integers(63), (9, 7))) for name in rng.choice(list(clean), 3)]
        for name, row, column in places:
            bad[name][row, column] = np.nan
        write(bad)
        name, row, column = min(places)
        with pytest.raises(
            SnapshotNotFinite, match=re.escape(f"tensor {name} is NaN at index [{row}, {column}]")
        ):
            check(tmp_path)


def test_a_single_number_has_no_index_and_a_complex_one_has_its_own(tmp_path: Path) -> None:
    with pytest.raises(SnapshotNotFinite, match=r"^tensor t is NaN at index \[\]"):
        check(written(tmp_path, {"t": ("F32", [], np.float32(np.nan).tobytes())}))
    numbers = np.zeros(4, np.complex64)
    numbers[2] = complex(0, np.inf)
    with pytest.raises(SnapshotNotFinite, match=r"^tensor t is infinity at index \[2\]"):
        check(written(tmp_path, {"t": ("C64", [4], numbers.tobytes())}))
    check(written(tmp_path, {"none": ("F32", [0, 3], b"")}))


def test_a_check_that_nobody_waits_for_reads_no_more(tmp_path: Path) -> None:
    written(tmp_path, {"t": ("F32", [1], np.float32(np.nan).tobytes())})
    check_finite(tmp_path, {FILE: read_file_layout(tmp_path / FILE)}, cancelled=lambda: True)


def test_a_file_that_became_shorter_is_said(tmp_path: Path) -> None:
    written(tmp_path, {"t": ("F32", [4], bytes(16))})
    layout = read_file_layout(tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-1])
    with pytest.raises(SnapshotCorrupt, match="shorter"):
        check_finite(tmp_path, {FILE: layout})
