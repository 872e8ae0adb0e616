"""Several gateway processes on one port: what the first one tells the others, and what they tell it.

The first has the ledger, control and the API. Each has its own data path and hears the replicas itself.
Always holds:
- Level-triggered: the whole of what is wanted is said whenever it changed, and to each worker when it starts.
- A worker admits a replica only in the boot in which the first process admitted it.
- A replica that leaves is let go only once every worker that runs has said, after it was told so, that it has no request there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

import msgspec

from midstream.fleet.replicas import Member
from midstream.fleet.view import ReplicaView
from midstream.gateway.metrics import Tally
from midstream.gateway.registry import Deployment, Deployments
from midstream.ledger import Signalled


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """admitted: the boot in which placement may use it; None: in none."""

    name: str
    url: str
    weight: float
    own: bool
    leaving: bool
    admitted: str | None


class DeploymentState(msgspec.Struct, frozen=True, kw_only=True):
    """signals, reset: of its SignalOrder."""

    name: str
    model: str
    deleting: bool
    replicas: tuple[ReplicaState, ...]
    signals: tuple[Signalled, ...] = ()
    reset: int = 0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker has to know; the default deployment comes first. number: grows with every change."""

    number: int
    deployments: tuple[DeploymentState, ...]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """boot: which process says this. state: the number of the last one it took up. caught_up: whether every replica that
    one admits can be used here. in_flight: requests by name of the replica, where there are any."""

    boot: str
    state: int
    listening: bool
    caught_up: bool
    in_flight: dict[str, int]
    tally: Tally


class Leader:
    """The first process' side. Use from one event loop."""

    def __init__(self, deployments: Deployments, send: Callable[[State], None]) -> None:
        """send: tells every worker that runs."""
        self._deployments = deployments
        self._send = send
        self._boots: dict[ReplicaView, str] = {}  # the last one heard of
        self._reports: dict[str, WorkerReport] = {}  # the last one of each that runs
        self._ended: list[Tally] = []  # of processes that are no more: what they counted stays counted
        self.state = State(number=0, deployments=())
        self.push()

    def __repr__(self) -> str:
        return f"Leader({len(self._reports)} workers heard of, state {self.state.number})"

    def push(self) -> None:
        """Tell the workers if anything changed. Call it often."""
        deployments = tuple(self._state_of(deployment) for deployment in self._deployments)
        if deployments != self.state.deployments:
            self.state = State(number=self.state.number + 1, deployments=deployments)
            self._send(self.state)

    def heard(self, worker: str, report: WorkerReport) -> None:
        before = self._reports.get(worker)
        if before is not None and before.boot != report.boot:
            self.gone(worker)
        self._reports[worker] = report

    def gone(self, worker: str) -> None:
        """It does not run: its requests are over."""
        report = self._reports.pop(worker, None)
        if report is not None:
            self._ended.append(report.tally)

    @property
    def listening(self) -> int:
        """How many workers do."""
        return sum(report.listening for report in self._reports.values())

    @property
    def ready(self) -> int:
        """How many listen and can use what the first process can use."""
        return sum(
            report.listening and report.caught_up and report.state == self.state.number
            for report in self._reports.values()
        )

    def tallies(self) -> list[Tally]:
        return [*self._ended, *(report.tally for report in self._reports.values())]

    def busy(self, view: ReplicaView) -> bool:
        """Whether there are, or may be, requests on a replica."""
        self.push()
        return view.in_flight > 0 or any(
            report.state < self.state.number or report.in_flight.get(view.name, 0) > 0
            for report in self._reports.values()
        )

    def _state_of(self, deployment: Deployment) -> DeploymentState:
        replicas = deployment.replicas
        return DeploymentState(
            name=deployment.name,
            model=deployment.model,
            deleting=deployment.deleting,
            replicas=tuple(self._replica(view) for view in (*replicas.views, *replicas.leaving)),
            signals=deployment.order.told(),
            reset=deployment.order.reset,
        )

    def _replica(self, view: ReplicaView) -> ReplicaState:
        if view.report is not None:
            self._boots[view] = view.report.boot
        return ReplicaState(
            name=view.name,
            url=view.url,
            weight=view.weight,
            own=view.own,
            leaving=view.standing == "leaving",
            admitted=self._boots.get(view) if view.admitted else None,
        )


class Follower:
    """A worker's side: its deployments made equal to what it is told. Use from one event loop."""

    def __init__(
        self,
        deployments: Deployments,
        make: Callable[[DeploymentState], Deployment],
        begin: Callable[[Deployment], None],
        end: Callable[[Deployment], None],
    ) -> None:
        """make: a run-time deployment. begin, end: called when one has come, and before it goes."""
        self._deployments = deployments
        self._make = make
        self._begin = begin
        self._end = end
        self._admitted: dict[str, str | None] = {}  # replica -> boot
        self._boot = secrets.token_hex(8)
        self.state = 0
        self._follow(deployments.default)

    def __repr__(self) -> str:
        return f"Follower({self._deployments!r}, state {self.state})"

    def take(self, state: State) -> None:
        self._admitted = {r.name: r.admitted for d in state.deployments for r in d.replicas}
        told = {deployment.name: deployment for deployment in state.deployments}
        for deployment in self._deployments:
            if deployment.name not in told:
                self._end(deployment)
                deployment.replicas.set_members(())
                self._deployments.remove(deployment)
        for name, wanted in told.items():
            found = self._deployments.known(name)
            if found is None:
                found = self._make(wanted)
                self._deployments.add(found)
                self._follow(found)
            if found.deleting != wanted.deleting:
                found.deleting = wanted.deleting
                self._deployments.renamed()
            found.order.learn(wanted.signals, wanted.reset)
            found.replicas.look_again()
            members = [Member(r.name, r.url, r.weight, r.own) for r in wanted.replicas]
            found.replicas.set_members(members, {r.name for r in wanted.replicas if r.leaving})
            self._admit(found)
        self.state = state.number

    @property
    def caught_up(self) -> bool:
        """Whether it was told anything, and every replica that the first process admits can be used here."""
        members = (view for deployment in self._deployments for view in deployment.replicas.views)
        return self.state > 0 and all(view.usable for view in members if self._admitted.get(view.name))

    def report(self, tally: Tally, *, listening: bool) -> WorkerReport:
        in_flight = {view.name: view.in_flight for view in self._views() if view.in_flight}
        return WorkerReport(
            boot=self._boot,
            state=self.state,
            listening=listening,
            caught_up=self.caught_up,
            in_flight=in_flight,
            tally=tally,
        )

    def _views(self) -> Iterable[ReplicaView]:
        for deployment in self._deployments:
            yield from deployment.replicas.views
            yield from deployment.replicas.leaving

    def _follow(self, deployment: Deployment) -> None:
        deployment.replicas.subscribe(lambda: self._admit(deployment))
        self._begin(deployment)

    def _admit(self, deployment: Deployment) -> None:
        for view in deployment.replicas.views:
            boot = self._admitted.get(view.name)
            if boot is None or view.report is not None:  # while it is not heard, nothing more is known
                view.admitted = boot is not None and view.report is not None and view.report.boot == boot
