"""Reads from rollout responses the MoE routes, the sampling mask, the near ties and the snapshot of each token. Pure.

Takes plain dicts or the OpenAI SDK's objects.
Always holds: there is one route or label per token, in order. A missing one is an error, never a guess: training on shifted
routes or labels is worse than stopping.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from midstream.core.masks import ALONE, BITS, EVERY, LONG, SHORT, kept_ids

RouteDtype = Literal["uint8", "uint16"]
Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}


def decode_routing_matrix(encoded: str, *, top_k: int, dtype: RouteDtype = "uint8") -> Routes:
    """The experts of one token, [moe_layers, top_k] of `dtype`.

    encoded: an entry's `routing_matrix`. top_k: `num_experts_per_tok` of the model's config.json. The bytes do not show it:
    another one that divides them gives other layers. dtype: the entry's `routing_matrix_dtype`, if it has one.
    Raises ValueError for what is not base64, and for bytes that rows of top_k do not fill.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"routing matrices are uint8 or uint16, not {dtype!r}")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"routing matrix is not base64: {error}") from error
    row_bytes = top_k * _DTYPES[dtype].itemsize
    if top_k < 1 or not raw or len(raw) % row_bytes:
        raise ValueError(f"routing matrix of {len(raw)} bytes is no [moe_layers, {top_k}] array of {dtype}")
    routes: Routes = np.frombuffer(raw, dtype=_DTYPES[dtype]).reshape(-1, top_k)
    return routes


def routes_of(choice: Any, *, top_k: int, moe_layers: int | None = None) -> Routes:
    """The routes of a choice's tokens, [tokens, moe_layers, top_k] of uint8 or uint16.

    choice: a choice, its `logprobs`, or a list of logprobs entries (of one choice, joined over the chunks of a stream). Under a
    full echo the first prompt token is left out: no forward pass produced it, so it has no route.
    top_k: `num_experts_per_tok` of the model's config.json. The response does not show it. A wrong one shows only when some
    layer would have an expert twice, or rows do not come out even. moe_layers: how many MoE layers the model has. With it a
    wrong top_k is always an error.

    Raises ValueError when a token lacks its route, and for a top_k that is seen to be wrong.
    """
    entries = _content(choice)
    rows = []
    for position, entry in enumerate(entries):
        encoded = entry.get("routing_matrix")
        if encoded is None:
            if position == 0 and entry.get("sampling_logprob", 0.0) is None:
                continue
            raise ValueError(f"token {position} of {len(entries)} has no routing matrix")
        dtype: RouteDtype = entry.get("routing_matrix_dtype") or "uint8"
        rows.append(decode_routing_matrix(encoded, top_k=top_k, dtype=dtype))
    if not rows:
        raise ValueError("there are no tokens with routes")
    if len({row.shape for row in rows}) != 1:
        raise ValueError("the tokens' routing matrices differ in size")
    stacked: Any = np.stack(rows)
    routes: Routes = stacked
    _check_top_k(routes, moe_layers)
    return routes


def router_weights_of(choice: Any, routes: Routes) -> npt.NDArray[np.float32]:
    """What the outputs of the experts were multiplied by, float32 of the shape of `routes`: [tokens, moe_layers, top_k].

    choice: as for `routes_of`, of a request with `return_router_weights`. routes: what `routes_of` gives of it; expert
    `routes[i, j, k]` has the weight `[i, j, k]`. Raises ValueError when a token lacks its weights, or has other counts.
    """
    entries = _content(choice)
    rows = [one for one in entries if one.get("routing_matrix") is not None]
    missing = [number for number, one in enumerate(rows) if one.get("router_weights") is None]
    if missing or len(rows) != len(routes):
        what = (
            f"token {missing[0]} of {len(rows)} has no"
            if missing
            else f"{len(routes)} routes have {len(rows)}"
        )
        raise ValueError(f"{what} router weights: ask for return_router_weights")
    try:
        data = b"".join(base64.b64decode(one["router_weights"], validate=True) for one in rows)
    except binascii.Error as error:
        raise ValueError(f"router weights are not base64: {error}") from error
    if len(data) != routes.size * 4:
        raise ValueError(f"router weights of {len(data)} bytes for routes of {routes.shape}")
    weights: npt.NDArray[np.float32] = np.frombuffer(data, "<f4").reshape(routes.shape)
    return weights


def _check_top_k(routes: Routes, moe_layers: int | None) -> None:
    """Raise ValueError where rows of top_k are seen to be no layers."""
    found, top_k = routes.shape[1:]
    if moe_layers is not None and found != moe_layers:
        raise ValueError(f"the routes have {found} MoE layers with top_k={top_k}, not {moe_layers}")
    # A router picks distinct experts. With a larger top_k, rows join layers.
    ordered = np.sort(routes, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))
    if twice.any():
        raise ValueError(
            f"token {int(twice.argmax())} has an expert twice in one layer: top_k={top_k} is not the model's "
            "num_experts_per_tok"
        )


class SamplingMasks(NamedTuple):
    """Which tokens each draw was from, one row per token behind each other.

    ids: int32, ascending within a row. offsets: int64, one more than tokens: row j is `ids[offsets[j]:offsets[j + 1]]`.
    An empty row means every token of the vocabulary. A row of one id means that nothing else could be drawn, as in a greedy
    draw.
    """

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    def row(self, token: int) -> npt.NDArray[np.int32]:
        """The ids of token number `token`; none where every one was left."""
        return self.ids[self.offsets[token] : self.offsets[token + 1]]


def decode_sampling_masks(encoded: Sequence[str], token_ids: Sequence[int]) -> SamplingMasks:
    """The masks of as many sampled tokens.

    encoded: `sampling_mask` of entries, or `sampling_masks` of a turn in a trace or a record. token_ids: those tokens.
    Raises ValueError for what is not base64, and for a mask that lacks its token.
    """
    rows = []
    for number, (text, _) in enumerate(zip(encoded, token_ids, strict=True)):
        try:
            rows.append(base64.b64decode(text, validate=True))
        except ValueError as error:
            raise ValueError(f"sampling mask of token {number}: {error}") from error
    return masks_of_bytes(
        np.frombuffer(b"".join(rows), np.uint8),
        _offsets(list(map(len, rows))),
        np.asarray(token_ids, np.int64),
    )


def masks_of_bytes(
    data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], token_ids: npt.NDArray[Any]
) -> SamplingMasks:
    """As `decode_sampling_masks`, of bytes: those of token j are `data[offsets[j]:offsets[j + 1]]`."""
    sizes, tokens = np.diff(offsets), token_ids.astype(np.int64)
    kinds = (
        np.where(sizes > 0, data[np.minimum(offsets[:-1], max(len(data) - 1, 0))], 255)
        if len(data)
        else sizes + 255
    )
    widths = {SHORT: "<u2", LONG: "<u4"}
    counts = np.where((kinds == ALONE[0]) & (sizes == 1), 1, 0)
    for width in widths:
        counts = np.where((kinds == width) & ((sizes - 1) % width == 0), (sizes - 1) // width, counts)
    bits = {
        int(row): _set_bits(data[offsets[row] + 1 : offsets[row + 1]])
        for row in np.flatnonzero(kinds == BITS)
    }
    for row, found in bits.items():
        counts[row] = len(found)
    ends, ids = _offsets(counts), np.empty(int(counts.sum()), np.int64)
    first = np.zeros(len(data), np.bool_)
    first[offsets[:-1][sizes > 0]] = True
    for width, dtype in widths.items():
        rows = (kinds == width) & (counts > 0)
        payload = np.repeat(rows, sizes) & ~first
        ids[np.repeat(rows, counts)] = data[payload].view(dtype)
    alone = (kinds == ALONE[0]) & (counts == 1)
    ids[ends[:-1][alone]] = tokens[alone]
    for row, found in bits.items():
        ids[ends[row] : ends[row + 1]] = found
    row_of = np.repeat(np.arange(len(tokens)), counts)
    wrong = np.bincount(row_of[ids == tokens[row_of]], minlength=len(tokens)) != 1
    wrong &= ~((kinds == EVERY[0]) & (sizes == 1))
    wrong[row_of[1:][(np.diff(ids) <= 0) & (np.diff(row_of) == 0)]] = True
    wrong[row_of[(ids < 0) | (ids > np.iinfo(np.int32).max)]] = True
    for row in np.flatnonzero(wrong)[:1]:
        try:
            kept_ids(data[offsets[row] : offsets[row + 1]].tobytes(), int(tokens[row]))
        except ValueError as error:
            raise ValueError(f"sampling mask of token {row}: {error}") from error
    return SamplingMasks(ids.astype(np.int32), ends)


def _offsets(sizes: Any) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _set_bits(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def sampling_masks_of(choice: Any) -> SamplingMasks:
    """The sampling masks of a choice's generated tokens; echoed prompt tokens are left out.

    choice: as for `routes_of`, of a request with `return_sampling_mask`. log_softmax of the penalised logits divided by the
    temperature, over a token's row alone, is its `sampling_logprob`. Raises ValueError when a token lacks its mask.
    """
    sampled = [entry for entry in _content(choice) if entry.get("sampling_logprob", 0.0) is not None]
    missing = [number for number, entry in enumerate(sampled) if entry.get("sampling_mask") is None]
    if missing:
        raise ValueError(
            f"token {missing[0]} of {len(sampled)} has no sampling mask: ask for return_sampling_mask"
        )
    return decode_sampling_masks(
        [entry["sampling_mask"] for entry in sampled], [entry["token_id"] for entry in sampled]
    )


def near_ties_of(choice: Any) -> list[frozenset[str]]:
    """The near ties in the pass behind each token of a choice: of "router", "top_k", "top_p", "min_p", "greedy".

    choice: as for `routes_of`. An engine without the feature `near_ties` never marks one.
    Raises ValueError for a mark that is no list of names.
    """
    found = []
    for position, entry in enumerate(_content(choice)):
        names = entry.get("near_tie") or ()
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"near_tie of token {position} is no list of names: {names!r}")
        found.append(frozenset(names))
    return found


def snapshot_of(model: str) -> str | None:
    """The snapshot in a `model` field such as accounts/A/models/M@step-3; None when it names none. An answer may be of several
    snapshots, which `token_snapshots` reads.
    """
    _, at, snapshot = model.partition("@")
    return snapshot if at else None


def token_snapshots(response: Any, index: int = 0) -> list[str]:
    """The snapshot of each generated token of choice `index`, one entry per token.

    response: a plain response, or all chunks of a stream in order. Prompt tokens that were echoed do not count.
    Tokens of a stream can be counted when the request asked for `return_token_ids` or `logprobs: true`.
    index: the choice's. Raises ValueError when tokens cannot be counted, when the labels do not cover the tokens, and for a
    plain response without the choice.
    """
    if isinstance(response, Mapping) or hasattr(response, "choices"):
        return _plain_snapshots(_as_dict(response), index)
    labels: list[str] = []
    for chunk in map(_as_dict, response):
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) == index:
                count = _count(choice)
                snapshot = snapshot_of(chunk.get("model") or "")
                if count and snapshot is None:
                    raise ValueError(f"chunk with {count} tokens names no snapshot: {chunk.get('model')!r}")
                labels += [snapshot or ""] * count
    return labels


def _plain_snapshots(response: Mapping[str, Any], index: int) -> list[str]:
    choice = next((c for c in response["choices"] if c.get("index", 0) == index), None)
    if choice is None:
        raise ValueError(f"the response has no choice {index}")
    spans = choice.get("snapshots")
    if spans is None:
        raise ValueError("the choice has no snapshots: the server does not label plain responses")
    labels: list[str] = []
    for span in spans:
        if span["start"] != len(labels) or span["end"] < span["start"]:
            raise ValueError(f"snapshot spans leave a gap or overlap: {spans}")
        labels += [span["snapshot"]] * (span["end"] - span["start"])
    ids = choice.get("token_ids")
    if ids is not None and len(ids) != len(labels):
        raise ValueError(f"snapshot spans cover {len(labels)} tokens, the choice has {len(ids)}")
    return labels


def _count(choice: Mapping[str, Any]) -> int:
    """Generated tokens in a chunk's choice."""
    ids = choice.get("token_ids")
    if ids is not None:
        return len(ids)
    logprobs = choice.get("logprobs")
    if logprobs is not None and logprobs.get("content") is not None:
        return sum(entry.get("sampling_logprob", 0.0) is not None for entry in logprobs["content"])
    text = choice.get("text") or (choice.get("delta") or {}).get("content")
    if text:
        raise ValueError("a chunk's tokens cannot be counted: ask for return_token_ids or logprobs: true")
    return 0


def _content(choice: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(choice, Sequence) and not isinstance(choice, str | bytes):
        return [_as_dict(entry) for entry in choice]
    found = _as_dict(choice)
    if "logprobs" in found:
        found = found["logprobs"] or {}
    content = found.get("content")
    if not isinstance(content, Iterable):
        raise ValueError("no logprobs content: ask for logprobs and include_routing_matrix")
    return [_as_dict(entry) for entry in content]


def _as_dict(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    dumped: Mapping[str, Any] = value.model_dump()
    return dumped
