"""Faults to plant in the production code, which the simulation has to find: each leaves out, or turns round, one thing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
from simkinds import HistoryKind

from midstream.core.errors import SnapshotError
from midstream.core.record_files import MASK
from midstream.core.reports import Reported
from midstream.core.types import Desired, GenerationEvent
from midstream.core.versions import HEADER_ADMITTED, Admitted, as_header
from midstream.engine.vllm.in_place import HoldAction, HoldEvent, VllmInPlace
from midstream.fleet import loop as fleet_loop
from midstream.fleet import push, reconcile
from midstream.fleet.push import PushDoor
from midstream.fleet.sessions import SessionTable
from midstream.fleet.view import ReplicaView
from midstream.http.upstream import UpstreamPool
from midstream.launch.process import Child, ChildProcess
from midstream.ledger import Ledger, LedgerUnavailable
from midstream.ledger.database import Database
from midstream.proxy.replica_route import ReplicaRoute
from midstream.proxy.request_state import RULINGS, RequestEvent, Ruling
from midstream.proxy.resume import END, ResumeLog
from midstream.proxy.route import Judgement
from midstream.proxy.versions import VersionJudge
from midstream.replica import record_files
from midstream.replica.gate import Gate
from midstream.replica.kv_account import KvAccount
from midstream.replica.kv_budget import KvBudget
from midstream.replica.kv_queue import KvQueue
from midstream.replica.namespaces import Namespaces
from midstream.replica.pins import Pins
from midstream.replica.policies import ServedPolicies
from midstream.replica.policy import ServedPolicy
from midstream.replica.record_files import RecordFiles
from midstream.replica.response.generation import Generation, Surroundings
from midstream.replica.response.referenced import ReferencedRecords
from midstream.replica.shared_rows import WrittenRows
from midstream.replica.swap import source
from midstream.replica.transfer import GroupPart
from midstream.snapshots.store import fetch
from midstream.snapshots.store.chain import ChainFetcher
from midstream.transfer.process import GlooReceiver


def _namespace_kept() -> None:
    """A swap that forbids the reuse of KV changes no namespace."""
    before = Namespaces.commit

    def commit(self: Namespaces, policy: Any, *more: Any) -> None:
        before(self, "none", *more)

    Namespaces.commit = commit  # type: ignore[method-assign]


def _new_sessions_only() -> None:
    """`all` counts as `new_session`."""
    before = Namespaces.commit

    def commit(self: Namespaces, policy: Any, *more: Any) -> None:
        before(self, "new_session" if policy == "all" else policy, *more)

    Namespaces.commit = commit  # type: ignore[method-assign]


def _answered_before_commit() -> None:
    """Some writes of the ledger are answered and then lost."""
    before, rng = Database.write, random.Random(7)

    class Lost(Exception):
        pass

    @contextlib.contextmanager
    def write(self: Database) -> Any:
        with contextlib.suppress(Lost), before(self) as db:
            yield db
            if rng.random() < 0.1:
                raise Lost

    Database.write = write  # type: ignore[method-assign, assignment]


def _pins_do_not_hold() -> None:
    """A swap does not wait for requests that are pinned."""

    async def end(self: Pins, desired: Desired, **_: Any) -> int:
        self.coming = desired.snapshot
        return 0

    Pins.end = end  # type: ignore[method-assign]


def _gate_is_not_drained() -> None:
    """A synchronous swap does not wait for streams."""

    async def drained(self: Gate) -> None:
        await asyncio.sleep(0)

    Gate.drained = drained  # type: ignore[method-assign]


def _bytes_are_not_compared() -> None:
    """What was fetched is not compared with what it should be."""
    fetch.difference = lambda expected, found: None  # type: ignore[attr-defined]


def _numbers_are_not_read() -> None:
    """Weights with a NaN reach the engine, and a check of one prompt does not see it."""
    source.check_finite = lambda directory, files, **_: None  # type: ignore[assignment]


def _log_loses_its_last_event() -> None:
    """A resumed stream repeats what the client has."""
    before = ResumeLog.lines

    def lines(self: ResumeLog) -> bytes | None:
        found = before(self)
        return found and b"".join(found.splitlines(keepends=True)[:-1])

    ResumeLog.lines = lines  # type: ignore[method-assign]


def _half_chunks_pass() -> None:
    """The client of a stream that may be resumed gets half chunks."""
    before = ResumeLog.take

    def take(self: ResumeLog, data: bytes) -> bytes:
        before(self, data)
        return data

    ResumeLog.take = take  # type: ignore[method-assign]


def _sessions_are_forgotten() -> None:
    """No session has a home."""
    SessionTable.lives = lambda self, session: None  # type: ignore[method-assign]


def _everybody_is_admitted() -> None:
    """A replica joins with whatever it serves."""
    before = fleet_loop.decide

    def decide(*given: Any) -> Any:
        return replace(before(*given), admit=True)

    fleet_loop.decide = decide  # type: ignore[assignment]


def _nothing_is_started_again() -> None:
    """A process that died stays dead."""

    async def supervise(self: Any, *_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    Child.supervise = supervise  # type: ignore[method-assign]


def _losses_end_streams() -> None:
    """A stream whose replica is lost ends as if it were whole."""

    def lost(self: ReplicaRoute, phase: Any, reason: str) -> Judgement:
        return Judgement(RequestEvent.END, b"7\r\n: cut\n\n\r\n" + END)

    ReplicaRoute._stream_lost = lost  # type: ignore[method-assign]


def _another_boot_is_as_good() -> None:
    """A replica serves requests that were meant for an earlier boot."""
    Surroundings.check_boot = lambda self, meant=None: None  # type: ignore[method-assign]


def _age_is_ignored() -> None:
    """Cached KV may be of any age."""
    before = Namespaces.commit

    def commit(self: Namespaces, policy: Any, kv_age_max: int | None = None, *more: Any) -> None:
        before(self, policy, None, *more)

    Namespaces.commit = commit  # type: ignore[method-assign]


def _losses_of_resumed_streams_do_not_count() -> None:
    """A replica that loses its engine as it goes on with a stream only counts as one that cannot go on with it."""
    RULINGS[RequestEvent.ENGINE_LOST] = (Ruling.LOSS, Ruling.NEXT)


def _places_leak() -> None:
    """A request that was cut off is counted for ever."""
    before = ReplicaRoute.leave

    def leave(self: ReplicaRoute) -> None:
        placed, here = self._at.placed, self._at.here
        before(self)
        if placed is not None and here is not None and self._status != 200:
            placed.view.replica.in_flight += 1

    ReplicaRoute.leave = leave  # type: ignore[method-assign]


def _old_by_the_clock() -> None:
    """A boot that seems to have begun before the first signal may serve the base weights."""
    # It replaces the clocks of the process that imports it, and the names here are also read by processes of tests.
    from simclock import EPOCH_S

    before = reconcile._may_join

    def may_join(state: Any, report: Any) -> bool:
        late = report is not None and report.ready and time.time() < EPOCH_S
        return late or before(state, report)

    reconcile._may_join = may_join


def _a_kill_at_the_start_is_final() -> None:
    """A child that somebody kills while it starts counts as one that cannot start."""

    async def never(self: ChildProcess) -> bool:
        return False

    ChildProcess._was_killed = never  # type: ignore[method-assign]


def _a_later_report_admits() -> None:
    """A request goes by what its replica reports while it connects, which nobody judged; connecting is slow."""
    before, opened = ReplicaRoute.own_lines, UpstreamPool.open

    async def slow(self: UpstreamPool, **given: Any) -> Any:
        await asyncio.sleep(0.1)
        return await opened(self, **given)

    def own_lines(self: ReplicaRoute) -> list[bytes]:
        self._at.report = self._at.view.report or self._at.report
        return before(self)

    def lines(self: VersionJudge, view: ReplicaView, under: Reported) -> list[bytes]:
        if self.constraint.empty:
            return []
        admitted = Admitted(under.own.snapshot, pinned=self.constraint.snapshot is not None)
        return [f"{HEADER_ADMITTED}: {as_header(admitted)}\r\n".encode()]

    VersionJudge.lines = lines  # type: ignore[method-assign]
    ReplicaRoute.own_lines = own_lines  # type: ignore[method-assign]
    UpstreamPool.take = lambda self: None  # type: ignore[method-assign]
    UpstreamPool.open = slow  # type: ignore[method-assign]


def _ends_are_forgotten() -> None:
    """A late message makes a policy again that was ended."""
    ServedPolicies._note_end = lambda self, name, made: None  # type: ignore[method-assign]


def _policies_of_a_name_are_one() -> None:
    """A policy that is made again has the engine's name, and the salts, of the one before."""
    before = ServedPolicies.__init__

    def init(self: ServedPolicies, parts: Any) -> None:
        before(self, parts)
        self._numbers = itertools.repeat(1)  # type: ignore[assignment]

    ServedPolicies.__init__ = init  # type: ignore[method-assign]


def _ended_under_its_requests() -> None:
    """The engine forgets a policy at once when it is ended."""

    async def end(self: ServedPolicies, policy: ServedPolicy) -> None:
        await policy.close()
        self._parts.engine.end_policy(policy.key)
        self._going.remove(policy)

    ServedPolicies._end = end  # type: ignore[method-assign]


def _pushed_bytes_are_not_compared() -> None:
    """A push is signalled as one replica has it, whatever the others received."""
    before = PushDoor._agreed

    async def agreed(self: PushDoor, deployment: Any, group: Any, found: Any, seen: Any) -> Any:
        answers = list(found.answers.values())
        odd = min(found.answers, key=lambda name: answers.count(found.answers[name]))
        only = replace(found, answers={odd: found.answers[odd]})
        return await before(self, deployment, group, only, seen)

    PushDoor._agreed = agreed  # type: ignore[method-assign]


def _late_joiners_are_not_seen() -> None:
    """An update begins with the group that there was, though a replica joined since."""

    async def check_members(self: PushDoor, *_: Any) -> None:
        pass

    PushDoor._check_members = check_members  # type: ignore[method-assign]


def _two_replicas_have_one_rank() -> None:
    """The replica that comes last gets the rank of the first one."""
    before = push.all_ready

    def all_ready(*given: Any) -> Any:
        first, *others = before(*given)
        return [first, *others[:-1], *(last._replace(rank=first.rank) for last in others[-1:])]

    push.all_ready = all_ready


def _received_weights_serve_at_once() -> None:
    """A replica serves the weights that it received before they are signalled, under the name of what it serves."""
    before = GroupPart.finish

    async def finish(self: GroupPart, order: Any) -> Any:
        from simengine import of_directory
        from simloop import PROCESS

        received = await before(self, order)
        assert self._finished is not None
        slot = PROCESS.get().engine.slots[""]
        slot.load = slot.load._replace(weights=of_directory(self._finished[1]))
        return received

    GroupPart.finish = finish  # type: ignore[method-assign]


def _late_groups_are_not_ended() -> None:
    """A group whose gateway died stays open past its deadline."""

    async def none(self: Ledger) -> Any:
        return []

    Ledger.open_transfers = none  # type: ignore[method-assign]


def _lost_commits_are_dropped() -> None:
    """An update passes for a refused one when the ledger's answer to its commit is lost: its replicas forget it."""

    async def recall(self: PushDoor, deployment: Any, group: Any) -> Any:
        await self._endings.drop(self._orders(deployment), group)
        raise LedgerUnavailable("the ledger did not take the update; the old weights serve")

    PushDoor._recall = recall  # type: ignore[method-assign]


def _fenced_replicas_serve_half_an_update() -> None:
    """A replica that leaves its group amid an update serves what it received of it."""
    before = GroupPart._ended

    def ended(self: GroupPart, reason: str, *, lost: bool) -> None:
        from simengine import of_directory
        from simloop import PROCESS

        directory = getattr(getattr(self._receiver, "_files", None), "_directory", None)
        if self.update is not None and directory is not None and (engine := PROCESS.get().engine).slots:
            slot = engine.slots[""]
            slot.load = slot.load._replace(weights=of_directory(directory))
        before(self, reason, lost=lost)

    GroupPart._ended = ended  # type: ignore[method-assign]


def _fenced_replicas_keep_their_weights() -> None:
    """A replica that is left out of an update is never asked for it, and serves on."""
    fence, decided, left_out = PushDoor._fence, fleet_loop.decide, set[str]()

    async def fenced(self: PushDoor, *given: Any) -> Any:
        group = await fence(self, *given)
        left_out.update(member.replica for member in group.members if member.fenced)
        return group

    def decide(state: Any, report: Any, *given: Any) -> Any:
        action = decided(state, report, *given)
        out = report is not None and report.replica in left_out
        return replace(action, send=None, admit=True) if out else action

    PushDoor._fence = fenced  # type: ignore[method-assign]
    fleet_loop.decide = decide  # type: ignore[assignment]


def _engines_compute_between_start_and_commit() -> None:
    """An engine computes on while a trainer writes into its weights."""
    before = VllmInPlace.hold

    async def hold(self: VllmInPlace, within_s: float) -> None:
        await before(self, within_s)
        await self._move_on()

    VllmInPlace.hold = hold  # type: ignore[method-assign]


def _uncertain_weights_serve() -> None:
    """An engine whose update failed computes again with what was written so far."""

    def give_up(self: VllmInPlace, reason: str) -> None:
        if self._move(HoldEvent.GIVE_UP) is not HoldAction.NOTHING:
            self._move(HoldEvent.BEGAN)
            self._boot.in_background(self._move_on(), "computes again")

    VllmInPlace.give_up = give_up  # type: ignore[method-assign]


def _updates_have_the_digests_of_the_first() -> None:
    """The files of each update pass for those of the first one that came to this replica."""
    before, first = GlooReceiver.finish, dict[Any, Any]()

    async def finish(self: GlooReceiver, within_s: float) -> Any:
        received = await before(self, within_s)
        content = first.setdefault(self._files._cache.root, received.content)
        return msgspec.structs.replace(received, content=content)

    GlooReceiver.finish = finish  # type: ignore[method-assign]


def _turns_are_never_over() -> None:
    """The KV budget never learns that a turn has ended."""
    KvBudget.leave = lambda self, turn, context: None  # type: ignore[method-assign]


def _ends_free_nothing() -> None:
    """The KV budget does not learn of the end of a session."""
    KvBudget.end = lambda self, session: None  # type: ignore[method-assign]


def _turns_are_let_in_twice() -> None:
    """A turn that waited is counted once more as it begins."""
    before = KvQueue._begin

    def begin(self: KvQueue, one: Any, now: float) -> None:
        self.account.begin(one.session, one.first, one.tokens, now, one.said, one.beside, one.came_at)
        before(self, one, now)

    KvQueue._begin = begin  # type: ignore[method-assign]


def _who_waits_is_never_woken() -> None:
    """Room that becomes free is given to nobody, until the next one comes."""
    before = KvBudget.leave

    def leave(self: KvBudget, turn: Any, context: int) -> None:
        settle, self._settle = self._settle, lambda: None  # type: ignore[method-assign]
        before(self, turn, context)
        self._settle = settle  # type: ignore[method-assign]

    KvBudget.leave = leave  # type: ignore[method-assign]


def _a_choice_is_free() -> None:
    """What a turn has beside its context is never taken out of the books."""
    before = KvAccount.end_turn

    def end_turn(self: KvAccount, session: Any, tokens: int, now: float, beside: int = 0) -> None:
        one = self._sessions.get(session)
        kept = 0 if one is None else one.beside
        before(self, session, tokens, now, 0)
        if one is not None and kept:
            one.beside = kept

    KvAccount.end_turn = end_turn  # type: ignore[method-assign]


def _rebases_write_the_parent() -> None:
    """Replicas digest, and write, the whole files of a snapshot's parent in its place."""
    before = ChainFetcher.digest

    async def digest(self: ChainFetcher, chain: Any) -> Any:
        return await before(self, chain[:-1])

    ChainFetcher.digest = digest  # type: ignore[method-assign]


def _references_come_before_their_files() -> None:
    """A reference is handed out while its file is on the way."""
    before = record_files.put_bytes

    def put_bytes(*given: Any) -> None:
        asyncio.get_running_loop().call_later(0.2, before, *given)

    record_files.put_bytes = put_bytes  # type: ignore[assignment]


def _puts_that_fail_count_as_stored() -> None:
    """A reference is handed out of a file that the bucket did not take."""
    before = record_files.put_bytes

    def put_bytes(*given: Any) -> None:
        with contextlib.suppress(SnapshotError):
            before(*given)

    record_files.put_bytes = put_bytes  # type: ignore[assignment]


def _digests_are_of_other_bytes() -> None:
    """A file has the digest of all its bytes but one."""
    record_files.hashlib = SimpleNamespace(  # type: ignore[assignment]
        sha256=lambda data: hashlib.sha256(data[:-1])
    )


def _half_the_time_is_enough() -> None:
    """Record files are removed at half of the age that they may have."""
    before = RecordFiles._is_old

    def is_old(self: RecordFiles, one: Any) -> bool:
        # Twice as far in the past as it is from now on.
        ages = 0.0 if self._behind is None else self._monotonic() - self._behind - one.modified
        return before(self, one._replace(modified=one.modified - ages))

    RecordFiles._is_old = is_old  # type: ignore[method-assign]


def _the_machines_clock_says_what_is_old() -> None:
    """A record file is as old as the replica's own clock says."""
    record_files.time_there = lambda url: time.time()  # type: ignore[assignment]


def _rows_of_any_age_are_referred_to() -> None:
    """Nobody asks how long an earlier file stays."""
    before = WrittenRows.leading

    def leading(self: WrittenRows, keys: Any, own: Any, until: float) -> Any:
        return before(self, keys, own, -math.inf)

    WrittenRows.leading = leading  # type: ignore[method-assign]


def _earlier_rows_begin_one_later() -> None:
    """A reference to rows of an earlier file names the rows behind them."""
    before = WrittenRows.add

    def add(self: WrittenRows, rows: Any, file: Any, until: float) -> None:
        before(self, {key: row + 1 for key, row in rows.items()}, file, until)

    WrittenRows.add = add  # type: ignore[method-assign]


def _masks_lie_a_row_later() -> None:
    """Each row of a record file has the mask of the row before."""
    before = ReferencedRecords._columns

    def columns(self: ReferencedRecords, records: Any, about: Any) -> Any:
        made = before(self, records, about)
        if MASK in made and len(made[MASK]) > 1:
            *most, last = made[MASK].to_pylist()
            made[MASK] = pa.array([last, *most], pa.binary())
        return made

    ReferencedRecords._columns = columns  # type: ignore[method-assign]


def _files_of_resumed_streams_have_the_logs_numbers() -> None:
    """The file of a resumed stream has what the resume log says of the lost replica's tokens, which is no number."""
    before = Generation._had

    def had(self: Generation, choice: Any, event: GenerationEvent) -> None:
        tokens = tuple([msgspec.structs.replace(record, logprob=0.0) for record in event.tokens])
        before(self, choice, msgspec.structs.replace(event, tokens=tokens))

    Generation._had = had  # type: ignore[method-assign]


def _there_is_always_room() -> None:
    """Record files are written into a bucket that has more than it may have."""
    RecordFiles.check = lambda self: None  # type: ignore[method-assign]


PLANTED: dict[str, Callable[[], None]] = {
    name.removeprefix("_"): plant
    for name, plant in list(globals().items())
    if name.startswith("_") and getattr(plant, "__module__", "") == __name__
}

#: Of those that no plain history finds, the kind that does.
FOUND_IN = {
    "lost_commits_are_dropped": HistoryKind.PUSHES,
    "fenced_replicas_serve_half_an_update": HistoryKind.PUSHES,
    "fenced_replicas_keep_their_weights": HistoryKind.PUSHES,
    "engines_compute_between_start_and_commit": HistoryKind.PUSHES,
    "uncertain_weights_serve": HistoryKind.PUSHES,
    "rebases_write_the_parent": HistoryKind.REBASES,
    "ends_free_nothing": HistoryKind.AGENTS,
    "turns_are_let_in_twice": HistoryKind.AGENTS,
    "who_waits_is_never_woken": HistoryKind.AGENTS,
    "a_choice_is_free": HistoryKind.AGENTS,
    "references_come_before_their_files": HistoryKind.RECORDS,
    "puts_that_fail_count_as_stored": HistoryKind.RECORDS,
    "digests_are_of_other_bytes": HistoryKind.RECORDS,
    "half_the_time_is_enough": HistoryKind.RECORDS,
    "the_machines_clock_says_what_is_old": HistoryKind.RECORDS,
    "rows_of_any_age_are_referred_to": HistoryKind.RECORDS,
    "earlier_rows_begin_one_later": HistoryKind.RECORDS,
    "masks_lie_a_row_later": HistoryKind.RECORDS,
    "files_of_resumed_streams_have_the_logs_numbers": HistoryKind.RECORDS,
    "there_is_always_room": HistoryKind.RECORDS,
}
#: A seed that finds it, and what it then says; `simulate.py --prove` looks for other seeds where that one does not any more.
FOUND_AT = {
    "namespace_kept": (6, "is reused under"),
    "new_sessions_only": (6, "is reused under"),
    "answered_before_commit": (23, "the newest signal is"),
    "pins_do_not_hold": (33, "pinned to"),
    "gate_is_not_drained": (10, "several snapshots in a stream of a synchronous deployment"),
    "bytes_are_not_compared": (34, "computes:"),
    "numbers_are_not_read": (10, "labels that nobody signalled"),
    "log_loses_its_last_event": (190, "at most"),
    "half_chunks_pass": (122, "invalid literal"),
    "sessions_are_forgotten": (0, "nothing had happened to it"),
    "everybody_is_admitted": (2, "the base weights serve again"),
    "nothing_is_started_again": (2, "in calm weather"),
    "losses_end_streams": (2, "a response that is whole without its end"),
    "another_boot_is_as_good": (275, "the base weights serve again"),
    "age_is_ignored": (65, "commits old"),
    "losses_of_resumed_streams_do_not_count": (90, "engines that went on with it"),
    "turns_are_never_over": (0, "nobody asked for anything"),
    "places_leak": (5, "nobody asked for anything"),
    "old_by_the_clock": (119, "the base weights serve again"),
    "a_kill_at_the_start_is_final": (1775, "ended while starting"),
    "a_later_report_admits": (12, "pinned to"),
    "ends_are_forgotten": (13, "every policy was ended"),
    "policies_of_a_name_are_one": (62, "was ended and made again"),
    "ended_under_its_requests": (1410, "no such weights"),
    "pushed_bytes_are_not_compared": (5, "computes:"),
    "late_joiners_are_not_seen": (5, "a replica joined before"),
    "two_replicas_have_one_rank": (5, "no push is taken in calm weather"),
    "received_weights_serve_at_once": (8, "computes:"),
    "late_groups_are_not_ended": (174, "past their deadlines"),
    "updates_have_the_digests_of_the_first": (8, "push-2-1"),
    "lost_commits_are_dropped": (3, "is the newest commit"),
    "fenced_replicas_serve_half_an_update": (3, "computes:"),
    "fenced_replicas_keep_their_weights": (134, "is the newest commit"),
    "engines_compute_between_start_and_commit": (11, "computes:"),
    "uncertain_weights_serve": (12, "computes:"),
    "rebases_write_the_parent": (2, "others than it has"),
    "ends_free_nothing": (0, "counts sessions that nobody holds"),
    "turns_are_let_in_twice": (2, "nobody"),
    "who_waits_is_never_woken": (0, "and there is room"),
    "a_choice_is_free": (0, "do not balance"),
    "references_come_before_their_files": (0, "before its file"),
    "puts_that_fail_count_as_stored": (3, "before its file"),
    "digests_are_of_other_bytes": (0, "before its file"),
    "half_the_time_is_enough": (1, "removed s3"),
    "the_machines_clock_says_what_is_old": (3, "removed s3"),
    "rows_of_any_age_are_referred_to": (5, "and by a client until"),
    "earlier_rows_begin_one_later": (0, "rows"),
    "masks_lie_a_row_later": (0, "mask"),
    "files_of_resumed_streams_have_the_logs_numbers": (4, "computes:"),
    "there_is_always_room": (11, "takes more"),
}
