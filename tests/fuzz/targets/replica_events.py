"""The event stream of a replica as its gateway hears it: fleet/replicas.py, and what the gateway then shows of it.

Checked: only the documented errors come out, and then the replica counts as lost. A stream that comes in pieces says what it
says in one piece. What is heard means the same when it is written again. Whatever was heard, the gateway can show it and
compare it with what is desired.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from reports import replica_report

from midstream.api.hotload import fleet_of, hotload_apis
from midstream.core.decoding import NOT_JSON
from midstream.core.measures import BUCKETS_S, TURN_MEASURES, Distribution, Trajectories
from midstream.core.reports import PolicyReport
from midstream.core.sessions import SessionsReport
from midstream.core.types import EngineCard, SnapshotCheck, Stage, Transition
from midstream.fleet.known_replica import last_words
from midstream.fleet.loop import Reconciler
from midstream.fleet.reconcile import failure, serves, serving_generation
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas, Member
from midstream.fleet.subscription import Lines
from midstream.fleet.view import ReplicaView
from targets.control_side import NAMES, Call, ControlSide, decoded, side
from targets.target import Target, check, controlled, outcome, pieces

OWN, OTHER = "replica-0", "10.0.0.7:9000"
#: Adds a replica of others; without it, the replica is the supervisor's own.
OTHERS = 128
POLICY_MADE = 1.5
SHOWN = (
    *(Call("GET", path) for path in ("/health", "/metrics", "/v1/models")),
    Call("GET", "/hot_load/v1/models/hot_load"),
)


class EventSide(ControlSide):
    """One gateway, whose deployment has a new set of replicas for each input."""

    def __init__(self) -> None:
        super().__init__()
        replicas = ReplicaSet(DeploymentReplicas())
        self._shown = Deployment(NAMES, replicas, Reconciler(self.ledger, replicas, NAMES.deployment))
        deployments = Deployments(self._shown)
        self.serve(deployments, hotload_apis(self.ledger, deployments))
        self.loop.run_until_complete(
            self.ledger.ensure_deployment(NAMES.deployment, NAMES.model, "file:///b", "ASYNC")
        )

    async def heard(self, name: str, parts: Iterable[bytes]) -> tuple[Heard, Exception | None]:
        replicas = ReplicaSet(DeploymentReplicas())
        replicas.facts.set_members([Member(name, "http://10.0.0.7:9000", own=name == OWN)])
        # Hears what the replica says of its policy.
        ReplicaSet(replicas.facts, "red", POLICY_MADE)
        heard = Heard(Deployment(NAMES, replicas, self._shown.reconciler))
        lines = Lines(lambda line: replicas.facts._heard(heard.view.replica, line))
        _, refused = outcome((*NOT_JSON, ValueError), lambda: [lines.feed(part) for part in parts])
        return heard, refused

    async def show(self, heard: Heard) -> None:
        """Everything that reads reports."""
        self._shown.replicas, self._shown.sessions = heard.deployment.replicas, heard.deployment.sessions
        for call in SHOWN:
            status, answer = await self.answer(call)
            check(status < 500 or call.path == "/health", "what was heard cannot be shown", call.path, answer)
            if call.path != "/metrics":
                decoded(answer)
        report = heard.view.report
        if report is not None and heard.view.replica.heard is not None:
            last_words(heard.view.replica.heard)
            serving_generation(report)
            state = await self.ledger.state(NAMES.deployment)
            fleet_of(state, [report])
            if state.desired is not None:
                serves(state, report, state.desired)
                failure(state, report, state.desired)


class Heard:
    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.told: list[SessionsReport] = []
        on_sessions = deployment.replicas.facts.on_sessions

        def tell(replica: str, told: SessionsReport) -> None:
            self.told.append(told)
            on_sessions(replica, told)

        deployment.replicas.facts.on_sessions = tell

    @property
    def view(self) -> ReplicaView:
        return self.deployment.replicas.views[0]

    def __repr__(self) -> str:
        homes = sorted(self.deployment.sessions._homes.items())
        return repr(
            (
                self.view.replica.heard,
                self.view.replica.trajectories,
                self.told,
                homes,
                self.deployment.sessions.counts,
            )
        )


def run(data: bytes) -> None:
    control, stream = controlled(data)
    server = side(EventSide)
    server.loop.run_until_complete(check_stream(server, control, stream))


async def check_stream(server: EventSide, control: int, stream: bytes) -> None:
    name = OTHER if control & OTHERS else OWN
    whole, refused = await server.heard(name, [stream])
    cut, again = await server.heard(name, pieces(stream, control))
    check(repr(whole) == repr(cut), "another thing is heard when it comes in pieces", whole, cut)
    check(type(refused) is type(again), "another end when it comes in pieces", refused, again)
    report, counts = whole.view.replica.heard, whole.deployment.sessions.counts
    check(refused is None or report is None, "a replica is heard that says no report", report, refused)
    check(report is None or report.replica == name, "a report of another replica", report)
    check(sum(counts.values()) <= len(whole.deployment.sessions), "sessions are counted twice", counts)
    for said in (report, *whole.told, whole.view.replica.trajectories):
        if said is not None:
            written = msgspec.json.encode(said)
            read = msgspec.json.decode(written, type=type(said))
            check(msgspec.json.encode(read) == written, "another thing when it is written again", said, read)
    await server.show(whole)
    # Callbacks that are due.
    await asyncio.sleep(0)


def seeds() -> Iterator[bytes]:
    check_of = SnapshotCheck(snapshot="s", generation=2, weights="k:d", canary=(-1.0, -2.5))
    moved = Transition(seq=0, at=1.0, snapshot="s", generation=2, stage=Stage.ERROR, detail="d")
    policy = PolicyReport(
        policy="red", made=POLICY_MADE, snapshot="r", generation=1, stage=Stage.IDLE, check=check_of
    )
    report = replica_report(OWN)
    full = replica_report(
        OWN,
        snapshot="s",
        generation=2,
        signalled=2,
        stage=Stage.ERROR,
        target="t",
        error="e",
        check=check_of,
        card=EngineCard(why={"routes": "dense"}),
        max_model_len=100,
        transitions=(moved,),
        policies=(policy,),
        resident=("q",),
    )
    measures = {name: Distribution([1] * (len(bounds) + 1), 2.0) for name, bounds in TURN_MEASURES.items()}
    sessions: list[Any] = [
        SessionsReport(boot="b", held=((("", "s"), 5), (("t", "s"), 6))),
        SessionsReport(closed=(("", "s"),), held=((("", "u"), 7),)),
        Trajectories(measures=measures, counts={"finishes": {"stop": 3, "new": 1}, "other": {}}),
        Trajectories(measures={"generation_seconds": Distribution([0] * (len(BUCKETS_S) + 1))}),
    ]
    first, closing, told, few = (msgspec.json.encode(line) + b"\n" for line in sessions)
    small, large = (msgspec.json.encode(line) + b"\n" for line in (report, full))
    yield b"\x00" + first + small
    yield b"\x15" + small + large
    yield b"\x83" + small + few + b"\n \n"
    yield b"\x01" + first + large + closing
    yield b"\x02" + told
    yield b"\x04" + b'{"kind":"sessions"}\n{"replica":"replica-1","boot":"b","ready":false}\n'


WORDS: tuple[bytes, ...] = (
    *(
        b'{"kind":"sessions"',
        b'{"kind":"trajectories","measures":{',
        b'"replica":"replica-0"',
        b'"ready":true',
    ),
    *(
        b'"boot":"c"',
        b'"held":[[["","s"],',
        b'"closed":[["","s"]]',
        b'"counts":[',
        b'"generation_seconds":{"counts":[',
    ),
    *(b'"stage":"error"', b'"card":{', b'"policies":[{', b'"check":{', b'"transitions":[{', b'"last_swap":{'),
    *(
        b"null",
        b"true",
        b"[" * 32,
        b'"\\u0000"',
        b"\xff",
        b"1e308",
        b"-1",
        b"18446744073709551616",
        b"9" * 64,
        b"\n",
    ),
)
TARGET = Target(run, seeds, WORDS, 4096)
