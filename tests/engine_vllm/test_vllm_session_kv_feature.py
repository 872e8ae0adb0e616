"""What a replica says of vLLM's KV cache, from a server that has passed the proof, and from those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import BLOCK, FakeVllm, until
from vllm_helpers import asking, attached, begun

from midstream.core.kv import KvStats
from midstream.engine.vllm import session_kv
from midstream.engine.vllm.arguments import UNHELD
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import LOOK, SESSION


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_kv, "LOOK_S", 0.01)


def holding(fake: FakeVllm) -> None:
    """With midstream's scheduler."""
    fake.by_priority = fake.checks_in_pause = True
    fake.holds = {}


async def test_a_server_says_what_it_holds_while_requests_run_and_between_turns(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=holding) as (engine, fake):
        card = engine._info().card
        assert card.has("session_kv")
        assert "session_kv" not in card.why
        # What the proof had is over.
        assert fake.holds == {}
        assert engine.stats().kv == KvStats(block_tokens=BLOCK, total=200)
        asked = asking("r", range(10), session="\0s", returns_s=2.0, kept_s=9.0)
        reading, (request,) = await begun(engine, fake, asked)
        assert request.sampling["extra_args"][SESSION] == ["\0s", 2.0, 9.0]
        request.step(2)
        await until(lambda: engine.stats().kv.used == 3)
        request.to_the_end()
        await reading.ended()
        # 13 positions.
        await until(lambda: engine.stats().kv.held == 3)
        assert engine.stats().kv.used == 0
        fake.ended.clear()
        engine.end_session("\0s")
        await until(lambda: engine.stats().kv.held == 0)
        assert fake.ended == ["\0s"]
        # A request without one says nothing of it.
        _, (request,) = await begun(engine, fake, asking("q"))
        assert SESSION not in request.sampling.get("extra_args", {})


async def test_a_server_is_not_asked_while_nothing_moves(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=holding) as (engine, fake):
        looks: list[list[str]] = []
        look = fake._look
        fake._look = lambda ended: (looks.append(ended), look(ended))[1]  # type: ignore[method-assign, func-returns-value]
        engine.end_session("a")
        engine.end_session("b")
        await until(lambda: looks)
        # Other calls that are answered meanwhile leave it at that.
        for _ in range(20):
            await engine._control.reach_workers(5.0)
        assert looks == [["a", "b"]]


async def test_a_server_is_asked_at_most_once_in_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(tmp_path, set_up=holding) as (engine, fake):
        monkeypatch.setattr(session_kv, "LOOK_S", 3600.0)
        fake.ended.clear()
        engine.end_session("a")
        for _ in range(20):
            await engine._control.reach_workers(5.0)
        assert fake.ended == []


async def test_what_a_server_says_is_believed_and_not_computed(tmp_path: Path) -> None:
    """Others may run requests on it, and its blocks may be shared."""

    async with attached(tmp_path, set_up=saying(used=7, loose=5)) as (engine, _):
        kv = engine.stats().kv
        assert (kv.used, kv.held, kv.loose, kv.free) == (7, 0, 5, 188)


async def test_sessions_that_are_over_are_told_again_where_a_call_fails(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=holding) as (engine, fake):
        fake.ended.clear()
        fake.fault("/collective_rpc", "refuse", "close", "odd")
        engine.end_session("a")
        await until(lambda: len(fake.calls) >= 2)
        engine.end_session("b")
        await until(lambda: fake.ended[-1:] == ["b"])
        # The third call was done, and its answer was none.
        assert [*dict.fromkeys(fake.ended)] == ["a", "b"]
        assert engine.stats().kv == KvStats(block_tokens=BLOCK, total=200)


def saying(**said: Any) -> Callable[[FakeVllm], None]:
    """It answers what others have there."""

    def set_up(fake: FakeVllm) -> None:
        holding(fake)
        look = fake._look
        fake._look = lambda ended: look(ended) | said  # type: ignore[method-assign]

    return set_up


def other(fake: FakeVllm) -> None:
    holding(fake)
    fake.holds = None


def older(fake: FakeVllm) -> None:
    """It hands the call to its workers."""
    holding(fake)
    rpc = fake._rpc
    refused = 500, {"error": {"message": "no such method", "code": 500}}
    fake._rpc = lambda method, kwargs: refused if method == LOOK else rpc(method, kwargs)  # type: ignore[method-assign]


def forgetful(fake: FakeVllm) -> None:
    holding(fake)
    fake.fill = lambda *_: None  # type: ignore[method-assign]


def deaf(fake: FakeVllm) -> None:
    """It goes on to hold what is over."""
    holding(fake)
    look = fake._look
    fake._look = lambda ended: look([])  # type: ignore[method-assign]


def growing(fake: FakeVllm) -> None:
    """A second turn does not take up what the first one left."""
    holding(fake)
    looks: list[int] = []
    look = fake._look

    def more(ended: list[str]) -> dict[str, Any]:
        looks.append(0)
        found = look(ended)
        return found | {"held": found["held"] * (2 if len(looks) == 3 else 1)}

    fake._look = more  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (other, "made up by the test"),
        (older, "no such method"),
        (saying(held=0), "of 75 blocks of a session it holds 0"),
        (saying(held=-1), "it answered"),
        (saying(block_tokens=0), "its blocks have 0 tokens, and the proof 300"),
        (saying(block_tokens=301), "its blocks have 301 tokens"),
        (forgetful, "it does not find what it holds"),
        (growing, "behind a second turn it holds 150 blocks of 75"),
        (deaf, "it holds what a session had that is over"),
    ],
)
async def test_a_server_that_fails_the_proof_is_used_without_it(
    tmp_path: Path, fault: Callable[[FakeVllm], None], why: str
) -> None:
    async with attached(tmp_path, set_up=fault) as (engine, fake):
        card = engine._info().card
        assert not card.has("session_kv")
        assert card.why["session_kv"].startswith(f"{UNHELD}: ")
        assert why in card.why["session_kv"]
        # As before: its capacity is known if its metrics say so, and here they do not.
        assert engine.stats().kv == KvStats()
        fake.ended.clear()
        engine.end_session("s")
        asked = asking("r", range(10), session="s", kept_s=9.0)
        reading, (request,) = await begun(engine, fake, asked)
        assert SESSION not in request.sampling.get("extra_args", {})
        request.to_the_end()
        await reading.ended()
        assert fake.ended == engine._kv._ended == []


async def test_a_server_without_midstreams_scheduler_is_not_asked(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, _):
        assert engine._info().card.why["session_kv"] == UNHELD
        engine.end_session("s")
        assert engine.stats().kv == KvStats()
