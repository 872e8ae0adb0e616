"""A trace before simulated replicas: the production placement, account, queue, scheduler and block pool, on a simulated clock.

Owns: how rules of the KV budget are compared in seconds, before `make bench-agents` measures them. A step of a replica takes as
long as its decodes, prompt tokens and new turns cost on the machine of docs/benchmarks.md; replicas share its two cores.
Always holds: a seed is one run. The first round has seen no session end, the second one knows what the first one came to.

    python -m agentic.simulated [--trace FILE] [--tokens-scale F] [--kv 0.6 1 2] [--offload 0 0.4] [--seeds 3] [--apart]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agentic.trace import Trace, first_groups, ideal_prefill, live_tokens, read, scaled
from midstream.core.types import GenerateRequest, SamplingParams, Session
from midstream.engine.embedded.blocks import BlockPool
from midstream.engine.embedded.offload import CopyPrice, Offload
from midstream.engine.embedded.scheduler import Scheduler, Sequence, StepWork
from midstream.fleet.placement import Candidate, Fleet
from midstream.fleet.prefixes import SessionGroup
from midstream.replica.kv_account import Beginning, KvAccount
from midstream.replica.kv_queue import KvQueue, Waiting

BLOCK, CORES, REPLICAS = 16, 2, 4
VOCABULARY = 1000
#: Core seconds of a step, of each decode, of each token of a prompt, and of each turn.
STEP_S, DECODE_S, PREFILL_S, TURN_S = 0.9e-3, 0.08e-3, 25e-6, 1.5e-3
#: Of each token that is copied back from the second tier of the KV cache.
COPY_S = 1e-6
#: From an answer to its client.
WIRE_S = 1e-3
SHARE = 0.95
LOAD_BOUND = 0.25
FAMILY = 32


class Figures(NamedTuple):
    """over_ideal: prompt tokens that were computed, over each token once in the whole fleet. waited: turns."""

    wall_s: float
    p90_s: float
    over_ideal: float
    waited: int


@dataclass(eq=False)
class Turn:
    """done: is called with the answer."""

    session: Session
    first: Beginning
    prompt: list[int]
    answer: int
    done: Callable[[list[int]], None]


class Replica:
    """blocks, offloaded: of the KV cache, and of its second tier."""

    def __init__(self, fleet: SimulatedFleet, blocks: int, offloaded: int, budget: bool) -> None:
        self._fleet, self._budget = fleet, budget
        price = CopyPrice()
        price.computed(1_000_000, PREFILL_S * 1_000_000)
        price.copied(1_000_000, COPY_S * 1_000_000)
        nothing = lambda source, target: None  # noqa: E731
        self._offload = Offload(blocks + 1, offloaded, move=nothing, merge=nothing, price=price)
        self.scheduler = Scheduler(
            BlockPool(blocks + 1, BLOCK, self._offload),
            max_batch_tokens=576,
            max_prefill_tokens=512,
            max_running=64,
            scored=lambda block, offset, epoch: False,
            on_allocate=lambda block: None,
            clock=lambda: fleet.now,
        )
        self.account = KvAccount()
        self.account.capacity = int(SHARE * (blocks + offloaded) * BLOCK) if budget else 0
        self.queue = KvQueue(self.account, waiting_max=100_000)
        self.busy = False
        self.placed = self.computed = 0
        self._known: set[Session] = set()
        self._turns: dict[Sequence, Turn] = {}
        self._overhead_s = 0.0

    def enter(self, turn: Turn) -> None:
        account, now = self.account, self._fleet.now
        account.demote(now)
        one = Waiting(turn.session, turn.first, len(turn.prompt), None, 0, now, go=lambda: self._go(turn))
        one.begun = turn.session in account or turn.session in self._known
        if not self.queue.join(one):
            account.begin(turn.session, turn.first, len(turn.prompt), now)
            self._go(turn)
        else:
            self._fleet.waited += 1
            self.settle()

    def over(self, session: Session) -> None:
        self._known.discard(session)
        self.queue.ended(session)
        self.scheduler.end_session("\0".join(session))
        self.account.end(session)
        self.settle()

    def settle(self) -> None:
        due = self.queue.admit(self._fleet.now) if len(self.queue) else None
        if due is not None and len(self.queue):
            self._fleet.at(max(due, self._fleet.now + 0.001), self.settle)

    def _go(self, turn: Turn) -> None:
        self._known.add(turn.session)
        kept = (
            {"returns_s": self.account.returns_s(), "kept_s": self.account.silent_s()} if self._budget else {}
        )
        request = GenerateRequest(
            request_id=str(next(self._fleet.numbers)),
            prompt=tuple(turn.prompt),
            sampling=SamplingParams(max_tokens=turn.answer),
            session="\0".join(turn.session),
            **kept,
        )
        sequence = Sequence(request, 0)
        self._turns[sequence] = turn
        self._overhead_s += TURN_S
        self.scheduler.add(sequence)
        if not self.busy:
            self._step()

    def _step(self) -> None:
        restored = self._offload.restored
        works = self.scheduler.plan()
        restored = self._offload.restored - restored
        self.busy = bool(works or restored)
        if not self.busy:
            return
        decodes = sum(work.size == 1 for work in works)
        prefill = sum(work.size for work in works if work.size > 1)
        cost_s = STEP_S + DECODE_S * decodes + PREFILL_S * prefill + self._overhead_s
        cost_s += COPY_S * BLOCK * restored
        self._overhead_s = 0.0
        crowd = max(1.0, sum(one.busy for one in self._fleet.replicas) / CORES)
        self._fleet.at(self._fleet.now + cost_s * crowd, lambda: self._stepped(works))

    def _stepped(self, works: list[StepWork]) -> None:
        for work in works:
            if not work.seq.done:
                self._advanced(work)
        self.settle()
        self._step()

    def _advanced(self, work: StepWork) -> None:
        sequence, turn = work.seq, self._turns[work.seq]
        self.scheduler.advance(work)
        self.computed += max(0, min(work.last, sequence.prompt_len) - max(work.first, work.write_from))
        self.account.found(turn.session, sequence.cached_tokens or 0)
        if work.last < len(sequence.tokens):
            return
        sequence.tokens.append(self._fleet.draw.randrange(VOCABULARY))
        if sequence.generated == turn.answer:
            self.scheduler.remove(sequence)
            del self._turns[sequence]
            answer = sequence.tokens[sequence.prompt_len :]
            self.account.end_turn(turn.session, len(sequence.tokens), self._fleet.now)
            self._fleet.at(self._fleet.now + WIRE_S, lambda: turn.done(answer))


@dataclass(eq=False)
class SimulatedFleet:
    """kv, offload: of the trace's live tokens, what the caches of all replicas hold, and their second tiers. budget: whether
    sessions wait. apart: sessions of a group are placed as any others."""

    trace: Trace
    kv: float
    seed: int
    budget: bool = True
    offload: float = 0.0
    apart: bool = False
    now: float = 0.0
    waited: int = 0
    draw: random.Random = field(init=False)
    replicas: list[Replica] = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.numbers = itertools.count()
        blocks, offloaded = (
            int(share * live_tokens(self.trace) / REPLICAS) // BLOCK for share in (self.kv, self.offload)
        )
        self.replicas = [Replica(self, blocks, offloaded, self.budget) for _ in range(REPLICAS)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._round = 0
        self._over_s: list[float] = []

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self.numbers), call))

    def round(self) -> Figures:
        """All trajectories at once, under new keys and with new tokens."""
        self._round, self._over_s, self.waited, began = self._round + 1, [], 0, self.now
        for replica in self.replicas:
            replica.computed = replica.placed = 0
        shared, prompts = self._drawn(self.trace.shared_len), dict[int, list[int]]()
        homes = dict[int, str]()
        for place, one in enumerate(self.trace.trajectories):
            if one.group not in prompts:
                prompts[one.group] = shared + self._drawn(one.prompt_len - len(shared))
            self._begin(place, self._placed(place, one.group, homes), prompts[one.group])
        while len(self._over_s) < len(self.trace.trajectories):
            self.now, _, call = heapq.heappop(self._events)
            call()
        for replica in self.replicas:
            replica.account.check()
            replica.scheduler.pool.check()
        times = sorted(over - began for over in self._over_s)
        computed = sum(replica.computed for replica in self.replicas)
        return Figures(
            times[-1], times[int(0.9 * len(times))], computed / ideal_prefill(self.trace), self.waited
        )

    def _placed(self, place: int, group: int, homes: dict[int, str]) -> Replica:
        """By the gateway's rule, which knows of each session, while none has ended. homes: where each group was placed."""
        counts = {str(number): replica.placed for number, replica in enumerate(self.replicas)}
        name = f"{self.seed}-{self._round}"
        told = None if self.apart else SessionGroup((name, f"group {group}"), homes.get(group, ""))
        fleet = Fleet(Candidate(*one) for one in counts.items())
        placed = fleet.place_session((name, str(place)), LOAD_BOUND, None, counts, told)
        assert placed is not None
        homes[group] = placed[0].name
        replica = self.replicas[int(placed[0].name)]
        replica.placed += 1
        return replica

    def _drawn(self, count: int) -> list[int]:
        return self.draw.choices(range(VOCABULARY), k=count)

    def _begin(self, place: int, replica: Replica, prompt: list[int]) -> None:
        plan, session = self.trace.trajectories[place].plan, ("", f"{self._round}-{place}")
        first = Beginning(hash(tuple(prompt[:FAMILY])), hash(tuple(prompt)))

        def turn(number: int, history: list[int]) -> None:
            def done(answer: list[int]) -> None:
                if number + 1 == len(plan):
                    self._over_s.append(self.now)
                    replica.over(session)
                    return
                more = plan[number + 1]
                longer = history + answer + self._drawn(more.added)
                self.at(self.now + more.pause_s, lambda: turn(number + 1, longer))

            replica.enter(Turn(session, first, history, plan[number].answer, done))

        self.at(self.now + 0.005 * self.draw.random(), lambda: turn(0, list(prompt)))


def rounds(
    trace: Trace, kv: float, seeds: int, *, budget: bool = True, offload: float = 0.0, apart: bool = False
) -> list[Figures]:
    """Medians of the first and of the second round."""
    fleets = [SimulatedFleet(trace, kv, seed, budget, offload, apart) for seed in range(seeds)]
    found = [(fleet.round(), fleet.round()) for fleet in fleets]
    return [
        Figures(*map(statistics.median, zip(*each, strict=True)))  # type: ignore[arg-type]
        for each in zip(*found, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=Path(__file__).parent / "traces" / "coding.jsonl")
    parser.add_argument("--tokens-scale", type=float, default=1 / 48)
    parser.add_argument("--kv", nargs="*", type=float, default=[0.6, 1.0, 2.0])
    parser.add_argument("--offload", nargs="*", type=float, default=[0.0, 0.4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="sessions of a group are placed as any others")
    args = parser.parse_args()
    trace = scaled(first_groups(read(args.trace), 16, 6), args.tokens_scale, 0.03)
    for kv, offload, budget in itertools.product(args.kv, args.offload, (False, True)):
        found = rounds(trace, kv, args.seeds, budget=budget, offload=offload, apart=args.apart)
        for name, one in zip(("first", "second"), found, strict=True):
            print(
                f"{kv:4.0%} + {offload:4.0%} {'budget' if budget else 'none':6} {name:6} wall {one.wall_s:5.2f} s,"
                f" p90 {one.p90_s:5.2f} s, prefill / ideal {one.over_ideal:5.3f}, {one.waited} turns waited"
            )


if __name__ == "__main__":
    main()
