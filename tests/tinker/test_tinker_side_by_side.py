"""The unmodified SDK: two runs and the base model on one server, sampled at the same time, each by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from sdk_venvs import API_KEY, NEWEST_AND_OLDEST, run_sdk
from serving import Server, serve, words_of

# Scripts may take 400.
pytestmark = [pytest.mark.variant, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SAMPLING_KEY = "tml-rollouts"
MOST = 3
CONFIG = f"""\
account = "acme"
[deployment]
name = "policy"
[gateway]
api_keys = [
  {{ key = "{API_KEY}", scopes = ["sample", "publish"], tenant = "team" }},
  {{ key = "{SAMPLING_KEY}", scopes = ["sample"], tenant = "team" }},
]
[tinker]
adapters_max = {MOST}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """Two replicas of the tiny MoE in float32."""
    directory = tmp_path_factory.mktemp("tinker")
    config = directory / "midstream.toml"
    config.write_text(CONFIG)
    with serve(directory / "state", "--model", str(tiny_model()), "--config", str(config)) as running:
        yield running


def asked(server: Server, path: str) -> Any:
    answer = httpx.get(f"{server.url}{path}", headers={"x-api-key": API_KEY}, timeout=60)
    return answer.raise_for_status().json()


def engine_of(server: Server) -> int:
    for pid in server.children():
        if "midstream.engine.embedded.loop" in words_of(pid):
            return pid
    raise AssertionError("no engine runs")


@pytest.mark.parametrize("version", NEWEST_AND_OLDEST)
def test_every_saved_path_and_the_base_model_are_sampled_at_the_same_time(
    server: Server, version: str
) -> None:
    arguments = {
        "url": server.url,
        "api_key": API_KEY,
        "sampling_key": SAMPLING_KEY,
        "base_model": server.model,
        "prompt": list(b"The capital of France is"),
        "target": list(b" Paris."),
        "turns": 2,
        "rate": 0.02,
        "victim": engine_of(server),
    }
    told = run_sdk(version, HERE / "sdk_side_by_side.py", arguments)
    trained = told["trained"]
    # What is compared is told apart.
    finals = {name: sum(logprobs) for name, logprobs in trained.items() if name != "unnamed"}
    assert len({round(value, 1) for value in finals.values()}) == len(finals), finals
    names = {"base", "one-0", "other-0", "one-1", "other-1", "unnamed", "newer"}
    for when in ("served", "again"):
        assert told[when].keys() == names
        for name in names:
            assert told[when][name] == pytest.approx(trained[name], abs=1e-4), (when, name)
    for name in ("last", "one-0"):
        assert told["rollouts"][name] == pytest.approx(trained[name], abs=1e-4), name
    for name, one in told["sampled"].items():
        assert one["sampled"] == pytest.approx(one["scored"], abs=1e-4), name
    check_labels(told)
    status = asked(server, "/hot_load/v1/models/hot_load")
    assert {row["current_snapshot_identity"] for row in status["replicas"]} == {"base"}
    policies = asked(server, f"/v1/{server.deployment}/policies")["policies"]
    assert 1 <= len(policies) <= MOST
    assert all(one["policy"].startswith("tinker-") for one in policies)


def check_labels(told: dict[str, Any]) -> None:
    labels = told["labels"]
    assert set(labels["base"]) == {"base"}
    snapshots = {name: set(found) for name, found in labels.items()}
    assert all(len(found) == 1 for found in snapshots.values()), labels
    assert len(set.union(*snapshots.values())) == len(labels)
    for name, path in told["paths"].items():
        if name in labels:
            model = path.removeprefix("tinker://session_").partition("/")[0].replace(":train:", "-")
            label = labels[name][0]
            assert label.startswith(f"tinker-{model}-")
            assert label.endswith(f"-{name}")
