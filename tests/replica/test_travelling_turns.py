"""The turns of a session that moves: found at the new home as at the old one, by messages, tokens and texts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import threading
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_fakes import MODEL, FakeEngine, Running, running
from test_kv_waits import SmallCache
from tiers import examples

from midstream.core.headers import HEADER_BOOT, HEADER_MOVED, HEADER_PLACED, HEADER_SESSION
from midstream.core.price import Moved
from midstream.http.call import CallFailed
from midstream.replica import control, earlier
from midstream.replica.earlier import PATH_TAKEN
from midstream.replica.gate import Door
from midstream.replica.turns.message_keys import digest
from midstream.replica.turns.travel import packed, unpacked
from midstream.replica.turns.tree import Trees, Turn, TurnKeys, TurnTree

SESSION = ("t", "s")


def grown(seed: int) -> TurnTree:
    """A tree with branches, turns of the same words, thinking and texts."""
    rng, trees = random.Random(seed), Trees()
    turns: list[Turn | None] = [None]
    for number in range(rng.randint(1, 12)):
        parent = rng.choice(turns)
        added = [rng.randrange(200_000) for _ in range(rng.randint(0, 9))]
        sampled = [rng.randrange(200_000) for _ in range(rng.randint(1, 9))]
        keys = [digest(b"", word) for word in range(rng.randint(1, 4))]
        text = None if rng.random() < 0.5 else f"text {rng.randrange(3)}"
        thoughts = [(at, "t") for at in range(rng.randint(0, 2))]
        turns.append(trees.add(SESSION, parent, added, sampled, TurnKeys(keys, thoughts, text), None))
        assert turns[-1] is not None
        assert turns[-1].number == number + 1
    tree = trees.of(SESSION)
    assert tree is not None
    return tree


def shape(turn: Turn | None) -> tuple[Any, ...]:
    return () if turn is None else (turn.number, turn.tokens, turn.answered, turn.all_thoughts)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(50))
def test_a_tree_that_travelled_finds_the_same_turns(seed: int) -> None:
    tree = grown(seed)
    [there] = unpacked(packed([tree]))
    assert [shape(turn) for turn in there.turns] == [shape(turn) for turn in tree.turns]
    for length in range(1, 5):
        keys = [digest(b"", word) for word in range(length)]
        for thoughts in ([""] * length, ["t"] * length):
            here, found = tree.find(keys, thoughts), there.find(keys, thoughts)
            assert shape(found.turn) == shape(here.turn)
            assert found[1:] == here[1:]
    for turn in tree.turns:
        assert shape(there.find_tokens([*turn.tokens, 1])) == shape(tree.find_tokens([*turn.tokens, 1]))
    for text in ("text 0 more", "text 1", "other"):
        assert shape(there.find_text(text).turn) == shape(tree.find_text(text).turn)
    assert unpacked(packed([])) == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode([[]]),
        msgspec.msgpack.encode([[[[1, b"", b"", "stop", []]], [], [], [], []]]),
        msgspec.msgpack.encode([[[[0, b"abc", b"", "stop", []]], [], [], [], []]]),
        msgspec.msgpack.encode([[[], [], [[b"k", [1]]], [], []]]),
        msgspec.msgpack.encode([[[], [], [[b"k", [0]]], [], []]]),
    ],
)
def test_what_is_no_tree_is_a_clear_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="turn"):
        unpacked(data)


def test_trees_of_homes_before_count_as_bytes_and_go_first_and_end_with_the_session() -> None:
    tree = grown(1)
    trees = Trees(bytes_max=3 * tree.size)
    trees.bring(SESSION, (tree, grown(1)))
    assert trees.size == 2 * tree.size
    trees.bring(SESSION, (tree,))
    assert trees.size == tree.size
    own = trees.add(SESSION, tree.turns[-1], [1], [2], TurnKeys())
    assert own.parent is None, "it stands by itself"
    assert own.tokens == (*tree.turns[-1].tokens, 1, 2)
    assert trees.all_of(SESSION)[1:] == (tree,)
    trees.add(("t", "other"), None, array("I", range(4 * tree.size // 4)), [1], TurnKeys())
    assert trees.all_of(SESSION)[1:] == ()
    trees.bring(SESSION, (tree,))
    trees.close(SESSION)
    assert trees.all_of(SESSION) == ()


# -- two replicas


@asynccontextmanager
async def homes(tmp_path: Path, *engines: FakeEngine, token: str = "") -> AsyncIterator[list[Running]]:
    """A replica for each engine."""
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        found = []
        for number, engine in enumerate(engines):
            (folder := tmp_path / str(number)).mkdir()
            here = await stack.enter_async_context(running(folder, engine, token))
            here.http.headers.update({"x-midstream-token": token} if token else {})
            found.append(here)
        yield found


class Chat:
    """A session, wherever its turns go. placed: the stamp of the last place, as a gateway gives it."""

    def __init__(self, *contents: str) -> None:
        roles = itertools.cycle(("user", "assistant"))
        self.messages = [
            {"role": role, "content": text} for role, text in zip(roles, contents or ("begin",), strict=False)
        ]
        self.placed = 0

    async def ask(self, here: Running, moved_from: str | None = None) -> httpx.Response:
        """moved_from: the URL in what a gateway says of a move."""
        body = {"model": MODEL, "messages": self.messages, "max_tokens": 4, "return_token_ids": True}
        given = {HEADER_BOOT: here.replica.boot, HEADER_SESSION: "s"}
        if moved_from is not None or not self.placed:
            self.placed += 1000
            given[HEADER_PLACED] = str(self.placed)
        if moved_from is not None:
            given[HEADER_MOVED] = msgspec.json.encode(Moved(url=moved_from)).decode()
        return await here.http.post("/v1/chat/completions", json=body, headers=given)

    async def turn(self, here: Running, moved_from: str | None = None) -> dict[str, Any]:
        """What it is answered. The next turn goes on from there."""
        answer = await self.ask(here, moved_from)
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        said = shown["choices"][0]["message"]["content"]
        self.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        return shown


def tokens_of(shown: dict[str, Any]) -> list[int]:
    made: list[int] = shown["prompt_token_ids"] + shown["choices"][0]["token_ids"]
    return made


@pytest.mark.parametrize("token", ["", "secret"])
async def test_a_chat_that_moved_continues_its_turns_at_the_new_home_and_at_the_next_one(
    tmp_path: Path, token: str
) -> None:
    engines = [FakeEngine(text) for text in ("hel", "lo ", "you")]
    async with homes(tmp_path, *engines, token=token) as (first, second, third):
        chat = Chat()
        before: list[int] = []
        url = None
        for here in (first, second, third, first):
            shown = await chat.turn(here, url)
            assert "midstream" not in shown, shown.get("midstream")
            assert shown["prompt_token_ids"][: len(before)] == before
            before, url = tokens_of(shown), here.url
        # Its next turn at that home needs nobody.
        shown = await chat.turn(first)
        assert shown["prompt_token_ids"][: len(before)] == before


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", ""])
async def test_a_home_that_does_not_answer_costs_the_history_alone_and_the_response_says_so(
    tmp_path: Path, url: str
) -> None:
    async with homes(tmp_path, FakeEngine("hel")) as [here]:
        shown = await Chat("begin", "elsewhere", "on").turn(here, url)
        assert shown["midstream"]["branch"]["why"] in ("unknown", "edited")


@pytest.mark.parametrize("moved", ["{", '{"url": 1}', "nonsense"])
async def test_what_says_of_no_move_where_its_turns_are_fetches_none(tmp_path: Path, moved: str) -> None:
    async with homes(tmp_path, FakeEngine("hel")) as [here]:
        here.http.headers[HEADER_MOVED] = moved
        shown = await Chat("begin", "elsewhere", "on").turn(here)
        assert shown["midstream"]["branch"]["why"] in ("unknown", "edited")


@pytest.mark.parametrize("admits", [True, False])
async def test_a_home_keeps_the_kv_of_a_session_until_another_replica_has_let_its_turn_in(
    tmp_path: Path, admits: bool
) -> None:
    cache = SmallCache()
    async with homes(tmp_path, cache, FakeEngine("hel"), token="secret") as (old, new):
        chat = Chat()
        await chat.turn(old)
        if not admits:
            new.replica.own.gate.set(Door.CLOSED)
            assert (await chat.ask(new, old.url)).status_code == 425
            assert repr(new.replica.earlier) == "EarlierTurns(0 fetched, 0 told)"
            assert cache.sessions_over == []
            assert "midstream" not in await chat.turn(old), "it comes back"
            return
        assert ("", "s") in old.replica.budget.account
        assert "midstream" not in await chat.turn(new, old.url)
        await old.until(lambda: cache.sessions_over == ["\0s"])
        assert ("", "s") not in old.replica.budget.account


async def test_a_late_word_of_a_move_takes_nothing_from_a_session_that_has_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SmallCache()
    async with homes(tmp_path, cache, FakeEngine("hel")) as (old, new):
        chat = Chat()
        await chat.turn(old)
        words: list[bytes] = []

        real = earlier.call

        async def holds_words_up(
            url: str, method: str, path: str, body: bytes, *more: Any, **rest: Any
        ) -> Any:
            if path != PATH_TAKEN:
                return await real(url, method, path, body, *more, **rest)
            words.append(body)
            raise CallFailed("it is on its way")

        monkeypatch.setattr(earlier, "call", holds_words_up)
        for moves, over in ((1, []), (3, ["\0s"])):
            await chat.turn(new, old.url)
            await new.until(lambda count=moves: len(words) == count)
            if not over:
                await chat.turn(old, new.url)
            answer = await old.http.post(PATH_TAKEN, content=words[-1 if over else 0])
            assert answer.status_code == 200
            assert cache.sessions_over == over
            assert (("", "s") in old.replica.budget.account) is not bool(over)


async def test_a_machine_that_accepts_no_connection_holds_no_turn_up_for_as_long_as_a_slow_process_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier, "CONNECT_S", 0.05)
    monkeypatch.setattr(earlier, "FETCH_S", 3600.0)

    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        # They fill its queue, so that the kernel answers no further one, as a machine that is gone.
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(address)
        async with homes(tmp_path, FakeEngine("hel")) as [here]:
            chat = Chat()
            await chat.turn(here)
            shown = await chat.turn(here, f"http://127.0.0.1:{address[1]}")
            assert "midstream" not in shown, "it has the turns itself"


async def test_a_slow_process_has_its_time_for_the_handshake_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over TLS a connection is one once the process has answered, and not the kernel alone."""
    monkeypatch.setattr(earlier, "CONNECT_S", 0.05)
    monkeypatch.setattr(earlier, "FETCH_S", 0.25)

    with socket.create_server(("127.0.0.1", 0)) as accepts:
        async with homes(tmp_path, FakeEngine("hel")) as [here]:
            chat = Chat()
            await chat.turn(here)
            await chat.turn(here, f"https://127.0.0.1:{accepts.getsockname()[1]}")
    assert "no connection within 0.25 s" in caplog.text


async def test_a_session_whose_old_home_is_slow_continues_token_for_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier, "CONNECT_S", 2.0)
    asked, goes_on = threading.Event(), threading.Event()

    def slowly(trees: Sequence[TurnTree]) -> bytes:
        asked.set()
        assert goes_on.wait(20)
        return packed(trees)

    monkeypatch.setattr(control, "packed", slowly)

    async with homes(tmp_path, FakeEngine("hel"), FakeEngine("lo ")) as (old, new):
        chat = Chat()
        await chat.turn(old)
        moving = asyncio.create_task(chat.turn(new, old.url))
        assert await asyncio.to_thread(asked.wait, 20)
        assert repr(new.replica.earlier) == "EarlierTurns(1 fetched, 0 told)"
        goes_on.set()
        assert "midstream" not in await moving
