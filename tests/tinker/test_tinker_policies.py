"""The front's calls for policies, to a real server whose two gateways share a port: each may know less than the other."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from serving import Server, serve
from trainer_helpers import new_model, request, text

from midstream_tinker.policies import DeploymentPolicies
from midstream_tinker.trainer.checkpoints import export_adapter
from midstream_tinker.trainer.types import AdamParams, LoraConfig, WorkFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DATA = [text("a line to learn")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """With the adapters step-0 to step-3 of one run in its bucket, and one that is torn."""
    place = tmp_path_factory.mktemp("policies")
    base = tiny_model()
    options = ("--replicas", "1", "--gateway-workers", "2", "--no-tinker")
    with serve(place / "state", "--model", str(base), *options) as running:
        model = new_model(base, LoraConfig(rank=4, seed=1))
        for step in range(4):
            model.forward_backward(request(DATA))
            model.optim_step(AdamParams(learning_rate=1e-2))
            export_adapter(model, running.bucket / f"step-{step}")
        export_adapter(model, running.bucket / "torn")
        weights = running.bucket / "torn" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        yield running


def play(server: Server, scene: Callable[[DeploymentPolicies], Awaitable[None]]) -> None:
    async def run() -> None:
        policies = DeploymentPolicies(gateway_url=server.url, deployment=server.deployment, patience_s=60.0)
        await scene(policies)

    asyncio.run(run())


def served(server: Server, policy: str) -> str:
    """The label of a token that it sampled."""
    asked = {"model": f"{server.deployment}/policies/{policy}", "prompt": [1, 2, 3], "max_tokens": 1}
    while True:
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
        # The other gateway hears of it within a second.
        if answer.status_code != 404:
            return str(answer.raise_for_status().json()["model"]).partition("@")[2]


@pytest.mark.variant
def test_adapters_come_and_go_and_come_again_under_one_name(server: Server) -> None:
    async def scene(policies: DeploymentPolicies) -> None:
        assert await policies.several()

        async def come_and_go(number: int) -> None:
            name = f"tinker-ab-0-{number}"
            for step in (number, (number + 1) % 4, number, number):
                await policies.load(name, f"step-{step}")
                assert name in await policies.known()
                assert await asyncio.to_thread(served, server, name) == f"step-{step}"
                await policies.end(name)

        await asyncio.gather(*(come_and_go(number) for number in range(4)))
        assert await policies.known() == []

    play(server, scene)


@pytest.mark.variant
def test_one_that_is_torn_is_refused_by_name_and_the_name_can_be_used_again(server: Server) -> None:
    async def scene(policies: DeploymentPolicies) -> None:
        with pytest.raises(WorkFailed, match=r"(?s)'torn'.*adapter_model\.safetensors"):
            await policies.load("tinker-ab-0-9", "torn")
        await policies.end("tinker-ab-0-9")
        await policies.load("tinker-ab-0-9", "step-1")
        assert await asyncio.to_thread(served, server, "tinker-ab-0-9") == "step-1"
        await policies.end("tinker-ab-0-9")
        await policies.end("never-there")

    play(server, scene)


@pytest.mark.variant
def test_what_is_not_in_the_bucket_and_a_name_that_is_taken_are_refused_in_words(server: Server) -> None:
    async def scene(policies: DeploymentPolicies) -> None:
        with pytest.raises(WorkFailed, match="not-there") as failed:
            await policies.load("tinker-ab-0-8", "not-there")
        assert failed.value.category == "user"
        await policies.end("tinker-ab-0-8")
        taken = server.deployment.rpartition("/")[2]
        with pytest.raises(WorkFailed, match="is the name of something else here"):
            await policies.load(taken, "step-1")

    play(server, scene)


async def test_a_gateway_that_is_away_is_waited_for_and_then_given_up() -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    policies = DeploymentPolicies(
        gateway_url="http://127.0.0.1:9",
        deployment="accounts/a/deployments/d",
        patience_s=100.0,
        sleep=sleep,
        now=lambda: sum(waited),
    )
    with pytest.raises(WorkFailed, match="serving 'step-1' failed") as failed:
        await policies.load("tinker-ab-0-1", "step-1")
    assert failed.value.category == "server"
    assert 90 < sum(waited) <= 100
