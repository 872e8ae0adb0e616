"""Recipes whose trainer is not installed are skipped."""

from __future__ import annotations

import pytest
from recipes import installed


@pytest.fixture(autouse=True)
def where_its_trainer_is(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("recipe")
    if marker is not None and not installed(marker.args[0]):
        pytest.skip(f"run `make setup-recipe NAME={marker.args[0]}`")
