"""The gateway's port over TLS: the same requests, streams and refusals; an unusable certificate is said at the start."""

import asyncio
import functools
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate
from gateway_harness import Message, Peer, get, post, read_chunk, read_head, run, staged

from midstream.core.errors import ConfigError
from midstream.core.retry import Backoff
from midstream.fleet.replicas import DeploymentReplicas
from midstream.http.call import CallFailed, call
from midstream.http.tls import HANDSHAKE_S, server_tls, unverified_tls


@pytest.mark.slow
async def test_a_handshake_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    assert HANDSHAKE_S == 10.0
    monkeypatch.setattr("midstream.proxy.server.HANDSHAKE_S", 0.2)

    async def handler(request: Message, peer: Peer) -> None:
        peer.respond(request.body)

    async with staged(handler, tls_cert=cert, tls_key=key) as stage:
        silent = await stage.connect()
        # The beginning of a record.
        silent.send(b"\x16\x03\x01")
        assert await silent.closed() == b""


@pytest.mark.slow
async def test_requests_streams_and_control_pass_over_tls_and_plain_http_does_not(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=cert)

    async def handler(request: Message, peer: Peer) -> None:
        if request.body == b"stream":
            peer.start_stream()
            for n in range(3):
                peer.chunk(b"data: %d\n\n" % n)
            peer.end_stream()
        else:
            peer.respond(request.body)

    async with staged(handler, tls_cert=cert, tls_key=key) as stage:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", stage.port, ssl=trust, server_hostname="localhost"
        )
        client = Peer(reader, writer)
        stage.peers.append(client)
        body = b"x" * 300_000
        client.send(post(body))
        assert (await client.message()).body == body
        client.send(post(b"stream"))
        assert (await read_head(reader)).headers["transfer-encoding"] == "chunked"
        chunks = [await read_chunk(reader) for _ in range(4)]
        assert chunks == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", b""]
        client.send(get("/health"))
        assert b"deployments" in (await client.message()).body
        client.send(b"nonsense\r\n\r\n")
        assert (await client.message()).status == 400
        assert await client.closed() == b""
        plain = await stage.connect()
        plain.send(get("/health"))
        assert b"HTTP" not in await plain.closed()


def test_a_certificate_that_cannot_be_used_says_which_and_why(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with pytest.raises(ConfigError, match=r"absent.pem.*No such file"):
        server_tls("gateway", str(tmp_path / "absent.pem"), key)
    (tmp_path / "other").mkdir()
    _, other = certificate(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"KEY_VALUES_MISMATCH|key values mismatch"):
        server_tls("gateway", cert, other)
    (tmp_path / "hidden").mkdir()
    cert, key = certificate(tmp_path / "hidden", b"secret")
    with pytest.raises(ConfigError, match="needs a password"):
        server_tls("gateway", cert, key)


async def test_a_call_of_the_server_itself_takes_a_certificate_for_another_name(tmp_path: Path) -> None:
    """The supervisor and the Tinker front call the gateway by an address that the certificate need not name."""
    cert, key = certificate(tmp_path)

    async def handler(request: Message, peer: Peer) -> None:
        peer.respond(request.body)

    async with staged(handler, tls_cert=cert, tls_key=key) as stage:
        url = f"https://127.0.0.1:{stage.port}"
        answer = await call(url, "GET", "/health", None, 10.0, tls=unverified_tls())
        assert answer.status == 200
        assert len(answer.read(dict[str, Any])["replicas"]) == 1
        with pytest.raises(CallFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await call(url, "GET", "/health", None, 10.0, tls=ssl.create_default_context())


class Door(asyncio.Protocol):
    """Takes connections, and keeps what comes over them."""

    def __init__(self, seen: list[bytes]) -> None:
        self._seen = seen

    def data_received(self, data: bytes) -> None:
        self._seen.append(data)


@pytest.mark.parametrize("url", ["https://localhost:{port}", "HTTPS://LOCALHOST:{port}"])
def test_a_replica_that_is_not_trusted_gets_no_token_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, url: str, free_port: int
) -> None:
    """Also when it comes after its gateway, as most do."""
    cert, key = certificate(tmp_path)
    seen: list[bytes] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(first_s=0.01, last_s=0.01)
        facts = DeploymentReplicas([("r", url.format(port=free_port))], token="SECRET", backoff=backoff)
        watching = asyncio.create_task(facts.run())
        lost = functools.partial(lines, caplog, "event stream of r lost")
        await until(lambda: len(lost()) > 2)
        assert {line.levelno for line in lost()} == {logging.DEBUG}
        server = await loop.create_server(
            lambda: Door(seen), "127.0.0.1", free_port, ssl=server_tls("replica", cert, key)
        )
        refused = functools.partial(lines, caplog, "CERTIFICATE_VERIFY_FAILED")
        await until(lambda: len(refused()) > 2)
        assert [line.levelno for line in refused()].count(logging.WARNING) == 1
        assert refused()[0].levelno == logging.WARNING
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        server.close()

    with caplog.at_level(logging.DEBUG, "midstream.fleet.replicas"):
        run(main)
    assert seen == []
    assert "SECRET" not in caplog.text


async def test_an_https_url_is_never_called_in_the_clear() -> None:
    with pytest.raises(CallFailed, match="no certificates are given"):
        await call("https://localhost:1", "GET", "/health", None, 1.0)


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [line for line in caplog.records if text in line.getMessage()]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        # Records of the log make it true, and they wake nothing.
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
