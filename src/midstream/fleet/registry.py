"""Which deployments this gateway serves, and which of them a request or a signal is for.

Owns: the run-time side of every deployment (its replicas, its reconciler, its sessions) and the table of their names.
Always holds:
- The default deployment, the one of the command line, is there from the beginning to the end.
- A deployment's name means that deployment alone; a model's name means the default deployment if it serves that model,
  else the only one that does. Nothing is guessed: several are an error that names them.
- With one deployment, names are only checked against its own: no body is looked into.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from midstream.core.errors import InvalidRequest, MidstreamError, NotFound, ReplicaUnavailable
from midstream.core.headers import HEADER_DEPLOYMENT, HEADER_MODEL
from midstream.core.served_names import POLICY_INFIX, ServedNames, split_model
from midstream.core.sessions import SessionsReport
from midstream.core.types import Desired
from midstream.fleet.loop import Reconciler
from midstream.fleet.moves import Mover
from midstream.fleet.prefixes import PrefixTable
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.sessions import SessionTable
from midstream.fleet.signal_order import SignalOrder
from midstream.fleet.view import ReplicaEntry
from midstream.ledger import Signalled


@dataclass(eq=False)
class Deployment:
    """One deployment while the gateway runs; what must survive it is in the ledger, under `name`."""

    names: ServedNames
    replicas: ReplicaSet
    reconciler: Reconciler
    sessions: SessionTable = field(default_factory=lambda: SessionTable(1_000_000))
    prefixes: PrefixTable = field(default_factory=PrefixTable)
    # The order of its snapshots.
    order: SignalOrder = field(default_factory=SignalOrder)
    # The number of replicas it should have, and how their names begin.
    wanted: int = 0
    prefix: str = ""
    # What was reported of single replicas.
    entries: dict[str, ReplicaEntry] = field(default_factory=dict)
    # The deployment takes no requests.
    deleting: bool = False
    # A snapshot was signalled, as far as is known here.
    published: bool = False
    # How long requests on a replica that leaves may continue.
    drain_s: float = 300.0
    # Whether unknown fields of bodies are passed over; None: as the settings say.
    ignores_fields: bool | None = None
    # Replica to the reason why it cannot be started.
    problems: dict[str, str] = field(default_factory=dict)
    # This is a policy of the deployment `of`, and runs on its replicas.
    policy: str = ""
    of: Deployment | None = None
    # What its replicas offer each other's turns: of the one that owns them.
    mover: Mover = field(init=False)

    def __post_init__(self) -> None:
        if self.of is None:
            # A policy's sessions are its deployment's.
            self.replicas.facts.on_sessions = self._hear_sessions
        self.mover = Mover(self.replicas) if self.of is None else self.of.mover
        self.reconciler.order = self.order

    @property
    def name(self) -> str:
        """accounts/A/deployments/D, and for a policy of it /policies/P behind that."""
        return self.names.deployment

    @property
    def host(self) -> Deployment:
        """The deployment that owns the replicas: itself, except for a policy."""
        return self.of or self

    @property
    def model(self) -> str:
        """accounts/A/models/M"""
        return self.names.model

    @property
    def wanted_in_all(self) -> int:
        """With those that others run."""
        return self.wanted + sum(entry.url is not None for entry in self.entries.values())

    @property
    def replica_names(self) -> list[str]:
        """The names of the replicas that it should have, beside those that others run: `replica-0` and so on."""
        return [f"{self.prefix}replica-{number}" for number in range(self.wanted)]

    @property
    def absent(self) -> list[str]:
        """Replicas that should serve it and have no address yet: their processes are still starting."""
        if self.replicas.by_demand:
            return []
        known = {view.name for view in (*self.host.replicas.views, *self.host.replicas.leaving)}
        return [name for name in self.host.replica_names if name not in known]

    @property
    def served(self) -> bool:
        """Whether a request for it finds a snapshot of it: one that is loaded, or will be when it is asked for."""
        loaded = any(view.report is not None and view.report.ready for view in self.replicas.views)
        return loaded or (self.replicas.by_demand and self.published)

    @property
    def troubles(self) -> dict[str, str]:
        """Replica -> why it cannot be started, or its engine not."""
        views = ((view.name, view.report) for view in self.replicas.views)
        down = {
            name: report.own.error
            for name, report in views
            if report and not report.ready and report.own.error
        }
        return down | self.problems

    def lives_on(self, replica: str) -> bool:
        """Whether sessions may stay on the replica: it is usable for the deployment's own weights."""
        view = self.host.replicas.named(replica)
        return view is not None and view.usable

    def _hear_sessions(self, replica: str, report: SessionsReport) -> None:
        if report.boot is not None:
            self.sessions.begin(replica, report.boot)
        for session, stamp in report.held:
            self.sessions.learn(session, replica, stamp)
        for session in report.closed:
            self.sessions.closed(session, replica)

    def signalled(self, desired: Desired | None = None) -> None:
        """Something new is desired: `desired`, if it is known. Requests that come from now on can ask for it."""
        if desired is not None:
            self.published = True
            self.order.learn([Signalled(desired.snapshot, desired.generation, False)])
            self.replicas.ask(retry_failed=True)
            self.replicas.look_again()
        self.reconciler.signalled()

    async def run(self) -> None:
        """Hear the replicas and keep them at what is desired, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self.of is None:
                tasks.create_task(self.replicas.facts.run(), name=f"events of {self.name}")
                tasks.create_task(self.mover.run(), name=f"moves of {self.name}")
            tasks.create_task(self.reconciler.run(), name=f"reconciler of {self.name}")


class Deployments:
    """All deployments of the gateway. Use from one event loop."""

    def __init__(self, default: Deployment, models: Iterable[str] = ()) -> None:
        """models: bare names of those that can be deployed, beside the default deployment's."""
        self.default = default
        self._known = {f"{default.names.account}/models/{name}" for name in models} | {default.model}
        self._by_name: dict[str, Deployment] = {}
        # Policies by the name of their row; and those names in order.
        self._policies: dict[str, Deployment] = {}
        self._order: list[str] = []
        # Every name, full and bare, to the deployments that have it, also while they take no requests.
        self._called: dict[str, list[Deployment]] = {}
        #: Every request is for the default deployment itself.
        self.single = True
        #: The ledger was not read yet, or the supervisor not heard: what is not known here may exist.
        self.catching_up = False
        self.add(default)

    def __repr__(self) -> str:
        return f"Deployments({', '.join(self._by_name)})"

    def __iter__(self) -> Iterator[Deployment]:
        """The default one first, then in the order they came. Policies are not among them."""
        return iter(tuple(self._by_name.values()))

    @property
    def several(self) -> bool:
        """Whether there are more deployments than the default one."""
        return len(self._by_name) > 1

    def policies(self, of: Deployment | None = None) -> list[Deployment]:
        """Those of one deployment, or all, by name."""
        begin, end = self._span(of)
        return [self._policies[name] for name in self._order[begin:end]]

    def policy_count(self, of: Deployment) -> int:
        begin, end = self._span(of)
        return end - begin

    def policies_after(self, of: Deployment, name: str, count: int) -> list[Deployment]:
        """The next ones of a deployment in the order of their own names, behind `name`."""
        begin, end = self._span(of)
        begin = (
            bisect.bisect_right(self._order, f"{of.name}{POLICY_INFIX}{name}", begin, end) if name else begin
        )
        return [self._policies[found] for found in self._order[begin : min(begin + count, end)]]

    def _span(self, of: Deployment | None) -> tuple[int, int]:
        if of is None:
            return 0, len(self._order)
        begin = bisect.bisect_left(self._order, f"{of.name}{POLICY_INFIX}")
        # Behind every name that begins so.
        return begin, bisect.bisect_left(self._order, f"{of.name}{POLICY_INFIX}\U0010ffff", begin)

    @property
    def models(self) -> list[str]:
        """Resource names of the models that are served or can be."""
        return sorted(self._known | {one.model for one in (*self, *self._policies.values())})

    # There may be thousands of policies: none of these looks through them.

    def add(self, deployment: Deployment) -> None:
        table = self._policies if deployment.policy else self._by_name
        assert deployment.name not in table
        table[deployment.name] = deployment
        if deployment is not self.default:
            # So no two replicas in the gateway share a name.
            deployment.prefix = f"{deployment.name.rpartition('/')[2]}-"
        if deployment.policy:
            bisect.insort(self._order, deployment.name)
        for name in deployment.names.accepted():
            self._called.setdefault(name, []).append(deployment)
        self.single = not self.several and not self._policies

    def remove(self, deployment: Deployment) -> None:
        assert deployment is not self.default
        del (self._policies if deployment.policy else self._by_name)[deployment.name]
        if deployment.policy:
            del self._order[bisect.bisect_left(self._order, deployment.name)]
        for name in deployment.names.accepted():
            called = self._called[name]
            called.remove(deployment)
            if not called:
                del self._called[name]
        self.single = not self.several and not self._policies

    def called(self, name: str) -> list[Deployment]:
        """All that have this name, in full or bare, also those that are being ended."""
        return list(self._called.get(name, ()))

    def known(self, name: str) -> Deployment | None:
        """By full name."""
        return self._by_name.get(name) or self._policies.get(name)

    def get(self, name: str) -> Deployment:
        """By full name, accounts/A/deployments/D. Raises NotFound, ReplicaUnavailable."""
        found = self._by_name.get(name)
        if found is None:
            raise self.missing(f"there is no deployment {name}", "deployment")
        return found

    def missing(self, what: str, param: str | None = None) -> MidstreamError:
        """The error for something that is not known here."""
        if self.catching_up:
            return ReplicaUnavailable(
                f"{what}, as far as this gateway knows, which has just started", param=param
            )
        return NotFound(what, param=param)

    def named(self, headers: Mapping[str, str]) -> Deployment:
        """The one that the headers of a signal or a status request mean; the default one if they name none.

        Raises NotFound, and InvalidRequest when a model's name fits several.
        """
        deployment, model = headers.get(HEADER_DEPLOYMENT), headers.get(HEADER_MODEL)
        return self.decide(deployment or None, model or None) or self.default

    def decide(self, deployment: str | None, model: str | None) -> Deployment | None:
        """The one that the values of the two headers mean; None when they name none.

        Raises NotFound, also when the deployment named does not serve the model named, and InvalidRequest.
        """
        if deployment is not None:
            found = self.find(deployment, param=HEADER_DEPLOYMENT)
            if model is not None and _resource(model) not in found.names.accepted():
                raise NotFound(f"{found.name} serves {found.model}, not {model}", param=HEADER_MODEL)
            return found
        return None if model is None else self.find(model, param=HEADER_MODEL)

    def find(self, name: str, *, param: str) -> Deployment:
        """By any of its names, in full or bare, with or without #deployment and @snapshot.

        Raises NotFound, InvalidRequest, and ReplicaUnavailable while the gateway is catching up.
        """
        resource, deployment, _ = split_model(name.strip())
        called = [d for d in self._called.get(resource, ()) if not (d.deleting or d.host.deleting)]
        if deployment:
            called = [d for d in called if d.names.is_on(deployment)]
        if not called:
            served = ", ".join(dict.fromkeys(d.model for d in self))
            raise self.missing(f"{name!r} is not served here; this server has {served}", param)
        if len(called) == 1:
            return called[0]
        if (exact := self._by_name.get(resource)) is not None:
            return exact
        if param == HEADER_DEPLOYMENT:
            bare = [d for d in called if d.name.rpartition("/")[2] == resource]
            if len(bare) == 1:
                return bare[0]
        if self.default in called:
            return self.default
        options = ", ".join(d.name for d in called)
        raise InvalidRequest(f"{name!r} fits several deployments: name one of {options}", param=param)


def _resource(name: str) -> str:
    return split_model(name.strip())[0]
