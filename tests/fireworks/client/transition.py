"""Rollouts in flight and rollouts that arrive while DeploymentManager hot-loads."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import Any

from sdk import answer, arguments, manager, sampler

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
        ignore_eos=True,
        seed=seed,
        hotload_retry_interval=0.2,
    )
    return {**asdict(completions[0]), "attempts": [asdict(metrics) for metrics in client.drain_metrics()]}


async def main() -> dict[str, Any]:
    early = [asyncio.create_task(rollout(seed, given.early_tokens)) for seed in range(given.early)]
    await asyncio.sleep(given.head_start_s)  # the early ones stream
    load = asyncio.create_task(
        asyncio.to_thread(deployments.hotload_and_wait, given.deployment, given.model, given.identity)
    )
    late: list[dict[str, Any]] = []
    while not load.done() or not late:
        late.append(await rollout(100 + len(late), 4))
    return {
        "ok": await load,
        "early": await asyncio.gather(*early),
        "late": late,
        "messages": messages.seen,
    }


answer(asyncio.run(main()))
