"""The policies of a replica: its deployment's own weights, and the adapters and snapshots that are served beside them.

Owns: which policies are held, and which one makes way for another. Sessions, turns and stored responses are the replica's.
Always holds:
- The deployment's own policy is always there. It is never ended, and makes way for none.
- At most `policies_max` policies are held beside it, with those that were ended and have requests left. For a newcomer the
  least recently used idle policy makes way. When none is idle, the newcomer is refused.
- A policy that a request uses never makes way, from before the request is read to its end. One that loads does not either, and
  one that has just loaded has UNUSED_S for its first request.
- A policy that was unloaded may return. Its stage changes continue their count.
- No request reaches another policy than the own before its first switch.
- What one policy waits for, holds up or fails at changes nothing for another.
- A policy that is ended and made again shares no cached KV with the one before: its salts have another number.
- One that was ended stays so, and of one name the newest made counts. A message of a gateway that has not heard of it changes
  nothing.
- The engine has a policy until the last request that it was ended under is done.
- The files of a policy that was ended go with it, unfinished ones too. Those of one that made way stay while there is room.
- Another policy than the own lives for one boot. The gateway says again what it should serve.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from midstream.core.errors import Overloaded, PolicyNotLoaded
from midstream.core.reports import PolicyReport
from midstream.core.types import Desired, Hint, ModelInfo
from midstream.replica.based import OneBase
from midstream.replica.gate import Door
from midstream.replica.policy import PolicyParts, ServedPolicy, besides, deployments_own
from midstream.replica.service import Service

log = logging.getLogger(__name__)

#: Policies that were ended and are remembered, so that a late message does not make them again.
ENDED_KNOWN = 4096
#: How many unloaded policies have their next sequence number remembered.
GONE_KNOWN = 65_536


def to_make_way(policies: Iterable[ServedPolicy], now: float) -> ServedPolicy | None:
    """Of those that may, the one that was used least recently."""
    return min((p for p in policies if p.may_go(now)), key=lambda policy: policy.used_at, default=None)


class ServedPolicies:
    """own: the deployment's own."""

    def __init__(self, parts: PolicyParts) -> None:
        self._parts = parts
        self._base = OneBase(
            lambda: self.own.driver.machine,
            lambda: self.everyone[1:],
            self.end,
            lambda: parts.engine.awaits_commit,
            parts.bounds.pin_drain_s,
        )
        self.own = ServedPolicy("", 0.0, parts, deployments_own(parts, self._base.of_base))
        self.own.begin()
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)
        # By (name, made), the next sequence number of one that made way.
        self._seqs: OrderedDict[tuple[str, float], int] = OrderedDict()
        # Besides the own.
        self._others: dict[str, ServedPolicy] = {}
        # By name, when the newest that was ended was made; the one that was ended last stands last.
        self._ended: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # Ended policies that have running requests.
        self._going: list[ServedPolicy] = []
        self._paused = False

    def __repr__(self) -> str:
        return f"ServedPolicies({', '.join(self._others)})"

    def __iter__(self) -> Iterator[ServedPolicy]:
        """The own first."""
        return iter((self.own, *self._others.values()))

    @property
    def everyone(self) -> list[ServedPolicy]:
        """With those that were ended and have requests left."""
        return [*self, *self._going]

    @property
    def requests(self) -> int:
        """Inside all gates."""
        return sum(policy.gate.inside for policy in self.everyone)

    @property
    def loading(self) -> bool:
        """Whether a swap is under way, or due."""
        return not all(policy.driver.resting for policy in self.everyone)

    def start(self, info: ModelInfo) -> None:
        """A boot's engine runs."""
        self.own.start(info)

    def desire(self, desired: Desired, info: ModelInfo) -> None:
        """Of another policy than the own. info: of the engine."""
        name, made = desired.policy, desired.made
        policy = self._others.get(name)
        if made and made <= self._ended.get(name, 0.0):
            return
        if policy is not None and policy.made != made:
            if made < policy.made:
                return
            self.end(name, policy.made)
            policy = None
        if policy is None:
            self._make_room(name)
            seq = self._seqs.pop((name, made), 0)
            number = next(self._numbers)
            policy = ServedPolicy(
                name, made, self._parts, besides(self._parts, name, number, self._base.of_policy)
            )
            self._others[name] = policy
            policy.gate.pause(self._paused)
            policy.begin(seq)
            policy.start(info)
            policy.drive()
            policy.gate.set(Door.OPEN)
        if policy.driver.desire(desired):
            policy.used_at = next(self._uses)

    def _make_room(self, name: str) -> None:
        """Raises Overloaded."""
        most = self._parts.bounds.policies_max
        if len(self._others) + sum(policy.users > 0 for policy in self._going) < most:
            return
        leaver = to_make_way(self._others.values(), self._parts.outside.monotonic())
        if leaver is None:
            raise Overloaded(
                f"all {most} policies of this replica are in use; {name!r} may be asked for again"
            )
        log.info("the policy %s makes way for %s", leaver.name, name)
        self._seqs[leaver.name, leaver.made] = leaver.driver.machine.seq
        if len(self._seqs) > GONE_KNOWN:
            self._seqs.popitem(last=False)
        self._go(leaver)

    def hint(self, hint: Hint) -> None:
        """Fetch files early that a target will need. Nothing is fetched for a policy that is not here."""
        policy = self._others.get(hint.policy) if hint.policy else self.own
        if policy is not None:
            policy.hints.add(hint)

    @contextmanager
    def serves(self, name: str) -> Iterator[Service]:
        """Within, it stays here. Raises PolicyNotLoaded."""
        with self.named(name).in_use(self._uses) as service:
            yield service

    def named(self, name: str) -> ServedPolicy:
        """One that serves. Raises PolicyNotLoaded."""
        policy = self._others.get(name)
        if policy is None or not policy.serves:
            raise PolicyNotLoaded(f"the policy {name!r} is not loaded on this replica; retry this request")
        return policy

    def end(self, name: str, made: float) -> bool:
        """Forget a policy; running requests continue to their end. True if it was here."""
        self._note_end(name, made)
        policy = self._others.get(name)
        if policy is None:
            # It may have made way, and left files.
            self._close(self._remove_files(name), f"end of the files of policy {name}")
        if policy is None or policy.made != made:
            return False
        self._go(policy)
        return True

    def _go(self, policy: ServedPolicy) -> None:
        del self._others[policy.name]
        self._going.append(policy)
        policy.shut()
        self._close(self._end(policy), f"end of policy {policy.name}")
        self._parts.on_change()

    def _close(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=what)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _note_end(self, name: str, made: float) -> None:
        newest = max(made, self._ended.pop(name, 0.0))
        if newest:
            self._ended[name] = newest
        if len(self._ended) > ENDED_KNOWN:
            del self._ended[next(iter(self._ended))]

    async def _end(self, policy: ServedPolicy) -> None:
        await policy.left()
        await policy.close()
        self._parts.engine.end_policy(policy.key)
        self._going.remove(policy)
        if policy.made <= self._ended.get(policy.name, 0.0):
            # It did not only make way.
            await self._remove_files(policy.name)

    async def _remove_files(self, name: str) -> None:
        """Unless another policy of the name has taken them over, or one that goes still has them."""
        if not any(policy.name == name for policy in self.everyone):
            await self._parts.files.source.remove_policy(name)

    def abort(self, ids: tuple[str, ...] | None = None, *, held: bool = True) -> int:
        """Ends requests with what they have; None: all. held: also those that wait at a gate. Returns of how many."""
        return sum(policy.abort(ids, held=held) for policy in self.everyone)

    def pause(self, paused: bool) -> None:
        self._paused = paused
        for policy in self.everyone:
            policy.gate.pause(paused)

    def reports(self, down: str | None = None) -> tuple[PolicyReport, ...]:
        """The own first. down: why the engine cannot be started again."""
        own, *others = (policy.report() for policy in self)
        return (replace(own, error=down) if down and own.error is None else own, *others)

    def shut(self) -> None:
        """A boot ends: no policy takes snapshots any more."""
        for policy in self.everyone:
            policy.shut()

    async def close(self) -> None:
        """Of a boot that ended, with its engine."""
        # Requests of ended policies end with the engine; no one waits for their clients.
        others, self._others, self._going = self.everyone[1:], {}, []
        self._seqs.clear()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(self.own.stopped(), *(policy.close() for policy in others))
