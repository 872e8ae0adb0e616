"""Routes as distances between experts, which a record file compresses to three quarters of what the experts take.

Always holds: `routes_of(gaps_of(routes))` has the experts of `routes`, those of each layer ascending. Their order is no part of
a route (docs/api.md, near ties).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: [tokens, layers, top_k].
Numbers = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
#: Bytes that one pass after the other finds in a core's cache.
_AT_ONCE = 2**16


def gaps_of(routes: Numbers) -> Numbers:
    """Of each layer the smallest expert, then the distance of each next one from the one before."""
    # One array for each place, as NumPy compares whole arrays far faster than it sorts rows of a few numbers.
    places: list[Any] = [np.ascontiguousarray(routes[..., place]) for place in range(routes.shape[-1])]
    for step in range(len(places)):
        # Odd-even transposition: as many steps as places sort any order.
        for place in range(step % 2, len(places) - 1, 2):
            one, other = places[place : place + 2]
            places[place : place + 2] = np.minimum(one, other), np.maximum(one, other)
    gaps = np.empty_like(routes)
    for place, experts in enumerate(places):
        gaps[..., place] = experts - places[place - 1] if place else experts
    return gaps


def routes_of(parts: Sequence[Numbers]) -> Numbers:
    """parts: at least one, behind each other. Raises ValueError for gaps of no route: a sum, or more experts, than the type of
    its numbers has."""
    shape, dtype = parts[0].shape[1:], parts[0].dtype
    layers, places = shape
    distinct = int(np.iinfo(dtype).max) + 1
    if places > distinct:
        raise ValueError(f"{places} experts, and their numbers tell {distinct} apart")
    routes: Numbers = np.empty((sum(map(len, parts)), *shape), dtype)
    rows_at_once, at = max(1, _AT_ONCE // max(1, layers * places * dtype.itemsize)), 0
    for part in parts:
        for first in range(0, len(part), rows_at_once):
            gaps = part[first : first + rows_at_once]
            _add_up(gaps, routes[at : at + len(gaps)])
            at += len(gaps)
    return routes


def _add_up(gaps: Numbers, routes: Numbers) -> None:
    """Both contiguous. Raises ValueError."""
    places, size = gaps.shape[-1], gaps.itemsize
    if places * size in (2, 4, 8):
        # A layer is one little-endian number, and its product with ones in all places has in each the sum up to there.
        word = np.dtype(f"<u{places * size}")
        ones = sum(1 << 8 * size * place for place in range(places))
        given, sums = gaps.reshape(-1).view(word), routes.reshape(-1).view(word)
        np.multiply(given, word.type(ones), out=sums)
        if not int(np.bitwise_or.reduce(given | sums)) & ones << 8 * size - 1:
            # Of numbers below half of what fits, the first sum that is not has its highest bit, without a carry.
            return
    else:
        routes[...] = gaps
        for place in range(1, places):
            routes[..., place] += routes[..., place - 1]
    # A sum that is too large is less than the one before it. Between two layers that says nothing.
    experts = routes.reshape(-1)
    falls = np.count_nonzero(experts[1:] < experts[:-1])
    if places and falls != np.count_nonzero(experts[places::places] < experts[places - 1 : -1 : places]):
        raise ValueError(f"gaps of experts add up to more than {np.iinfo(gaps.dtype).max}")
