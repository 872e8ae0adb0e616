"""A gateway whose replicas hold some of the policies: requests find them, load them, and touch nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from gateway_harness import NAMES, Message, MockReplica, Peer, post
from msgspec import to_builtins
from reports import replica_report
from session_holders import until

from midstream.api.answers import HotLoadRow
from midstream.api.app import control_app
from midstream.api.status import replica_rows, unloaded
from midstream.client.status import read_status
from midstream.core.config import GatewaySettings
from midstream.core.errors import Overloaded, PolicyNotLoaded
from midstream.core.headers import HEADER_POLICY
from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.served_names import names_of
from midstream.core.sessions import SessionsReport
from midstream.core.types import Desired, Stage, Transition
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.http.message import error_response
from midstream.ledger import Ledger, NewDeployment, Signal, sqlite_url
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.server import Gateway

ENDED = (Stage.FETCHING, Stage.VERIFYING, Stage.STAGING, Stage.STAGED, Stage.COMMITTING, Stage.CHECKING)


class Holder:
    """A replica that loads what it is told at once, as long as it has room, and says so when `tell` is called or at once."""

    def __init__(self, name: str, most: int) -> None:
        self.name, self.most = name, most
        self.mock = MockReplica(self._handle)
        self.held: dict[str, PolicyReport] = {}
        self.told: list[str] = []
        self.in_use: set[str] = set()
        self.broken: set[str] = set()
        # What it reports; None: what is true.
        self.claims: tuple[PolicyReport, ...] | None = None
        self.extra_load = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self._seq = 0
        self._changed = asyncio.Event()

    def change(self) -> None:
        self._changed.set()

    def evict(self, policy: str) -> None:
        del self.held[policy]
        self.change()

    async def _handle(self, request: Message, peer: Peer) -> None:
        path = request.start.split()[1]
        if path == "/replica/events":
            await self._tell(peer)
        elif path == "/replica/desired":
            self._load(msgspec.json.decode(request.body, type=Desired), peer)
        else:
            policy = request.headers.get(HEADER_POLICY, "")
            if policy and policy not in self.held:
                peer.send(
                    error_response(PolicyNotLoaded(f"{policy} is not here"), close=False, with_body=True)
                )
                return
            await self.answers.wait()
            peer.respond(b'{"policy":"%b"}' % policy.encode())

    def _load(self, desired: Desired, peer: Peer) -> None:
        if not desired.policy:
            peer.respond(status="202 Accepted")
            return
        self.told.append(desired.policy)
        if desired.policy not in self.held and len(self.held) >= self.most:
            idle = [name for name in self.held if name not in self.in_use]
            if not idle:
                peer.send(error_response(Overloaded("all are in use"), close=False, with_body=True))
                return
            del self.held[idle[0]]
        stages = (Stage.FETCHING, Stage.ERROR) if desired.policy in self.broken else (*ENDED, Stage.IDLE)
        moves = tuple(self._moved(stage, desired) for stage in stages)
        failed = stages[-1] is Stage.ERROR
        self.held[desired.policy] = PolicyReport(
            policy=desired.policy,
            made=desired.made,
            snapshot="base" if failed else desired.snapshot,
            signalled=0 if failed else desired.signalled,
            generation=desired.generation,
            stage=stages[-1],
            transitions=moves,
        )
        self.change()
        peer.respond(status="202 Accepted")

    def _moved(self, stage: Stage, desired: Desired) -> Transition:
        self._seq += 1
        seq, of = self._seq - 1, (desired.snapshot, desired.generation)
        return Transition(seq=seq, at=1.0, snapshot=of[0], generation=of[1], stage=stage)

    def report(self) -> ReplicaReport:
        held = (
            msgspec.structs.replace(one, in_flight=int(one.policy in self.in_use))
            for one in self.held.values()
        )
        return replica_report(
            self.name,
            boot="b1",
            in_flight=self.extra_load,
            policies=tuple(held) if self.claims is None else self.claims,
            policies_max=self.most,
        )

    async def _tell(self, peer: Peer) -> None:
        peer.start_stream("application/x-ndjson")
        peer.chunk(msgspec.json.encode(SessionsReport(boot="b1")) + b"\n")
        while not peer.writer.is_closing():
            self._changed.clear()
            peer.chunk(msgspec.json.encode(self.report()) + b"\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._changed.wait()


class World:
    """One gateway with real reconcilers on a real ledger."""

    def __init__(self, ledger: Ledger, made: list[Holder]) -> None:
        self.ledger, self.made = ledger, made
        members = [(one.name, f"http://127.0.0.1:{one.mock.port}") for one in made]
        self.replicas = ReplicaSet(DeploymentReplicas(members))
        self.default = Deployment(NAMES, self.replicas, Reconciler(ledger, self.replicas, NAMES.deployment))
        self.deployments = Deployments(self.default)
        metrics = GatewayMetrics(self.deployments)
        self.gateway = Gateway(
            GatewaySettings(), self.deployments, metrics, control_app(self.deployments, metrics)
        )
        self.tasks: list[asyncio.Task[None]] = []
        self.port = 0

    def start(self, deployment: Deployment) -> None:
        self.tasks.append(asyncio.create_task(deployment.run()))

    async def policy(self, name: str, *, published: bool = True) -> Deployment:
        names = names_of(NAMES, name)
        row = await self.ledger.create_deployment(
            NewDeployment(names.deployment, model=names.model, bucket_url="file:///b")
        )
        if published:
            signal = Signal(identity=f"{name}-1", url=f"file:///b/{name}-1")
            await self.ledger.signal(names.deployment, signal)
        replicas = ReplicaSet(self.replicas.facts, name, row.created_at)
        kept = Reconciler(self.ledger, replicas, names.deployment, poll_s=0.1)
        made = Deployment(names, replicas, kept, self.default.sessions, policy=name, of=self.default)
        self.deployments.add(made)
        self.start(made)
        return made

    async def ask(self, policy: str, headers: str = "") -> Message:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port))
        peer.send(post(b'{"model":"%b"}' % policy.encode(), headers=headers))
        answer = await peer.message()
        peer.writer.close()
        return answer

    async def served(self, policy: str, headers: str = "") -> str:
        """The replica that answered."""
        answer = await self.ask(policy, headers)
        assert (answer.status, answer.body) == (200, b'{"policy":"%b"}' % policy.encode()), answer.body
        return answer.headers["x-midstream-replica"]

    def where(self, policy: str) -> list[str]:
        return [one.name for one in self.made if policy in one.held]


@contextlib.asynccontextmanager
async def world(path: Path, *most: int, policies: int = 4) -> AsyncIterator[World]:
    """policies: `p0` and so on, each signalled before the gateway starts."""
    made = [Holder(f"replica-{number}", room) for number, room in enumerate(most)]
    for one in made:
        await one.mock.start()
    ledger = Ledger(sqlite_url(path / "ledger.sqlite"))
    await ledger.ensure_deployment(NAMES.deployment, NAMES.model, "file:///b", "ASYNC", len(most))
    here = World(ledger, made)
    here.port = await here.gateway.start("127.0.0.1", 0)
    try:
        for number in range(policies):
            await here.policy(f"p{number}")
        here.start(here.default)
        await until(lambda: all(view.usable for view in here.replicas.views))
        yield here
    finally:
        for task in here.tasks:
            task.cancel()
        await asyncio.gather(*here.tasks, return_exceptions=True)
        await here.gateway.close()
        for one in made:
            one.mock.stop()
        ledger.close()


async def passes(here: World, count: int = 5) -> None:
    """So many reports of each replica come, with the reconcilers' passes after them."""
    for _ in range(count):
        for one in here.made:
            one.change()
        for deployment in here.deployments.policies():
            await deployment.reconciler.reconcile_once()


async def test_with_room_for_all_every_replica_holds_every_policy(tmp_path: Path) -> None:
    async with world(tmp_path, 4, 4) as here:
        await until(lambda: all(set(one.held) == {"p0", "p1", "p2", "p3"} for one in here.made))
        # One more than there is room for: what is loaded stays, and the newcomer is loaded on demand.
        await here.policy("p4")
        await passes(here)
        assert here.where("p4") == []
        before = [list(one.told) for one in here.made]
        await here.served("p4")
        assert len(here.where("p4")) == 1
        told = [one.told[len(known) :] for one, known in zip(here.made, before, strict=True)]
        assert sorted(map(len, told)) == [0, 1], "nobody is told of other policies"


async def test_a_request_loads_what_nobody_holds_on_one_replica_and_what_made_way_waits_for_demand(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, 1, 1) as here:
        await passes(here)
        assert [one.told for one in here.made] == [[], []]
        for number in range(4):
            assert [await here.served(f"p{number}")] == here.where(f"p{number}")
        told = [list(one.told) for one in here.made]
        assert sorted(told[0] + told[1]) == ["p0", "p1", "p2", "p3"]
        await passes(here)
        assert [one.told for one in here.made] == told, "no reconciler loads it again by itself"
        assert sum(len(one.held) for one in here.made) == 2
        # A publisher of what made way does not wait, and one of what was never loaded has it loaded.
        gone = next(p for p in here.deployments.policies() if not here.where(p.policy))
        await until(lambda: not gone.replicas.holders)
        assert await shown(here, gone) == {"unloaded"}
        status = read_status({"replicas": to_builtins(await rows_of(here, gone))})
        assert status.serves(f"{gone.policy}-1")
        assert not status.serves("another")
        assert unloaded(gone.replicas) == ["replica-0", "replica-1"]
        new = await here.policy("new")
        assert await shown(here, new) == {"pending"}
        new.replicas.ask()
        await until(lambda: here.where("new") != [])
        await until(lambda: len(unloaded(new.replicas)) == 1 and any(v.usable for v in new.replicas.views))
        assert await shown(here, new) == {"done"}
        await here.served("p0")
        at_rest = [d for d in here.deployments.policies() if not d.replicas.at_work]
        assert len(at_rest) == 3


async def rows_of(here: World, policy: Deployment) -> list[HotLoadRow]:
    return replica_rows(await here.ledger.state(policy.name), policy)


async def shown(here: World, policy: Deployment) -> set[str]:
    """The stages of its rows."""
    rows = await rows_of(here, policy)
    assert rows
    return {row.loading_state.stage for row in rows}


async def test_a_replica_that_gave_up_a_policy_since_its_report_refuses_and_the_client_sees_nothing(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, 1) as here:
        one = here.made[0]
        await here.served("p0")
        # It made way, and the report that says so is late.
        one.claims = tuple(one.held.values())
        del one.held["p0"]
        asking = asyncio.create_task(here.served("p0"))
        await until(lambda: len(one.mock.requests) > 0 and _refused(one) > 0)
        one.claims = None
        one.change()
        assert await asking == "replica-0"
        assert one.told.count("p0") == 2
        view = here.replicas.views[0]
        assert (view.replica.failures, view.report is not None, view.admitted) == (0, True, True)
        assert not here.gateway.proxy.metrics.upstream_errors


def _refused(one: Holder) -> int:
    asked = [r for r in one.mock.requests if r.start.startswith("POST /v1/completions")]
    return len(asked) - 1


async def test_a_session_waits_for_its_policy_at_home(tmp_path: Path) -> None:
    async with world(tmp_path, 1, 1) as here:
        session = "x-session-id: s\r\n"
        home = await here.served("p0", session)
        other = next(one for one in here.made if one.name != home)
        at_home = next(one for one in here.made if one.name == home)
        # Its policy makes way at home and is loaded elsewhere.
        at_home.evict("p0")
        other.held["p0"] = _as_of(at_home, other, here)
        other.change()
        await until(lambda: here.deployments.policies()[0].replicas.views[other_index(other)].usable)
        assert await here.served("p0") == other.name
        assert await here.served("p0", session) == home
        # When everything at home is in use, it goes to the other one this time.
        at_home.evict("p0")
        other.extra_load = 0
        at_home.held["p1"] = PolicyReport(policy="p1", made=-1.0)
        at_home.in_use.add("p1")
        at_home.change()
        await until(lambda: not _holds(here, home, "p0"))
        assert await here.served("p0", session) == other.name
        at_home.in_use.clear()
        at_home.change()
        await until(lambda: _idle(here, home) == 1)
        assert await here.served("p0", session) == home, "its home has not changed"


def other_index(other: Holder) -> int:
    return int(other.name.rpartition("-")[2])


def _as_of(at_home: Holder, other: Holder, here: World) -> PolicyReport:
    policy = here.deployments.policies()[0]
    view = policy.replicas.named(at_home.name)
    assert view is not None
    assert view.report is not None
    report = view.report
    return PolicyReport(
        policy="p0",
        made=policy.replicas.made,
        snapshot="p0-1",
        signalled=report.own.signalled,
        generation=report.own.generation,
    )


def _holds(here: World, replica: str, policy: str) -> bool:
    view = here.replicas.named(replica)
    assert view is not None
    assert view.replica.heard is not None
    return any(one.policy == policy for one in view.replica.heard.policies)


def _idle(here: World, replica: str) -> int:
    view = here.replicas.named(replica)
    assert view is not None
    assert view.replica.heard is not None
    return sum(one.in_flight == 0 for one in view.replica.heard.others)


async def test_a_busy_holder_is_relieved_by_another_and_requests_without_a_session_spread(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, 2, 2) as here:
        first = await here.served("p0")
        holder = next(one for one in here.made if one.name == first)
        holder.extra_load = 30
        holder.change()
        view = here.replicas.named(holder.name)
        await until(lambda: view is not None and view.replica.load == 30)
        await here.served("p0")
        await until(lambda: len(here.where("p0")) == 2)
        other = next(one for one in here.made if one is not holder)
        policy = here.deployments.policies()[0]
        await until(lambda: policy.replicas.views[other_index(other)].usable)
        assert await here.served("p0") == other.name
        assert sum(one.told.count("p0") for one in here.made) == 2


async def test_a_replica_without_room_refuses_and_another_one_is_asked(tmp_path: Path) -> None:
    async with world(tmp_path, 1, 1) as here:
        for one, policy in zip(here.made, ("p1", "p2"), strict=True):
            # What it holds is in use, though its report does not say so.
            one.held[policy] = PolicyReport(policy=policy, made=-1.0)
            one.in_use.add(policy)
            one.claims = tuple(one.held.values())
            one.change()
        await passes(here)
        asking = asyncio.create_task(here.served("p0"))
        await until(lambda: sum(one.told.count("p0") for one in here.made) > 0)
        assert not asking.done()
        free = here.made[1]
        free.in_use.clear()
        free.claims = None
        here.made[0].claims = None
        for one in here.made:
            one.change()
        assert await asking == "replica-1"
        assert "p1" in here.made[0].held, "what is in use stays"


async def test_a_policy_that_fails_on_one_replica_is_tried_on_another(tmp_path: Path) -> None:
    async with world(tmp_path, 2, 1) as here:
        here.made[0].broken.add("p0")
        assert await here.served("p0") == "replica-1"
        assert here.made[0].held["p0"].stage is Stage.ERROR


async def test_a_signal_loads_a_policy_that_nobody_holds(tmp_path: Path) -> None:
    async with world(tmp_path, 1, 1) as here:
        policy = here.deployments.policies()[0]
        signal = Signal(identity="p0-2", url="file:///b/p0-2")
        result = await here.ledger.signal(policy.name, signal)
        policy.signalled(result.desired)
        await until(lambda: [one.held["p0"].snapshot for one in here.made if "p0" in one.held] == ["p0-2"])
        await passes(here)
        assert len(here.where("p0")) == 1
        holder = next(one for one in here.made if "p0" in one.held)
        await until(lambda: policy.order.position("p0-2") is not None)
        # It reaches the one that holds it, too.
        result = await here.ledger.signal(policy.name, Signal(identity="p0-3", url="file:///b/p0-3"))
        policy.signalled(result.desired)
        await until(lambda: holder.held["p0"].snapshot == "p0-3")


async def test_demand_for_a_policy_that_is_gone_disturbs_no_report() -> None:
    facts = DeploymentReplicas([("replica-0", "http://127.0.0.1:1")])
    own, policies = ReplicaSet(facts), [ReplicaSet(facts, name, 1.0) for name in ("p", "q")]
    [replica] = facts.members
    replica.hear(replica_report(policies_max=0))
    gone = policies[0]
    assert gone.by_demand
    gone.close()
    # A request that waited looks again.
    gone.ask()
    replica.hear(replica_report(policies_max=0, in_flight=1))
    assert own.views[0].report is not None


async def test_a_policy_that_failed_its_check_stays_known_when_its_replica_refuses_requests() -> None:
    members = [(f"replica-{number}", f"http://127.0.0.1:{number + 1}") for number in range(2)]
    facts = DeploymentReplicas(members)
    policy = ReplicaSet(facts, "p", 1.0)
    bad = PolicyReport(policy="p", made=1.0, snapshot="s", sound=False, error="differs")
    first, second = facts.members
    first.hear(replica_report(first.name, policies=(bad,)))
    policy.mark_missing(policy.views[0])
    second.hear(replica_report(second.name))
    report = policy.views[0].report
    assert report is not None
    assert report.own == bad
