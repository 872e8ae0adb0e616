"""Servers as a Fireworks user meets them: an account, API keys, a named deployment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from fireworks_helpers import API_KEY, Endpoint
from serving import serve

CONFIG = f"""\
account = "acme"
[deployment]
name = "policy"
[gateway]
api_keys = ["{API_KEY}", "another-key"]
"""


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "midstream.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="session")
def endpoint(
    config: Path, tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Iterator[Endpoint]:
    """Two replicas of the tiny MoE in float32, of all tests that publish nothing to it."""
    state = tmp_path_factory.mktemp("served") / "state"
    with serve(state, "--model", str(tiny_model()), "--config", str(config), "--no-tinker") as server:
        yield Endpoint(server)


@pytest.fixture(scope="session")
def published(
    config: Path, tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Iterator[Endpoint]:
    """Another one, of tests that publish to it. Which snapshot it serves, the tests before decide."""
    state = tmp_path_factory.mktemp("published") / "state"
    with serve(state, "--model", str(tiny_model()), "--config", str(config), "--no-tinker") as server:
        yield Endpoint(server)
