"""Sessions over the replica's port: what its event stream tells of them, listing and closing them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import MODEL, FakeEngine, Running, running

from midstream.core.headers import HEADER_PLACED, HEADER_SESSION, HEADER_TENANT
from midstream.replica import app


async def turn(here: Running, key: str | None, tenant: str = "", placed: int | None = None) -> None:
    headers = {HEADER_TENANT: tenant}
    headers |= {} if key is None else {HEADER_SESSION: key}
    headers |= {} if placed is None else {HEADER_PLACED: str(placed)}
    body = {"model": MODEL, "prompt": "hey", "max_tokens": 3}
    answer = await here.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@asynccontextmanager
async def events(here: Running) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with here.http.stream("GET", "/replica/events") as stream:
        lines = stream.aiter_lines()
        yield (json.loads(line) async for line in lines)


async def next_of_kind(lines: AsyncIterator[dict[str, Any]], kind: str) -> dict[str, Any]:
    return await anext(line async for line in lines if line.get("kind") == kind)


async def test_a_stream_tells_of_all_sessions_before_its_first_report_and_then_of_changes(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await turn(here, "a%2Fb", placed=5)
        await turn(here, "c", tenant="t", placed=0)
        await turn(here, None)
        async with events(here) as lines:
            begin, first, second = await anext(lines), await anext(lines), await anext(lines)
            boot = here.replica.boot
            assert begin == {"kind": "sessions", "boot": boot, "held": [], "closed": []}
            assert first == {
                "boot": None,
                "kind": "sessions",
                "held": [[["", "a/b"], 5], [["t", "c"], 0]],
                "closed": [],
            }
            assert second["replica"] == "replica-0"
            assert "kind" not in second
            await turn(here, "d", placed=8)
            told = await next_of_kind(lines, "sessions")
            assert (told["held"], told["closed"]) == ([[["", "d"], 8]], [])
            close = await here.http.post("/replica/sessions/close", json={"tenant": "t", "key": "c"})
            assert close.json() == {"closed": True}
            told = await next_of_kind(lines, "sessions")
            assert (told["held"], told["closed"]) == ([], [["t", "c"]])


async def test_a_session_that_begins_is_told_of_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SESSIONS_GAP_S", 3600.0)

    async with asyncio.timeout(120), running(tmp_path, FakeEngine()) as here, events(here) as lines:
        assert "kind" not in [await anext(lines), await anext(lines)][1]
        await turn(here, "a", placed=5)
        assert (await next_of_kind(lines, "sessions"))["held"] == [[["", "a"], 5]]
        await turn(here, "a", placed=7)
        assert (await next_of_kind(lines, "sessions"))["held"] == [[["", "a"], 7]]


async def test_a_request_that_is_refused_opens_no_session(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        body = {"model": f"{MODEL}@other", "prompt": "hey", "user": "a"}
        assert (await here.http.post("/v1/completions", json=body)).status_code == 409
        assert len(here.replica.sessions) == 0


async def test_what_turns_were_like_is_kept_by_session_and_told_in_all(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        async with events(here) as lines:
            for _ in range(2):
                await turn(here, "a", tenant="t")
            measures = (await next_of_kind(lines, "trajectories"))["measures"]
            while sum(measures["time_to_first_token_seconds"]["counts"]) < 2:
                measures = (await next_of_kind(lines, "trajectories"))["measures"]
        assert measures["cached_prompt_share"]["sum"] == 2 * 3 / 2, "the fake reuses 3 tokens of 2"
        asked = {"tenant": "t", "key": "a"}
        [stats] = (await here.http.post("/replica/sessions", json=asked)).json()["sessions"]
        counts = ("turns", "open_turns", "prompt_tokens", "cached_prompt_tokens", "generated_tokens")
        assert [stats[name] for name in (*counts, "first_tokens", "token_gaps")] == [2, 0, 4, 6, 6, 2, 4]
        assert 0 < stats["time_to_first_token_s"] < stats["used_at"] - stats["opened_at"] + 10


async def test_a_tenant_sees_its_own_sessions_in_pages(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        for key, tenant in (("b", "t"), ("a", "t"), ("a", "")):
            await turn(here, key, tenant)

        async def listed(**asked: Any) -> list[tuple[str, str]]:
            answer = await here.http.post("/replica/sessions", json=asked)
            return [(s["tenant"], s["key"]) for s in answer.json()["sessions"]]

        assert await listed(tenant="t", limit=1) == [("t", "a")]
        assert await listed(tenant="t", limit=1, after="a") == [("t", "b")]
        assert await listed() == [("", "a")]
        assert await listed(tenant="t", key="none") == []
        refused = await here.http.post("/replica/sessions", json={"limit": 0})
        assert refused.status_code == 400
        assert (await here.http.post("/replica/sessions/close", json={})).status_code == 400


async def test_a_session_that_is_closed_finds_nothing_of_its_cached_prompt_and_others_do(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        for key in ("a", "b", "a"):
            await turn(here, key)
        await here.http.post("/replica/sessions/close", json={"key": "a"})
        for key in ("a", "a", "b"):
            await turn(here, key)
        before, other, again, fresh, next_turn, other_again = [r.salt for r in here.engine.requests]
        assert before == other == again == other_again
        assert fresh == next_turn != before
        await here.http.post("/replica/sessions/close", json={"key": "a"})
        await turn(here, "a")
        assert here.engine.requests[-1].salt not in (before, fresh)


async def test_a_session_that_is_closed_begins_in_the_newest_namespace(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await turn(here, "a")
        await here.swapped("s1", reset_prompt_cache="new_session")
        await turn(here, "a")
        await here.http.post("/replica/sessions/close", json={"key": "a"})
        await turn(here, "a")
        first, pinned, fresh = [request.salt for request in here.engine.requests]
        assert first == pinned != fresh
