"""A real vLLM server whose processes are killed or stopped in drawn phases of a swap, by files or by a trainer's four calls.

`python tests/soak/vllmkills.py --seeds 0:32` runs so many rounds. Each block of sixteen seeds has one for each phase. In every
other block stops end after some seconds. Such rounds follow each other on one server; a process that is killed, or stopped for
good, costs a start.

Owns: one engine, streams in it, a swap under them, and one strike a round. A replica and a gateway are not in it.
Always holds: a round that is struck ends. Each stream has its end, or an error that says so, within LOUD_S of the strike, and
LOADING_S more while a call that may take so long is under way, unless a process stays stopped. Every token has the numbers of
its label. Of a server that was lost no process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import soakpath  # noqa: F401
import vllm_door

sys.path.append(str(Path(__file__).parents[1] / "vllm"))

# isort: split
import torch
from recompute import Recomputer
from serving import descendants
from test_vllm_sampling_numbers import CLASSES, DENSE
from vllm_bed import PYTHON, cmdline, started_at
from vllm_door import Door, DoorFailed
from vllm_streams import random_prompt

from midstream.core.server_settings import VllmSettings
from midstream.core.types import GenerateRequest, SamplingParams, TokenRecord
from midstream.engine.base import EngineDied, StagingFailed, StreamLost
from midstream.engine.vllm.engine import VllmEngine
from midstream.models.tiny_moe import build_tokenizer

VICTIMS = ("Worker", "EngineCore", "api_server")
SWAP = ("stage", "look", "pause", "switch", "set_version", "resume", "check", "none")
PHASES = (*SWAP, *vllm_door.PHASES)
HOWS = (signal.SIGKILL, signal.SIGSTOP)
STREAMS, TOKENS = 6, 400
#: A strike comes so long after a call began, at most. A stop that ends takes so long.
LATE_S, STALL_S = 0.05, (0.05, 5.0)
LOUD_S, LOADING_S = 10.0, 9.0
#: In which the core may be held up for LOADING_S.
LONG = {"stage", "look", "switch", *vllm_door.PHASES} - {"joined", "written"}
TOLERANCE = 1e-4


@dataclass
class Reading:
    request: GenerateRequest
    records: list[TokenRecord] = field(default_factory=list)
    end: str = ""
    at: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, engine: VllmEngine) -> None:
        try:
            async for event in engine.generate(self.request):
                self.records += event.tokens
                self.end = event.error or event.finish or self.end
                self.begun.set()
        except (EngineDied, StreamLost) as error:
            self.end = f"{type(error).__name__}: {error}"
        self.at = time.monotonic()
        self.begun.set()

    @property
    def whole(self) -> bool:
        return self.end == "length" and len(self.records) == TOKENS


@dataclass
class Strike:
    """stall_s: after which the process goes on; 0.0: never. at: when it came; 0.0: it did not."""

    victim: str
    how: signal.Signals
    phase: str
    late_s: float
    pid: int
    stall_s: float = 0.0
    at: float = 0.0
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def come(self) -> None:
        """Also in another thread than the loop's."""
        if not self.at:
            self.at = time.monotonic()
            os.kill(self.pid, self.how)
            if self.stall_s:
                self.loop.call_soon_threadsafe(self.loop.call_later, self.stall_s, self.end)

    def reached(self, phase: str) -> None:
        if phase == self.phase:
            self.come()

    def end(self) -> None:
        # The watch may have ended it, as one that hangs.
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def around(self, call: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
        async def struck(*args: Any, **kwargs: Any) -> Any:
            now = self._phase_of(name, args)
            if now == self.phase and now not in vllm_door.REACHED:
                self.loop.call_later(self.late_s, self.come)
            return await call(*args, **kwargs)

        return struck

    def _phase_of(self, name: str, args: tuple[Any, ...]) -> str:
        """Of a call to the server."""
        if name == "transfer":
            return vllm_door.CALLS.get(args[0], "")
        if name == "ask_workers":
            return str(args[1]["do"]) if args[0] == "midstream_weights" else ""
        return "hold" if name == "pause" and self.phase in vllm_door.PHASES else name

    def __str__(self) -> str:
        verb = "killed" if self.how is signal.SIGKILL else "stopped"
        verb += f" for {self.stall_s:.1f} s" if self.stall_s else ""
        return f"{self.victim} {verb} {self.late_s * 1e3:.0f} ms into {self.phase}"


def draw(seed: int, family: Collection[int]) -> Strike:
    rng = random.Random(seed)
    victim, phase = rng.choice(VICTIMS), PHASES[seed % len(PHASES)]
    pid = next(pid for pid in family if victim.encode() in cmdline(pid))
    how, late_s = rng.choice(HOWS), rng.uniform(0.0, LATE_S)
    if phase in vllm_door.REACHED:
        late_s = 0.0
    if (seed // len(PHASES)) % 2:
        return Strike(victim, how, phase, late_s, pid)
    return Strike(victim, signal.SIGSTOP, phase, late_s, pid, rng.uniform(*STALL_S))


class Beaten:
    """An engine, with a server that is started when a round needs one.

    places: the weights that it is switched between, the ones of its start first. folder: for what a trainer writes.
    """

    def __init__(self, engine: VllmEngine, places: dict[str, Path], folder: Path) -> None:
        self.engine = engine
        self._door = Door(engine, places["base"], folder)
        self.starts = 0
        self._places = places
        self._upcoming = itertools.cycle([*places][1:])
        # Of the server that runs, if one does: its processes, each with the time at which it was started.
        self.born: dict[int, str] = {}
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {}

    async def start(self) -> list[str]:
        if self.born:
            return []
        info = await self.engine.start()
        self.starts += 1
        pid = self.engine._server.pid
        assert pid is not None
        self.born = {pid: started_at(pid) for pid in (pid, *descendants(pid))}
        control = self.engine._control
        self._calls = {
            name: getattr(control, name)
            for name in ("pause", "set_version", "resume", "ask_workers", "transfer")
        }
        self._upcoming = itertools.cycle([*self._places][1:])
        return [] if info.card.has("short_swap") else [f"no short_swap: {info.card.why}"]

    def strikes_in(self, strike: Strike) -> None:
        for name, call in self._calls.items():
            setattr(self.engine._control, name, strike.around(call, name))

    async def close(self) -> list[str]:
        await self.engine.close()
        left = [pid for pid, start in self.born.items() if start and started_at(pid) == start]
        self.born = {}
        return [f"processes were left: {[cmdline(pid) for pid in left]}"] if left else []

    async def swap(self, strike: Strike) -> str:
        engine, name = self.engine, next(self._upcoming)
        try:
            place = self._places[name]
            if strike.phase in vllm_door.PHASES:
                place = await self._door.write(place, strike.reached)
            await engine.stage(name, place)
            await engine.commit(name)
            if strike.phase == "check":
                asyncio.get_running_loop().call_later(strike.late_s, strike.come)
            check = GenerateRequest(
                request_id="check",
                prompt=tuple(random_prompt("check", 20)),
                sampling=SamplingParams(max_tokens=0),
                prompt_records=20,
                urgent=True,
            )
            async for event in engine.generate(check):
                assert event.error is None or strike.at, event.error
            engine.settle(name, sound=True)
        except (DoorFailed, EngineDied, StagingFailed, StreamLost) as error:
            return f"{type(error).__name__}"
        finally:
            # A phase that this swap had none of, or that was over at once.
            asyncio.get_running_loop().call_later(0.3, strike.come)
        return "swapped"


def streams_of(seed: int) -> list[Reading]:
    return [
        Reading(
            GenerateRequest(
                request_id=f"{seed} {i}",
                prompt=tuple(random_prompt(f"{seed} {i}", 20 + i)),
                sampling=SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=seed + i),
                want_logprobs=True,
            )
        )
        for i in range(STREAMS)
    ]


async def one_round(beaten: Beaten, seed: int) -> tuple[Strike, list[Reading], str, list[str]]:
    wrong = await beaten.start()
    strike = draw(seed, beaten.born)
    beaten.strikes_in(strike)
    readings = streams_of(seed)
    tasks = [asyncio.create_task(reading.run(beaten.engine)) for reading in readings]
    for reading in readings:
        await reading.begun.wait()
    swapped = await beaten.swap(strike)
    _, late = await asyncio.wait(tasks, timeout=120.0)
    for task in late:
        task.cancel()
    wrong += [f"{len(late)} streams had no end"] if late else []
    # A process that stays stopped is seen whatever holds the server up.
    stays = strike.how is signal.SIGSTOP and not strike.stall_s
    bound = LOUD_S + (LOADING_S if strike.phase in LONG and not stays else 0.0)
    for reading in readings:
        if not reading.whole and strike.at and reading.at - strike.at > bound:
            wrong.append(
                f"{reading.request.request_id} ended {reading.at - strike.at:.1f} s after: {reading.end}"
            )
        if not reading.whole and reading.end in ("", "length", "stop"):
            wrong.append(f"{reading.request.request_id} ended short: {reading.end!r}, {len(reading.records)}")
    lives = strike.stall_s and swapped == "swapped" and all(reading.whole for reading in readings)
    if not lives:
        wrong += await beaten.close()
    return strike, readings, swapped, wrong


def numbers_wrong(recomputer: Recomputer, reading: Reading) -> list[str]:
    if not reading.records:
        return []
    prompt, labels = [*reading.request.prompt], [record.snapshot for record in reading.records]
    ids = [record.token_id for record in reading.records]
    kv = [labels[0]] * len(prompt) + labels[1:]
    logits = recomputer.passes([*prompt, *ids[:-1]], kv).logits[len(prompt) - 1 :]
    own = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    off = (own - torch.tensor([record.logprob for record in reading.records])).abs()
    if float(off.max()) <= TOLERANCE:
        return []
    at = int(off.argmax())
    return [f"{reading.request.request_id}: token {at} of {labels[at]} is {float(off[at]):.2g} off"]


@dataclass
class Found:
    """Of all rounds. slowest_s: from a strike to the end of a stream, at most."""

    recomputer: Recomputer
    wrong: list[str] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    tokens: int = 0

    async def take(
        self, seed: int, strike: Strike, readings: list[Reading], swapped: str, wrong: list[str]
    ) -> None:
        for reading in readings:
            # Beside other rounds, whose times are measured.
            wrong += await asyncio.to_thread(numbers_wrong, self.recomputer, reading)
            self.tokens += len(reading.records)
        ended = [reading for reading in readings if not reading.whole]
        worst = max((reading.at - strike.at for reading in ended), default=0.0) if strike.at else 0.0
        self.slowest_s = max(self.slowest_s, worst)
        how = "stalled" if strike.stall_s else strike.how.name
        self.tally.update(("rounds", f"{strike.victim} {how}", f"in {strike.phase}"))
        self.tally["struck"] += bool(strike.at)
        said = f"{len(ended)} of {STREAMS} streams ended, {worst:.1f} s after at most, {swapped}"
        print(f"seed {seed}: {strike}: {said}{''.join(f'; WRONG: {w}' for w in wrong)}", flush=True)
        self.wrong += [f"seed {seed}: {w}" for w in wrong]

    def __str__(self) -> str:
        numbers = f"{self.tokens} tokens computed again; at most {self.slowest_s:.1f} s"
        return f"{dict(self.tally)}; {numbers}; {len(self.wrong)} wrong"


async def one_after_another(beaten: Beaten, seeds: Iterator[int], until: float, found: Found) -> None:
    try:
        while time.monotonic() < until and (seed := next(seeds, None)) is not None:
            await found.take(seed, *await one_round(beaten, seed))
    finally:
        found.wrong += await beaten.close()
        found.tally["starts"] += beaten.starts


async def run(seeds: Iterable[int], until: float, beside: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        places = {}
        for number, name in enumerate(("base", "next")):
            config, model = CLASSES["qwen3"]
            torch.manual_seed(number)
            places[name] = Path(folder) / name
            model(config(**DENSE)).save_pretrained(places[name])
            build_tokenizer().save_pretrained(places[name])
        flags = ["--enforce-eager", "--max-model-len", "2048", "--dtype", "float32"]
        settings = VllmSettings(
            python=str(PYTHON), args=flags, env={"VLLM_CPU_KVCACHE_SPACE": "1"}, weight_transfer="gloo"
        )
        places["back"] = places["base"]
        found, coming = Found(Recomputer(places)), iter(seeds)
        async with asyncio.TaskGroup() as group:
            for number in range(beside):
                engine = VllmEngine(places["base"], settings, Path(folder) / f"cache-{number}")
                beaten = Beaten(engine, places, Path(folder) / f"written-{number}")
                group.create_task(one_after_another(beaten, coming, until, found))
    print(found, flush=True)
    return 1 if found.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:32", help="first:end, several of them with commas")
    parser.add_argument("--minutes", type=float, default=1e6, help="no round begins after so long")
    parser.add_argument("--beside", type=int, default=1, help="servers at a time")
    given = parser.parse_args()
    ranges = [range(*map(int, part.split(":"))) for part in given.seeds.split(",")]
    torch.set_num_threads(1)
    return asyncio.run(run(itertools.chain(*ranges), time.monotonic() + 60 * given.minutes, given.beside))


if __name__ == "__main__":
    sys.exit(main())
