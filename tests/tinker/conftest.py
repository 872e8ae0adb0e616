"""A real server for the tests of the unmodified SDK."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from sdk_venvs import ALIAS, API_KEY
from serving import Server, serve

CONFIG = f"""\
account = "acme"
[deployment]
name = "policy"
[gateway]
api_keys = [
    {{ key = "{API_KEY}", scopes = ["sample", "publish"] }},
    "tml-another",
    {{ key = "tml-rollouts", scopes = ["sample"] }},
]
[tinker]
base_models = ["{ALIAS}"]
"""


@pytest.fixture(scope="session")
def sdk_server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """Two replicas of the tiny MoE in float32. Which snapshot they serve, the tests before decide."""
    directory = tmp_path_factory.mktemp("tinker")
    config = directory / "midstream.toml"
    config.write_text(CONFIG)
    with serve(directory / "state", "--model", str(tiny_model()), "--config", str(config)) as running:
        yield running
