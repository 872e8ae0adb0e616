"""One `midstream serve --engine vllm` with two replicas for the whole folder: a start takes a minute and 3 GB for each.

The modules run in ORDER: policies have a server of their own, which has ended when the other one starts. What kills processes
comes last, and at its very end the server itself is killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("e2e", "engine")]

import version_results
from dense_models import write_dense
from vllm_bed import PYTHON, REPLICAS, REQUIRED, Bed, installed, vllm_bed

#: The version of vLLM whose outcomes are recorded; nothing is recorded without it.
RECORD = "MIDSTREAM_TEST_VLLM_RECORD"
RUN = version_results.VersionRun()
ORDER = [
    "test_vllm_push",
    "test_vllm_policies",
    "test_vllm_tied",
    "test_vllm_transfer_in_place",
    "test_vllm_sampling_numbers",
    "test_vllm_priorities",
    "test_real_routes",
    "test_real_digest",
    "test_real_frozen",
    "test_real_provenance",
    "test_vllm_session_kv",
    "test_real_policy_provenance",
    "test_real_policy_numbers",
    "test_vllm_tinker",
    "test_vllm_conformance",
    "test_vllm_openai",
    "test_vllm_hotload",
    "test_vllm_two_machines",
    "test_vllm_strikes",
    "test_vllm_kills",
]
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


def needs_vllm() -> None:
    if not installed():
        why = f"vLLM is not installed in {PYTHON.parents[1].name}: make setup-vllm"
        if os.environ.get(REQUIRED):
            pytest.fail(why)
        pytest.skip(why)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python that has vLLM."""
    needs_vllm()
    return PYTHON


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM for CPUs serves no adapters of models with experts."""
    return write_dense(tmp_path_factory.mktemp("dense"), 0, tied=False)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two such models whose output layer is that of the embeddings, by name; the first is served."""
    folder = tmp_path_factory.mktemp("tied")
    return {
        name: write_dense(folder / name, seed, tied=True) for seed, name in enumerate(("served", "other"))
    }


@pytest.fixture
def computed_again(request: pytest.FixtureRequest) -> Callable[..., None]:
    """computed_again(family, tokens=..., worst=..., wrong=..., ...): what a test found, for the file of results."""

    def note(family: str, **found: Any) -> None:
        RUN.computed_again(request.path.stem, family, **found)

    return note


@pytest.fixture(scope="module")
def lora_bed(tmp_path_factory: pytest.TempPathFactory, dense: Path) -> Iterator[Bed]:
    """One replica whose vLLM serves four adapters at once, of rank 8 at most."""
    needs_vllm()
    args = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")
    with vllm_bed(tmp_path_factory.mktemp("lora"), dense, *args, replicas=1) as running:
        yield running


@pytest.fixture(scope="module")
def tied_bed(tmp_path_factory: pytest.TempPathFactory, tied: dict[str, Path]) -> Iterator[Bed]:
    """One replica of a model whose output layer is that of the embeddings."""
    needs_vllm()
    with vllm_bed(tmp_path_factory.mktemp("tied-bed"), tied["served"], replicas=1) as running:
        yield running


@pytest.fixture(scope="module")
def in_place_bed(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Bed]:
    """Two replicas into whose servers a trainer may write weights."""
    needs_vllm()
    # What is to be noticed here is a failed call. A busy machine may be silent for longer.
    settings = 'weight_transfer = "gloo"\nsilence_s_max = 60'
    with vllm_bed(tmp_path_factory.mktemp("in-place"), checkpoint, settings=settings) as running:
        yield running


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Bed]:
    needs_vllm()
    with vllm_bed(tmp_path_factory.mktemp("vllm"), checkpoint, replicas=REPLICAS) as running:
        if os.environ.get(RECORD):
            RUN.card = running.card
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.path.parent == HERE and not (report.when != "call" and report.passed):
        RUN.took(item.path.stem, item.name.partition("[")[0], report)
        if version := os.environ.get(RECORD):
            # At once: a run may be cut off.
            version_results.write(version, RUN, REPLICAS)
    return report
