"""What a push says of policies, on a real ledger and the real control app: the words of a signal, and when they are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_hotload_api import DEPLOYMENT, while_three_load, write_adapter
from test_policy_calls_api import FATES, POLICIES, PolicyServer, refused, serve
from test_weight_transfer_api import INIT, Replicas, send

from midstream.core.transfer import Begin, Drop
from midstream.core.types import ENGINE_FEATURES, EngineCard

START, FINISH = "/start_weight_update", "/finish_weight_update"


class Gateway:
    """A server whose three replicas have engines with or without a base of their own for policies."""

    def __init__(self, server: PolicyServer, own_base: bool) -> None:
        features = tuple(name for name in ENGINE_FEATURES if own_base or name != "policy_base")
        report = server.report

        def with_card(index: int, *given: Any, **fields: Any) -> None:
            report(index, *given, card=EngineCard(features=features), **fields)

        server.report = with_card  # type: ignore[method-assign]
        self.server, self.replicas = server, Replicas(server)

    async def policy(self, name: str) -> None:
        write_adapter(self.server, "v1")
        answer = await self.server.signal({"identity": "v1", "policy": name})
        assert answer.status_code == 200, answer.text

    async def post(self, path: str, **body: Any) -> httpx.Response:
        asked = self.server.http.post(path, json=body or None)
        return await (while_three_load(self.server, asked) if path == FINISH else asked)

    async def states(self) -> list[str]:
        await self.server.changed()
        listed = (await self.server.http.get(POLICIES)).json()["policies"]
        return [policy["state"] for policy in listed]

    async def sent(self, **of_start: Any) -> None:
        """An update is on the replicas."""
        assert (await self.post("/init_weight_transfer_engine", **INIT)).status_code == 200
        answer = await self.post(START, **of_start)
        assert answer.status_code == 200, answer.text
        assert (await send(self.server)).status_code == 200


@asynccontextmanager
async def pushing(path: Path, *, own_base: bool) -> AsyncIterator[Gateway]:
    async with serve(path) as server:
        yield Gateway(server, own_base)


@pytest.mark.parametrize(("fate", "own_base", "expected"), [*FATES, ("drop", True, (400, "policies"))])
async def test_a_push_says_what_becomes_of_policies_as_a_signal_does_and_before_a_byte_moves(
    tmp_path: Path, fate: str | None, own_base: bool, expected: int | tuple[int, str]
) -> None:
    async with pushing(tmp_path, own_base=own_base) as gateway:
        await gateway.policy("red")
        assert (await gateway.post("/init_weight_transfer_engine", **INIT)).status_code == 200
        answer = await gateway.post(START, **({} if fate is None else {"policies": fate}))
        assert (answer.status_code if expected == 200 else refused(answer)) == expected, answer.text
        assert len(gateway.replicas.of(Begin)) == (3 if expected == 200 else 0)
        if expected == 200:
            assert (await send(gateway.server)).status_code == 200
            # What was said at the start holds.
            answer = await gateway.post(FINISH, weight_version="7")
            assert answer.status_code == 200, answer.text
        assert await gateway.states() == ([] if fate == "end" else ["READY"])
        # A call that was refused ended nothing: the same group may begin an update.
        assert (await gateway.post(START, policies="end")).status_code == 200


async def test_the_last_call_may_say_something_else_than_the_first(tmp_path: Path) -> None:
    async with pushing(tmp_path, own_base=False) as gateway:
        await gateway.policy("red")
        await gateway.sent(policies="rebase")
        assert refused(await gateway.post(FINISH, policies="keep")) == (400, "policies")
        assert (await gateway.post(FINISH, policies="end")).status_code == 200
        assert await gateway.states() == []


async def test_a_policy_that_is_made_in_an_update_refuses_it_and_loses_no_weights(tmp_path: Path) -> None:
    async with pushing(tmp_path, own_base=False) as gateway:
        await gateway.sent()
        await gateway.policy("red")
        answer = await gateway.post(FINISH, weight_version="7")
        assert refused(answer) == (409, "policies"), answer.text
        assert "The replicas hold the weights for" in answer.text
        assert gateway.replicas.of(Drop) == []
        assert await gateway.server.desired() is None
        answer = await gateway.post(FINISH, weight_version="7", policies="rebase")
        assert (answer.status_code, answer.json()["weight_version"]) == (200, "7"), answer.text
        assert await gateway.states() == ["READY"]


async def test_a_finish_that_is_repeated_says_the_same_of_policies(tmp_path: Path) -> None:
    async with pushing(tmp_path, own_base=False) as gateway:
        await gateway.sent()
        first = await gateway.post(FINISH, weight_version="7", policies="rebase")
        # It was made behind the commit. The answer to that may have been lost.
        await gateway.policy("red")
        for again in ({}, {"policies": "rebase"}):
            answer = await gateway.post(FINISH, weight_version="7", **again)
            assert answer.json() == first.json()
        answer = await gateway.post(FINISH, weight_version="7", policies="end")
        assert refused(answer) == (409, "policies")
        assert "was finished with rebase, not end" in answer.text
        assert await gateway.states() == ["READY"]


async def test_a_push_waits_for_an_engines_word_while_there_are_policies(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        write_adapter(server, "v1")
        assert (await server.signal({"identity": "v1", "policy": "red"})).status_code == 200
        answer = await asyncio.wait_for(server.http.post(START), 60)
        assert answer.status_code == 503
        assert "whether its engine keeps a base" in answer.text
        assert (await server.ledger.transfer(DEPLOYMENT)) is None
