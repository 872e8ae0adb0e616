"""The channel between a process and its child: framing, and what happens to a message that cannot be read."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from midstream.http import ipc


class Said(msgspec.Struct, tag=True, frozen=True):
    text: str


DECODER: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


class Listening(ipc.Link[Said]):
    def __init__(self) -> None:
        super().__init__(DECODER)
        self.heard: list[str] = []

    def received(self, message: Said) -> None:
        if message.text == "who asked":
            raise ipc.Unexpected("nobody")
        self.heard.append(message.text)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Listening, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        _, link = await asyncio.get_running_loop().create_connection(Listening, sock=ours)
        try:
            yield link, theirs
        finally:
            link.transport.abort()


@pytest.mark.parametrize(
    "unread",
    [
        b"\x03\x00\x00\x00\xff\xff\xff",
        ipc.frame("no tag"),
        ipc.frame(Said("who asked")),
        ipc.frame(Said("who")).replace(b"who", b"\xff\xfe\xfd"),
        (5003).to_bytes(4, "little") + b"\x82\xa1x" + b"\x91" * 5000,
    ],
    ids=["not MessagePack", "another type", "not asked for", "no text", "nested too deeply"],
)
async def test_a_message_that_cannot_be_understood_closes_the_link_and_nothing_behind_it_is_heard(
    unread: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with linked() as (link, theirs):
            theirs.sendall(ipc.frame(Said("before")) + unread + ipc.frame(Said("behind")))
            async with asyncio.timeout(120):
                await link.lost.wait()
            assert link.heard == ["before"]
    assert ["cannot be understood" in record.message for record in caplog.records] == [True]
    assert caplog.records[0].exc_info is not None


async def test_a_child_reads_what_its_parent_sends_and_hears_of_its_end() -> None:
    async with linked() as (link, theirs):
        channel = ipc.Channel(theirs, DECODER)
        assert list(channel.receive(0.0)) == []
        link.send(Said("one"))
        link.send(Said("two"))
        assert [message.text for message in channel.receive(None)] == ["one", "two"]
        channel.send(Said("back"))
        link.transport.close()
        async with asyncio.timeout(120):
            await link.lost.wait()
        with pytest.raises(ipc.Disconnected):
            list(channel.receive(None))


async def test_a_message_too_long_for_a_frame_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 30)

    async with linked() as (link, theirs):
        with pytest.raises(ValueError, match=r"^Said of \d+ bytes is over the 30 of a frame$"):
            link.send(Said("x" * 40))
        link.send(Said("short"))
        assert [message.text for message in ipc.Channel(theirs, DECODER).receive(10.0)] == ["short"]


def test_no_child_is_left_when_its_link_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def broken() -> Listening:
        raise RuntimeError("no link")

    def popen(*args: object, **options: object) -> object:
        started.append(made := real(*args, **options))
        return made

    real = ipc.subprocess.Popen
    monkeypatch.setattr(ipc.subprocess, "Popen", popen)
    with pytest.raises(RuntimeError, match="no link"):
        asyncio.run(ipc.spawn("http.server", broken))
    assert [process.wait(30) < 0 for process in started] == [True]
