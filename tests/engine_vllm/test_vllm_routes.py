"""Routes off vLLM's wire: each belongs to its token, or none is shown."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from midstream.engine.servers.chunks import Chunk
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import InvalidRoutes
from midstream.engine.vllm.routes import decode_routes, passes_of

SAMPLES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "routes.json").read_text())
SHAPE = Shape(moe_layers=(1, 2), hidden_layers=3, top_k=2, num_experts=8, vocab_size=9, eos_token_ids=())


PLAIN = "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 3, 2), }"


def npy(array: np.ndarray, **options: Any) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array, **options)
        return base64.b64encode(buffer.getvalue()).decode()


def with_header(text: str, version: int = 1) -> str:
    """The array of `good`, behind a header of one's own."""
    head = b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little")
    return base64.b64encode(head + text.encode() + good().tobytes()).decode()


def good(rows: int = 4) -> np.ndarray:
    """[rows, 3 layers, 2 experts], the first layer dense."""
    array = np.zeros((rows, 3, 2), np.uint8)
    array[:, 1:] = (np.arange(rows * 4).reshape(rows, 2, 2)) % 8
    return array


@pytest.mark.parametrize("sample", SAMPLES, ids=[s["name"] for s in SAMPLES])
def test_what_vllm_encodes_is_the_route_of_the_pass_that_scored_the_token(sample: dict[str, Any]) -> None:
    # Positions, the last one included.
    scored = range(sample["start"] + 1, sample["prompt"] + sample["generated"])
    routes = decode_routes(
        sample["data"],
        replace(
            SHAPE,
            moe_layers=tuple(sample["moe_layers"]),
            hidden_layers=sample["layers"],
            top_k=sample["top_k"],
            num_experts=sample["experts"],
        ),
        first=sample["start"],
        count=len(scored),
    )
    kind = np.uint8 if sample["experts"] <= 256 else "<u2"
    shape = (len(sample["moe_layers"]), sample["top_k"])
    told = {
        str(p): np.frombuffer(r, kind).reshape(shape).tolist() for p, r in zip(scored, routes, strict=True)
    }
    assert told == sample["routes"]


def test_the_samples_have_every_form_that_is_claimed() -> None:
    assert {s["dtype"] for s in SAMPLES} == {"uint8", "uint16", "int32"}
    assert {s["start"] - s["prompt"] for s in SAMPLES} >= {0, -1}
    assert any(s["start"] == 0 for s in SAMPLES)
    assert any(s["shape"][1] < s["layers"] for s in SAMPLES)


def test_big_endian_numbers_become_little_endian_ones() -> None:
    array = np.array([[[0, 0], [3, 1], [299, 256]]], dtype=">u2")
    routes = decode_routes(npy(array), replace(SHAPE, num_experts=300), first=0, count=1)
    assert routes == [np.array([3, 1, 299, 256], dtype="<u2").tobytes()]


def changed(place: tuple[int, int, int], value: int, dtype: Any = np.uint8) -> np.ndarray:
    array = good().astype(dtype)
    array[place] = value
    return array


BROKEN: dict[str, tuple[str, str]] = {
    "one pass too few": (npy(good(3)), "3 passes"),
    "one pass too many": (npy(good(5)), "5 passes"),
    "no passes": (npy(good(0)), "0 passes"),
    "another top_k": (npy(np.zeros((4, 3, 3), np.uint8)), "3 experts per token"),
    "another number of layers": (npy(np.zeros((4, 4, 2), np.uint8)), "4 layers"),
    "two dimensions": (npy(np.zeros((4, 6), np.uint8)), "shape"),
    "four dimensions": (npy(np.zeros((4, 3, 2, 1), np.uint8)), "shape"),
    "floats": (npy(good().astype(np.float32)), "header"),
    "int64": (npy(good().astype(np.int64)), "header"),
    "objects, pickled": (npy(np.full((4, 3, 2), None, dtype=object), allow_pickle=True), "header"),
    "an expert that there is not": (
        npy(changed((2, 1, 0), 8)),
        "expert 8 in layer 1 of the pass at position 12",
    ),
    "a negative expert": (npy(changed((0, 2, 1), -1, np.int32)), "expert -1 in layer 2"),
    "the same expert twice": (npy(changed((3, 2, 0), int(good()[3, 2, 1]))), "twice"),
    "a layer that was not recorded": (npy(np.zeros((4, 3, 2), np.uint8)), "twice"),
    "a padded expert": (npy(changed((1, 1, 0), 255)), "expert 255"),
    "not base64": ("!!!!", "base64"),
    "not text of base64": ("rötung", "base64"),
    "nothing": ("", "npy"),
    "not an array": (base64.b64encode(pickle.dumps(good())).decode(), "npy"),
    "a header of brackets": (with_header("(" * 1000), "npy"),
    "a header of signs": (with_header("-" * 1000 + "1"), "npy"),
    "a header of lists": (with_header("[" * 150 + "]" * 150), "npy"),
    "a header with an open quote": (with_header("{'descr': '|u1"), "npy"),
    "a header with three open quotes": (with_header("{'descr': '''|u1"), "npy"),
    "a header of one key": (with_header("{'descr': '|u1'}"), "npy"),
    "a header of keys that have no order": (with_header("{'descr': '|u1', 1: 2}"), "npy"),
    "a header over its bound": (with_header(PLAIN + " " * 1024), "npy"),
    "a header over its bound, in the second version": (with_header(PLAIN + " " * 70_000, version=2), "npy"),
    "a header of a version there is not": (with_header(PLAIN, version=4), "npy"),
    "negative sizes": (with_header(PLAIN.replace("(4, 3,", "(-4, -3,")), "shape"),
    "objects without a pickle": (with_header(PLAIN.replace("|u1", "|O")), "shape"),
    "fields": (with_header(PLAIN.replace("'|u1'", "[('a', '|u1')]")), "shape"),
    "a zip": (base64.b64encode(b"PK\x03\x04" + bytes(40)).decode(), "npy"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_exactly_as_expected_is_refused_with_words(name: str) -> None:
    data, words = BROKEN[name]
    with pytest.raises(InvalidRoutes, match=words):
        decode_routes(data, SHAPE, first=10, count=4)


def test_a_header_that_promises_more_than_there_is_allocates_nothing() -> None:
    raw = base64.b64decode(npy(good()))
    lying = raw.replace(b"(4, 3, 2), }        ", b"(400000000, 3, 2), }")
    assert len(lying) == len(raw)
    assert lying != raw
    with pytest.raises(InvalidRoutes, match="bytes follow"):
        decode_routes(base64.b64encode(lying).decode(), SHAPE, first=0, count=4)


@pytest.mark.parametrize("cut", [1, 7, 9, 60, -1, -24])
def test_a_cut_array_is_refused(cut: int) -> None:
    raw = base64.b64decode(npy(good()))[:cut]
    with pytest.raises(InvalidRoutes):
        decode_routes(base64.b64encode(raw).decode(), SHAPE, first=0, count=4)


@settings(deadline=None)
@given(place=st.integers(0, 127), bits=st.integers(1, 255))
def test_a_damaged_header_gives_the_same_routes_or_none(place: int, bits: int) -> None:
    whole = base64.b64decode(npy(good()))
    raw = bytearray(whole)
    raw[place] ^= bits
    expected = decode_routes(npy(good()), SHAPE, first=0, count=4)
    try:
        found = decode_routes(base64.b64encode(raw).decode(), SHAPE, first=0, count=4)
    except InvalidRoutes:
        return
    assert found == expected


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    text = base64.b64encode(b"\x93NUMPY\x01\x00" + data).decode()
    with pytest.raises(InvalidRoutes):
        decode_routes(text, SHAPE, first=0, count=4)
    with pytest.raises(InvalidRoutes):
        passes_of(Chunk(routes=text))
