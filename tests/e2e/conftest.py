from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest
from serving import Server, on_device, serve

if TYPE_CHECKING:
    from policy_helpers import Adapters


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of the tiny MoE, of all tests that publish nothing to it."""
    with serve(tmp_path_factory.mktemp("served") / "state", "--no-tinker") as running:
        yield running


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another one, of tests that publish to it. Which snapshot it serves, the tests before decide."""
    with serve(tmp_path_factory.mktemp("published") / "state", "--no-tinker") as running:
        yield running


@pytest.fixture(scope="session")
def served(server: Server) -> Server:
    """The first one, of tests that kill parts of it, publish nothing, and end when all of it serves again."""
    return server


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """Two replicas of it in float32, of tests that load weights and kill parts, and end when all of it serves again.

    Which snapshot it serves, the tests before decide. Each test gives its snapshots names of their own.
    """
    place = tmp_path_factory.mktemp("trained")
    with serve(place / "state", "--model", str(tiny_model()), *on_device(place)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def adapter_base(tiny_model: Callable[..., Path]) -> Path:
    """The model that adapters stand on."""
    return tiny_model(dtype="float32")


@pytest.fixture(scope="session")
def adapter_server(tmp_path_factory: pytest.TempPathFactory, adapter_base: Path) -> Iterator[Server]:
    """Two replicas of it, of tests whose adapters and policies have names of their own."""
    state = tmp_path_factory.mktemp("adapters") / "state"
    with serve(state, "--model", str(adapter_base), "--no-tinker") as running:
        yield running


@pytest.fixture(scope="session")
def adapters(adapter_base: Path) -> Adapters:
    from policy_helpers import Adapters

    return Adapters(adapter_base)
