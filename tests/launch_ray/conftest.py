from __future__ import annotations

from collections.abc import Iterator

import pytest
from raycluster import Nodes

pytest.importorskip("ray", reason="needs the extra `ray`")


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """A cluster of a head without room for replicas, and three nodes with room for one each."""
    made = Nodes()
    try:
        for number in (3, 4, 5):
            made.add(number, slots=1)
        yield made
    finally:
        made.close()
