"""One replica: an engine, the swap driver beside it, and the report of both.

Owns: the life of the engine (start, death, start again) and the boot id. A swap driver that fails counts as a dead engine.
Always holds: a boot starts on the base weights with an empty cache and no accepted target. A report's `ready` is true only
between a successful engine start and its death, and only while the serving weights have not failed their check. Every change
of the report wakes its watchers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from midstream.core.engine_words import declared
from midstream.core.errors import AnotherBoot, InvalidRequest
from midstream.core.measures import Trajectories
from midstream.core.pulse import Pulse
from midstream.core.reports import ReplicaReport
from midstream.core.retry import Backoff
from midstream.core.served_names import ServedNames
from midstream.core.sessions import SessionStats
from midstream.core.traces import Reward, RewardAsked, RewardTaken, Trace
from midstream.core.tracing import Tracer
from midstream.core.types import ENGINE_SILENT_FROM_S, Desired, Hint, ModelInfo, Pause, Session
from midstream.engine.base import Engine, EngineDied
from midstream.replica.audit import Audits
from midstream.replica.earlier import EarlierTurns
from midstream.replica.gate import Door
from midstream.replica.journal import Journal
from midstream.replica.kv_budget import KvBudget, session_name
from midstream.replica.kv_travel import KvTravel
from midstream.replica.moves import Moves
from midstream.replica.pausing import Pausing
from midstream.replica.policies import ServedPolicies
from midstream.replica.policy import Bounds, PolicyParts
from midstream.replica.record_files import RecordFiles
from midstream.replica.service import REAL, KeptAcrossBoots, Outside, Service
from midstream.replica.sessions import Sessions
from midstream.replica.spans import trace_swap
from midstream.replica.stored import StoredResponses
from midstream.replica.swap.hints import Hints
from midstream.replica.swap.history import SwapHistory
from midstream.replica.swap.source import Files, SnapshotSource
from midstream.replica.text.chat import TextModel
from midstream.replica.text.grammarcheck import GrammarChecks
from midstream.replica.text.text_jobs import TextJobs
from midstream.replica.transfer import Transfers
from midstream.replica.turns.trace import recorded, trace_of, traced
from midstream.replica.turns.tree import Trees, Turn

log = logging.getLogger(__name__)

RESTARTS = Backoff(first_s=0.5, last_s=10.0)
#: No call is under way for longer than so many boots.
BOOTS_MAX = 64

DEFAULT_BOUNDS = Bounds()


class Replica:
    """`base_directory` is the served model's directory: the base snapshot, should it be asked for again."""

    #: Set before `start` where spans are exported.
    tracer: Tracer | None = None

    def __init__(
        self,
        *,
        name: str,
        engine: Engine,
        text: TextModel,
        source: SnapshotSource,
        names: ServedNames,
        base_directory: Path,
        bounds: Bounds = DEFAULT_BOUNDS,
        outside: Outside = REAL,
    ) -> None:
        clock, monotonic = outside.clock, outside.monotonic
        self.name = name
        self.names = names
        self.trees = Trees(bounds.turns_bytes_max)
        self.earlier = EarlierTurns(self.trees)
        self.sessions = Sessions(
            idle_s=bounds.session_idle_s,
            clock=clock,
            monotonic=monotonic,
            on_change=self._changed,
            on_close=self._session_over,
        )
        self.ready = False
        self.clock, self.monotonic = clock, monotonic
        self._engine = engine
        self.budget = self._budget_of(bounds)
        self._text = text
        self._outside = outside
        #: Of the process, once it is watched.
        self._pulse = Pulse(name)
        self.responses = StoredResponses(name, self.trees.close)
        self._journal: Journal | None = None
        self._audits: Audits | None = None
        self._kept = KeptAcrossBoots(
            self.sessions, self.budget, TextJobs(), GrammarChecks(), self.trees, self.responses
        )
        self._watch = asyncio.Event()
        #: Loads that have ended, of the deployment's own snapshots and of policies: each end is reported at once.
        self.settled = 0
        self._recovery: asyncio.Task[None] | None = None
        #: Why the engine cannot be started again.
        self._down: str | None = None
        self.closed = False
        self.boot = outside.new_boot()
        # Those of this process, the last ones.
        self._boots = deque((self.boot.encode(),), maxlen=BOOTS_MAX)
        self.source = source
        #: Its part in groups of trainers. No group outlives the boot.
        self.transfers = Transfers(source.chains, lambda: self.boot if self.ready else None, outside.sleep)
        self._policies_max = bounds.policies_max
        self.policies = ServedPolicies(
            self._parts(bounds, Files(source, Hints(source.prefetch), base_directory))
        )
        #: The deployment's own policy.
        self.own = self.policies.own
        self._pausing = Pausing(engine, self.policies, self._changed)
        engine.on_death(self._on_death)

    def __repr__(self) -> str:
        return f"Replica({self.name}, boot={self.boot}, ready={self.ready}, {self.own!r})"

    @property
    def travel(self) -> KvTravel:
        return self._kept.travel

    def keep_records(self, journal: Journal) -> None:
        """The records of turns and rewards go into it. To be called before `start`."""
        self._journal = journal
        self.trees.on_turn = self._turn_ended
        # Who keeps records wants all of them, also of clients that cannot ask.
        self._kept = replace(self._kept, records="routes")

    def audit_turns(self, audits: Audits) -> None:
        """It hears of turns, of what serves and of requests. To be called before `start`, behind `keep_records`."""
        self._audits = audits
        audits.traced = lambda turn: traced(turn, self.names.model, *self._routes_shape())
        audits.on_change = self._changed
        self.trees.on_turn = self._turn_ended
        if self._journal is None:
            self._kept = replace(self._kept, records="logprobs")

    def keep_record_files(self, files: RecordFiles) -> None:
        """Records that requests want by reference go into it. To be called before `start`."""
        self._kept = replace(self._kept, files=files)

    def watch(self, pulse: Pulse) -> None:
        """Report what that says of the process's event loop."""
        self._pulse = pulse
        pulse.on_change = self._changed
        pulse.on_stall = partial(self.sessions.measures.observe, "event_loop_stall_seconds")

    def _budget_of(self, bounds: Bounds) -> KvBudget:
        engine = self._engine
        return KvBudget(
            share=bounds.kv_budget,
            waiting_max=bounds.kv_waiting_max,
            stats=lambda: engine.stats().kv,
            known=self.sessions.holds,
            ended=lambda session: engine.end_session(session_name(session)),
            monotonic=self.monotonic,
            on_change=self._changed,
            moves=Moves(engine.stats, self._opened_s),
        )

    def _opened_s(self, session: Session) -> float | None:
        """How long ago it began here."""
        found = self.sessions.one(session)
        return None if found is None else self.clock() - found.opened_at

    def _parts(self, bounds: Bounds, files: Files) -> PolicyParts:
        return PolicyParts(
            engine=self._engine,
            text=self._text,
            names=self.names,
            files=files,
            kept=lambda: self._kept,
            outside=self._outside,
            bounds=bounds,
            boot=lambda: self.boot,
            on_change=self._changed,
            on_settled=self._settled,
            on_swapped=self._swapped,
            on_served=self._served,
            died=self.engine_died,
            driver_ended=self._driver_ended,
        )

    def had_boot(self, boot: bytes | None) -> bool:
        """Whether it is one of this process. None: whoever asks means no special one."""
        return boot is None or boot in self._boots

    def serves(self, policy: str, boot: str | None = None) -> AbstractContextManager[Service]:
        """What serves a policy's requests, for one of them. boot: the one that is meant.

        Raises AnotherBoot, and PolicyNotLoaded as it is entered."""
        if (service := self.own.service) is None:
            raise AnotherBoot("the engine is starting; retry this request")
        if not policy:
            return contextlib.nullcontext(service)
        if boot not in (None, self.boot) or not self.ready:
            raise AnotherBoot("the replica restarted after this request was sent to it; retry this request")
        return self.policies.serves(policy)

    def trace(self, session: Session) -> Trace | None:
        """The turns of a session; None: nothing is known of it here."""
        top_k, wide = self._routes_shape()
        return trace_of(self.trees, session, self.names.model, top_k=top_k, wide_routes=wide)

    def _routes_shape(self) -> tuple[int, bool]:
        """Experts of a token in each layer, and whether their numbers have 16 bits."""
        info = self._info
        return (0, False) if info is None else (info.top_k, info.num_experts > 256)

    def _turn_ended(self, session: Session, tree: int, turn: Turn) -> None:
        if self._audits is not None:
            self._audits.turn_ended(session, turn)
        if self._journal is None:
            return
        about = {"kind": "turn", "tenant": session[0], "session": session[1], "tree": tree}
        shape = self._routes_shape()
        self._journal.add(lambda: {**about, "turn": recorded(turn, self.names.model, *shape)})

    def reward(self, asked: RewardAsked) -> RewardTaken:
        """Keeps it beside the session's turns. Raises InvalidRequest."""
        given = asked.given
        reward = Reward(
            reward=given.reward,
            turn=given.turn,
            name=given.name,
            metadata=given.metadata,
            created=self.clock(),
        )
        session = (asked.tenant, asked.key)
        has, taken = self.trees.reward(session, reward, look=asked.look)
        if taken and not asked.look:
            self.sessions.rewarded(session, given.reward)
            if given.turn is None:
                # The whole trajectory is judged, so it is over. If it is not, its next turn begins as any other.
                self.budget.end(session)
        tree = self.trees.of(session)
        if self._journal is not None and taken and not asked.look and tree is not None:
            about = {"kind": "reward", "tenant": session[0], "session": session[1], "tree": tree.number}
            self._journal.add(lambda: {**about, "reward": reward})
        return RewardTaken(has=has, taken=taken)

    def trajectories(self) -> Trajectories:
        """What its turns and swaps were like, and what rewards came to. It changes with what is measured."""
        found = self.sessions.trajectories()
        return Trajectories(measures=found.measures, counts=found.counts, rewards=self.trees.rewards.report())

    async def start(self) -> None:
        """Start the engine on the base weights and open the gate. Raises what the engine's start raises, and NotSound."""
        info = await self._engine.start()
        own = self.own
        self.policies.start(info)
        await own.prove_base(info)
        own.drive()
        self._down = None
        self.ready = True
        self.budget.open(serving=True)
        own.gate.set(Door.OPEN)
        if self._audits is not None:
            self._audits.begin()
        self._changed()

    async def drained(self) -> None:
        """Take no more requests, and wait until none is inside."""
        gates = [policy.gate for policy in self.policies.everyone]
        for gate in gates:
            gate.set(Door.DOWN)
        self.budget.open(serving=False)
        for gate in gates:
            await gate.drained()

    async def close(self) -> None:
        """Idempotent. Requests inside end with the engine."""
        self.closed = True
        self.ready = False
        self.own.gate.set(Door.DOWN)
        self.budget.open(serving=False)
        await self.own.hints.close()
        self._kept.jobs.close()
        self._kept.grammars.close()
        await _cancel(self._recovery)
        await self._pausing.close()
        if self._audits is not None:
            await self._audits.close()
        await self._end_boot()
        await self.transfers.close()
        self._changed()

    def desire(self, desired: Desired) -> None:
        """Raises InvalidRequest for a policy that this engine does not serve, AnotherBoot while the replica takes none."""
        if not desired.policy:
            self.own.driver.desire(desired)
            return
        info = self._info
        if info is None or not self.ready:
            raise AnotherBoot("the engine is starting; retry this request")
        if self.own.gate.door is Door.DOWN:
            raise AnotherBoot("the replica is ending; retry this request")
        if not info.card.has("policies"):
            raise InvalidRequest("policy: this engine serves one policy", param="policy")
        self.policies.desire(desired, info)

    def pause(self, wanted: Pause) -> None:
        """Pause or resume, unless a newer message said otherwise. The report shows when it is done."""
        self._pausing.ask(wanted)

    def reset_cache(self, event: str = "") -> None:
        for policy in self.policies:
            policy.reset_cache(event)

    def hint(self, hint: Hint) -> None:
        self.policies.hint(hint)

    def close_session(self, session: Session) -> bool:
        """Close the session. True if it was held here. Its next request begins a new one; a running request continues."""
        for policy in self.policies:
            policy.namespaces.forget(session)
        # Its turns outlive the engine, although the engine's end closes the session.
        had_turns = self.trees.of(session) is not None
        self.trees.close(session)
        return self.sessions.close(session) or had_turns

    def session(self, session: Session) -> SessionStats | None:
        """What is known of it, also while its first turn waits."""
        found, wait = self.sessions.one(session), self.budget.wait_of(session, self.name)
        if wait is None:
            return found
        now = self.clock()
        blank = SessionStats(tenant=session[0], key=session[1], stamp=0, opened_at=now, used_at=now)
        return msgspec.structs.replace(found or blank, wait=wait)

    def _session_over(self, session: Session) -> None:
        self.trees.close(session)
        self.budget.end(session)

    def report(self) -> ReplicaReport:
        info = self._info
        silent_s = int(self._engine.silent_s()) if self.ready else 0
        return ReplicaReport(
            replica=self.name,
            boot=self.boot,
            alive=self.ready,
            in_flight=self.policies.requests + len(self.budget.queue),
            policies=self.policies.reports(self._down),
            policies_max=self._policies_max,
            pause=self._pausing.carried_out,
            engine=self._engine.stats(),
            kv_waits=self.budget.report(),
            pace=self.budget.pace(),
            card=None if info is None else declared(info),
            max_model_len=None if info is None else info.max_model_len,
            long_texts=self._kept.jobs.jobs,
            records=None if self._journal is None else self._journal.stats(),
            record_files=None if self._kept.files is None else self._kept.files.stats(),
            audit=None if self._audits is None else self._audits.stats(),
            stalled_s=self._pulse.stalled_s,
            engine_silent_s=silent_s if silent_s >= ENGINE_SILENT_FROM_S else 0,
        )

    @property
    def _info(self) -> ModelInfo | None:
        """Of the engine that runs, or ran last."""
        return None if self.own.service is None else self.own.service.info

    def changed(self, timeout_s: float) -> Coroutine[Any, Any, None]:
        """Returns at the first change of the report after this call, or after `timeout_s`."""
        return _until_set(self._watch, timeout_s)

    def engine_died(self, boot: str, reason: str) -> None:
        """Start over, once per boot: whoever notices first says so."""
        if self.closed or boot != self.boot or self._recovery is not None:
            return
        log.error("%s: the engine died: %s", self.name, reason)
        self.ready = False
        self.own.gate.set(Door.DOWN)
        self.budget.open(serving=False)
        self._recovery = asyncio.create_task(self._recover(), name="engine recovery")
        self._recovery.add_done_callback(_log_failure)
        self._changed()

    async def _on_death(self, reason: str) -> None:
        if self.ready:
            # A boot that never served is for `start` to report.
            self.engine_died(self.boot, reason)

    def _driver_ended(self, boot: str, policy: str, task: asyncio.Task[None]) -> None:
        """A driver that ends by itself leaves open what the engine serves, so the replica starts over."""
        if task.cancelled() or self.closed or self._recovery is not None or boot != self.boot:
            return
        error = task.exception()
        driver = f"the swap driver of policy {policy}" if policy else "the swap driver"
        log.error("%s: %s failed", self.name, driver, exc_info=error)
        self.engine_died(boot, f"{driver} failed: {error!r}")

    async def _end_boot(self) -> None:
        """The engine is closed before the drivers are waited for: a commit under way ends with the engine at the latest."""
        self.policies.shut()
        self.transfers.end_group("the replica's engine ended")
        try:
            await self._engine.close()
        finally:
            await self.policies.close()

    async def _recover(self) -> None:
        try:
            await self._end_boot()
        except Exception:
            # A new engine is started whatever the old one raises.
            log.exception("%s: the dead engine could not be closed", self.name)
        self.boot = self._outside.new_boot()
        self._boots.append(self.boot.encode())
        # The cache died with the engine.
        self.own.namespaces.commit("all")
        self.sessions.close_all()
        self.budget.reset()
        self.own.begin()
        self._changed()
        failures = 0
        while True:
            try:
                await self.start()
            except Exception as error:
                # The cause may be gone at the next try.
                self._down = f"the engine cannot be started again: {error or repr(error)}"[:1000]
                failures += 1
                delay = RESTARTS.pause_s(failures)
                # Of an engine that died once more, a traceback would say nothing.
                trace = not isinstance(error, EngineDied)
                log.error("%s: %s; trying again in %.1f s", self.name, self._down, delay, exc_info=trace)
                self._changed()
                await self._outside.sleep(delay)
            else:
                self._recovery = None
                return

    def _served(self, model: str, snapshot: str, directory: Path) -> None:
        if self._audits is not None:
            self._audits.serves(model, snapshot, directory)

    def _swapped(self, history: SwapHistory) -> None:
        history.count(self.sessions.measures)
        if self.tracer is not None:
            epoch_s = self.clock() - self.monotonic()
            trace_swap(self.tracer, history, self.name, self.names, epoch_s)

    def _settled(self) -> None:
        self.settled += 1
        self._changed()

    def _changed(self) -> None:
        if self._audits is not None:
            self._audits.moved(busy=self.policies.requests > 0 or self.policies.loading)
        if self.own.driver.quiet:
            return
        watch, self._watch = self._watch, asyncio.Event()
        watch.set()


async def _until_set(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for it, `timeout_s` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait((task,))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
