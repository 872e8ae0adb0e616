"""Routes as gaps: what comes back has the experts of each layer, ascending."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from midstream.core.route_gaps import gaps_of, routes_of

SHAPES = st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 12))
ROUTES = st.sampled_from([np.dtype("u1"), np.dtype("<u2")]).flatmap(
    lambda dtype: arrays.arrays(dtype, SHAPES)
)


@given(ROUTES)
def test_gaps_keep_the_experts_of_each_layer(routes: np.ndarray) -> None:
    before = routes.copy()
    gaps = gaps_of(routes)
    assert gaps.dtype == routes.dtype
    assert np.array_equal(routes, before)
    assert np.array_equal(routes_of([gaps]), np.sort(routes, axis=-1))
    # A file has them in several parts.
    assert np.array_equal(routes_of([gaps[:1], gaps[1:]]), np.sort(routes, axis=-1))


@given(ROUTES)
def test_numbers_that_are_no_gaps_are_refused(gaps: np.ndarray) -> None:
    whole = np.cumsum(gaps.astype(np.int64), axis=-1)
    if (whole > np.iinfo(gaps.dtype).max).any():
        with pytest.raises(ValueError, match="add up to more than"):
            routes_of([gaps])
    else:
        assert np.array_equal(routes_of([gaps]), whole)
