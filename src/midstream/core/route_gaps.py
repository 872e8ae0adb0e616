"""Routes as distances between experts, which a record file compresses to three quarters of what the experts take.

Always holds: `routes_of(gaps_of(routes))` has the experts of `routes`, those of each layer ascending. Their order is no part of
a route (docs/api.md, near ties).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: [tokens, layers, top_k].
Numbers = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


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


def routes_of(gaps: Numbers) -> Numbers:
    """Raises ValueError for gaps of no route: a sum, or more experts, than the type of its numbers has."""
    distinct = int(np.iinfo(gaps.dtype).max) + 1
    if gaps.shape[-1] > distinct:
        raise ValueError(f"{gaps.shape[-1]} experts, and their numbers tell {distinct} apart")
    routes = gaps.copy()
    for place in range(1, gaps.shape[-1]):
        routes[..., place] += routes[..., place - 1]
        if (routes[..., place] < gaps[..., place]).any():
            raise ValueError(f"gaps of experts add up to more than {np.iinfo(gaps.dtype).max}")
    return routes
