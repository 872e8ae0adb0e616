"""Rollouts in flight and rollouts that arrive while DeploymentManager hot-loads."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import Any

import httpx
from sdk import answer, arguments, manager, sampler

ATTEMPTS = 4
given = arguments()
deployments = manager(given)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


messages = Messages()
logging.getLogger("fireworks").addHandler(messages)


async def rollout(seed: int, max_tokens: int) -> dict[str, Any]:
    client = sampler(given)
    completions = await client.sample_with_prompt_tokens(
        given.prompt,
        max_tokens=max_tokens,
        logprobs=True,
        echo=True,
        include_routing_matrix=True,
        ignore_eos=True,
        seed=seed,
    )
    return {**asdict(completions[0]), "attempts": [asdict(metrics) for metrics in client.drain_metrics()]}


async def in_flight() -> list[asyncio.Task[dict[str, Any]]]:
    """The early rollouts, with replicas at work on every one. Begun anew when one ends before the last is there."""
    headers = {"X-Api-Key": given.api_key}
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(ATTEMPTS):
            early = [asyncio.create_task(rollout(seed, given.early_tokens)) for seed in range(given.early)]
            while not any(task.done() for task in early):
                health = (await client.get(f"{given.url}/health", headers=headers)).json()
                if sum(replica["in_flight"] for replica in health["replicas"]) >= given.early:
                    return early
            await asyncio.gather(*early)
    raise AssertionError("the rollouts were never all in flight")


async def main() -> dict[str, Any]:
    early = await in_flight()
    load = asyncio.create_task(
        asyncio.to_thread(deployments.hotload_and_wait, given.deployment, given.model, given.identity)
    )
    late: list[dict[str, Any]] = []
    while not load.done():
        late.append(await rollout(100 + len(late), 4))
    # Certainly after the swap.
    late.append(await rollout(99, 4))
    return {
        "ok": await load,
        "early": await asyncio.gather(*early),
        "late": late,
        "messages": messages.seen,
        "status": deployments.hotload_check_status(given.deployment, given.model),
    }


answer(asyncio.run(main()))
