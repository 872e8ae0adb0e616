"""Kills and stalls of who takes part in a push, each in a drawn phase of it, for histories in which every trainer pushes.

Owns: the pairs of victim, phase and kind, the plan of such a history, and the strikes themselves.
Always holds: over as many seeds as there are pairs, each pair is drawn. A strike counts for its pair only if the phase is under
way when it strikes. A stall ends.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from simloop import PROCESS
from simprocess import Process

from midstream.core.config import PushSettings

if TYPE_CHECKING:
    from simworld import World

VICTIMS = ("trainer", "replica", "receiver", "engine", "gateway")
#: signal: from the commit in the ledger until the call to finish is answered. keep: while the files come into the bucket.
PHASES = ("init", "start", "update", "finish", "signal", "keep")
KINDS = ("kill", "stall")
PAIRS = tuple(itertools.product(VICTIMS, PHASES, KINDS))
#: For so long a strike waits for its victim, if there is none yet.
VICTIM_S = 0.5
#: What the deaths of processes cost besides: other trouble, in so many of the histories.
WITH_WEATHER = 0.3
#: Of these histories, those whose engines take weights in place.
IN_PLACE = 0.3
WEATHER = ("bucket", "disk", "ledger", "scale", "staging", "clock")
#: Behind every deadline of a push, whatever ends it.
LONGEST_S = 40.0
COUNTED = "strike: "


class Strike(NamedTuple):
    """which: of the victims that there are. after_s: since the phase began. s: how long a stall is."""

    victim: str
    phase: str
    kind: str
    which: float
    after_s: float
    s: float

    def __str__(self) -> str:
        return f"{self.victim}, {self.phase}, {self.kind}"


def drawn_strike(pair: tuple[str, str, str], rng: random.Random) -> Strike:
    after_s = rng.choice((0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.3)))
    # Trainers and gateways that stand still too long are given up by their peers in the simulation.
    longest = 14.0 if pair[0] in ("trainer", "gateway") else LONGEST_S
    seconds = rng.choice((rng.uniform(0.2, 2.0), rng.uniform(2.0, 14.0), rng.uniform(10.0, longest)))
    return Strike(*pair, rng.random(), round(after_s, 4), round(seconds, 3))


def settings_of(rng: random.Random) -> dict[str, Any]:
    return {
        "deployment": {
            "replicas": rng.choice((1, 2, 2, 2, 3)),
            "transition": rng.choice(("async", "async", "sync")),
        },
        "gateway": {"workers": rng.choice((1, 2, 2)), "swap_order": rng.choice(("together", "one-by-one"))},
        "push": PushSettings(
            join_s=rng.choice((2.0, 5.0)),
            update_s=rng.choice((3.0, 6.0)),
            finish_s=rng.choice((5.0, 10.0)),
            quorum=rng.choice((1.0, 1.0, 0.5)),
        ),
    }


def ranks_of(seed: int) -> int:
    """How many ranks each engine has in a trainer's group, if it takes weights in place; else 0."""
    rng = random.Random(f"{seed} in place")
    return rng.choice((1, 1, 2)) if rng.random() < IN_PLACE else 0


def entries(seed: int, rng: random.Random) -> Iterator[tuple[float, str, Any]]:
    """What befalls the pushes, as (time, kind, value). The first push has the pair of the seed."""
    pairs = [PAIRS[seed % len(PAIRS)], *rng.choices(PAIRS, k=rng.randint(0, 2))]
    for pair in pairs:
        yield rng.uniform(0.0, 8.0), "push", _push(rng, drawn_strike(pair, rng))
    # The ledger does not answer a commit, and the trainer asks no second time.
    lost = random.Random(f"{seed} lost")
    for _ in range(rng.randint(1, 2)):
        yield rng.uniform(0.0, 20.0), "push", _push(rng, None) | {"lost": lost.random() < 0.2}


def _push(rng: random.Random, strike: Strike | None) -> dict[str, Any]:
    trainer = rng.choice((0, 0, 0, 0, 1))
    return {
        "trainer": trainer,
        "weights": rng.randrange(6),
        "policy": rng.choice(("all", "new_session", "none", None)),
        "calls": rng.randint(1, 3),
        "packed": rng.random() < 0.7,
        "trouble": None,
        "phase": "",
        "s": 0.0,
        # Else the other one is refused for as long as this one lives.
        "shutdown": trainer == 1 or rng.random() < 0.1,
        "strike": strike,
    }


class Strikes:
    """Does what is drawn. gateway_upset(s): the server may not answer for so long. disturbed(): clients may notice."""

    def __init__(
        self,
        world: World,
        say: Callable[[str], None],
        gateway_upset: Callable[[float], None],
        disturbed: Callable[[], None],
    ) -> None:
        self._world, self._say = world, say
        self._gateway_upset, self._disturbed = gateway_upset, disturbed
        self._tasks: list[asyncio.Task[None]] = []

    def begin(
        self,
        strike: Strike,
        still: Callable[[], bool],
        missed: Callable[[Strike], None],
        trainer: Callable[[], None],
        process: Process,
        at: Process | None = None,
    ) -> None:
        """Strike later. still: whether the phase is under way. missed: is called if it was not.

        trainer: kills the trainer, whose process is `process`. at: works in the phase, if that is known.
        """
        task = self._world.outside(
            f"strike {strike}", self._strike(strike, still, missed, trainer, process, at)
        )
        self._tasks.append(task)

    def over(self) -> bool:
        """No stall is under way."""
        return all(task.done() for task in self._tasks)

    async def _strike(
        self,
        strike: Strike,
        still: Callable[[], bool],
        missed: Callable[[Strike], None],
        trainer: Callable[[], None],
        process: Process,
        at: Process | None,
    ) -> None:
        await asyncio.sleep(strike.after_s)
        until = self._world.now + VICTIM_S
        while still() and not self._world.counts["calm"]:
            act = self._act(strike, trainer, process, at)
            if act is not None:
                self._say(f"struck: {strike}")
                self._world.counts[f"{COUNTED}{strike}"] += 1
                self._disturbed()
                await act()
                return
            if self._world.now > until:
                break
            await asyncio.sleep(0.01)
        self._world.counts["a strike missed its phase"] += 1
        missed(strike)

    def _act(
        self, strike: Strike, trainer: Callable[[], None], process: Process, at: Process | None
    ) -> Callable[[], Any] | None:
        """What strikes; None: no victim is there."""
        kill = strike.kind == "kill"
        match strike.victim:
            case "trainer":
                return _at_once(trainer) if kill else lambda: self._stop(process, strike.s)
            case "receiver":
                ends = [e for e in self._world.receivers.ends.values() if e.process.alive and not e.hung]
                if not ends:
                    return None
                end = ends[int(strike.which * len(ends))]
                return _at_once(lambda: self._world.receivers.end(end.process) if kill else end.hang())
            case "engine":
                victim = self._victim("replica", strike.which, at)
                if victim is None or victim.engine is None:
                    return None
                return lambda: self._strike_engine(victim, strike)
            case _:
                victim = self._victim(strike.victim, strike.which, at)
                if victim is None:
                    return None
                if strike.victim == "gateway":
                    self._gateway_upset(5.0 if kill else strike.s)
                if kill:
                    return _at_once(lambda: self._world.processes.signal(victim, signal.SIGKILL))
                return lambda: self._stop(victim, strike.s)

    def _victim(self, prefix: str, which: float, at: Process | None) -> Process | None:
        if at is not None and at.alive and at.name.startswith(prefix):
            return at
        there = [
            one
            for one in self._world.processes.alive()
            if one.name.startswith(prefix) and not one.stopped and (prefix != "replica" or one.engine)
        ]
        return there[int(which * len(there))] if there else None

    async def _stop(self, process: Process, seconds: float) -> None:
        self._world.processes.signal(process, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._world.processes.signal(process, signal.SIGCONT)

    async def _strike_engine(self, victim: Process, strike: Strike) -> None:
        if strike.kind == "stall":
            victim.engine.stalled_until = self._world.now + strike.s
            await asyncio.sleep(strike.s)
            return
        dying = victim.engine.die("the simulated engine crashed")
        self._world.loop.create_task(dying, name="death", context=victim.context.copy())


def _at_once(act: Callable[[], Any]) -> Callable[[], Any]:
    async def do() -> None:
        act()

    return do


def own_process() -> Process:
    return PROCESS.get()


def table(counts: Mapping[str, int]) -> str:
    """How often each pair struck, as lines."""
    found = Counter[tuple[str, str, str]]()
    for what, count in counts.items():
        if what.startswith(COUNTED):
            victim, phase, kind = what.removeprefix(COUNTED).split(", ")
            found[victim, phase, kind] += count
    lines = [f"{'kills/stalls':12}" + "".join(f"{phase:>11}" for phase in PHASES)]
    for victim in VICTIMS:
        cells = (f"{found[victim, phase, 'kill']}/{found[victim, phase, 'stall']}" for phase in PHASES)
        lines.append(f"{victim:12}" + "".join(f"{cell:>11}" for cell in cells))
    missing = [", ".join(pair) for pair in PAIRS if not found[pair]]
    lines.append(f"pairs that never struck: {'; '.join(missing) or 'none'}")
    lines.append(f"{struck(counts)} kills and stalls struck")
    return "\n".join(lines)


def struck(counts: Mapping[str, int]) -> int:
    """How many kills and stalls there were."""
    return sum(count for what, count in counts.items() if what.startswith(COUNTED))
