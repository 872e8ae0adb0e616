"""A replica over VllmEngine over a scripted server: whole swaps, snapshots that are refused, servers that are lost."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import BLOCK, FakeVllm, until, write_model, write_weights

from midstream.core.server_settings import VllmSettings
from midstream.core.types import Desired, Stage
from midstream.engine.vllm import session_kv
from midstream.engine.vllm import swap as swap_module
from midstream.engine.vllm.engine import VllmEngine
from midstream.snapshots.arc2.files import Making

sys.path.append(str(Path(__file__).parents[1] / "replica"))
from replica_fakes import Running, running, sse

TOKENS = 6


@asynccontextmanager
async def serving(
    folder: Path, *, checks_in_pause: bool = False, holds: bool = False, **settings: Any
) -> AsyncIterator[tuple[Running, FakeVllm]]:
    """A replica and its server; the weights of a snapshot `step-N` are N, those of any other cannot be loaded."""
    fake = FakeVllm()
    fake.checks_in_pause = fake.by_priority = checks_in_pause
    fake.holds = {} if holds else None
    await fake.start()
    model = write_model(folder / "model")
    engine = VllmEngine(model, VllmSettings(**settings), folder / "cache", url=fake.url)

    async def fetch(desired: Desired, *, refetch: bool = False, making: Making | None = None) -> Path:
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


def checked(here: Running) -> str:
    """The snapshot of the last check."""
    check = here.replica.report().own.check
    return "" if check is None else check.snapshot


def models(response: Any) -> list[str]:
    """The snapshot that each chunk with text names."""
    assert response.status_code == 200, response.text
    return [
        event["model"].partition("@")[2]
        for event in sse(response.text)
        if event != "[DONE]" and event.get("choices") and event["choices"][0]["text"]
    ]


async def test_a_swap_with_its_canary_under_a_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as (here, fake):
        base = here.replica.report().own.check
        asked = stream(here)
        await until(lambda: fake.requests)
        fake.requests[0].step(1, 1)
        await here.swap("step-1")
        await here.until(lambda: here.replica.report().own.stage is Stage.IDLE and checked(here) == "step-1")
        report = here.replica.report()
        assert (report.own.snapshot, report.own.stage, report.own.error, report.ready) == (
            "step-1",
            Stage.IDLE,
            None,
            True,
        )
        assert report.own.last_swap is not None
        assert report.own.last_swap.streams_crossed == 1
        assert report.own.check is not None
        assert base is not None
        assert report.own.check.snapshot == "step-1"
        assert [a - b for a, b in zip(report.own.check.canary, base.canary, strict=True)] == [-1.0] * 31
        fake.requests[0].to_the_end()
        response = await asked
        assert set(models(response)) <= {"base", "step-1"}
        assert models(response)[-1] == "step-1"
        assert "[DONE]" in response.text
        assert [stage.stage for stage in report.own.transitions] == [
            Stage.FETCHING,
            Stage.VERIFYING,
            Stage.STAGING,
            Stage.STAGED,
            Stage.COMMITTING,
            Stage.CHECKING,
            Stage.IDLE,
        ]


async def test_what_a_session_holds_between_its_turns_is_reported_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_kv, "LOOK_S", 0.01)

    async with serving(tmp_path, checks_in_pause=True, holds=True) as (here, fake):
        body = {"model": here.replica.names.model, "prompt": [*range(9)], "max_tokens": 2}
        headers = {"x-session-affinity": "s"}
        asked = asyncio.create_task(here.http.post("/v1/completions", json=body, headers=headers))
        await until(lambda: fake.requests)
        fake.requests[0].to_the_end()
        assert (await asked).status_code == 200
        # Ten positions.
        await here.until(lambda: here.replica.report().engine.kv.held == 2)
        kv = here.replica.report().engine.kv
        assert (kv.used, kv.block_tokens, kv.total) == (0, BLOCK, 200)
        closed = await here.http.post("/replica/sessions/close", json={"key": "s"})
        assert closed.json() == {"closed": True}
        await here.until(lambda: here.replica.report().engine.kv.held == 0)
        assert fake.ended[-1] == "\0s"


async def paused(here: Running, serial: int, mode: str | None) -> None:
    answer = await here.http.post("/replica/pause", json={"serial": serial, "mode": mode})
    assert answer.status_code == 202
    await here.until(lambda: here.replica.report().pause.serial >= serial)


@pytest.mark.parametrize("sound", [True, False])
async def test_a_snapshot_that_comes_in_a_pause_is_proved_after_it(tmp_path: Path, sound: bool) -> None:
    """Kept streams and newcomers see a token of it only once it was, and never if it fails."""

    async with serving(tmp_path) as (here, fake):
        asked = stream(here)
        await until(lambda: fake.requests)
        fake.requests[0].step(1, 1)
        await here.until(lambda: here.engine.stats().running == 1)
        await paused(here, 1, "keep")
        assert fake.paused
        newcomer = stream(here)
        await here.swap("step-1")
        await here.until(lambda: here.replica.report().own.stage is Stage.CHECKING)
        assert (fake.weights, fake.paused, here.replica.own.gate.waiting) == (1, True, 1)
        fake.nan_scores = not sound
        fake.hold_scores = True
        scored = len(fake.scores)
        await paused(here, 2, None)
        await until(lambda: len(fake.scores) > scored, "it is checked")
        fake.requests[0].step(2)
        assert not asked.done()
        fake.hold_scores = False
        fake.scores[-1].gate.set()
        if sound:
            await here.until(lambda: here.replica.report().own.stage is Stage.IDLE)
            await until(lambda: len(fake.requests) == 2)
            for request in fake.requests:
                request.to_the_end()
            assert models(await asked)[-1] == "step-1"
            assert set(models(await newcomer)) == {"step-1"}
            return
        await here.until(lambda: here.replica.report().own.stage is Stage.ERROR)
        report = here.replica.report()
        assert not report.ready
        assert report.own.error is not None
        assert "canary" in report.own.error
        assert set(models(await asked)) == {"base"}
        assert (await newcomer).status_code == 503


@pytest.mark.parametrize("sound", [True, False])
async def test_a_snapshot_that_comes_in_a_pause_is_proved_in_it_where_the_server_can(
    tmp_path: Path, sound: bool
) -> None:
    async with serving(tmp_path, checks_in_pause=True) as (here, fake):
        card = here.replica.report().card
        assert card is not None
        assert card.has("frozen_check")
        asked = stream(here)
        await until(lambda: fake.requests)
        fake.requests[0].step(1, 1)
        await here.until(lambda: here.engine.stats().running == 1)
        await paused(here, 1, "keep")
        fake.nan_scores = not sound
        await here.swap("step-1")
        await here.until(lambda: here.replica.report().own.stage in (Stage.IDLE, Stage.ERROR))
        assert (fake.weights, fake.paused) == (1, True)
        if not sound:
            assert here.replica.report().own.stage is Stage.ERROR
            assert set(models(await asked)) == {"base"}
            return
        check = here.replica.report().own.check
        assert check is not None
        assert (check.snapshot, fake.requests[0].body.get("priority", 0)) == ("step-1", 0)
        await paused(here, 2, None)
        fake.requests[0].to_the_end()
        assert models(await asked)[-1] == "step-1"


async def test_a_refused_snapshot_leaves_the_old_one_and_an_error_row(tmp_path: Path) -> None:
    async with serving(tmp_path) as (here, fake):
        await here.swapped("step-1")
        asked = stream(here)
        await until(lambda: fake.requests)
        fake.requests[0].step()
        await here.swap("broken")
        await here.until(lambda: here.replica.report().own.stage is Stage.ERROR)
        report = here.replica.report()
        assert (report.own.snapshot, report.ready, report.own.target) == ("step-1", True, "broken")
        assert report.own.error is not None
        assert "a tensor is missing" in report.own.error
        assert (fake.weights, fake.version) == (1, "1:step-1")
        fake.requests[0].to_the_end()
        assert set(models(await asked)) == {"step-1"}
        boot = report.boot
        await here.swapped("step-2")
        assert (fake.weights, here.replica.boot) == (2, boot)


@pytest.mark.parametrize("how", ["in doubt", "restarted", "lost"])
async def test_a_server_that_is_lost_is_taken_over_in_a_new_boot(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (here, fake):
        await here.swapped("step-1")
        await here.until(lambda: here.replica.report().own.stage is Stage.IDLE)
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
        assert (report.own.snapshot, fake.weights, fake.version) == ("base", 0, "0:base")
        broken = await asked
        assert "[DONE]" not in broken.text
        again = stream(here)
        await until(lambda: len(fake.requests) == 2)
        fake.requests[1].to_the_end()
        assert set(models(await again)) == {"base"}
        await here.swapped("step-2")
        assert fake.weights == 2


async def test_numbers_of_an_answer_that_a_grammar_constrains_are_told_as_what_they_are(
    tmp_path: Path,
) -> None:
    """vLLM's are of the tokens that the grammar allows: on every wire, plain and streamed, and in the session's trace."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    limits = {"max_new_tokens": TOKENS, "json_schema": json.dumps(schema)}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {
            "prompt": [5, 6],
            "max_tokens": TOKENS,
            "response_format": form,
            "logprobs": True,
        },
        "/generate": {"input_ids": [5, 6], "sampling_params": limits, "return_logprob": True},
    }
    legacy = bodies["/v1/completions"] | {"logprobs": 1}

    async with serving(tmp_path) as (here, fake):

        async def answer(path: str, body: dict[str, Any], **headers: str) -> Any:
            before = len(fake.requests)
            asked = asyncio.create_task(here.http.post(path, json=body, headers=headers))
            await until(lambda: len(fake.requests) > before or asked.done())
            assert not asked.done(), (await asked).text
            fake.requests[-1].to_the_end()
            response = await asked
            assert response.status_code == 200, response.text
            return response

        records = {"x-midstream-records": "logprobs", "x-multi-turn-session-id": "s"}
        told = (await answer("/v1/completions", bodies["/v1/completions"], **records)).json()
        entries = told["choices"][0]["logprobs"]["content"]
        assert len(entries) == TOKENS
        assert all(entry["logprob_of"] == "allowed" for entry in entries)
        # At temperature 1 without filters it is what importance sampling needs.
        assert all(entry["sampling_logprob"] == entry["logprob"] for entry in entries)
        trace = here.replica.trace(("", "s"))
        assert trace is not None
        assert [turn.logprob_of for turn in trace.turns] == ["allowed"]
        numbers = (await answer("/v1/completions", legacy)).json()["choices"][0]["logprobs"]
        assert numbers["logprob_of"] == "allowed"
        sglang = (await answer("/generate", bodies["/generate"])).json()
        assert sglang["midstream"]["logprob_of"] == "allowed"
        body = bodies["/v1/completions"] | {"stream": True}
        events = [event for event in sse((await answer("/v1/completions", body)).text) if event != "[DONE]"]
        seen = [
            e for event in events for c in event["choices"] for e in (c["logprobs"] or {}).get("content", [])
        ]
        assert [entry["logprob_of"] for entry in seen] == ["allowed"] * TOKENS
        free = {"prompt": [5, 6], "max_tokens": TOKENS, "logprobs": True}
        own = (await answer("/v1/completions", free)).json()["choices"][0]["logprobs"]["content"]
        assert not any("logprob_of" in entry for entry in own)


async def test_what_vllm_cannot_do_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    async with serving(tmp_path) as (here, fake):
        response = await stream(here, temperature=0.001)
        assert response.status_code == 400, response.text
        assert "temperature" in response.json()["error"]["message"]
        assert fake.requests == []
