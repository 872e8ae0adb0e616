"""Two real replicas, and sessions that move between them: by the price, and because one is asked to leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Server, serve
from test_kv_cache import client_of

#: Tokens of one cache. Two sessions of two turns fit, about 400 tokens each, and three do not.
CACHE = 1024
ANSWER = 16
#: A session that is silent for 5 s frees its place. On a machine that stands still for so long, nothing has to move.
ROUNDS = 5
WORDS = "move " * 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("moves")
    config = folder / "kv.toml"
    config.write_text(f"[embedded]\nkv_cache_tokens = {CACHE}\nthreads = 1\n")
    with serve(folder / "state", "--config", str(config), "--replicas", "2") as found:
        yield found


class Talk:
    """One session of chat turns, whose words are those of every other one."""

    def __init__(self, client: httpx.AsyncClient, server: Server, key: str) -> None:
        self.client, self.server, self.key = client, server, key
        self.messages: list[dict[str, str]] = []
        #: The answer's tokens, and where it was made, by turn.
        self.made: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.ways: list[tuple[str, str]] = []

    async def turn(self) -> None:
        number = len(self.made)
        self.messages.append({"role": "user", "content": f"{number} {WORDS if number else 'begin'}"})
        body = {
            "model": self.server.model,
            "messages": self.messages,
            "max_tokens": ANSWER,
            "seed": 7 + number,
            "ignore_eos": True,
            "return_token_ids": True,
            "prompt_cache_isolation_key": self.key,
        }
        # Each needs what it has, whatever others came to.
        headers = {"x-session-id": self.key, "x-midstream-expected-tokens": "10"}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        shown = answer.json()
        assert "midstream" not in shown, f"a branch: {shown['midstream']}"
        choice = shown["choices"][0]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"]})
        self.prompts.append(shown["prompt_token_ids"])
        self.made.append(choice["token_ids"])
        self.ways.append((answer.headers["x-midstream-replica"], answer.headers["x-midstream-route-reason"]))
        if number:
            before = self.prompts[-2] + self.made[-2]
            assert self.prompts[-1][: len(before)] == before, (
                "a turn begins with the tokens of the one before"
            )

    async def end(self) -> None:
        await self.client.delete(f"/v1/sessions/{self.key}")


async def standing(client: httpx.AsyncClient, server: Server, name: str, **body: Any) -> dict[str, Any]:
    answer = await client.patch(f"/v1/{server.deployment}/replicas/{name}", json=body)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def is_usable(client: httpx.AsyncClient, server: Server, name: str, *, wanted: bool = True) -> None:
    async with asyncio.timeout(60):
        while True:
            shown = (await client.get(f"/v1/{server.deployment}/replicas")).json()["replicas"]
            if next(one for one in shown if one["name"] == name)["usable"] is wanted:
                return
            await asyncio.sleep(0.05)


async def three_on(client: httpx.AsyncClient, server: Server, home: str, name: str) -> list[Talk]:
    """Sessions that have begun on one replica, while the other one takes nothing."""
    other = "replica-1" if home == "replica-0" else "replica-0"
    await standing(client, server, home, drain=False)
    await is_usable(client, server, home)
    await standing(client, server, other, drain=True)
    await is_usable(client, server, other, wanted=False)
    talks = [Talk(client, server, f"{name}-{one}") for one in "abc"]
    for talk in talks:
        await talk.turn()
        assert talk.ways == [(home, "new")]
    await standing(client, server, other, drain=False)
    await is_usable(client, server, other)
    for talk in talks[:2]:
        await talk.turn()
        # The other one is idle, and they wait for nothing.
        assert talk.ways[-1] == (home, "sticky")
    return talks


async def control(client: httpx.AsyncClient, server: Server, turns: int) -> list[list[int]]:
    """What any of the sessions answers."""
    talk = Talk(client, server, "control")
    for _ in range(turns):
        await talk.turn()
    await talk.end()
    return talk.made


async def test_a_session_moves_from_a_full_replica_to_one_that_joins_and_goes_on_token_for_token(
    server: Server,
) -> None:
    async with client_of(server) as client:
        expected = await control(client, server, 3)
        for number in range(ROUNDS):
            talks = await three_on(client, server, "replica-0", f"priced{number}")
            last = talks[2]
            await last.turn()
            if last.ways[-1] == ("replica-1", "priced"):
                break
            for talk in talks:
                await talk.end()
        assert last.ways[-1] == ("replica-1", "priced")
        await last.turn()
        assert last.ways[-1] == ("replica-1", "sticky")
        assert last.made == expected
        trace = (await client.get(f"/v1/sessions/{last.key}/trace")).json()
        assert sum(len(one["turns"]) for one in trace["traces"]) == 3
        labels = {
            span["snapshot"] for one in trace["traces"] for turn in one["turns"] for span in turn["snapshots"]
        }
        assert labels == {"base"}
        metrics = (await client.get("/metrics")).text
        assert 'midstream_gateway_moves_total{reason="wait"}' in metrics
        for talk in talks:
            await talk.end()


async def test_a_replica_that_is_asked_to_leave_loses_no_turn(server: Server) -> None:
    async with client_of(server) as client:
        expected = await control(client, server, 3)
        talks = await three_on(client, server, "replica-1", "left")
        last = talks[2]
        streamed = asyncio.create_task(stream(client, server))
        # It has to wait, or runs.
        turn = asyncio.create_task(last.turn())
        shown = await standing(client, server, "replica-1", drain=True, within_s=0)
        assert shown["standing"] == "leaving"
        assert shown["leaves_at"] is not None
        await turn
        for talk in (last, *talks[:2]):
            await talk.turn()
            assert talk.made == expected
            assert talk.ways[-1][0] == "replica-0"
            await talk.end()
        assert await streamed == await stream(client, server)
        metrics = (await client.get("/metrics")).text
        assert 'midstream_gateway_moves_total{reason="leaving"}' in metrics
        assert 'midstream_replica_leaves_timestamp_seconds{replica="replica-1"}' in metrics
        await standing(client, server, "replica-1", drain=False)


async def stream(client: httpx.AsyncClient, server: Server) -> list[int]:
    """The tokens of a stream, whole."""
    body = {
        "model": server.model,
        "prompt": [5] * 40,
        "max_tokens": 80,
        "seed": 3,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            tokens += choice.get("token_ids") or []
    assert len(tokens) == 80
    return tokens
