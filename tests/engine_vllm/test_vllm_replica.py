"""A replica over VllmEngine over a scripted server: whole swaps, snapshots that are refused, servers that are lost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm, until, write_model, write_weights

from midstream.core.config import VllmSettings
from midstream.core.types import Desired, Stage
from midstream.engine.vllm import swap as swap_module
from midstream.engine.vllm.engine import VllmEngine

sys.path.append(str(Path(__file__).parents[1] / "replica"))
from replica_fakes import Running, running, sse

TOKENS = 6


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[tuple[Running, FakeVllm]]:
    """A replica and its server; the weights of a snapshot `step-N` are N, those of any other cannot be loaded."""
    fake = FakeVllm()
    await fake.start()
    model = write_model(folder / "model")
    engine = VllmEngine(model, VllmSettings(**settings), folder / "cache", url=fake.url)

    async def fetch(desired: Desired, *, anew: bool = False) -> Path:
        number = desired.snapshot.removeprefix("step-")
        return write_weights(folder / desired.snapshot, int(number) if number.isdigit() else -1)

    try:
        async with running(model, engine) as here:  # type: ignore[arg-type]
            here.source.fetch = fetch  # type: ignore[method-assign,assignment]
            fake.calls.clear()
            yield here, fake
    finally:
        await fake.stop()


def stream(here: Running, **more: Any) -> asyncio.Task[Any]:
    body = {
        "model": here.replica.names.model,
        "prompt": [5, 6, 7],
        "max_tokens": TOKENS,
        "stream": True,
        **more,
    }
    return asyncio.create_task(here.http.post("/v1/completions", json=body))


def models(response: Any) -> list[str]:
    """The snapshot that each chunk with text names."""
    assert response.status_code == 200, response.text
    return [
        event["model"].partition("@")[2]
        for event in sse(response.text)
        if event != "[DONE]" and event.get("choices") and event["choices"][0]["text"]
    ]


def test_a_swap_with_its_canary_under_a_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (here, fake):
            base = here.replica.report().check
            asked = stream(here)
            await until(lambda: fake.requests)
            fake.requests[0].step(1, 1)
            await here.swap("step-1")
            await here.until(lambda: here.replica.report().check not in (None, base))
            report = here.replica.report()
            assert (report.snapshot, report.stage, report.error, report.ready) == (
                "step-1",
                Stage.IDLE,
                None,
                True,
            )
            assert report.last_swap is not None
            assert report.last_swap.streams_crossed == 1
            assert report.check is not None
            assert base is not None
            assert report.check.snapshot == "step-1"
            assert [a - b for a, b in zip(report.check.canary, base.canary, strict=True)] == [-1.0] * 31
            fake.requests[0].to_the_end()
            response = await asked
            assert set(models(response)) <= {"base", "step-1"}
            assert models(response)[-1] == "step-1"
            assert "[DONE]" in response.text
            assert [stage.stage for stage in report.transitions] == [
                Stage.FETCHING,
                Stage.VERIFYING,
                Stage.STAGING,
                Stage.STAGED,
                Stage.COMMITTING,
                Stage.CHECKING,
                Stage.IDLE,
            ]

    asyncio.run(main())


def test_a_refused_snapshot_leaves_the_old_one_and_an_error_row(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (here, fake):
            await here.swapped("step-1")
            asked = stream(here)
            await until(lambda: fake.requests)
            fake.requests[0].step()
            await here.swap("broken")
            await here.until(lambda: here.replica.report().stage is Stage.ERROR)
            report = here.replica.report()
            assert (report.snapshot, report.ready, report.target) == ("step-1", True, "broken")
            assert report.error is not None
            assert "a tensor is missing" in report.error
            assert (fake.weights, fake.version) == (1, "1:step-1")
            fake.requests[0].to_the_end()
            assert set(models(await asked)) == {"step-1"}
            boot = report.boot
            await here.swapped("step-2")
            assert (fake.weights, here.replica.boot) == (2, boot)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["in doubt", "restarted", "lost"])
def test_a_server_that_is_lost_is_taken_over_in_a_new_boot(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (here, fake):
            await here.swapped("step-1")
            await here.until(lambda: here.replica.report().stage is Stage.IDLE)
            boot = here.replica.boot
            asked = stream(here)
            await until(lambda: fake.requests)
            fake.requests[0].step()
            if how == "in doubt":
                fake.fault("/update_weight_version", "done-hang")
                with monkeypatch.context() as patch:
                    patch.setattr(swap_module, "CALL_S_MAX", 0.3)
                    await here.swap("step-2")
                    await here.until(lambda: not here.replica.ready or here.replica.boot != boot)
                fake.heal()
            elif how == "restarted":
                await fake.restart()
            else:
                port = int(fake.url.rpartition(":")[2])
                await fake.stop()
                await here.until(lambda: not here.replica.ready)
                await fake.start(port)
            await here.until(lambda: here.replica.boot != boot and here.replica.ready)
            report = here.replica.report()
            assert (report.snapshot, fake.weights, fake.version) == ("base", 0, "0:base")
            broken = await asked
            assert "[DONE]" not in broken.text
            again = stream(here)
            await until(lambda: len(fake.requests) == 2)
            fake.requests[1].to_the_end()
            assert set(models(await again)) == {"base"}
            await here.swapped("step-2")
            assert fake.weights == 2

    asyncio.run(main())


def test_what_vllm_cannot_do_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (here, fake):
            response = await stream(here, temperature=0.001)
            assert response.status_code == 400, response.text
            assert "temperature" in response.json()["error"]["message"]
            assert fake.requests == []

    asyncio.run(main())
