"""What stands between vllm-router and the replicas: vllm-router writes completion requests anew, with fields that OpenAI's API
does not have (`no_stop_trim` is the first of them), and midstream's replicas refuse fields that they do not know.

Always holds: a request goes on with the fields that the client of this benchmark sends, and the values that vllm-router gave
them; return_token_ids is on, whether vllm-router kept it or not. A GET, which is a health check, is answered here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

from rollout_load import SENT, Connections, TurnFailed

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Filter:
    """In front of one replica, at `port` once it is started."""

    def __init__(self, replica_port: int) -> None:
        self._replica_port = replica_port
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
        if first.startswith("GET "):
            return OK
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        status, answer = await replica.post(self._replica_port, first.split()[1], {}, cleaned(body))
        head = (
            f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(answer)}\r\n\r\n"
        )
        return head.encode() + answer


def cleaned(body: bytes) -> bytes:
    """The request's body with what the client of this benchmark sends, and nothing else."""
    fields = json.loads(body)
    kept = {name: fields[name] for name in SENT if name in fields}
    return json.dumps({**kept, "return_token_ids": True}, separators=(",", ":")).encode()
