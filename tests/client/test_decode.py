"""Routes and snapshots read off responses."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from midstream.client import snapshot_of
from midstream.client.decode import (
    decode_routing_matrix,
    decode_sampling_masks,
    near_ties_of,
    router_weights_of,
    routes_of,
    sampling_masks_of,
    token_snapshots,
)

M = "accounts/local/models/tiny-moe"


def encoded(array: Any) -> str:
    return base64.b64encode(np.asarray(array).tobytes()).decode()


def entry(route: Any = None, **fields: Any) -> dict[str, Any]:
    found = {"token": "x", "logprob": -1.0, "sampling_logprob": -1.0, **fields}
    return found if route is None else {**found, "routing_matrix": encoded(route)}


@given(st.sampled_from([("uint8", "u1"), ("uint16", "<u2")]), st.integers(1, 6), st.integers(1, 8), st.data())
def test_a_routing_matrix_comes_back_as_it_was(kind: Any, layers: int, top_k: int, data: Any) -> None:
    name, dtype = kind
    array = data.draw(hnp.arrays(np.dtype(dtype), (layers, top_k)))
    decoded = decode_routing_matrix(encoded(array), top_k=top_k, dtype=name)
    assert decoded.shape == (layers, top_k)
    assert decoded.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("text", "top_k", "dtype", "says"),
    [
        ("AAECAw==", 3, "uint8", "of 4 bytes is no"),
        ("AAEC", 2, "uint16", "of 3 bytes is no"),
        ("", 2, "uint8", "of 0 bytes"),
        ("AAEC", 0, "uint8", "of 3 bytes"),
        ("***", 2, "uint8", "not base64"),
        ("AAEC", 1, "int64", "not 'int64'"),
    ],
)
def test_what_is_no_routing_matrix_is_an_error(text: str, top_k: int, dtype: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode_routing_matrix(text, top_k=top_k, dtype=dtype)


ROUTES = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)


def test_near_ties_are_read_per_token_and_none_are_where_nothing_is_said() -> None:
    entries = [entry(), entry(near_tie=["router"]), entry(near_tie=None), entry(near_tie=["router", "top_p"])]
    expected = [frozenset(), {"router"}, frozenset(), {"router", "top_p"}]
    assert near_ties_of({"logprobs": {"content": entries}}) == near_ties_of(entries) == expected
    with pytest.raises(ValueError, match="near_tie of token 1 is no list of names: 'router'"):
        near_ties_of([entry(), entry(near_tie="router")])


#: Of tokens 7, 5, 9 and 70000: alone, two of them, all of them, and two large ones.
MASKS = [b"\0", b"\2\5\0\6\0", b"\1", b"\4\1\0\0\0\x70\x11\1\0"]
ENCODED = [base64.b64encode(mask).decode() for mask in MASKS]
MASKED = [7, 5, 9, 70000]


def test_sampling_masks_are_rows_of_ids_and_an_empty_row_is_every_token() -> None:
    sampled = [entry(token_id=t, sampling_mask=m) for t, m in zip(MASKED, ENCODED, strict=True)]
    prompt = entry(token_id=3) | {"sampling_logprob": None}
    for given_as in ({"logprobs": {"content": [prompt, *sampled]}}, sampled):
        masks = sampling_masks_of(given_as)
        assert (masks.ids.dtype, masks.offsets.dtype) == ("int32", "int64")
        assert masks.ids.tolist() == [7, 5, 6, 1, 70000]
        assert masks.offsets.tolist() == [0, 1, 3, 3, 5]
        assert [masks.row(i).tolist() for i in range(4)] == [[7], [5, 6], [], [1, 70000]]
    assert decode_sampling_masks(ENCODED, MASKED).ids.tolist() == [7, 5, 6, 1, 70000]
    assert sampling_masks_of([prompt]).offsets.tolist() == [0]


def test_a_token_without_its_mask_and_a_mask_of_another_token_are_errors() -> None:
    with pytest.raises(ValueError, match="token 1 of 2 has no sampling mask: ask for return_sampling_mask"):
        sampling_masks_of([entry(token_id=7, sampling_mask="AA=="), entry(token_id=8)])
    for encoded, says in (
        ("***", "token 1"),
        ("AgUABgA=", "lacks token 9"),
        ("CQ==", "are no sampling mask"),
    ):
        with pytest.raises(ValueError, match=says):
            decode_sampling_masks(["AA==", encoded], [1, 9])
    with pytest.raises(ValueError, match="zip"):
        decode_sampling_masks(["AA=="], [1, 9])


def test_router_weights_have_the_shape_of_their_routes_and_a_missing_one_is_an_error() -> None:
    given = np.arange(ROUTES.size, dtype="<f4").reshape(ROUTES.shape) / 4
    encoded = [base64.b64encode(row.tobytes()).decode() for row in given]
    entries = [entry(route) | {"router_weights": one} for route, one in zip(ROUTES, encoded, strict=True)]
    first = entry(token_id=3) | {"sampling_logprob": None}
    weights = router_weights_of([first, *entries], routes_of([first, *entries], top_k=2))
    assert (weights.dtype, weights.tolist()) == ("float32", given.tolist())
    del entries[1]["router_weights"]
    with pytest.raises(ValueError, match=f"token 1 of {len(ROUTES)} has no router weights: ask for"):
        router_weights_of(entries, ROUTES)
    with pytest.raises(ValueError, match=f"{len(ROUTES)} routes have 1 router weights"):
        router_weights_of(entries[:1], ROUTES)
    for wrong, says in (("***", "not base64"), ("AAAA", "router weights of 3 bytes for routes of")):
        with pytest.raises(ValueError, match=says):
            router_weights_of([entries[0] | {"router_weights": wrong}], ROUTES[:1])


def test_routes_are_stacked_per_token_from_a_choice_its_logprobs_or_its_entries() -> None:
    entries = [entry(route) for route in ROUTES]
    for given_as in ({"logprobs": {"content": entries}}, {"content": entries}, entries, tuple(entries)):
        assert routes_of(given_as, top_k=2).tolist() == ROUTES.tolist()


def test_wide_routes_are_read_with_the_width_the_entry_states() -> None:
    wide = np.array([[300, 2]], dtype="<u2")
    assert routes_of([entry(wide, routing_matrix_dtype="uint16")], top_k=2).tolist() == [[[300, 2]]]


def test_only_the_first_echoed_token_may_lack_a_route() -> None:
    first = entry(sampling_logprob=None)
    assert routes_of([first, *(entry(route) for route in ROUTES)], top_k=2).shape == (3, 2, 2)
    with pytest.raises(ValueError, match="token 1 of 3 has no routing matrix"):
        routes_of([entry(ROUTES[0]), first, entry(ROUTES[1])], top_k=2)
    with pytest.raises(ValueError, match="token 0 of 1 has no routing matrix"):
        routes_of([entry()], top_k=2)
    with pytest.raises(ValueError, match="no tokens with routes"):
        routes_of([first], top_k=2)
    with pytest.raises(ValueError, match="differ in size"):
        routes_of([entry(ROUTES[0]), entry(ROUTES[0][:1])], top_k=2)
    with pytest.raises(ValueError, match="ask for logprobs"):
        routes_of({"logprobs": None}, top_k=2)


def test_a_top_k_that_is_not_the_models_is_an_error_where_it_shows() -> None:
    # Four layers of a top-2 model. Two rows of four are read of them with top_k=4.
    layers = np.array([[[0, 1], [2, 3], [1, 2], [3, 1]], [[2, 0], [0, 1], [3, 0], [1, 2]]], dtype=np.uint8)
    entries = [entry(route) for route in layers]
    assert routes_of(entries, top_k=2, moe_layers=4).tolist() == layers.tolist()
    # No layer takes an expert twice.
    with pytest.raises(
        ValueError, match="token 0 has an expert twice in one layer: top_k=4 is not the model's"
    ):
        routes_of(entries, top_k=4)
    # These do not show it, so the number of layers has to.
    for top_k, found in ((1, 8), (4, 2)):
        distinct = [entry(np.arange(8, dtype=np.uint8).reshape(4, 2))]
        assert routes_of(distinct, top_k=top_k).shape == (1, found, top_k)
        with pytest.raises(ValueError, match=f"{found} MoE layers with top_k={top_k}, not 4"):
            routes_of(distinct, top_k=top_k, moe_layers=4)


@pytest.mark.parametrize(
    ("model", "snapshot"), [(f"{M}@step-3", "step-3"), (f"{M}@a/b", "a/b"), (M, None), ("", None)]
)
def test_the_snapshot_is_what_follows_the_at_sign(model: str, snapshot: str | None) -> None:
    assert snapshot_of(model) == snapshot


def chunk(snapshot: str, index: int = 0, **choice: Any) -> dict[str, Any]:
    return {"model": f"{M}@{snapshot}", "choices": [{"index": index, "text": "", **choice}]}


def test_each_token_of_a_stream_has_its_chunks_snapshot() -> None:
    chunks = [
        chunk("a", text="echo", token_ids=[]),
        chunk("a", text="x", token_ids=[1]),
        chunk("a", index=1, text="y", token_ids=[9, 9]),
        chunk("b", text="zz", token_ids=[2, 3]),
        chunk("b", token_ids=[], finish_reason="stop"),
        {"model": f"{M}@b", "choices": [], "usage": {}},
    ]
    assert token_snapshots(chunks) == ["a", "b", "b"]
    assert token_snapshots(chunks, index=1) == ["a", "a"]


def test_tokens_are_counted_by_logprobs_when_there_are_no_ids_and_echo_does_not_count() -> None:
    chunks = [
        chunk("a", text="ab", logprobs={"content": [entry(sampling_logprob=None)] * 2}),
        chunk("a", text="x", logprobs={"content": [entry()]}),
        chunk("b", text="yz", logprobs={"content": [entry(), entry()]}),
    ]
    assert token_snapshots(chunks) == ["a", "b", "b"]


def test_a_stream_whose_tokens_cannot_be_counted_or_labelled_is_an_error() -> None:
    for uncountable in (
        chunk("a", text="x"),
        chunk("a", text="x", logprobs={"tokens": ["x"], "token_logprobs": [-1.0]}),
        {"model": f"{M}@a", "choices": [{"index": 0, "delta": {"content": "x"}}]},
    ):
        with pytest.raises(ValueError, match="ask for return_token_ids"):
            token_snapshots([uncountable])
    with pytest.raises(ValueError, match="names no snapshot"):
        token_snapshots([{"model": M, "choices": [{"index": 0, "token_ids": [1]}]}])


def plain(spans: Any, **choice: Any) -> dict[str, Any]:
    snapshots = [dict(zip(("snapshot", "start", "end"), span, strict=True)) for span in spans]
    return {"model": f"{M}@b", "choices": [{"index": 0, "text": "", "snapshots": snapshots, **choice}]}


def test_spans_of_a_plain_response_label_every_token() -> None:
    response = plain([("a", 0, 2), ("b", 2, 3)], token_ids=[1, 2, 3])
    assert token_snapshots(response) == ["a", "a", "b"]
    assert token_snapshots(plain([])) == []


def test_spans_that_do_not_cover_the_tokens_are_an_error() -> None:
    for spans in ([("a", 1, 2)], [("a", 0, 2), ("b", 3, 4)], [("a", 0, 2), ("b", 1, 4)]):
        with pytest.raises(ValueError, match="gap or overlap"):
            token_snapshots(plain(spans))
    with pytest.raises(ValueError, match="cover 1 tokens, the choice has 2"):
        token_snapshots(plain([("a", 0, 1)], token_ids=[1, 2]))
    with pytest.raises(ValueError, match="no choice 1"):
        token_snapshots(plain([("a", 0, 1)]), index=1)
    with pytest.raises(ValueError, match="does not label plain responses"):
        token_snapshots({"choices": [{"index": 0, "text": "x"}]})


def test_the_openai_sdks_objects_are_read_like_dicts() -> None:
    common = {"id": "c", "created": 1}
    completion = Completion.model_validate(
        {
            **common,
            "object": "text_completion",
            **plain(
                [("a", 0, 1), ("b", 1, 3)],
                finish_reason="stop",
                token_ids=[1, 2, 3],
                logprobs={"content": [entry(route) for route in ROUTES]},
            ),
        }
    )
    assert token_snapshots(completion) == ["a", "b", "b"]
    assert routes_of(completion.choices[0], top_k=2).tolist() == ROUTES.tolist()
    chunks = [
        ChatCompletionChunk.model_validate(
            {
                **common,
                "object": "chat.completion.chunk",
                "model": f"{M}@{snapshot}",
                "choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": ids}],
            }
        )
        for snapshot, ids in (("a", [1]), ("b", [2, 3]))
    ]
    assert token_snapshots(iter(chunks)) == ["a", "b", "b"]
