"""Gateways over one ledger, a trainer's calls, and replicas that answer orders as a test says. On a driven clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from reports import replica_report

from midstream.core.config import PushSettings
from midstream.core.served_names import ServedNames
from midstream.core.transfer import (
    Alive,
    Begin,
    CarriedOut,
    Check,
    Digest,
    Digested,
    Distrust,
    Drop,
    Finish,
    Join,
    Keep,
    LeaveGroup,
    Receive,
    Received,
    Rendezvous,
    SentTensors,
    TrainerSeen,
    TrainerState,
    TransferOrder,
)
from midstream.core.types import Content, Desired, FileContent
from midstream.fleet.loop import Reconciler
from midstream.fleet.push import PushDoor
from midstream.fleet.push_orders import MemberLeft, OrderFailed, OrderRefused
from midstream.fleet.push_upkeep import PushUpkeep
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.ledger import Begun, Committing, Ledger, Phase, Signal, SignalResult, sqlite_url
from midstream.snapshots.content import content_fingerprint

MODEL = "accounts/local/models/tiny-moe"
DEPLOYMENT = "accounts/local/deployments/default"
SENT = SentTensors(names=("a", "b"), dtype_names=("float32", "float32"), shapes=((2, 2), (3,)))
SETTINGS = PushSettings(join_s=60.0, update_s=300.0, finish_s=200.0)


def content(text: str) -> Content:
    return (FileContent("model.safetensors", 28, text * 64),)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@dataclass
class FakeReplica:
    """faults: what becomes of its next order of a kind. bytes: what its files hold. bucket: the identities that it wrote."""

    name: str
    boot: str
    clock: Clock
    faults: dict[type, str] = field(default_factory=dict)
    bytes: str = "a"
    group: str = ""
    rank: int = 0
    update: int = 0
    received: list[str] = field(default_factory=list)
    finished: int = 0
    trainer: TrainerState = TrainerState.ALIVE
    dead: bool = False
    #: Its whole files are used no more. The next snapshot's are others.
    distrusted: bool = False
    orders: list[TransferOrder] = field(default_factory=list)
    bucket: list[str] = field(default_factory=list)
    hangs: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, order: TransferOrder) -> bytes:
        assert 0 < order.within_s < 2000, order
        self.orders.append(order)
        await self._meet_fault(order)
        if order.boot not in ("", self.boot):
            raise OrderFailed(f"{self.name} answered 409: another boot")
        return msgspec.json.encode(self._do(order))

    async def _meet_fault(self, order: TransferOrder) -> None:
        fault = self.faults.pop(type(order), "")
        if fault == "die":
            self.dead = True
        if fault == "restart":
            self.restart()
            raise OrderFailed(f"{self.name}: connection lost")
        if self.dead:
            raise OrderFailed(f"{self.name}: connection refused")
        if fault == "stall":
            self.clock.time += order.within_s
            raise OrderFailed(f"{self.name}: no answer in {order.within_s:g} s")
        if fault == "refuse":
            raise OrderRefused("update_info.names: 'x' is none of the model's", "update_info.names")
        if fault == "hang":
            self.hangs.set()
            await self.goes_on.wait()
            if self.dead:
                raise OrderFailed(f"{self.name}: connection lost")

    def restart(self) -> None:
        self.boot += "+"
        self.group, self.update, self.received = "", 0, []

    def _do(self, order: TransferOrder) -> msgspec.Struct:
        match order:
            case Join(rendezvous=given):
                self.group, self.rank = order.group, given.rank_offset
            case LeaveGroup():
                if order.group == self.group:
                    self.group = ""
            case Drop(update=update):
                if update == self.update:
                    self.received = []
                    self.finished = 0
            case Keep(snapshot=snapshot):
                self.bucket.append(snapshot)
            case Distrust():
                self.distrusted = True
            case Digest():
                if self.distrusted:
                    raise OrderFailed(f"{self.name}: its whole files are not in this snapshot cache")
                return Digested(content=content(self.bytes))
            case Alive():
                if order.group != self.group:
                    raise MemberLeft(f"{self.name} answered 409: another group")
                return TrainerSeen(self.trainer)
            case _:
                if order.group != self.group:
                    raise OrderFailed(f"{self.name} answered 409: another group")
                return self._work(order)
        return CarriedOut()

    def _work(self, order: TransferOrder) -> msgspec.Struct:
        match order:
            case Begin(update=update):
                self.update, self.received, self.finished = update, [], 0
            case Receive(sent=sent):
                self.received += sent.names
            case Finish(update=update):
                if update not in (self.update, self.finished):
                    raise OrderFailed(f"{self.name} answered 409: another update")
                self.finished = update
                return Received(content=content(self.bytes), received_bytes=28)
            case Check():
                pass
        return CarriedOut()


class Gateway:
    """A gateway's part in pushes, with its own ledger connection and its own view of the replicas."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = Ledger(world.url, now=world.clock)
        urls = [(name, f"http://127.0.0.1:{n + 1}") for n, name in enumerate(world.replicas)]
        self.replicas = ReplicaSet(DeploymentReplicas(urls))
        reconciler = Reconciler(self.ledger, self.replicas, DEPLOYMENT)
        self.deployment = Deployment(
            ServedNames(MODEL, DEPLOYMENT), self.replicas, reconciler, wanted=len(urls)
        )
        self.door = PushDoor(self.ledger, world.settings, orders=lambda _: self, group_id=world.next_group)
        self.upkeep = PushUpkeep(self.ledger, Deployments(self.deployment), self.door)
        #: Raised instead of what a part of the finish does.
        self.fails_sign: Exception | None = None
        self.fails_served: Exception | None = None
        self.waited_for: list[str] = []

    async def send(self, replica: str, order: TransferOrder) -> bytes:
        if self.replicas.named(replica) is None:
            raise OrderFailed(f"{replica} is gone")
        return await self.world.replicas[replica].take(order)

    async def sign(self, content: Content, committing: Committing) -> SignalResult:
        if self.fails_sign is not None:
            raise self.fails_sign
        sent = Signal(
            identity=self.world.version, url="", fingerprint=content_fingerprint(content), content=content
        )
        return await self.ledger.signal(DEPLOYMENT, sent, committing=committing)

    async def served(self, desired: Desired, replicas: Collection[str], within_s: float) -> None:
        self.waited_for = sorted(replicas)
        if self.fails_served is not None:
            raise self.fails_served

    def hear(self, snapshot: str = "base", generation: int = 0) -> None:
        """The replicas report as they are."""
        for view in self.replicas.views:
            replica = self.world.replicas[view.name]
            if replica.dead:
                view.replica.hear(None)
                continue
            told: dict[str, Any] = {"replica": view.name, "boot": replica.boot, "ready": True}
            view.replica.hear(replica_report(**told, snapshot=snapshot, generation=generation))
            view.admitted = True

    def scale(self, count: int) -> None:
        """The deployment is to have so many replicas. The others drain."""
        members = [(name, f"http://127.0.0.1:{n + 1}") for n, name in enumerate(self.world.replicas)]
        self.replicas.facts.set_members(members, leaving=[name for name, _ in members[count:]])
        self.deployment.wanted = count

    # -- the trainer's calls

    async def init(self, port: int = 29500, world_size: int | None = None) -> Any:
        size = 1 + len(self.world.replicas) if world_size is None else world_size
        given = Rendezvous(master_address="127.0.0.1", master_port=port, world_size=size, key="k")
        return await self.door.run(self.door.init(self.deployment, given), Phase.JOINING)

    async def start(self) -> Any:
        return await self.door.run(self.door.start(self.deployment), Phase.STARTING)

    async def update(self) -> Any:
        return await self.door.run(self.door.update(self.deployment, [SENT]), Phase.RECEIVING)

    async def finish(self, version: str | None = None) -> Any:
        return await self.door.run(self.door.finish(self.deployment, self, Begun(version)), Phase.FINISHING)

    async def push(self) -> Any:
        """From the start to the finish."""
        await self.start()
        await self.update()
        return await self.finish()

    async def whole(self) -> Any:
        await self.init()
        return await self.push()


class World:
    def __init__(self, path: Path, settings: PushSettings, replicas: int, gateways: int) -> None:
        self.url = sqlite_url(path / "ledger.sqlite")
        self.settings = settings
        self.clock = Clock()
        self.version = "v1"
        self._groups = 0
        names = [f"replica-{number}" for number in range(replicas)]
        self.replicas = {name: FakeReplica(name, f"boot-{name}", self.clock) for name in names}
        self.gateways = [Gateway(self) for _ in range(gateways)]

    def next_group(self) -> str:
        self._groups += 1
        return f"group-{self._groups}"

    def hear(self, snapshot: str = "base", generation: int = 0) -> None:
        for gateway in self.gateways:
            gateway.hear(snapshot, generation)

    @property
    def groups(self) -> set[str]:
        """The groups that living replicas are in."""
        return {one.group for one in self.replicas.values() if not one.dead and one.group}

    async def signalled(self) -> list[str]:
        return [row.identity for row in await self.gateways[0].ledger.snapshots(DEPLOYMENT)]

    async def group(self) -> Any:
        return await self.gateways[0].ledger.transfer(DEPLOYMENT)


@asynccontextmanager
async def in_world(
    path: Path,
    settings: PushSettings = SETTINGS,
    *,
    replicas: int = 3,
    gateways: int = 1,
) -> AsyncIterator[World]:
    world = World(path, settings, replicas, gateways)
    try:
        ledger = world.gateways[0].ledger
        await ledger.ensure_deployment(DEPLOYMENT, MODEL, "file:///bucket", "ASYNC", replicas)
        world.hear()
        yield world
        for gateway in world.gateways:
            await gateway.door.close()
    finally:
        for gateway in world.gateways:
            gateway.ledger.close()
