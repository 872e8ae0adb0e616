"""A real vLLM server takes waiting requests in the order of their priorities, and midstream's checks before all of them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from vllm_bed import DEADLINE_S, POLL_S, PYTHON
from vllm_streams import random_prompt

from midstream.core.server_settings import VllmSettings
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.vllm.engine import VllmEngine
from midstream.http.call import call

#: Of requests that come together.
PRIORITIES = (3, 0, 5, 1, 4, 2)
ENDLESS = 1900


def asking(name: str, priority: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=ENDLESS)
    return GenerateRequest(
        request_id=name, prompt=tuple(random_prompt(name, 30)), sampling=sampling, priority=priority
    )


async def until_waiting(engine: VllmEngine, count: int) -> None:
    """So many requests have come to the server and wait."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            answer = await call(engine._server.url, "GET", "/metrics", None, DEADLINE_S, "")
            found = re.findall(rb"^vllm:num_requests_waiting\{.*\} ([0-9.]+)$", answer.body, re.MULTILINE)
            if sum(map(float, found)) == count:
                return
            await asyncio.sleep(POLL_S)


def test_requests_go_by_their_priorities_and_a_check_goes_first(
    vllm_python: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """One runs at a time, and is ended once its first token is seen. So the order of first tokens is the server's."""
    flags = ["--enforce-eager", "--max-model-len", "2048", "--dtype", "float32", "--max-num-seqs", "1"]
    settings = VllmSettings(python=str(PYTHON), args=flags, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    engine = VllmEngine(checkpoint, settings, tmp_path / "cache")
    order: list[str] = []
    runs = asyncio.Event()

    async def ask(name: str, priority: int) -> None:
        async for event in engine.generate(asking(name, priority)):
            assert event.error is None
            if name == "first":
                runs.set()
            elif event.tokens and name not in order:
                order.append(name)
                engine.abort(name)

    async def check() -> None:
        request = GenerateRequest(
            request_id="check",
            prompt=(1, 2, 3),
            sampling=SamplingParams(max_tokens=0),
            prompt_records=3,
            urgent=True,
        )
        async for event in engine.generate(request):
            assert event.error is None
            order.append("check")

    async def main() -> None:
        try:
            assert (await engine.start()).card.has("priorities")
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
                # Of the highest number: what runs is not stopped.
                group.create_task(ask("first", 99))
                await runs.wait()
                for name in "ab":
                    for priority in PRIORITIES:
                        group.create_task(ask(f"{priority}{name}", priority))
                    await until_waiting(engine, len(PRIORITIES) * (1 + (name == "b")))
                group.create_task(check())
                await until_waiting(engine, 2 * len(PRIORITIES) + 1)
                assert order == []
                engine.abort("first")
        finally:
            await engine.close()

    asyncio.run(main())
    # Its answer and the first token of the next request may be read in any order.
    assert order.index("check") <= 1
    order.remove("check")
    # Of equal ones, those that came first.
    assert order == [f"{priority}{name}" for priority in sorted(PRIORITIES) for name in "ab"]
