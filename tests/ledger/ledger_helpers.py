"""What the tests of the ledger share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from midstream.core.types import Stage, Transition
from midstream.ledger import FleetReports, Ledger, Signal

DEPLOYMENT = "accounts/local/deployments/default"
MODEL = "accounts/local/models/tiny-moe"


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


@contextmanager
def opened(url: str) -> Iterator[Ledger]:
    ledger = Ledger(url, now=Clock())
    try:
        yield ledger
    finally:
        ledger.close()


@asynccontextmanager
async def on_ledger(
    url: str,
) -> AsyncIterator[Ledger]:
    with opened(url) as ledger:
        await ledger.ensure_deployment(DEPLOYMENT, MODEL, "file:///bucket", "ASYNC")
        yield ledger


def signal(
    ledger: Ledger,
    identity: str,
    *,
    failed_generation: int | None = None,
    generation_floor: int = 0,
    serving: tuple[tuple[str, int], ...] = (),
    chain_max: int = 64,
    **kwargs: Any,
) -> Awaitable[Any]:
    fleet = FleetReports(failed_generation, generation_floor, serving)
    signalled = Signal(identity=identity, url=f"file:///bucket/{identity}", **kwargs)
    return ledger.signal(DEPLOYMENT, signalled, fleet, chain_max=chain_max)


def moved(seq: int, identity: str, generation: int, stage: Stage, detail: str = "") -> Transition:
    return Transition(
        seq=seq, at=5.0 + seq, snapshot=identity, generation=generation, stage=stage, detail=detail
    )
