"""KV between a replica's process and its engine's: whole, for one call, and in no other file."""

from __future__ import annotations

import asyncio
import errno
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from engine_helpers import request
from msgspec.structs import replace
from test_compiling import Played

from midstream.core.config import EngineSettings
from midstream.core.types import GenerationEvent
from midstream.engine.base import EngineDied
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.engine import EmbeddedEngine
from midstream.engine.embedded.kv_files import EmbeddedCopies, mapped
from midstream.engine.embedded.loop import EngineLoop
from midstream.engine.kv_copies import KvForm, KvPiece, KvPlace, KvRefused
from midstream.http.ipc import Disconnected

PROMPT = [(at * 7) % 251 for at in range(200)]
SALT = b"s" * 32
PLACE = KvPlace(SALT, "", array("i", PROMPT).tobytes())


def files() -> set[str]:
    """Of this process, those of pieces."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return {one for one in found if "midstream-kv" in one}


async def first_event(engine: EmbeddedEngine, prompt: Sequence[int]) -> GenerationEvent:
    asked = replace(request("r", prompt, max_tokens=1, echo=0), salt=SALT)
    events = [event async for event in engine.generate(asked)]
    return events[0]


@pytest.mark.slow
async def test_two_engine_processes_exchange_kv_and_one_that_dies_leaves_no_file(
    tiny_model: Callable[..., Path],
) -> None:
    settings = EngineSettings(kv_cache_tokens=8192)
    old, new = (EmbeddedEngine(tiny_model(), settings) for _ in range(2))
    try:
        await asyncio.gather(old.start(), new.start())
        assert old.kv is not None
        assert new.kv is not None
        assert old.kv.form == new.kv.form
        await first_event(old, PROMPT)
        part, content = await old.kv.give(PLACE, 0, 5, None)
        assert (part.total, part.count, len(content)) == (12, 5, 5 * old.kv.form.block_bytes)
        with pytest.raises(KvRefused):
            await new.kv.take(PLACE, part, content[1:], "s", 9.0)
        assert await new.kv.take(PLACE, part, content, "s", 9.0) == 5
        part, content = await old.kv.give(PLACE, 5, 100, None)
        # Who leaves does not take the file from under the engine.
        leaves = asyncio.create_task(new.kv.take(PLACE, part, content, "s", 9.0))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await new.kv.take(PLACE, part, content, "s", 9.0) == 12
        assert (await first_event(new, PROMPT)).cached_tokens == 192
        assert os.getpid() != old.pid
        before = old.kv
        await old.close()
        assert old.kv is None, "questions would wait until the next process has loaded the model"
        with pytest.raises(EngineDied):
            await before.give(PLACE, 0, 5, None)
    finally:
        await asyncio.gather(old.close(), new.close())
    async with asyncio.timeout(30):
        while files():  # noqa: ASYNC110 - a call that was left has a file until it is over
            await asyncio.sleep(0.01)


async def test_the_engine_opens_no_file_but_the_one_that_was_meant(tmp_path: Path) -> None:
    """Its number in the replica may be another file's by then, such as a journal's."""
    (tmp_path / "journal").write_bytes(b"kept")
    meant: list[m.KvFile] = []

    async def call(build: Callable[[int], m.Command]) -> m.CallDone:
        command = build(1)
        assert isinstance(command, m.TakeKv)
        meant.append(command.file)
        tokens, content = mapped(command.file)
        assert (tokens, content.tobytes()) == (PLACE.tokens, b"content")
        return m.CallDone(1, kv_blocks=3)

    form = KvForm(kind="", block_tokens=16, block_bytes=64)
    copies = EmbeddedCopies(form, call)
    assert await copies.take(PLACE, KvPiece(), b"content", "s", 1.0) == 3
    with pytest.raises(KvRefused):
        mapped(meant[0])
    with (tmp_path / "journal").open("r+b") as journal, pytest.raises(KvRefused, match="another one"):
        mapped(replace(meant[0], number=journal.fileno()))
    with pytest.raises(KvRefused):
        mapped(m.KvFile(process=2**22, number=1, device=0, inode=0, size=1, tokens=0))


async def test_a_replica_that_has_no_file_number_left_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turn is computed. Any other error would end it."""

    async def call(build: Callable[[int], m.Command]) -> m.CallDone:
        raise AssertionError("there is no file")

    def none_left(*given: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    copies = EmbeddedCopies(KvForm(kind="", block_tokens=16, block_bytes=64), call)
    with pytest.raises(KvRefused, match="Too many"):
        await copies.take(PLACE, KvPiece(), b"content", "s", 1.0)


class Steps(Played):
    """What comes back, in order: the number of a call, or the tokens of a step's event. One read for each command."""

    def __init__(self, commands: list[m.Command], enough: Callable[[Played], bool]) -> None:
        super().__init__(commands, enough)
        self.order: list[str] = []
        self.blocks: list[int] = []

    def send(self, reply: m.Reply) -> None:
        super().send(reply)
        if isinstance(reply, m.CallDone):
            assert reply.error is None
            self.order.append("copy")
            self.blocks.append(reply.kv_blocks)
        elif isinstance(reply, m.Events) and reply.events:
            self.order.append("step")


@pytest.fixture
def piece(tiny_model: Callable[..., Path]) -> Iterator[tuple[m.KvFile, KvPiece]]:
    """Of PROMPT, all that another engine has, in a file of this process."""
    old = EngineCore(tiny_model(), EngineSettings())
    old.add(replace(request("r", PROMPT, max_tokens=1, echo=0), salt=SALT))
    while not old.idle:
        old.step()
    content = np.zeros(12 * old.copies.block_bytes, dtype=np.uint8)
    part = old.copies.give(PLACE, 0, 12, None, content)
    number = os.memfd_create("midstream-kv")
    os.write(number, PLACE.tokens + content.tobytes())
    found = os.fstat(number)
    size = len(PLACE.tokens)
    yield m.KvFile(os.getpid(), number, found.st_dev, found.st_ino, found.st_size, tokens=size), part
    os.close(number)


def test_a_stream_has_a_step_between_two_copies(
    tiny_model: Callable[..., Path], piece: tuple[m.KvFile, KvPiece]
) -> None:
    file, part = piece
    core = EngineCore(tiny_model(), EngineSettings())
    stream = m.Generate(request("stream", b"abc", max_tokens=30, echo=0))
    gives = [m.GiveKv(call, file, SALT, "", 0, 0, None) for call in range(3)]
    takes = [m.TakeKv(call, file, SALT, "", part, "s", 9.0) for call in range(3, 6)]
    channel = Steps(cast("list[m.Command]", [stream, *gives, *takes]), lambda one: one.ended("stream"))
    with pytest.raises(Disconnected):
        EngineLoop(channel, core).run()
    assert channel.order[:12] == ["copy", "step"] * 6
    assert channel.blocks == [0, 0, 0, 12, 12, 12]
    core.check()


def test_a_session_that_ends_while_its_kv_comes_claims_none_of_it(
    tiny_model: Callable[..., Path], piece: tuple[m.KvFile, KvPiece]
) -> None:
    file, part = piece
    core = EngineCore(tiny_model(), EngineSettings())
    takes = [m.TakeKv(1, file, SALT, "", part, "s", 9.0), m.TakeKv(2, file, SALT, "", part, "t", 9.0)]
    commands = cast("list[m.Command]", [*takes, m.EndSession("s")])
    channel = Steps(commands, lambda one: len(cast("Steps", one).blocks) == 2)
    with pytest.raises(Disconnected):
        EngineLoop(channel, core).run()
    assert channel.blocks == [12, 12]
    assert {claim.session for claim in core.scheduler.claims} == {"t"}
