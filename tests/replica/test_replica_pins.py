"""What a request may ask of the snapshot that serves it, at one replica: asked for by body, name or gateway; pinned to it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from replica_fakes import MODEL, FakeEngine, Running, running, sse

from midstream.core.types import Stage
from midstream.core.versions import HEADER_ADMITTED, HEADER_REFUSED, Admitted, as_header

BODY = {"model": MODEL, "prompt": [65], "max_tokens": 6, "stream": True}


def labels(text: str) -> list[str]:
    """The snapshot of each token."""
    events = [event for event in sse(text) if event != "[DONE]" and "error" not in event]
    return [event["model"].rpartition("@")[2] for event in events if event["choices"][0]["text"]]


@asynccontextmanager
async def streaming(
    here: Running, model: str = MODEL, headers: dict[str, str] | None = None, **fields: Any
) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A stream that has given two tokens and waits for more to be allowed."""
    here.engine.allow(2)
    body = {**BODY, **fields, "model": model}
    known = len(here.engine.requests)
    task = asyncio.create_task(here.http.post("/v1/completions", json=body, headers=headers))
    await here.engine.until(
        lambda: (
            len(here.engine.requests) > known
            and here.engine.made.get(here.engine.requests[-1].request_id) == 2
        )
    )
    try:
        yield task
    finally:
        task.cancel()


async def refused(here: Running, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """What the replica tells its gateway."""
    answer = await here.http.post("/v1/completions", json=BODY | fields, headers=headers)
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "1"), answer.text
    assert answer.json()["error"]["code"] == "snapshot_not_served"
    told: dict[str, Any] = json.loads(answer.headers[HEADER_REFUSED])
    return told


def admitted(snapshot: str, **more: bool) -> dict[str, str]:
    return {HEADER_ADMITTED: as_header(Admitted(snapshot, **more))}


@pytest.mark.parametrize("form", ["model", "body", "gateway"])
async def test_a_swap_waits_for_the_stream_that_is_pinned_and_no_other_crosses_unlabelled(
    tmp_path: Path, form: str
) -> None:
    model = f"{MODEL}@base" if form == "model" else MODEL
    headers = admitted("base", pinned=True) if form == "gateway" else None
    fields: dict[str, Any] = {"midstream": {"snapshot": "base"}} if form == "body" else {}
    async with (
        running(tmp_path, FakeEngine()) as here,
        streaming(here) as free,
        streaming(here, model, headers, **fields) as pinned,
    ):
        await here.swap("v1")
        await here.until(lambda: not here.replica.report().own.pinnable)
        assert (here.replica.report().own.stage, here.replica.report().own.snapshot) == (Stage.STAGED, "base")
        assert here.engine.switches == []
        known = here.engine.requests[1].request_id
        here.engine.allow(5)
        await here.engine.until(lambda: here.engine.made[known] == 5)
        assert here.engine.switches == [], "not before the last token"
        here.engine.allow(6)
        await here.until(lambda: here.replica.report().own.snapshot == "v1")
        assert here.replica.report().own.pinnable
        assert labels((await pinned).text) == ["base"] * 6
        assert sse((await pinned).text)[-1] == "[DONE]"
        assert sse((await free).text)[-1] == "[DONE]"


async def test_streams_that_are_not_pinned_cross_while_others_are_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here, streaming(here, max_tokens=8) as free:
        async with streaming(here, f"{MODEL}@base", max_tokens=4) as pinned:
            await here.swap("v1")
            await here.until(lambda: not here.replica.report().own.pinnable)
            here.engine.allow(4)
            assert labels((await pinned).text) == ["base"] * 4
        await here.until(lambda: here.replica.report().own.snapshot == "v1")
        here.engine.allow(8)
        assert labels((await free).text) == ["base"] * 4 + ["v1"] * 4


async def test_nobody_is_pinned_anew_while_a_swap_waits_and_everybody_else_is_served(tmp_path: Path) -> None:
    async with (
        running(tmp_path, FakeEngine()) as here,
        streaming(here, f"{MODEL}@base") as pinned,
    ):
        await here.swap("v1")
        await here.until(lambda: not here.replica.report().own.pinnable)
        told = await refused(here, model=f"{MODEL}@base")
        assert told == {"serving": "base", "pinnable": False, "constraint": {"snapshot": "base"}}
        assert (await refused(here, admitted("base", pinned=True)))["pinnable"] is False
        answer = await here.http.post("/v1/completions", json=BODY | {"max_tokens": 2})
        assert labels(answer.text) == ["base"] * 2
        here.engine.allow(10)
        assert labels((await pinned).text) == ["base"] * 6
        await here.until(lambda: here.replica.report().own.snapshot == "v1")
        assert (await refused(here, model=f"{MODEL}@base"))["serving"] == "v1"
        answer = await here.http.post("/v1/completions", json=BODY | {"model": f"{MODEL}@v1"})
        assert labels(answer.text) == ["v1"] * 6


async def test_a_pinned_stream_that_outlasts_the_drain_ends_with_an_error_and_is_not_crossed(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path, FakeEngine(), pin_drain_s=0.0) as here,
        streaming(here, f"{MODEL}@base") as pinned,
    ):
        await here.swapped("v1")
        here.engine.allow(10)
        text = (await pinned).text
        assert labels(text) == ["base"] * 2
        error = sse(text)[-1]["error"]
        assert (error["code"], error["status_code"]) == ("snapshot_not_served", 409)
        assert "'base', to which this request is pinned, is replaced by 'v1'" in error["message"]
        assert here.engine.aborted == [here.engine.requests[0].request_id]
        assert here.replica.report().own.pinnable


async def test_a_pinned_plain_request_that_outlasts_the_drain_is_a_409(tmp_path: Path) -> None:
    async with (
        running(tmp_path, FakeEngine(), pin_drain_s=0.0) as here,
        streaming(here, f"{MODEL}@base", stream=False) as pinned,
    ):
        await here.swapped("v1")
        answer = await pinned
        assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
        assert "is replaced by 'v1'" in answer.json()["error"]["message"]
        # Its gateway may ask another replica.
        told = json.loads(answer.headers[HEADER_REFUSED])
        assert told == {"serving": "base", "pinnable": False, "constraint": {"snapshot": "base"}}


async def test_other_files_under_the_name_that_serves_wait_for_its_pinned_streams_too(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await here.swapped("v1", fingerprint="one")
        async with streaming(here, f"{MODEL}@v1") as pinned:
            await here.swap("v1", fingerprint="other")
            await here.until(lambda: len(here.engine.switches) == 2 or not here.replica.report().own.pinnable)
            assert here.engine.switches == ["v1"]
            here.engine.allow(10)
            assert labels((await pinned).text) == ["v1"] * 6
        await here.until(lambda: len(here.engine.switches) == 2 and here.replica.report().own.pinnable)


async def test_the_same_files_loaded_once_more_do_not_wait_for_pinned_streams(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await here.swapped("v1", fingerprint="one")
        async with streaming(here, f"{MODEL}@v1") as pinned:
            await here.swap("v1", fingerprint="one", reload=1)
            await here.until(lambda: len(here.engine.switches) == 2)
            here.engine.allow(10)
            assert labels((await pinned).text) == ["v1"] * 6


async def test_a_newer_snapshot_takes_the_place_of_one_that_waits_for_pinned_streams(tmp_path: Path) -> None:
    async with (
        running(tmp_path, FakeEngine()) as here,
        streaming(here, f"{MODEL}@base") as pinned,
    ):
        await here.swap("v1")
        await here.until(lambda: here.replica.own.pins.coming == "v1")
        await here.swap("v2")
        await here.until(lambda: here.replica.own.pins.coming == "v2")
        here.engine.allow(10)
        assert labels((await pinned).text) == ["base"] * 6
        await here.until(lambda: here.replica.report().own.snapshot == "v2")
        assert here.engine.switches == ["v2"]


class Standing(FakeEngine):
    """Has what a trainer wrote, and computes nothing until it is switched to."""

    awaits_commit = True


async def test_a_swap_does_not_wait_for_pinned_streams_that_stand_still_until_it(tmp_path: Path) -> None:
    async with (
        running(tmp_path, Standing(), pin_drain_s=3600.0) as here,
        streaming(here, f"{MODEL}@base") as pinned,
    ):
        await here.swap("v1")
        assert "it had 0 s to end" in (await pinned).text
        await here.until(lambda: here.replica.report().own.snapshot == "v1")


async def test_a_sync_swap_that_would_wait_for_streams_that_wait_for_it_fails(tmp_path: Path) -> None:
    async with running(tmp_path, Standing()) as here, streaming(here):
        await here.swap("v1", transition="SYNC")
        await here.until(lambda: "which wait for it" in str(here.replica.report().own.transitions))
        assert here.engine.switches == []


async def test_a_sync_swap_lets_pinned_streams_end_too(tmp_path: Path) -> None:
    async with (
        running(tmp_path, FakeEngine(), pin_drain_s=0.0) as here,
        streaming(here, f"{MODEL}@base") as pinned,
    ):
        await here.swap("v1", transition="SYNC")
        await here.until(lambda: not here.replica.report().own.admitting)
        here.engine.allow(10)
        assert labels((await pinned).text) == ["base"] * 6
        await here.until(lambda: here.replica.report().own.snapshot == "v1")


async def test_what_takes_the_order_of_signals_is_left_to_the_gateway(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        for constraint in ({"min_snapshot": "v1"}, {"max_staleness": 0, "wait": 2}):
            told = await refused(here, midstream=constraint)
            renamed = {"wait_s" if name == "wait" else name: value for name, value in constraint.items()}
            assert told == {"serving": "base", "constraint": renamed}
            assert await refused(here, admitted("base"), midstream=constraint) == told, (
                "judged without the body"
            )
            answer = await here.http.post(
                "/v1/completions", json=BODY | {"midstream": constraint}, headers=admitted("base", body=True)
            )
            assert labels(answer.text) == ["base"] * 6


async def test_a_request_is_served_only_by_the_snapshot_that_its_gateway_judged_by(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        here.engine.commit_gate.clear()
        await here.swap("v1")
        await here.engine.committing.wait()
        asked = asyncio.create_task(refused(here, admitted("base")))
        wanted = asyncio.create_task(
            here.http.post("/v1/completions", json=BODY, headers=admitted("v1", pinned=True))
        )
        await here.until(lambda: here.replica.own.gate.waiting == 2)
        here.engine.commit_gate.set()
        assert await asked == {"serving": "v1", "constraint": {}}
        assert labels((await wanted).text) == ["v1"] * 6


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"snapshot": ""}, "midstream.snapshot"),
        ({"snapshot": 3}, "midstream.snapshot"),
        ({"min_snapshot": "x" * 513}, "midstream.min_snapshot"),
        ({"max_staleness": -1}, "midstream.max_staleness"),
        ({"max_staleness": True}, "midstream.max_staleness"),
        ({"max_staleness": 1.5}, "midstream.max_staleness"),
        ({"wait": -1}, "midstream.wait"),
        ({"wait": "1"}, "midstream.wait"),
        ({"wait": 86401}, "midstream.wait"),
        ({"snapshots": "a"}, "midstream.snapshots"),
        ([], "midstream"),
        ("v1", "midstream"),
    ],
)
async def test_a_version_constraint_that_cannot_be_understood_is_refused_by_its_name(
    tmp_path: Path, given: Any, param: str
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.http.post("/v1/completions", json=BODY | {"midstream": given})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert here.engine.requests == []


async def test_a_body_that_asks_for_two_snapshots_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        body = BODY | {"model": f"{MODEL}@base", "midstream": {"snapshot": "v1"}}
        answer = await here.http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "asks for 'v1' and for 'base'" in answer.json()["error"]["message"]
        none = {"snapshot": None, "min_snapshot": None, "max_staleness": None, "wait": None}
        answer = await here.http.post("/v1/completions", json=BODY | {"midstream": none})
        assert labels(answer.text) == ["base"] * 6
