"""The answers of a replica or of vLLM to a call of this server's own: one response, and no more of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from midstream.core.http_answer import HttpAnswer
from midstream.http.call import CallFailed, Lost, call

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


def test_an_interim_response_is_passed_over() -> None:
    answer = answered([b"HTTP/1.1 103 Early Hints\r\n\r\n", WHOLE])
    assert (answer.status, answer.body) == (200, b"{}")


def test_the_names_of_headers_are_read_in_lower_case() -> None:
    answer = answered([b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\ncontent-length: 0\r\n\r\n"])
    assert (answer.outcome, answer.asked_pause_s(0.0)) == ("absent", 7.0)


def test_a_connection_that_ends_before_its_response_is_lost() -> None:
    with pytest.raises(Lost, match="before the response ended"):
        answered([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{"])


def test_a_switch_to_another_protocol_is_a_failed_call() -> None:
    with pytest.raises(CallFailed, match="bad response"):
        answered([b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc"])
