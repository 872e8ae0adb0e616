"""What tests of VllmEngine on a fake server share: an engine that is attached, requests, someone who reads their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_vllm import FakeRequest, FakeVllm, until, write_model, write_tensors, write_weights

from midstream.core.server_settings import VllmSettings
from midstream.core.types import GenerateRequest, GenerationEvent, SamplingParams, SwapTiming, TokenRecord
from midstream.engine.base import EngineDied
from midstream.engine.vllm.engine import VllmEngine


class Trusting(VllmEngine):
    """Its weights pass their check as soon as they serve."""

    async def commit(self, snapshot: str) -> SwapTiming:
        timing = await super().commit(snapshot)
        self.settle(snapshot, sound=True)
        return timing


@asynccontextmanager
async def attached(
    folder: Path,
    *,
    places: int = 0,
    set_up: Callable[[FakeVllm], None] = lambda fake: None,
    kind: type[VllmEngine] = Trusting,
    **settings: Any,
) -> AsyncIterator[tuple[VllmEngine, FakeVllm]]:
    """An engine that was started on a fake server. places: adapters that it serves at once."""
    fake = FakeVllm()
    fake.places = places
    set_up(fake)
    await fake.start()
    model = write_model(folder / "model")
    if places:
        write_tensors(model)
    engine = kind(model, VllmSettings(**settings), folder / "cache", url=fake.url)
    try:
        await engine.start()
        fake.calls.clear()
        fake.scores.clear()
        yield engine, fake
    finally:
        await engine.close()
        await fake.stop()


def asking(
    name: str = "r", prompt: Sequence[int] = (5, 6, 7), max_tokens: int = 4, **more: Any
) -> GenerateRequest:
    names = {k: more.pop(k) for k in list(more) if k in SamplingParams.__struct_fields__}
    sampling = SamplingParams(max_tokens=max_tokens, **names)
    return GenerateRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, **more)


class Reading:
    """Someone who iterates over `generate` beside the test. error: what it raised."""

    def __init__(self, engine: VllmEngine, request: GenerateRequest) -> None:
        self.events: list[GenerationEvent] = []
        self.died: EngineDied | None = None
        self._iterator = engine.generate(request)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self._iterator:
                self.events.append(event)
        except EngineDied as error:
            self.died = error

    def records(self, index: int = 0) -> list[TokenRecord]:
        return [r for e in self.events if e.index == index for r in e.tokens]

    def labels(self, index: int = 0) -> list[str]:
        return [record.snapshot for record in self.records(index)]

    @property
    def errors(self) -> list[str]:
        return [event.error for event in self.events if event.error is not None]

    @property
    def finishes(self) -> dict[int, str]:
        return {event.index: event.finish for event in self.events if event.finish is not None}

    async def stop(self) -> None:
        """As a client that leaves."""
        self.task.cancel()
        await asyncio.wait((self.task,))

    async def ended(self) -> Reading:
        async with asyncio.timeout(120):
            await self.task
        return self


async def begun(
    engine: VllmEngine, fake: FakeVllm, request: GenerateRequest
) -> tuple[Reading, list[FakeRequest]]:
    """A request that has reached the server with all its choices."""
    before = len(fake.requests)
    reading = Reading(engine, request)
    await until(lambda: len(fake.requests) == before + len(request.choices), "the choices reach the server")
    return reading, fake.requests[before:]


async def swap(engine: VllmEngine, folder: Path, number: int, name: str = "") -> str:
    """To weights `number`; what they are called."""
    snapshot = name or f"step-{number}"
    await engine.stage(snapshot, write_weights(folder / snapshot, number))
    await engine.commit(snapshot)
    return snapshot
