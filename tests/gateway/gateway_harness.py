"""What the data path tests share: mock replicas that are real asyncio servers, a gateway before them, a raw client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop
from openapi_answers import Checked
from reports import replica_report

from midstream.api.app import control_app
from midstream.core.config import GatewaySettings
from midstream.core.served_names import ServedNames
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.view import ReplicaView
from midstream.http.upstream import UpstreamPool
from midstream.ledger import Ledger
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.server import Gateway, Timeouts

NAMES = ServedNames("accounts/local/models/tiny-moe", "accounts/local/deployments/default")
# Of a busy machine.
DEADLINE_S = 120
GATEWAY_OPTIONS = ("replica_token", "front_path")
TIMEOUTS = ("head_s", "body_window_s", "retiring_idle_s", "unreachable_s")


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run within a deadline on the event loop that the gateway runs on in production."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


@dataclass
class Message:
    """A request as a mock replica got it, or a response as the client got it."""

    start: str
    headers: dict[str, str]
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.start.split()[1])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


async def read_head(reader: asyncio.StreamReader) -> Message:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = [line.split(":", 1) for line in lines[1:] if line]
    return Message(lines[0], {name.lower(): value.strip() for name, value in headers})


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk's data; empty for the last one."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


async def read_message(reader: asyncio.StreamReader, *, head_only: bool = False) -> Message:
    message = await read_head(reader)
    if head_only:
        return message
    if message.headers.get("transfer-encoding") == "chunked":
        while chunk := await read_chunk(reader):
            message.chunks.append(chunk)
        message.body = b"".join(message.chunks)
    elif "content-length" in message.headers:
        message.body = await reader.readexactly(int(message.headers["content-length"]))
    return message


class Peer:
    """One open connection, either end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def respond(self, body: bytes = b"{}", status: str = "200 OK", headers: str = "") -> None:
        self.send(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body)

    def start_stream(self, content_type: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        self.send(head.encode())

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.send(b"0\r\n\r\n")

    def abort(self) -> None:
        self.writer.transport.abort()

    async def closed(self) -> bytes:
        """Wait for the other side to close; what it still sent."""
        rest = b""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                rest += data
        return rest

    async def message(self, *, head_only: bool = False) -> Message:
        return await read_message(self.reader, head_only=head_only)


Handler = Callable[[Message, Peer], Awaitable[None]]


async def respond_ok(request: Message, peer: Peer) -> None:
    peer.respond(b'{"ok":true}')


class MockReplica:
    """Serves each request with `handler`; keeps connections alive; remembers what it was asked."""

    def __init__(self, handler: Handler = respond_ok) -> None:
        self.handler = handler
        self.requests: list[Message] = []
        self.connections = 0
        self.peers: list[Peer] = []
        self.changed = asyncio.Condition()

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=2**24)
        self.port = self.server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Die: refuse new connections, reset the open ones."""
        self.server.close()
        for peer in self.peers:
            peer.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                request = await read_message(reader)
                self.requests.append(request)
                async with self.changed:
                    self.changed.notify_all()
                await self.handler(request, peer)
        writer.close()

    async def asked(self, count: int) -> None:
        """Wait until `count` requests have arrived."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.requests) >= count)


class Stage:
    """A gateway before mock replicas."""

    def __init__(
        self, gateway: Gateway, port: int, replicas: ReplicaSet, mocks: Sequence[MockReplica]
    ) -> None:
        self.gateway = gateway
        self.port = port
        self.views = replicas.views
        self.mocks = mocks
        self.metrics = gateway.proxy.metrics
        self.peers: list[Peer] = []

    async def connect(self, limit: int = 2**24) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port, limit=limit))
        self.peers.append(peer)
        return peer

    async def ask(self, request: bytes) -> Message:
        peer = await self.connect()
        peer.send(request)
        message = await peer.message()
        peer.writer.close()
        return message

    def pool(self, view: ReplicaView) -> UpstreamPool:
        """The gateway's connections to a replica."""
        return self.gateway.proxy.upstream(view.replica).pool

    def in_flight(self) -> list[int]:
        return [view.replica.in_flight for view in self.views]


def reconciler(replicas: ReplicaSet) -> Reconciler:
    """One that never runs: the data path does not need it."""
    return Reconciler(cast(Ledger, None), replicas, NAMES.deployment)


@contextlib.asynccontextmanager
async def staged(*handlers: Handler, app: Any = None, **settings: Any) -> AsyncIterator[Stage]:
    """A gateway with one usable mock replica per handler. `settings`: the gateway's, and GATEWAY_OPTIONS, TIMEOUTS."""
    options = {name: settings.pop(name) for name in GATEWAY_OPTIONS if name in settings}
    timeouts = Timeouts(**{name: settings.pop(name) for name in TIMEOUTS if name in settings})
    mocks = [MockReplica(handler) for handler in handlers]
    for mock in mocks:
        await mock.start()
    replicas = ReplicaSet(
        DeploymentReplicas([(f"replica-{i}", f"http://127.0.0.1:{m.port}") for i, m in enumerate(mocks)])
    )
    for view in replicas.views:
        view.replica.hear(replica_report(replica=view.name, boot=f"boot of {view.name}", ready=True))
        view.admitted = True
    deployments = Deployments(Deployment(NAMES, replicas, reconciler(replicas)))
    metrics = GatewayMetrics(deployments)
    app = app or Checked(control_app(deployments, metrics, keyed=bool(settings.get("api_keys"))))
    gateway = Gateway(GatewaySettings(**settings), deployments, metrics, app, timeouts=timeouts, **options)
    stage = Stage(gateway, await gateway.start("127.0.0.1", 0), replicas, mocks)
    try:
        yield stage
    finally:
        for peer in stage.peers:
            peer.abort()
        await gateway.close()
        for mock in mocks:
            mock.stop()
    assert not gateway.service.clients
    assert repr(gateway.service.budget) == "Budget(0 bytes, 0 connections, 0 requests)"
    assert stage.in_flight() == [0] * len(mocks), "in_flight must return to zero"
    assert not getattr(app, "misfits", ()), "as the OpenAPI document says"


def post(
    body: bytes = b"{}", path: str = "/v1/completions", headers: str = "", version: str = "1.1"
) -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: test\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def get(path: str, headers: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n".encode()
