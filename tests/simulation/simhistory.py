"""One history: a server, its users, and what befalls it, all by one seed; then calm, and the checks.

Always holds: a plan is data. It says what happens when; leaving an entry out leaves the others as they are, so a failing
history can be made smaller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import simstrikes
from simagents import AGENTS, Agents, check_books, empty_after_silence
from simagents import kinds as agent_kinds
from simclient import Broken, Oracle, Rollout, Wrong, exchange
from simdisk import Trouble as DiskTrouble
from simkinds import HistoryKind
from simloop import HistoryTooLong
from simpolicies import Policies, kinds
from simprocess import Process
from simpush import WITH_PUSHES, Pushes
from simpush import kinds as push_kinds
from simpush import settings_of as push_settings
from simrecords import CLIENTS, Records
from simrecords import kinds as record_kinds
from simrecords import settings_of as record_settings
from simstrikes import LONGEST_S, Strikes
from simtinker import TinkerClient
from simtrainer import HOT_LOAD, Trainer, Weights
from simworld import BUCKET, PORT, World, asked_of

from midstream.core.config import PushSettings, TinkerSettings

DEPLOYMENT = "accounts/local/deployments/default"
#: When trouble ends, and how long the server then has to be well again, in seconds.
STORM_S = 20.0
CALM_S = 60.0
READY_S = 60.0
#: How long a death keeps a server from answering.
UPSET_S = 5.0
#: What befalls pushes.
PUSHES = frozenset(("push", "kill receiver", "hang receiver"))
#: What befalls record files and who writes them.
RECORDS = frozenset(("record files", "kill writer"))
#: What keeps a server from answering for a while.
SLOWS = frozenset(
    ("kill replica", "kill gateway", "engine dies", "stop", "stall", "bucket", "disk", "ledger", "restart")
)
#: What no client and no session notices.
HARMLESS = frozenset(("signal", "bucket", "clock", "staging", "disk", "ledger", "record files")) | PUSHES
#: Of histories, those with policies.
WITH_POLICIES = 0.4
#: Of histories, those with streams that kill each engine that goes on with them.
WITH_POISON = 0.2


@dataclass(frozen=True)
class Entry:
    """at: seconds after the server was ready."""

    at: float
    kind: str
    value: Any = None

    def __str__(self) -> str:
        return f"{self.at:7.3f} {self.kind} {'' if self.value is None else json.dumps(self.value)}"


@dataclass(frozen=True)
class Plan:
    settings: dict[str, Any]
    entries: tuple[Entry, ...]
    clients: int
    samplers: int
    policy_clients: int
    #: Of engines that take weights in place.
    ranks: int = 0
    agents: int = 0
    record_clients: int = 0


def plan_of(seed: int, kind: HistoryKind = HistoryKind.PLAIN) -> Plan:
    return _PLANS[kind](seed)


def _plan_of_rebases(seed: int) -> Plan:
    plan, rng = _plan(seed), random.Random(f"{seed} rebases")
    signals = [_entry("signal", rng) for _ in range(rng.randint(4, 10))]
    for entry in signals:
        entry.value["form"] = rng.choice(("full", "delta", "delta", "delta"))
    joins = [_entry(rng.choice(("scale", "kill replica")), rng) for _ in range(rng.randint(1, 3))]
    plan.settings["gateway"]["chain_rebase"] = rng.choice((1, 1, 2))
    in_order = sorted((*plan.entries, *signals, *joins), key=lambda entry: entry.at)
    return replace(plan, entries=tuple(in_order))


def _plan_of_agents(seed: int) -> Plan:
    plan, rng = _plan(seed), random.Random(f"{seed} agents")
    made = [Entry(round(at, 3), kind, value) for at, kind, value in agent_kinds(rng)]
    in_order = sorted((*plan.entries, *made), key=lambda entry: entry.at)
    return replace(plan, entries=tuple(in_order), agents=rng.randint(*AGENTS))


def _plan_of_leaves(seed: int) -> Plan:
    plan, rng = _plan(seed), random.Random(f"{seed} leaves")
    plan.settings["deployment"]["replicas"] = rng.choice((2, 3))
    made = [_entry("leave", rng) for _ in range(rng.randint(1, 4))]
    in_order = sorted((*plan.entries, *made), key=lambda entry: entry.at)
    return replace(plan, entries=tuple(in_order))


def _plan_of_pushes(seed: int) -> Plan:
    rng = random.Random(f"{seed} strikes")
    settings = simstrikes.settings_of(rng)
    settings["replica"] = {"pin_drain_s": rng.choice((0.5, 5.0)), "resident_snapshots": rng.choice((1, 1, 2))}
    settings["tinker"] = TinkerSettings(enabled=False)
    made = [Entry(round(at, 3), kind, value) for at, kind, value in simstrikes.entries(seed, rng)]
    made += [_entry("signal", rng) for _ in range(rng.randint(0, 2))]
    if rng.random() < simstrikes.WITH_WEATHER:
        made.append(_entry(rng.choice(simstrikes.WEATHER), rng))
    in_order = tuple(sorted(made, key=lambda entry: entry.at))
    ranks = simstrikes.ranks_of(seed)
    if ranks:
        # Such an engine has one set of weights, and a switch cannot wait for streams that stand still.
        settings["deployment"]["transition"] = "async"
        settings["replica"]["resident_snapshots"] = 1
    return Plan(settings, in_order, rng.choice((1, 1, 2)), 0, 0, ranks)


def _plan_of_records(seed: int) -> Plan:
    rng = random.Random(f"{seed} records")
    settings: dict[str, Any] = {
        "deployment": {
            "replicas": rng.choice((1, 2, 2, 3)),
            "transition": rng.choice(("async", "async", "sync")),
        },
        "gateway": {"workers": rng.choice((1, 2))},
        "replica": {"pin_drain_s": 0.5, "resident_snapshots": rng.choice((1, 2))},
        "tinker": TinkerSettings(enabled=False),
        "records": record_settings(rng),
    }
    made = [Entry(round(at, 3), kind, value) for at, kind, value in record_kinds(rng)]
    made += [_entry("signal", rng) for _ in range(rng.randint(2, 6))]
    for kind in ("kill replica", "engine dies", "kill gateway", "stop", "stall", "clock", "restart", "scale"):
        if rng.random() < 0.3:
            made += [_entry(kind, rng) for _ in range(rng.randint(1, 2))]
    in_order = tuple(sorted(made, key=lambda entry: entry.at))
    return Plan(settings, in_order, 1, 0, 0, record_clients=rng.randint(*CLIENTS))


def _plan(seed: int) -> Plan:
    """Not every kind of trouble in every history, so that a rare order is not always hidden by another."""
    rng = random.Random(f"{seed} plan")
    settings: dict[str, Any] = {
        "deployment": {
            "replicas": rng.choice((1, 2, 2, 3)),
            "transition": rng.choice(("async", "async", "sync")),
        },
        "gateway": {
            "swap_order": rng.choice(("together", "together", "one-by-one")),
            "workers": rng.choice((1, 1, 2, 3)),
        },
        "replica": {"pin_drain_s": rng.choice((0.5, 5.0))},
    }
    settings["replica"]["resident_snapshots"] = random.Random(f"{seed} resident").choice((1, 1, 2, 3))
    tinker = random.Random(f"{seed} tinker")
    samplers = tinker.choice((0, 0, 1, 2))
    settings["tinker"] = TinkerSettings(enabled=samplers > 0, base_model_clients="serving")
    entries: list[Entry] = []
    for kind, most in (
        ("signal", 9),
        ("kill replica", 4),
        ("kill gateway", 3),
        ("stop", 3),
        ("engine dies", 3),
        ("stall", 4),
        ("bucket", 3),
        ("clock", 2),
        ("restart", 1),
        ("scale", 2),
        ("staging", 2),
        ("disk", 3),
        ("ledger", 2),
        ("forget", 1),
    ):
        if kind != "signal" and rng.random() < (0.9 if kind == "forget" else 0.55):
            continue
        entries += [_entry(kind, rng) for _ in range(rng.randint(1, most))]
    if samplers and tinker.random() < 0.4:
        entries += [_entry("kill tinker", tinker) for _ in range(tinker.randint(1, 2))]
    poison = random.Random(f"{seed} poison")
    if poison.random() < WITH_POISON:
        entries += [_entry("poison", poison) for _ in range(poison.randint(1, 3))]
    entries = _beside_signals(entries, random.Random(f"{seed} beside"))
    policies, policy_clients = random.Random(f"{seed} policies"), 0
    if policies.random() < WITH_POLICIES:
        policy_clients = policies.randint(1, 4)
        entries += [Entry(_some_time(policies), kind, value) for kind, value in kinds(policies)]
    push = random.Random(f"{seed} pushed")
    if push.random() < WITH_PUSHES:
        settings["push"] = push_settings(push)
        entries += [Entry(_some_time(push), kind, value) for kind, value in push_kinds(push)]
    in_order = tuple(sorted(entries, key=lambda entry: entry.at))
    return Plan(settings, in_order, rng.randint(1, 5), samplers, policy_clients)


def _beside_signals(entries: list[Entry], rng: random.Random) -> list[Entry]:
    """Most trouble of bucket, disk and ledger comes just before a signal, as they are used then."""
    signals = [entry.at for entry in entries if entry.kind == "signal"]
    return [
        replace(entry, at=max(0.0, rng.choice(signals) - 0.05))
        if entry.kind in ("bucket", "disk", "ledger") and rng.random() < 0.7
        else entry
        for entry in entries
    ]


def _entry(kind: str, rng: random.Random) -> Entry:
    return Entry(_some_time(rng), kind, _value(kind, rng))


def _some_time(rng: random.Random) -> float:
    return round(rng.uniform(0.0, STORM_S), 3)


def _value(kind: str, rng: random.Random) -> Any:
    match kind:
        case "signal":
            policy = rng.choice(("all", "new_session", "none", None, {"max_age": rng.randint(0, 2)}))
            form = rng.choice(("full", "full", "hinted", "delta", "delta", "delta", "torn", "late"))
            again = rng.random() < 0.15
            return {"weights": rng.randint(0, 5), "policy": policy, "again": again, "form": form}
        case "kill replica" | "kill gateway" | "kill tinker" | "engine dies" | "poison":
            return rng.random()
        case "stop":
            return {"which": rng.random(), "s": round(rng.uniform(0.2, 8.0), 2)}
        case "stall":
            return {"which": rng.random(), "other": rng.random(), "s": round(rng.uniform(0.1, 6.0), 2)}
        case "bucket":
            return {
                "fails": rng.choice((0.0, 0.3, 1.0)),
                "wrong": rng.choice((0.0, 0.1, 0.5)),
                "slow": rng.choice((0.02, 0.5, 3.0)),
                "s": round(rng.uniform(0.5, 6.0), 2),
            }
        case "clock":
            return round(rng.uniform(-7200.0, 7200.0), 1)
        case "scale":
            return rng.randint(1, 3)
        case "leave":
            # Short notices and none, and machines that are gone for a while.
            within_s, gone_s = rng.choice((0.0, 0.5, 3.0, 60.0)), round(rng.uniform(0.5, 6.0), 2)
            return {"replica": rng.randint(0, 2), "within_s": within_s, "s": gone_s}
        case "staging":
            return {"fails": 0.7, "s": round(rng.uniform(0.5, 4.0), 2)}
        case "disk":
            full, short = rng.choice((0.0, 0.2, 1.0)), rng.choice((0.0, 0.5))
            return {"full": full, "short": short, "s": round(rng.uniform(0.5, 6.0), 2)}
        case "ledger":
            fails, lost = rng.choice((0.0, 0.3, 1.0)), rng.choice((0.0, 0.0, 0.3))
            return {"fails": fails, "lost": lost, "s": round(rng.uniform(0.5, 6.0), 2)}
    return None


_PLANS = {
    HistoryKind.PLAIN: _plan,
    HistoryKind.PUSHES: _plan_of_pushes,
    HistoryKind.REBASES: _plan_of_rebases,
    HistoryKind.AGENTS: _plan_of_agents,
    HistoryKind.LEAVES: _plan_of_leaves,
    HistoryKind.RECORDS: _plan_of_records,
}


@dataclass
class Outcome:
    seed: int
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    log: list[str] = field(default_factory=list)


class History:
    """left_out: numbers of the plan's entries."""

    def __init__(
        self,
        seed: int,
        model_dir: Path,
        weights: Weights,
        left_out: Collection[int] = (),
        kind: HistoryKind = HistoryKind.PLAIN,
    ) -> None:
        self.seed = seed
        self.plan = plan_of(seed, kind)
        self._left_out = frozenset(left_out)
        self.world = World(seed, model_dir)
        self.world.ranks = self.plan.ranks
        self.oracle = Oracle(synchronous=self.plan.settings["deployment"]["transition"] == "sync")
        self.log: list[str] = []
        self.trainer = Trainer(
            PORT,
            self.world.bucket,
            BUCKET,
            weights,
            self.oracle,
            random.Random(f"{seed} trainer"),
            self._say,
            self._count,
        )
        self._policies = Policies(PORT, self.world, BUCKET, weights, self._say, seed)
        self._agents = Agents(PORT, self.world, seed, self._count)
        self._records = Records(
            PORT, self.world, self.oracle, self.plan.settings.get("records"), seed, self._say
        )
        limits = self.plan.settings.get("push", PushSettings())
        strikes = None
        if kind is HistoryKind.PUSHES:
            strikes = Strikes(self.world, self._say, self._upset, self._disturb)
        self._strikes = strikes
        self.world.on_fence = self._fenced
        given = (PORT, self.world, BUCKET, weights, self.oracle, limits, seed, self._say, self._kill_amid)
        self._pushes = Pushes(*given, strikes)
        self._rng = random.Random(f"{seed} history")
        #: What a client could notice has happened.
        self._disturbed = False
        self._clients: list[Rollout] = []
        self.oracle.undisturbed = lambda: not self._disturbed
        self.oracle.committed_at = self.world.committed_at
        self._restarts = 0
        self._samplers: list[TinkerClient] = []
        self._clients_run: list[asyncio.Task[None]] = []
        self._entries: list[asyncio.Task[None]] = []

    def run(self) -> Outcome:
        world = self.world
        outcome = Outcome(self.seed, counts=world.counts)
        with world.installed():
            try:
                self._run()
            except HistoryTooLong as error:
                world.wrong.append(f"too long: {error}")
            except Wrong as error:
                world.wrong.append(str(error))
            outcome.wrong = [*world.wrong, *world.processes.crashed, *world.loop.unforeseen]
            outcome.steps, outcome.seconds = world.loop.steps, world.loop.now
            outcome.tokens = self.oracle.checked_tokens
            outcome.log = self.log
        return outcome

    def _say(self, text: str) -> None:
        self.log.append(f"{self.world.now:8.3f} {text}")

    def _run(self) -> None:
        world, loop = self.world, self.world.loop
        self.oracle.weights["base"] = world.base_weights
        world.serve(world.settings(**self.plan.settings))
        if not loop.run_until(lambda: world.counts["server: ready"] > 0 or bool(world.wrong), READY_S):
            raise Wrong("the server was not ready in time")
        begun = loop.now
        for number in range(self.plan.clients):
            name = f"client-{number}"
            rng = random.Random(f"{self.seed} {name}")
            client = Rollout(name, PORT, rng, self.oracle, self._count, self._pin)
            client.undisturbed = lambda: not self._disturbed
            self._clients.append(client)
            self._clients_run.append(world.outside(name, client.run()))
        for number in range(self.plan.samplers):
            name = f"sampler-{number}"
            rng = random.Random(f"{self.seed} {name}")
            sampler = TinkerClient(name, PORT, rng, self.oracle, self._count, self._fronts)
            self._samplers.append(sampler)
            self._clients_run.append(world.outside(name, sampler.run()))
        for number in range(self.plan.policy_clients):
            client = self._policies.client(number, self.seed)
            self._clients.append(client)
            self._clients_run.append(world.outside(client.name, client.run()))
        for number in range(self.plan.record_clients):
            client = self._records.client(number)
            client.undisturbed = lambda: not self._disturbed
            self._clients.append(client)
            self._clients_run.append(world.outside(client.name, client.run()))
        if self.plan.record_clients:
            self._clients_run.append(world.outside("reader", self._records.read_on()))
        for number in range(self.plan.agents):
            self._clients_run.append(world.outside(f"agent-{number}", self._agents.run(number)))
        if self.plan.agents:
            world.outside("books", self._agents.watch())
        for number, entry in enumerate(self.plan.entries):
            if number not in self._left_out:
                self._entries.append(world.outside(f"entry {number}", self._befall(begun, entry)))
        world.outside("watcher", self._watch())
        loop.run_until(lambda: bool(world.wrong), begun + STORM_S)
        # A stall may be longer than every deadline.
        loop.run_until(
            lambda: bool(world.wrong) or self._strikes is None or self._strikes.over(), loop.now + LONGEST_S
        )
        if not world.wrong:
            self._calm()

    def _count(self, what: str) -> None:
        self.world.counts[what] += 1

    def _fronts(self) -> int:
        """How often a front was started, or told to end with its server."""
        started = sum(process.name == "tinker" for process in self.world.processes.by_pid.values())
        return started + self._restarts

    def _pin(self) -> str | None:
        """Few requests are pinned, to a snapshot that was signalled lately."""
        if self.trainer.signalled and self._rng.random() < 0.08:
            return self._rng.choice(self.trainer.signalled[-2:])
        return None

    async def _watch(self) -> None:
        """Which replicas have left the base weights."""
        while True:
            await asyncio.sleep(0.5)
            with contextlib.suppress(Broken):
                rows = (await exchange(PORT, "GET", HOT_LOAD)).json().get("replicas", ())
                self._pushes.ready.append((self.world.now, sum(row["readiness"] for row in rows)))
                for row in rows:
                    name = row["midstream"]["replica"]
                    left = row["readiness"] and row["current_snapshot_identity"] != "base"
                    if left and name not in self.oracle.left_base:
                        self.oracle.left_base.add(name)
                        self._count("left the base weights")
                        self._say(f"{name} has left the base weights: {json.dumps(row)}")

    # -- what befalls

    async def _befall(self, begun: float, entry: Entry) -> None:
        await asyncio.sleep(max(0.0, begun + entry.at - self.world.now))
        self._say(str(entry))
        of_policy = entry.kind.startswith("policy ")
        self._disturbed = self._disturbed or not (of_policy or entry.kind in HARMLESS)
        if of_policy:
            await self._policies.befall(entry.kind, entry.value)
            self._count(f"event: {entry.kind}")
            return
        if entry.kind in RECORDS:
            await self._records.befall(entry.kind, entry.value, self._kill)
            self._count(f"event: {entry.kind}")
            return
        if entry.kind in PUSHES:
            await self._pushes.befall(entry.kind, entry.value)
            self._count(f"event: {entry.kind}")
            return
        if entry.kind in SLOWS:
            seconds = entry.value["s"] if isinstance(entry.value, dict) else UPSET_S
            self._pushes.pauses.append((self.world.now, seconds))
        await getattr(self, "_" + entry.kind.replace(" ", "_"))(entry.value)
        self._count(f"event: {entry.kind}")

    async def _signal(self, value: dict[str, Any]) -> None:
        await self.trainer.signal(value)

    async def _forget(self, _: Any) -> None:
        await self.trainer.forget()

    def _some(self, prefix: str, which: float) -> Process | None:
        there = [one for one in self.world.processes.alive() if one.name.startswith(prefix)]
        return there[int(which * len(there))] if there else None

    async def _kill_replica(self, which: float) -> None:
        self._kill(self._some("replica", which))

    async def _kill_tinker(self, which: float) -> None:
        self._kill(self._some("tinker", which))

    async def _kill_gateway(self, which: float) -> None:
        self._kill(self._some("gateway", which))

    def _upset(self, seconds: float) -> None:
        self._pushes.pauses.append((self.world.now, seconds))

    def _disturb(self) -> None:
        self._disturbed = True

    def _fenced(self) -> None:
        """An update in place ended behind its first tensor, for whatever reason: not in calm weather."""
        if not self.world.counts["calm"]:
            self._disturbed = True

    def _kill_amid(self, name: str) -> None:
        """A process that a push needs is killed."""
        if not self.world.counts["calm"]:
            self._disturbed = True
            self._pushes.pauses.append((self.world.now, UPSET_S))
            self._kill(self._some(name, self._rng.random()))

    def _kill(self, process: Process | None) -> None:
        if process is not None:
            self._say(f"killed: {process}")
            self.world.processes.signal(process, signal.SIGKILL)

    async def _stop(self, value: dict[str, Any]) -> None:
        process = self._some("", value["which"])
        if process is not None and not process.stopped:
            self._say(f"stopped: {process}")
            self.world.processes.signal(process, signal.SIGSTOP)
            await asyncio.sleep(value["s"])
            self.world.processes.signal(process, signal.SIGCONT)

    async def _engine_dies(self, which: float) -> None:
        process = self._some("replica", which)
        if process is not None:
            self._die(process)

    def _die(self, process: Process) -> None:
        if process.engine is not None:
            self._say(f"engine of {process} dies")
            self.world.loop.create_task(
                process.engine.die("the simulated engine crashed"),
                name="death",
                context=process.context.copy(),
            )

    async def _poison(self, which: float) -> None:
        """An engine dies under its streams, and each engine that goes on with one of them dies before the first event."""
        there = [one for one in self.world.processes.alive() if one.engine is not None and one.engine.running]
        if there:
            process = there[int(which * len(there))]
            assert process.engine is not None
            streams = {asked_of(request): 0 for request in process.engine.running}
            self._say(f"{len(streams)} requests of {process} are poison")
            self.world.poison |= streams
            self._die(process)

    async def _stall(self, value: dict[str, Any]) -> None:
        one, other = self._some("", value["which"]), self._some("", value["other"])
        if one is None or other is None or one is other:
            return
        weather = self.world.network.weather
        weather.stalled = (weather.stalled or {}) | {
            frozenset((one.name, other.name)): self.world.now + value["s"]
        }

    async def _bucket(self, value: dict[str, Any]) -> None:
        trouble = self.world.bucket.trouble
        trouble.fails, trouble.wrong, trouble.seconds = value["fails"], value["wrong"], value["slow"]
        await asyncio.sleep(value["s"])
        trouble.fails, trouble.wrong, trouble.seconds = 0.0, 0.0, 0.02

    async def _disk(self, value: dict[str, Any]) -> None:
        trouble = self.world.disk.trouble
        trouble.full, trouble.short = value["full"], value["short"]
        await asyncio.sleep(value["s"])
        trouble.full = trouble.short = 0.0

    async def _ledger(self, value: dict[str, Any]) -> None:
        trouble = self.world.disk.trouble
        trouble.ledger_fails, trouble.answer_lost = value["fails"], value["lost"]
        await asyncio.sleep(value["s"])
        trouble.ledger_fails = trouble.answer_lost = 0.0

    async def _clock(self, value: float) -> None:
        self.world.wall_offset_s += value

    async def _scale(self, count: int) -> None:
        await self._patch("", {"minReplicaCount": count, "maxReplicaCount": count}, 10)

    async def _leave(self, value: dict[str, Any]) -> None:
        path = f"/replicas/replica-{value['replica']}"
        if await self._patch(path, {"drain": True, "within_s": value["within_s"]}, 3):
            self._count("a replica was asked to leave")
        await asyncio.sleep(value["s"])
        # Calm weather is no use without it.
        await self._patch(path, {"drain": False}, 100)

    async def _patch(self, path: str, body: dict[str, Any], tries: int) -> bool:
        for _ in range(tries):
            try:
                answer = await exchange(PORT, "PATCH", f"/v1/{DEPLOYMENT}{path}", body)
            except Broken:
                pass
            else:
                if answer.status in (200, 404):
                    return answer.status == 200
                self._say(f"PATCH {path}: {answer.status} {answer.body[:200]!r}")
            await asyncio.sleep(0.5)
        return False

    async def _staging(self, value: dict[str, Any]) -> None:
        self._fail_staging(value["fails"])
        await asyncio.sleep(value["s"])
        self._fail_staging(0.0)

    def _fail_staging(self, share: float) -> None:
        self.world.staging_fails = share
        for process in self.world.processes.alive():
            if process.engine is not None:
                process.engine.staging_fails = share

    async def _restart(self, _: Any) -> None:
        """The supervisor is killed, and started again by whoever runs it."""
        world = self.world
        if world.server is None or not world.server.alive:
            return
        self._restarts += 1
        world.processes.end(world.server, -9)
        await asyncio.sleep(0.5)
        world.serve(world.settings(**self.plan.settings))

    # -- the end

    def _calm(self) -> None:
        """No trouble any more: everything has to become well, and stay."""
        world, loop = self.world, self.world.loop
        trouble = world.bucket.trouble
        trouble.fails, trouble.wrong, trouble.seconds = 0.0, 0.0, 0.02
        world.disk.trouble = DiskTrouble()
        world.network.calm()
        self._fail_staging(0.0)
        for process in world.processes.alive():
            if process.stopped:
                world.processes.signal(process, signal.SIGCONT)
            if process.engine is not None:
                process.engine.stalled_until = 0.0
        for client in (*self._clients, *self._samplers):
            client.over = True
        self._agents.stop()
        self._records.calm()
        self._say("calm")
        self._count("calm")
        ending = world.outside("end", self._end())
        if not loop.run_until(lambda: ending.done() or bool(world.wrong), loop.now + 5 * CALM_S):
            raise Wrong("the last checks did not end")
        if ending.done():
            ending.result()

    async def _end(self) -> None:
        # No signal may come behind the last one. No request may hang.
        await asyncio.gather(*self._entries, *self._clients_run)
        if self._strikes is not None:
            await self._pushes.converge(self.world.now + CALM_S)
        until = self.world.now + CALM_S
        name = await self.trainer.publish_full(5, "all")
        if name is None:
            raise Wrong("no signal is taken in calm weather")
        newest = max(self.oracle.signals, key=lambda signal: signal.generation)
        if newest.snapshot != name:
            raise Wrong(f"the newest signal is {newest}, not {name}: {self.oracle.signals}")
        self._say(f"waiting for {name}")
        said: Any = None
        while True:
            try:
                answer = await exchange(PORT, "GET", HOT_LOAD)
                said = answer.json()
                rows = said["replicas"]
                if rows and all(
                    row["current_snapshot_identity"] == name and row["readiness"] for row in rows
                ):
                    break
            except Broken as error:
                said = str(error)
            if self.world.now > until:
                raise Wrong(
                    f"after {CALM_S:g} s of calm not all replicas serve {name}: {json.dumps(said)[:3000]}"
                )
            await asyncio.sleep(0.2)
        self._say(f"all serve {name}")
        self._count("end: well")
        asking = Rollout("last", PORT, random.Random(self.seed), self.oracle, self._count, lambda: None)
        await self._all_answer_by(asking, name)
        if "push" in self.plan.settings:
            pushed = await self._pushes.end_well(self.world.now + CALM_S)
            await self._all_answer_by(asking, pushed)
        self.trainer.check_rebases()
        if self.plan.record_clients:
            await self._records.end_well()
        await self._all_are_there(self.world.now + CALM_S)
        if self.plan.policy_clients:
            await self._policies.all_are_well(self.world.now + CALM_S)
            self._policies.nothing_is_left()

    async def _all_answer_by(self, asking: Rollout, name: str) -> None:
        """In calm weather all requests are answered by this snapshot."""
        for number in range(4):
            body = {
                "model": "sim",
                "prompt": [3, 1, 4, 1, 5, number + 1],
                "max_tokens": 4,
                "logprobs": True,
                "stream": True,
            }
            body |= {
                "perf_metrics_in_response": True,
                "ignore_eos": True,
                "return_token_ids": True,
                "temperature": 1.0,
            }
            try:
                turn = await asking.ask_once(body, [("x-multi-turn-session-id", f"last-{name}-{number}")])
            except Broken as error:
                raise Wrong(f"a request in calm weather: {error}") from error
            self.oracle.check(turn, 4)
            if set(turn.labels) != {name}:
                raise Wrong(f"{turn.labels}, not {name}")

    async def _all_are_there(self, until: float) -> None:
        """As many replicas and gateways as there should be, and nothing is in flight."""
        said, rows, listening = None, 0, 0
        while True:
            with contextlib.suppress(Broken):
                said = (await exchange(PORT, "GET", f"/v1/{DEPLOYMENT}")).json()
                rows = len((await exchange(PORT, "GET", HOT_LOAD)).json()["replicas"])
                counts = {rows, said["desiredReplicaCount"], said["replicaStats"]["readyReplicaCount"]}
                listening = self.world.network.listeners_at(PORT)
                if len(counts) == 1 and listening == self.plan.settings["gateway"]["workers"]:
                    break
            if self.world.now > until:
                raise Wrong(f"{rows} replicas, {listening} gateways listen: {json.dumps(said)[:1000]}")
            await asyncio.sleep(0.2)
        for process, proxy in self.world.proxies:
            busy = [one for one, upstream in proxy.upstreams.items() if upstream.requests or one.in_flight]
            if process.alive and busy:
                raise Wrong(f"{process} has requests on {busy}, and nobody asked for anything")
        for process, replica in self.world.replicas:
            gate, pins = replica.own.gate, replica.own.pins
            if process.alive and (gate.inside or gate.choices or gate.waiting or len(pins)):
                raise Wrong(f"{process} has {gate} and {pins}, and nobody asked for anything")
            budget = replica.budget
            if process.alive and (budget.account.turns or len(budget.queue)):
                raise Wrong(f"{process} counts turns in {budget}, and nobody asked for anything")
        check_books(self.world)
        self._agents.nothing_is_left()
        empty_after_silence(self.world)
