"""The answers of a replica or of vLLM to a call of this server's own: one response, and no more of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import uvloop

from midstream.core.http_answer import HttpAnswer
from midstream.core.probes import PROBED
from midstream.http.call import CallFailed, Lost, ResponseStream, call, open_stream

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def answered(parts: Iterable[bytes]) -> HttpAnswer:
    """What a call makes of a server that answers with these bytes."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(parts)
        writer.close()

    async def main() -> HttpAnswer:
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await call(f"http://127.0.0.1:{port}", "GET", "/", None, timeout_s=10)

    return asyncio.run(main())


def test_bytes_behind_a_response_are_no_part_of_it() -> None:
    answer = answered([WHOLE, b"HTTP/1.1 500 No\r\ncontent-length: 3\r\n\r\nabc"])
    assert (answer.status, answer.body) == (200, b"{}")


@pytest.mark.parametrize("parts", [[WHOLE], [WHOLE, b"more"]])
def test_a_call_that_is_over_does_not_wait_for_a_collection(parts: list[bytes]) -> None:
    gc.collect()
    gc.disable()
    try:
        assert answered(parts).status == 200
        assert not [one for one in gc.get_objects() if isinstance(one, ResponseStream)]
    finally:
        gc.enable()


def test_an_interim_response_is_passed_over() -> None:
    answer = answered([b"HTTP/1.1 103 Early Hints\r\n\r\n", WHOLE])
    assert (answer.status, answer.body) == (200, b"{}")


def test_the_names_of_headers_are_read_in_lower_case() -> None:
    answer = answered([b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\ncontent-length: 0\r\n\r\n"])
    assert (answer.outcome, answer.asked_pause_s(0.0)) == ("absent", 7.0)


def test_a_connection_that_ends_before_its_response_is_lost() -> None:
    with pytest.raises(Lost, match="before the response ended"):
        answered([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{"])


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_call_without_a_time_limit_ends_when_the_other_machine_is_lost(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """As a sample of the Tinker front is. A machine that is lost says nothing, so that only probes show it."""

    async def main() -> list[int]:
        over = asyncio.Event()

        async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await writer.wait_closed()
            over.set()

        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            stream = await open_stream(f"http://127.0.0.1:{port}", "GET", "/", None, lambda _: None, 10)
            assert stream._transport is not None
            own = stream._transport.get_extra_info("socket")
            found = [own.getsockopt(level, option) for level, option, _ in PROBED]
            stream.abort()
            await over.wait()
            return found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(main()) == [value for _, _, value in PROBED]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_is_gone_before_it_is_looked_at_is_lost(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a replica that is killed just now. Any other error of its event stream would end the gateway."""

    async def main() -> None:
        running = asyncio.get_running_loop()
        connect = running.create_connection

        async def late(*given: Any, **named: Any) -> tuple[asyncio.Transport, ResponseStream]:
            transport, stream = await connect(*given, **named)
            await stream.ended
            return transport, stream

        monkeypatch.setattr(running, "create_connection", late)
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(Lost):
                await call(f"http://127.0.0.1:{port}", "GET", "/", None, timeout_s=10)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_a_switch_to_another_protocol_is_a_failed_call() -> None:
    with pytest.raises(CallFailed, match="bad response"):
        answered([b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc"])
