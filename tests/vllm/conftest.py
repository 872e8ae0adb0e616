"""One `midstream serve --engine vllm` with two replicas for the whole folder: a start takes a minute and 3 GB for each.

The modules run in ORDER: what kills processes comes last, and at its very end the server itself is killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from vllm_bed import PYTHON, REQUIRED, Bed, installed, vllm_bed

ORDER = ["test_vllm_conformance", "test_vllm_openai", "test_vllm_hotload", "test_vllm_kills"]
HERE = Path(__file__).parent
TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [i for i, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[i] for i in ours), key=lambda item: ORDER.index(item.path.stem))
    for i, item in zip(ours, ordered, strict=True):
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        items[i] = item


@pytest.fixture(scope="session")
def weights(tiny_model: Callable[..., Path]) -> Callable[[int], Path]:
    """weights(seed) -> a checkpoint in float32 whose tokens go to all of its experts.

    So every number can be compared: where a router chooses, two experts may be within a rounding of a tie, another batch takes
    the other one, and the numbers of that token and of those after it are off by up to a nat.
    """
    return lambda seed: tiny_model(seed=seed, experts=4, top_k=4)


@pytest.fixture(scope="session")
def checkpoint(weights: Callable[[int], Path]) -> Path:
    """Of what both replicas serve."""
    return weights(0)


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Bed]:
    if not installed():
        why = f"vLLM is not installed in {PYTHON.parents[1].name}: make setup-vllm"
        if os.environ.get(REQUIRED):
            pytest.fail(why)
        pytest.skip(why)
    with vllm_bed(tmp_path_factory.mktemp("vllm"), checkpoint) as running:
        yield running
