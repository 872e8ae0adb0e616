"""Mock replicas with a real session table and an event stream, and gateways that hear them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
from gateway_harness import NAMES, Message, MockReplica, Peer, Stage, post, reconciler
from openapi_answers import Checked
from reports import replica_report

from midstream.api.app import control_app
from midstream.core.config import GatewaySettings
from midstream.core.headers import HEADER_SESSION, HEADER_TENANT
from midstream.core.sessions import SessionsAsked, SessionsHeld, SessionsReport
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.server import Gateway
from midstream.replica.sessions import Sessions, stamp_of


class Holder:
    """A mock replica with a session table and an event stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sessions = Sessions(on_change=self._change)
        self.mock = MockReplica(self._handle)
        self.boot = "b1"
        # It is heard, and fails every request.
        self.broken = False
        self.speaks = asyncio.Event()
        self.speaks.set()
        self._changed = asyncio.Event()

    def _change(self) -> None:
        self._changed.set()

    async def _handle(self, request: Message, peer: Peer) -> None:
        if request.start.startswith("GET /replica/events "):
            await self._tell(peer)
            return
        if request.start.startswith("POST /replica/sessions"):
            peer.respond(self._answer(request))
            return
        if self.broken:
            peer.abort()
            return
        key = request.headers.get(HEADER_SESSION)
        session = None if key is None else (request.headers.get(HEADER_TENANT, ""), unquote(key))
        with self.sessions.turn(session, stamp_of(request.headers)) as turn:
            self._change()
            turn.prompt_tokens, turn.cached_tokens, turn.generated_tokens, turn.longest = 8, 6, 5, 5
            turn.first_token_s, turn.generation_s = 0.25, 1.0
            peer.respond()

    def _answer(self, request: Message) -> bytes:
        asked = msgspec.json.decode(request.body, type=SessionsAsked)
        if " /replica/sessions/close " in request.start:
            assert asked.key is not None
            return msgspec.json.encode({"closed": self.sessions.close((asked.tenant, asked.key))})
        if asked.key is None:
            found = self.sessions.of(asked.tenant, asked.after, asked.limit)
        else:
            one = self.sessions.one((asked.tenant, asked.key))
            found = [] if one is None else [one]
        return msgspec.json.encode(SessionsHeld(tuple(found)))

    async def _tell(self, peer: Peer) -> None:
        peer.start_stream("application/x-ndjson")
        await self.speaks.wait()
        report = msgspec.json.encode(replica_report(self.name, self.boot)) + b"\n"
        with self.sessions.feed() as feed:
            peer.chunk(msgspec.json.encode(SessionsReport(boot=self.boot)) + b"\n")
            while not peer.writer.is_closing():
                self._changed.clear()
                for line in self.sessions.reports(feed):
                    peer.chunk(line)
                peer.chunk(report)
                peer.chunk(msgspec.json.encode(self.sessions.trajectories()) + b"\n")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await self._changed.wait()


async def until(holds: Callable[[], bool]) -> None:
    """Every turn of the loop is a look; the test has a deadline."""
    for _ in iter(holds, True):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def holders(count: int) -> AsyncIterator[list[Holder]]:
    made = [Holder(f"replica-{number}") for number in range(count)]
    for holder in made:
        await holder.mock.start()
    try:
        yield made
    finally:
        for holder in made:
            holder.mock.stop()


@contextlib.asynccontextmanager
async def gateway(made: Sequence[Holder], learn_s: float = 0.0, **settings: Any) -> AsyncIterator[Stage]:
    """One that admits every replica it hears of, as control/ would."""
    members = [(holder.name, f"http://127.0.0.1:{holder.mock.port}") for holder in made]
    replicas = ReplicaSet(DeploymentReplicas(members, learn_s=learn_s))

    def admit() -> None:
        for view in replicas.views:
            view.admitted = view.report is not None

    replicas.subscribe(admit)
    deployments = Deployments(Deployment(NAMES, replicas, reconciler(replicas)))
    metrics = GatewayMetrics(deployments)
    app = Checked(control_app(deployments, metrics, keyed=bool(settings.get("api_keys"))))
    server = Gateway(GatewaySettings(**settings), deployments, metrics, app)
    stage = Stage(server, await server.start("127.0.0.1", 0), replicas, [holder.mock for holder in made])
    watching = asyncio.create_task(replicas.facts.run())
    try:
        yield stage
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await server.close()
    assert not app.misfits


async def all_usable(stage: Stage) -> None:
    await until(lambda: all(view.usable for view in stage.views))


async def where(stage: Stage, key: str) -> tuple[str, str]:
    answer = await stage.ask(post(headers=f"x-session-id: {key}\r\n"))
    assert answer.status == 200, answer.body
    return answer.headers["x-midstream-replica"], answer.headers["x-midstream-route-reason"]


def home(stage: Stage, key: str) -> str | None:
    return stage.gateway.proxy.deployments.default.sessions.home(("", key))


async def until_known(stage: Stage, key: str, replica: str | None) -> None:
    await until(lambda: home(stage, key) == replica)
