"""The routes of tokens, of the rows that an engine's server returns: one row for each pass, with each layer's experts.

Always holds: a token gets the route of the pass that scored it, or none: InvalidRoutes refuses rows that are not exactly what
was expected. A layer that was not recorded is all zeros, which shows as one expert twice. With one expert per token it looks
like a choice of expert 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from midstream.engine.servers.model import Shape

#: The share of layers that two passes over the same tokens choose alike, at least.
ALIKE = 0.9


class InvalidRoutes(Exception):
    """A server's routes do not fit this model. The message says how."""


def routes_of(array: np.ndarray, shape: Shape, *, first: int, count: int) -> list[bytes]:
    """The routes of the tokens at positions first + 1 .. first + count, each of the pass over the token before.

    array: [passes from position `first` on, layers, experts per token]; the layers are all hidden ones, or those with experts.
    Raises InvalidRoutes.
    Returns `count` routes: C-order [moe_layers, top_k] bytes, uint8, or little-endian uint16 above 256 experts.
    """
    moe_layers, num_experts = shape.moe_layers, shape.num_experts
    rows, layers, width = array.shape
    if rows != count:
        raise InvalidRoutes(
            f"routes of {rows} passes from position {first} on, expected {count}: one for each token but the last"
        )
    if width != shape.top_k:
        raise InvalidRoutes(f"{width} experts per token and layer, expected {shape.top_k}")
    if layers == shape.hidden_layers:
        chosen = array[:, list(moe_layers), :]
    elif layers == len(moe_layers):
        chosen = array
    else:
        raise InvalidRoutes(
            f"routes of {layers} layers, expected {shape.hidden_layers} ({len(moe_layers)} with experts)"
        )
    _check_experts(chosen, first, moe_layers, num_experts)
    packed = np.ascontiguousarray(chosen, dtype=np.uint8 if num_experts <= 256 else np.dtype("<u2"))
    flat, size = packed.tobytes(), packed.itemsize * len(moe_layers) * shape.top_k
    return [flat[i * size : (i + 1) * size] for i in range(count)]


def alike(one: Sequence[bytes], other: Sequence[bytes], shape: Shape) -> float:
    """The share of layers of passes in which both chose the same experts."""
    dtype = "u1" if shape.num_experts <= 256 else "<u2"
    ours, theirs = (
        np.sort(np.frombuffer(b"".join(routes), dtype).reshape(-1, shape.top_k)) for routes in (one, other)
    )
    return float((ours == theirs).all(axis=1).mean())


def _check_experts(chosen: np.ndarray, first: int, moe_layers: tuple[int, ...], num_experts: int) -> None:
    """chosen: [rows, moe_layers, top_k]."""
    if chosen.size and (chosen.min() < 0 or chosen.max() >= num_experts):
        row, layer, place = np.argwhere((chosen < 0) | (chosen >= num_experts))[0]
        raise InvalidRoutes(
            f"expert {chosen[row, layer, place]} in layer {moe_layers[layer]} of the pass at position {first + row}; "
            f"the layer has {num_experts}"
        )
    # Comparing columns is 20 times as fast as sorting each row. Other streams wait for this event loop.
    columns = np.ascontiguousarray(np.moveaxis(chosen, -1, 0))
    twice = np.zeros(chosen.shape[:-1], dtype=bool)
    for one, other in combinations(columns, 2):
        twice |= one == other
    if twice.any():
        row, layer = np.argwhere(twice)[0]
        raise InvalidRoutes(
            f"experts {chosen[row, layer].tolist()} in layer {moe_layers[layer]} of the pass at position {first + row}: "
            "the same one twice, so this layer's choice was not recorded"
        )
