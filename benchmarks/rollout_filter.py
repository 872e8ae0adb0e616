"""What stands between other routers and the replicas: those in Rust write completion requests again, with fields that OpenAI's
API does not have (vllm-router's `no_stop_trim` is one), and midstream's replicas refuse fields that they do not know.

Always holds: a request is passed on with the fields that the client of this benchmark sends, and the values that the router
gave them; return_token_ids is on, whether the router kept it or not. A router may ask for the tokens of a prompt, too. A GET is
a health check, or asks what the worker serves. It is answered 200 while the replica accepts connections. When the replica's
connection is lost, the router's is closed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping

from rollout_load import SENT, Connections, TurnFailed

PATH, RENDER = "/v1/completions", "/v1/completions/render"
#: What routers ask of a worker before they use it.
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"midstream"}]}'
STATUS = b'{"status":"ok","model_path":"m","served_model_name":"m","model_id":"m"}'


def unchanged(headers: Mapping[str, str], body: bytes) -> bytes:
    return body


class Filter:
    """In front of one replica, at `port` once it is started.

    replica_port: may change while it runs. asked: the request's body as the replica gets it. answered: of the response's
    headers and body, the body that the router gets. headers: more of them for the replica. passed: names of those that the
    router's request has and the replica gets, too.
    """

    def __init__(
        self,
        replica_port: int,
        *,
        asked: Callable[[bytes], bytes] | None = None,
        answered: Callable[[Mapping[str, str], bytes], bytes] = unchanged,
        headers: Mapping[str, str] | None = None,
        passed: tuple[str, ...] = (),
    ) -> None:
        self.replica_port = replica_port
        self._asked = asked or cleaned
        self._read = answered
        self._headers = dict(headers or {})
        self._passed = passed
        self._open = set[asyncio.Task[None]]()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        replica = Connections()
        try:
            with contextlib.suppress(
                OSError, asyncio.IncompleteReadError, TurnFailed, asyncio.CancelledError
            ):
                while True:
                    writer.write(await self._answered(reader, replica))
        finally:
            self._open.discard(task)
            await replica.close()
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, replica: Connections) -> bytes:
        """The response to the next request."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        # Also of gRPC: a router tries it.
        method, _, path = first.removesuffix(" HTTP/1.1").partition(" ")
        if method == "GET":
            _, writer = await asyncio.open_connection("127.0.0.1", self.replica_port)
            writer.close()
            return _response(200, MODELS if path == "/v1/models" else STATUS)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path not in (PATH, RENDER):
            return _response(404, b"{}")
        sent = self._headers | {name: headers[name] for name in self._passed if name in headers}
        status, told, answer = await replica.exchange(
            "POST", self.replica_port, path, sent, self._asked(body)
        )
        if status == 200 and path == PATH:
            answer = self._read(told, answer)
        return _response(status, answer, told.get("retry-after"))


def _response(status: int, body: bytes, retry_after: str | None = None) -> bytes:
    later = f"retry-after: {retry_after}\r\n" if retry_after else ""
    head = (
        f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n{later}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def cleaned(body: bytes) -> bytes:
    """The request's body with what the client of this benchmark sends, and nothing else."""
    fields = json.loads(body)
    kept = {name: fields[name] for name in SENT if name in fields}
    return json.dumps({**kept, "return_token_ids": True}, separators=(",", ":")).encode()
