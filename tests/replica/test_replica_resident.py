"""Snapshots that stay loaded at one replica: who may ask for them, which stay, what a swap still waits for."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from replica_fakes import MODEL, FakeEngine, Running, running, sse
from test_replica_pins import BODY, admitted, labels, refused, streaming
from test_resume_pipeline import COMPLETIONS, PROMPT, an_engine, resume, stream

from midstream.core.types import BASE_SNAPSHOT, EngineCard, GenerateRequest, Stage
from midstream.replica.pins import Residency

TWO, THREE = Residency(2), Residency(3)


async def ask(here: Running, snapshot: str | None = None, **more: Any) -> httpx.Response:
    model = MODEL if snapshot is None else f"{MODEL}@{snapshot}"
    return await here.http.post("/v1/completions", json=BODY | {"model": model} | more)


async def served(here: Running, snapshot: str | None = None, **more: Any) -> GenerateRequest:
    """What the engine was asked."""
    answer = await ask(here, snapshot, **more)
    expected = here.replica.report().own.snapshot if snapshot is None else snapshot
    assert labels(answer.text) == [expected] * 6, answer.text
    return here.engine.requests[-1]


async def after(here: Running, *snapshots: str) -> tuple[str, ...]:
    """They have served, one after another; what stays."""
    for snapshot in snapshots:
        await here.swapped(snapshot)
        await here.until(lambda: here.replica.report().own.stage is Stage.IDLE)
    return here.replica.report().own.resident


async def test_a_swap_waits_for_no_pinned_stream_which_goes_on_under_its_own_snapshot(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), residency=TWO, pin_drain_s=0.0) as here:
        async with streaming(here, f"{MODEL}@base") as pinned, streaming(here) as free:
            await here.swapped("v1")
            report = here.replica.report()
            assert (report.own.snapshot, report.own.resident, report.own.pinnable) == ("v1", ("base",), True)
            here.engine.allow(10)
            assert labels((await pinned).text) == ["base"] * 6
            assert sse((await pinned).text)[-1] == "[DONE]"
            assert set(labels((await free).text)) == {"base", "v1"}
        assert [request.snapshot for request in here.engine.requests] == ["base", None]
        assert (await served(here, "base")).snapshot == "base"
        assert (await served(here, "v1")).snapshot == "v1"
        assert (await served(here)).snapshot is None


async def test_the_last_snapshots_stay_and_of_older_ones_a_request_is_told_what_does(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), residency=THREE) as here:
        assert await after(here, "v1") == ("base",)
        assert await after(here, "v2") == ("base", "v1")
        assert await after(here, "v3") == ("v1", "v2")
        assert here.engine.holds == {"v1", "v2", "v3"}
        assert await refused(here, model=f"{MODEL}@base") == {
            "serving": "v3",
            "constraint": {"snapshot": "base"},
        }
        told = (await ask(here, "base")).json()["error"]["message"]
        assert told == f"snapshot 'base' is not serving; {MODEL}@v3 is, and 'v1', 'v2' may be asked for"
        # It is what was used least recently that goes.
        await served(here, "v1")
        assert await after(here, "v4") == ("v1", "v3")
        # Who comes back serves, and is not counted twice.
        assert await after(here, "v1") == ("v3", "v4")
        assert here.engine.holds == {"v1", "v3", "v4"}


async def test_a_snapshot_in_use_stays_beyond_the_number_until_its_last_request_ends(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine(), residency=TWO, pin_drain_s=0.0) as here:
        async with streaming(here, f"{MODEL}@base") as first, streaming(here, f"{MODEL}@base") as second:
            assert await after(here, "v1", "v2") == ("base", "v1")
            second.cancel()
            await here.engine.any_aborted.wait()
            assert await after(here, "v3") == ("base", "v2")
            here.engine.allow(10)
            assert labels((await first).text) == ["base"] * 6
        # Of the two it was used later.
        await here.until(lambda: here.replica.report().own.resident == ("base",))
        assert here.engine.holds == {"base", "v3"}
        assert (await refused(here, model=f"{MODEL}@v2"))["serving"] == "v3"


async def test_beyond_the_bound_a_swap_waits_for_the_least_recently_used_alone(tmp_path: Path) -> None:
    bound = Residency(3, most=2)
    async with (
        running(tmp_path, FakeEngine(), residency=bound) as here,
        streaming(here, f"{MODEL}@base") as oldest,
    ):
        assert await after(here, "v1") == ("base",)
        async with streaming(here, f"{MODEL}@v1", max_tokens=8) as newer:
            await here.swap("v2")
            await here.until(lambda: here.replica.own.pins.coming == "v2" or len(here.engine.switches) == 2)
            assert here.engine.switches == ["v1"]
            assert (await refused(here, model=f"{MODEL}@v1"))["pinnable"] is False
            here.engine.allow(6)
            assert labels((await oldest).text) == ["base"] * 6
            await here.until(lambda: here.replica.report().own.snapshot == "v2")
            assert here.replica.report().own.resident == ("v1",)
            assert here.engine.holds == {"v1", "v2"}
            here.engine.allow(8)
            assert labels((await newer).text) == ["v1"] * 8


async def test_beyond_the_bound_a_request_that_outlasts_the_drain_ends_with_an_error(tmp_path: Path) -> None:
    bound = Residency(3, most=2)
    async with (
        running(tmp_path, FakeEngine(), residency=bound, pin_drain_s=0.0) as here,
        streaming(here, f"{MODEL}@base") as oldest,
    ):
        await here.swapped("v1")
        async with streaming(here, f"{MODEL}@v1") as newer:
            await here.swapped("v2")
            here.engine.allow(10)
            error = sse((await oldest).text)[-1]["error"]
            assert error["code"] == "snapshot_not_served"
            assert "'base', to which this request is pinned, is replaced by 'v2'" in error["message"]
            assert labels((await newer).text) == ["v1"] * 6


async def test_other_files_of_a_name_that_stays_wait_for_its_pinned_streams(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), residency=THREE) as here:
        await here.swapped("v1", fingerprint="one")
        async with streaming(here, f"{MODEL}@v1") as pinned:
            await here.swapped("v2")
            await here.swap("v1", fingerprint="other")
            await here.until(lambda: here.replica.own.pins.coming == "v1" or len(here.engine.switches) == 3)
            assert here.engine.switches == ["v1", "v2"]
            here.engine.allow(10)
            assert labels((await pinned).text) == ["v1"] * 6
            await here.until(lambda: here.engine.switches == ["v1", "v2", "v1"])
            await here.until(lambda: here.replica.report().own.resident == ("base", "v2"))


async def test_the_same_files_of_a_name_that_stays_wait_for_nobody(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), residency=THREE, pin_drain_s=0.0) as here:
        await here.swapped("v1", fingerprint="one")
        async with streaming(here, f"{MODEL}@v1") as pinned:
            await here.swapped("v2")
            await here.swapped("v1", fingerprint="one")
            here.engine.allow(10)
            assert labels((await pinned).text) == ["v1"] * 6


async def test_who_asks_for_an_older_snapshot_shares_kv_with_requests_for_the_same_load_only(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine(), residency=THREE) as here:
        await here.swapped("v1", fingerprint="one", max_cache_age=0, reset_prompt_cache="none")
        serving = await served(here, "v1")
        assert serving.salt == (await served(here)).salt
        assert serving.kv_age_max == 0
        await here.swapped("v2", reset_prompt_cache="none", max_cache_age=0)
        base, newest, pinned = await served(here, "base"), await served(here), await served(here, "v1")
        assert newest.salt == serving.salt
        # None of it is older than its snapshot, whatever the bound for those who are served by the newest.
        assert (pinned.salt == newest.salt, pinned.kv_age_max, newest.kv_age_max) == (False, None, 0)
        assert base.salt not in (newest.salt, pinned.salt)
        await here.swapped("v3", reset_prompt_cache="all")
        assert (await served(here, "v1")).salt == pinned.salt
        assert (await served(here, "v1", prompt_cache_max_len=0)).salt != pinned.salt
        # Another load of its name, with other files.
        await after(here, "v4")
        await here.swapped("v1", fingerprint="other")
        await here.swapped("v5", reset_prompt_cache="none")
        other = await served(here, "v1")
        assert other.salt not in (pinned.salt, serving.salt)
        here.replica.reset_cache()
        assert (await served(here, "v1")).salt != other.salt


async def test_a_sync_swap_drains_pinned_streams_and_what_served_stays(tmp_path: Path) -> None:
    async with (
        running(tmp_path, FakeEngine(), residency=TWO) as here,
        streaming(here, f"{MODEL}@base") as pinned,
    ):
        await here.swap("v1", transition="SYNC")
        await here.until(lambda: not here.replica.report().own.admitting)
        assert here.engine.switches == []
        here.engine.allow(10)
        assert labels((await pinned).text) == ["base"] * 6
        await here.until(lambda: here.replica.report().own.snapshot == "v1")
        await served(here, "base")


async def test_weights_that_failed_their_check_are_offered_to_nobody_afterwards(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.canary["v1"] = [float("nan")]
    async with running(tmp_path, engine, residency=THREE) as here:
        await here.swap("v1")
        await here.until(lambda: here.replica.report().own.stage is Stage.ERROR)
        assert await after(here, "v2") == ("base",)
        assert engine.holds == {"base", "v2"}


async def test_a_snapshot_that_replicas_disagreed_on_is_offered_to_nobody_afterwards(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), residency=THREE) as here:
        await here.swapped("v1")
        await here.swap("v1", reload=1)
        await here.until(lambda: len(here.engine.switches) == 2)
        assert await after(here, "v2") == ("base",)
        assert here.engine.holds == {"base", "v2"}


async def test_a_new_boot_has_what_it_starts_on_alone(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), residency=THREE) as here:
        assert await after(here, "v1", "v2") == ("base", "v1")
        here.engine.start_gate.clear()
        await here.engine.die()
        await here.until(lambda: here.engine.starts == 2)
        assert here.replica.report().own.resident == ()
        here.engine.start_gate.set()
        await here.until(lambda: here.replica.ready)
        assert (here.replica.report().own.snapshot, here.replica.report().own.resident) == (BASE_SNAPSHOT, ())
        assert (await refused(here, model=f"{MODEL}@v1"))["serving"] == BASE_SNAPSHOT


@pytest.mark.parametrize("residency", [Residency(), Residency(1, most=4), Residency(3, most=1), None])
async def test_with_one_snapshot_nothing_is_kept_and_no_request_names_one(
    tmp_path: Path, residency: Residency | None
) -> None:
    engine = FakeEngine()
    if residency is None:
        # It cannot.
        residency = THREE
        features = tuple(name for name in EngineCard().features if name != "resident_snapshots")
        engine.info = type(engine.info)(
            max_model_len=128, vocab_size=259, card=EngineCard(features=features), eos_token_ids=(258,)
        )
    async with running(tmp_path, engine, residency=residency) as here:
        async with streaming(here, f"{MODEL}@base") as pinned:
            await here.swap("v1")
            await here.until(lambda: not here.replica.report().own.pinnable)
            engine.allow(10)
            assert labels((await pinned).text) == ["base"] * 6
        await here.until(lambda: here.replica.report().own.snapshot == "v1")
        assert (here.replica.report().own.resident, engine.retained) == ((), [])
        assert [request.snapshot for request in engine.requests] == [None]
        assert (await refused(here, model=f"{MODEL}@base"))["serving"] == "v1"


async def test_who_waited_at_the_gate_while_its_snapshot_was_replaced_is_served_by_it(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), residency=TWO) as here:
        here.engine.commit_gate.clear()
        await here.swap("v1")
        await here.engine.committing.wait()
        asked = [asyncio.create_task(ask(here, name)) for name in ("base", "v1")]
        await here.until(lambda: here.replica.own.gate.waiting == 2)
        here.engine.commit_gate.set()
        assert [labels((await task).text) for task in asked] == [["base"] * 6, ["v1"] * 6]


async def test_a_replica_tells_its_gateway_that_what_the_body_asks_for_stays(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), residency=TWO) as here:
        await here.swapped("v1")
        # Judged by its headers alone.
        body = {"midstream": {"snapshot": "base"}}
        told = await refused(here, admitted("v1"), **body)
        assert told == {"serving": "v1", "constraint": {"snapshot": "base"}, "here": True}
        answer = await here.http.post(
            "/v1/completions", json=BODY | body, headers=admitted("base", pinned=True, body=True)
        )
        assert labels(answer.text) == ["base"] * 6


async def test_a_pinned_stream_goes_on_where_its_snapshot_stays_and_no_other_one_does(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with (
        running(tmp_path / "a", an_engine()) as lost,
        running(tmp_path / "b", an_engine(), residency=TWO) as there,
    ):
        await lost.swapped("v1")
        await after(there, "v1", "v2")
        body = {"prompt": PROMPT, "max_tokens": 9, "model": f"{MODEL}@v1"}
        writes = await stream(lost, COMPLETIONS, body)
        answer = await resume(there, COMPLETIONS, body, writes[:4])
        assert answer.status_code == 200, answer.text
        assert set(labels("".join(data_lines(answer.text)))) == {"v1"}
        request = there.engine.requests[-1]
        assert (request.snapshot, request.kv_age_max) == ("v1", 0)
        free = await stream(lost, COMPLETIONS, body | {"model": MODEL})
        other = await resume(there, COMPLETIONS, body | {"model": MODEL}, free[:4])
        assert (other.status_code, "'v2' serves here" in other.text) == (409, True)


def data_lines(text: str) -> list[str]:
    return [block + "\n\n" for block in text.split("\n\n") if block.startswith("data: ")]
