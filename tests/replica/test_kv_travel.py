"""KV of a session that moves: asked for where it pays, taken only from an answer to this very question, not waited for long."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from httpx import Response
from replica_fakes import MODEL, FakeEngine, Running, ids
from test_travelling_turns import homes

from midstream.core.headers import HEADER_BOOT, HEADER_MOVED, HEADER_PLACED, HEADER_SESSION, HEADER_TENANT
from midstream.core.price import Moved
from midstream.engine.base import EngineDied
from midstream.engine.kv_copies import KvCopies, KvForm, KvPiece, KvPlace, KvRefused
from midstream.http.call import CallFailed
from midstream.replica import kv_travel
from midstream.replica.gate import Door
from midstream.replica.kv_travel import PATH_KV, SHARE, opened, sealed

BLOCK, BLOCK_BYTES = 4, 64
TEXT = "a history of some length, as tokens"
TOKENS = len(ids(TEXT))
BLOCKS = TOKENS // BLOCK
Hook = Callable[[], Any]


class FakeCopies(KvCopies):
    """Gives what it is said to hold. A block's content is its tokens, many times."""

    def __init__(self) -> None:
        self.form = KvForm(kind="one", block_tokens=BLOCK, block_bytes=BLOCK_BYTES)
        self.held: dict[tuple[bytes, str], list[bytes]] = {}
        self.asked: list[tuple[KvPlace, int, int, int | None]] = []
        self.taken: list[tuple[KvPlace, KvPiece]] = []
        self.before_giving: Hook = lambda: None
        self.gives = asyncio.Event()
        self.gives.set()
        self.asking = asyncio.Event()

    def blocks(self, place: KvPlace) -> list[bytes]:
        width = BLOCK * 4
        return [place.tokens[at : at + width] for at in range(0, len(place.tokens), width)]

    async def give(
        self, place: KvPlace, first: int, most: int, kv_age_max: int | None
    ) -> tuple[KvPiece, bytes]:
        self.asked.append((place, first, most, kv_age_max))
        self.asking.set()
        await self.gives.wait()
        self.before_giving()
        held = self.held.get((place.salt, place.policy), [])
        chain = [mine for mine, wanted in zip(held, self.blocks(place), strict=False) if mine == wanted]
        part = chain[first : first + most]
        return (
            KvPiece(total=len(chain), first=first, count=len(part)),
            b"".join(block * (BLOCK_BYTES // len(block)) for block in part),
        )

    async def take(self, place: KvPlace, part: KvPiece, content: bytes, session: str, kept_s: float) -> int:
        self.taken.append((place, part))
        own = self.held.setdefault((place.salt, place.policy), [])
        if part.first == len(own):
            wanted = self.blocks(place)[part.first : part.first + part.count]
            assert content == b"".join(block * (BLOCK_BYTES // len(block)) for block in wanted)
            assert (session, kept_s > 0) == ("\0".join(("t", "s")), True)
            own += wanted
        return len(own)


class Caching(FakeEngine):
    def __init__(self) -> None:
        super().__init__("hel")
        self.kv = FakeCopies()


def copies_of(here: Running) -> FakeCopies:
    copies = here.engine.kv
    assert isinstance(copies, FakeCopies)
    return copies


def came(here: Running) -> int:
    """Blocks that it took from another replica."""
    return sum(part.count for _, part in copies_of(here).taken)


async def answered(here: Running, moved_from: str = "", **more: Any) -> Response:
    headers = {HEADER_BOOT: here.replica.boot, HEADER_SESSION: "s", HEADER_TENANT: "t"}
    headers[HEADER_PLACED] = str(2000 if moved_from else 1000)
    if moved_from:
        headers[HEADER_MOVED] = msgspec.json.encode(Moved(url=moved_from)).decode()
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 2, **more}
    return await here.http.post("/v1/completions", json=body, headers=headers)


async def ask(here: Running, moved_from: str = "", **more: Any) -> None:
    answer = await answered(here, moved_from, **more)
    assert answer.status_code == 200, answer.text


async def lives(here: Running, **more: Any) -> bytes:
    """A session's first turn. The salt under which its KV is cached now."""
    await ask(here, **more)
    request, copies = here.engine.requests[-1], copies_of(here)
    place = KvPlace(request.salt, "", array("i", request.prompt[: BLOCKS * BLOCK]).tobytes())
    copies.held[request.salt, ""] = copies.blocks(place)
    slow(here)
    return request.salt


def slow(*replicas: Running, tokens_s: float = 10.0) -> None:
    """Computing was measured to be slow."""
    for here in replicas:
        here.replica.budget.moves.pace.prefills.clear()
        here.replica.budget.moves.pace.prefills.append((1000, 1000 / tokens_s))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_travel, "PIECE_BYTES", 3 * BLOCK_BYTES)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("token", ["", "secret"])
async def test_a_sessions_kv_comes_in_pieces_before_its_turn_is_let_in(tmp_path: Path, token: str) -> None:
    async with homes(tmp_path, Caching(), Caching(), token=token) as (old, new):
        slow(new)
        await lives(old, prompt_cache_isolation_key="mine")
        before, after = copies_of(old), copies_of(new)
        let_in: list[int] = []
        before.before_giving = lambda: let_in.append(new.replica.own.gate.inside)
        await ask(new, old.url, prompt_cache_isolation_key="mine")
        assert came(new) == BLOCKS
        assert max(part.count for _, part in after.taken) == 3
        assert set(let_in) == {0}
        # Both say whose it is by themselves, and say the same.
        assert {place.salt for place, *_ in before.asked} == {new.engine.requests[-1].salt}
        assert {place.salt for place, _ in after.taken} == {new.engine.requests[-1].salt}
        # Whatever is here already does not come again.
        await ask(old, new.url, prompt_cache_isolation_key="mine")
        assert came(old) == 0


async def test_only_the_replicas_of_a_server_may_ask(tmp_path: Path) -> None:
    async with homes(tmp_path, Caching(), token="secret") as [here]:
        answer = await here.http.post(PATH_KV, content=b"x", headers={"x-midstream-token": "wrong"})
        assert answer.status_code == 401
        for body in (b"", b"x", msgspec.msgpack.encode({"tenant": "t"})):
            answer = await here.http.post(PATH_KV, content=body)
            assert answer.status_code == 400, "a question that nobody asks"


def other_model(old: Running, new: Running) -> None:
    copies = copies_of(new)
    copies.form = msgspec.structs.replace(copies.form, kind="other")


def older_namespace(old: Running, new: Running) -> None:
    for here in (old, new):
        here.replica.own.namespaces.commit("new_session", None, "1")


#: What leaves two homes unlike.
UNLIKE: dict[str, Callable[[Running, Running], Any]] = {
    "only the new home was reset": lambda old, new: new.replica.reset_cache("r"),
    "only the old home was reset": lambda old, new: old.replica.reset_cache("r"),
    "the old home has switched": lambda old, new: old.replica.own.namespaces.commit("none", None, "1"),
    "the session stays with an older namespace": older_namespace,
    "the session was closed": lambda old, new: old.replica.close_session(("t", "s")),
    "another model": other_model,
    "weights whose check another target ended": lambda old, new: setattr(
        old.replica.own.driver.machine, "checked", False
    ),
    "weights that failed their check": lambda old, new: setattr(
        old.replica.own.driver.machine, "sound", False
    ),
    "an engine that gives nothing": lambda old, new: setattr(old.engine, "kv", None),
}


@pytest.mark.parametrize("what", ["nothing", *UNLIKE])
async def test_two_homes_that_differ_leave_the_history_to_be_computed(tmp_path: Path, what: str) -> None:
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new)
        if what != "nothing":
            UNLIKE[what](old, new)
        await ask(new, old.url)
        assert came(new) == (BLOCKS if what == "nothing" else 0)


@pytest.mark.parametrize(("call", "blocks"), [("by one call", BLOCKS), ("", 0)])
async def test_replicas_that_the_same_call_reset_give_each_other_what_came_since(
    tmp_path: Path, call: str, blocks: int
) -> None:
    """Without a name, each was reset by itself: nobody knows which of them came first."""
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        for here in (old, new):
            here.replica.reset_cache(call)
        await lives(old)
        slow(new)
        await ask(new, old.url)
        assert came(new) == blocks
        assert {age for *_, age in copies_of(old).asked} == ({None} if blocks else set())


async def test_a_replica_that_joined_later_gets_what_the_newest_weights_computed(tmp_path: Path) -> None:
    """It cannot know what of the older KV a reset before its time was to end."""
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        old.replica.own.namespaces.commit("none", 3, "1")
        new.replica.own.namespaces.commit("all", 3, "1")
        slow(new)
        await ask(new, old.url)
        before = copies_of(old)
        assert {age for *_, age in before.asked} == {0}


@pytest.mark.parametrize("more", [{"prompt_cache_max_len": 0}, {"model": f"{MODEL}@base"}])
async def test_a_turn_that_would_not_find_it_asks_for_nothing(tmp_path: Path, more: dict[str, Any]) -> None:
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new)
        await ask(new, old.url, **more)
        before = copies_of(old)
        assert before.asked == []


async def test_a_short_history_is_computed_and_so_is_one_that_comes_too_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        before = copies_of(old)
        slow(new, tokens_s=1e6)
        await ask(new, old.url)
        assert before.asked == []
        slow(new)
        new.replica.travel.tokens_s = 1.0
        await ask(new, old.url)
        assert before.asked == []
        # Now and then it is measured again.
        monkeypatch.setattr(kv_travel, "RETRY", 1)
        await ask(new, old.url)
        assert before.asked
        assert new.replica.travel.tokens_s > 1.0


# -- messages


def torn(data: bytes, question: bytes) -> bytes:
    return data[:-1]


def changed(data: bytes, question: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def nothing(data: bytes, question: bytes) -> bytes:
    return b""


def forged(data: bytes, question: bytes) -> bytes:
    """By somebody who knows the form and not the token."""
    size = int.from_bytes(data[32:36], "little")
    return sealed(b"", question, data[36 : 36 + size], data[36 + size :])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("spoiled", [torn, changed, nothing, forged])
async def test_what_is_not_the_answer_to_the_question_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: Callable[[bytes, bytes], bytes]
) -> None:
    async with homes(tmp_path, Caching(), Caching(), token="secret") as (old, new):
        await lives(old)
        slow(new)
        real, count = new.replica.travel._call, 0

        async def spoils(url: str, question: bytes, most: int) -> bytes:
            nonlocal count
            count += 1
            data = await real(url, question, most)
            return spoiled(data, question) if count == 3 else data

        monkeypatch.setattr(new.replica.travel, "_call", spoils)
        await ask(new, old.url)
        assert (came(new), count) == (3, 3), "what came before is used, and nothing more is asked"


@pytest.mark.usefixtures("small_pieces")
async def test_an_answer_that_comes_again_is_not_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new)
        real, answers = new.replica.travel._call, list[bytes]()

        async def repeats(url: str, question: bytes, most: int) -> bytes:
            answers.append(await real(url, question, most))
            return answers[1] if len(answers) == 3 else answers[-1]

        monkeypatch.setattr(new.replica.travel, "_call", repeats)
        await ask(new, old.url)
        assert came(new) == 3
        # Nor one to the same question, asked before.
        copies_of(new).held.clear()
        copies_of(new).taken.clear()
        earlier = iter(answers[:2])

        async def replays(url: str, question: bytes, most: int) -> bytes:
            return next(earlier)

        monkeypatch.setattr(new.replica.travel, "_call", replays)
        await ask(new, old.url)
        assert copies_of(new).taken == []


async def test_an_answer_without_end_takes_bounded_memory(tmp_path: Path) -> None:
    sent = 0

    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"10000\r\n" + bytes(2**16) + b"\r\n")
                await writer.drain()
                sent += 2**16
        except OSError:
            writer.close()

    async with homes(tmp_path, Caching()) as [here]:
        server = await asyncio.start_server(pours, "127.0.0.1", 0)
        async with server:
            slow(here, tokens_s=1.0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(CallFailed, match="too long"):
                await here.replica.travel._call(url, b"", 2**16)
        # And what the kernel holds.
        assert sent < 2**25


def test_only_what_was_sealed_for_a_question_is_opened() -> None:
    head = msgspec.msgpack.encode({"part": {}, "prefill_tokens_s": 1.0})
    data = sealed(b"key", b"question", head, b"content")
    assert opened(b"key", b"question", data)[1] == b"content"
    for key, question in ((b"", b"question"), (b"key", b"other")):
        with pytest.raises(ValueError, match="digest"):
            opened(key, question, data)
    for wrong in (b"", b"x", msgspec.msgpack.encode({"part": {"total": -1}, "prefill_tokens_s": 1.0})):
        with pytest.raises(ValueError, match="head"):
            opened(b"key", b"question", sealed(b"key", b"question", wrong, b""))


# -- time, ends and deaths


@pytest.mark.usefixtures("small_pieces")
async def test_a_home_that_does_not_answer_costs_a_share_of_what_computing_costs(tmp_path: Path) -> None:
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new, tokens_s=SHARE * TOKENS / 0.2)
        before, after = copies_of(old), copies_of(new)
        # It answers once, and then is silent.
        before.before_giving = before.gives.clear
        await ask(new, old.url)
        assert (len(after.taken), came(new)) == (1, 0)
        # The old home waits for nobody who has left.
        before.before_giving = lambda: None
        before.gives.set()
        await old.until(lambda: old.replica.travel._giving._value == kv_travel.GIVING_MAX)
        assert new.replica.travel._taking._value == kv_travel.TAKING_MAX
        await ask(new, old.url)
        assert came(new) == BLOCKS


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("what", ["reset", "switch", "closed"])
async def test_what_comes_after_a_reset_or_a_switch_here_is_not_taken(tmp_path: Path, what: str) -> None:
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new)
        before = copies_of(old)
        happens: dict[str, Hook] = {
            "reset": lambda: new.replica.reset_cache("r"),
            "switch": lambda: new.replica.own.namespaces.commit("none", None, "1"),
            "closed": lambda: new.replica.close_session(("t", "s")),
        }

        def meanwhile() -> None:
            if len(before.asked) == 3:
                happens[what]()

        before.before_giving = meanwhile
        await ask(new, old.url)
        assert came(new) == 3


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("what", ["reset", "switch", "not proved"])
async def test_what_was_read_while_the_old_home_changed_is_not_given(tmp_path: Path, what: str) -> None:
    """Its engine may have switched before it read, and computed some of it with weights that nobody has checked."""
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new)
        before = copies_of(old)
        happens: dict[str, Hook] = {
            "reset": lambda: old.replica.reset_cache("r"),
            "switch": lambda: old.replica.own.namespaces.commit("none", None, "1"),
            "not proved": lambda: setattr(old.replica.own.driver.machine, "checked", False),
        }

        def meanwhile() -> None:
            if len(before.asked) == 3:
                happens[what]()

        before.before_giving = meanwhile
        await ask(new, old.url)
        assert came(new) == 3


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "https://127.0.0.1:9", "nonsense", "http://x:y"])
async def test_a_home_that_is_gone_leaves_the_history_to_be_computed(tmp_path: Path, url: str) -> None:
    async with homes(tmp_path, Caching()) as [new]:
        slow(new)
        await ask(new, url)
        assert new.replica.travel._taking._value == kv_travel.TAKING_MAX


@pytest.mark.parametrize("error", [KvRefused("no"), EngineDied("gone")])
@pytest.mark.parametrize("side", ["give", "take"])
async def test_an_engine_that_gives_or_takes_nothing_leaves_the_history_to_be_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str, error: Exception
) -> None:
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new)

        async def fails(*given: Any) -> Any:
            raise error

        monkeypatch.setattr((old if side == "give" else new).engine.kv, side, fails)
        await ask(new, old.url)
        assert new.engine.requests


async def test_a_client_that_leaves_leaves_nothing_behind(tmp_path: Path) -> None:
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new)
        before = copies_of(old)
        before.gives.clear()
        before.asking.clear()
        asked = asyncio.create_task(ask(new, old.url))
        await before.asking.wait()
        asked.cancel()
        await new.until(lambda: ("t", "s") not in new.replica.budget.account)
        assert new.replica.travel._taking._value == kv_travel.TAKING_MAX
        await old.until(lambda: old.replica.travel._giving._value == kv_travel.GIVING_MAX)
        assert new.engine.requests == []


@pytest.mark.parametrize("what", ["aborted", "its gate is down"])
async def test_a_turn_that_is_over_waits_for_no_kv(tmp_path: Path, what: str) -> None:
    """The old home is silent, and computing takes so long that a minute of waiting seems worth it."""
    async with homes(tmp_path, Caching(), Caching()) as (old, new):
        await lives(old)
        slow(new, tokens_s=1e-3)
        before = copies_of(old)
        before.gives.clear()
        before.asking.clear()
        asked = asyncio.create_task(answered(new, old.url))
        await before.asking.wait()
        if what == "aborted":
            assert (await new.http.post("/replica/abort", content=b"null")).json() == {"aborted": 1}
            answer = await asked
            assert answer.json()["choices"][0]["finish_reason"] == "abort"
        else:
            new.replica.own.gate.set(Door.DOWN)
            assert (await asked).status_code == 503
        assert new.replica.travel._taking._value == kv_travel.TAKING_MAX
        before.gives.set()
