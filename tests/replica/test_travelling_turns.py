"""The turns of a session that moves: found at the new home as at the old one, by messages, tokens and texts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_fakes import MODEL, FakeEngine, Running, running
from test_kv_waits import SmallCache
from tiers import examples

from midstream.core.headers import HEADER_BOOT, HEADER_MOVED, HEADER_SESSION
from midstream.core.price import Moved
from midstream.replica import control, earlier
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


async def turn(here: Running, messages: list[dict[str, str]], **headers: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "return_token_ids": True}
    given = {HEADER_BOOT: here.replica.boot, HEADER_SESSION: "s", **headers}
    answer = await here.http.post("/v1/chat/completions", json=body, headers=given)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def tokens_of(shown: dict[str, Any]) -> list[int]:
    made: list[int] = shown["prompt_token_ids"] + shown["choices"][0]["token_ids"]
    return made


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_chat_that_moved_continues_its_turns_at_the_new_home_and_at_the_next_one(
    tmp_path: Path, token: str
) -> None:
    async def main() -> None:
        folders = [tmp_path / name for name in "abc"]
        for folder in folders:
            folder.mkdir()
        async with (
            running(folders[0], FakeEngine("hel"), token) as first,
            running(folders[1], FakeEngine("lo "), token) as second,
            running(folders[2], FakeEngine("you"), token) as third,
        ):
            for here in (first, second, third):
                here.http.headers.update({"x-midstream-token": token} if token else {})
            messages: list[dict[str, str]] = [{"role": "user", "content": "begin"}]
            before: list[int] = []
            url = ""
            for here in (first, second, third, first):
                moved = {HEADER_MOVED: msgspec.json.encode(Moved(url=url)).decode()} if url else {}
                shown = await turn(here, messages, **moved)
                assert "midstream" not in shown, shown.get("midstream")
                assert shown["prompt_token_ids"][: len(before)] == before
                before, url = tokens_of(shown), here.url
                said = shown["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
            # Its next turn at that home needs nobody.
            shown = await turn(first, messages)
            assert shown["prompt_token_ids"][: len(before)] == before

    asyncio.run(main())


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", ""])
def test_a_home_that_does_not_answer_costs_the_history_alone_and_the_response_says_so(
    tmp_path: Path, url: str
) -> None:
    async def main() -> None:
        async with running(tmp_path, FakeEngine("hel")) as here:
            messages = [
                {"role": "user", "content": "begin"},
                {"role": "assistant", "content": "elsewhere"},
                {"role": "user", "content": "on"},
            ]
            for moved in (msgspec.json.encode(Moved(url=url)).decode(), "{"):
                shown = await turn(here, messages, **{HEADER_MOVED: moved})
                assert shown["midstream"]["branch"]["why"] in ("unknown", "edited")

    asyncio.run(main())


@pytest.mark.parametrize("admits", [True, False])
def test_a_home_keeps_the_kv_of_a_session_until_another_replica_has_let_its_turn_in(
    tmp_path: Path, admits: bool
) -> None:
    async def main() -> None:
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        async with (
            asyncio.timeout(30),
            running(folders[0], SmallCache(), "secret") as old,
            running(folders[1], FakeEngine("hel"), "secret") as new,
        ):
            for here in (old, new):
                here.http.headers["x-midstream-token"] = "secret"
            messages = [{"role": "user", "content": "begin"}]
            shown = await turn(old, messages)
            said = shown["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
            moved = msgspec.json.encode(Moved(url=old.url)).decode()
            assert isinstance(old.engine, SmallCache)
            if not admits:
                new.replica.own.gate.set(Door.CLOSED)
                headers = {HEADER_BOOT: new.replica.boot, HEADER_SESSION: "s", HEADER_MOVED: moved}
                body = {"model": MODEL, "messages": messages, "max_tokens": 4}
                refused = await new.http.post("/v1/chat/completions", json=body, headers=headers)
                assert refused.status_code == 425
                assert repr(new.replica.earlier) == "EarlierTurns(0 fetched, 0 told)"
                assert old.engine.sessions_over == []
                assert "midstream" not in await turn(old, messages), "it comes back"
                return
            assert ("", "s") in old.replica.budget.account
            assert "midstream" not in await turn(new, messages, **{HEADER_MOVED: moved})
            await old.until(lambda: old.engine.sessions_over == ["\0s"])
            assert ("", "s") not in old.replica.budget.account

    asyncio.run(main())


async def continued(old: Running, new: Running, url: str = "") -> dict[str, Any]:
    """What the second turn of a chat is answered that moves from the old home to the new one. url: of the old home."""
    messages = [{"role": "user", "content": "begin"}]
    said = (await turn(old, messages))["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
    return await turn(
        new, messages, **{HEADER_MOVED: msgspec.json.encode(Moved(url=url or old.url)).decode()}
    )


def test_a_machine_that_accepts_no_connection_holds_no_turn_up_for_as_long_as_a_slow_process_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier, "CONNECT_S", 0.05)
    monkeypatch.setattr(earlier, "FETCH_S", 3600.0)

    async def main() -> None:
        with socket.socket() as listener, contextlib.ExitStack() as stack:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = listener.getsockname()
            # They fill its queue, so that the kernel answers no further one, as a machine that is gone.
            for _ in range(4):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(address)
            async with asyncio.timeout(30), running(tmp_path, FakeEngine("hel")) as here:
                shown = await continued(here, here, f"http://127.0.0.1:{address[1]}")
                assert "midstream" not in shown, "it has the turns itself"

    asyncio.run(main())


def test_a_slow_process_has_its_time_for_the_handshake_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over TLS a connection is one once the process has answered, and not the kernel alone."""
    monkeypatch.setattr(earlier, "CONNECT_S", 0.05)
    monkeypatch.setattr(earlier, "FETCH_S", 0.25)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as accepts:
            url = f"https://127.0.0.1:{accepts.getsockname()[1]}"
            async with asyncio.timeout(30), running(tmp_path, FakeEngine("hel")) as here:
                await continued(here, here, url)

    asyncio.run(main())
    assert "no connection within 0.25 s" in caplog.text


def test_a_session_whose_old_home_is_slow_continues_token_for_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier, "CONNECT_S", 2.0)
    asked, goes_on = threading.Event(), threading.Event()

    def slowly(trees: Sequence[TurnTree]) -> bytes:
        asked.set()
        assert goes_on.wait(20)
        return packed(trees)

    monkeypatch.setattr(control, "packed", slowly)

    async def main() -> None:
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        async with (
            asyncio.timeout(30),
            running(folders[0], FakeEngine("hel")) as old,
            running(folders[1], FakeEngine("lo ")) as new,
        ):
            moving = asyncio.create_task(continued(old, new))
            assert await asyncio.to_thread(asked.wait, 20)
            assert repr(new.replica.earlier) == "EarlierTurns(1 fetched, 0 told)"
            goes_on.set()
            assert "midstream" not in await moving

    asyncio.run(main())
