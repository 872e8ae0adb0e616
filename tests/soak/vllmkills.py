"""A real vLLM server whose processes are killed or stopped in drawn phases of a swap.

`python tests/soak/vllmkills.py --seeds 0:20` runs so many rounds.

Owns: one engine, streams in it, a swap under them, and one strike a round. A replica and a gateway are not in it.
Always holds: a round that is struck ends. Each stream has its end, or an error that says so, within LOUD_S of the strike, and
LOADING_S more while weights are loaded. Every token has the numbers of its label. Of a server that was lost no process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import soakpath  # noqa: F401

sys.path.append(str(Path(__file__).parents[1] / "vllm"))

# isort: split
import torch
from recompute import Recomputer
from serving import descendants
from test_vllm_sampling_numbers import CLASSES, DENSE
from vllm_bed import PYTHON, cmdline, started_at
from vllm_streams import random_prompt

from midstream.core.server_settings import VllmSettings
from midstream.core.types import GenerateRequest, SamplingParams, TokenRecord
from midstream.engine.base import EngineDied, StagingFailed, StreamLost
from midstream.engine.vllm.engine import VllmEngine
from midstream.models.tiny_moe import build_tokenizer

VICTIMS = ("Worker", "EngineCore", "api_server")
PHASES = ("stage", "look", "pause", "switch", "set_version", "resume", "check", "none")
HOWS = (signal.SIGKILL, signal.SIGSTOP)
STREAMS, TOKENS = 6, 400
#: A strike comes so long after a call began, at most.
LATE_S = 0.05
LOUD_S, LOADING_S = 10.0, 9.0
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
    """at: when it came; 0.0: it did not."""

    victim: str
    how: signal.Signals
    phase: str
    late_s: float
    pid: int
    at: float = 0.0

    def come(self) -> None:
        if not self.at:
            self.at = time.monotonic()
            os.kill(self.pid, self.how)

    def around(self, call: Callable[..., Awaitable[Any]], phase: str) -> Callable[..., Awaitable[Any]]:
        async def struck(*args: Any, **kwargs: Any) -> Any:
            now = args[1]["do"] if args and args[0] == "midstream_weights" else phase
            if now == self.phase:
                asyncio.get_running_loop().call_later(self.late_s, self.come)
            return await call(*args, **kwargs)

        return struck

    def __str__(self) -> str:
        verb = "killed" if self.how is signal.SIGKILL else "stopped"
        return f"{self.victim} {verb} {self.late_s * 1e3:.0f} ms into {self.phase}"


def draw(seed: int, family: list[int]) -> Strike:
    rng = random.Random(seed)
    victim, phase = rng.choice(VICTIMS), PHASES[seed % len(PHASES)]
    pid = next(pid for pid in family if victim.encode() in cmdline(pid))
    return Strike(victim, rng.choice(HOWS), phase, rng.uniform(0.0, LATE_S), pid)


async def swap(engine: VllmEngine, strike: Strike, directory: Path) -> str:
    try:
        await engine.stage("next", directory)
        await engine.commit("next")
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
        engine.settle("next", sound=True)
    except (EngineDied, StagingFailed, StreamLost) as error:
        return f"{type(error).__name__}"
    finally:
        # A phase that this swap had none of, or that was over at once.
        asyncio.get_running_loop().call_later(0.3, strike.come)
    return "swapped"


async def one_round(
    engine: VllmEngine, seed: int, directory: Path
) -> tuple[Strike, list[Reading], str, list[str]]:
    info = await engine.start()
    wrong = [] if info.card.has("short_swap") else [f"no short_swap: {info.card.why}"]
    assert engine._server.pid is not None
    family = [engine._server.pid, *descendants(engine._server.pid)]
    born = {pid: started_at(pid) for pid in family}
    strike = draw(seed, family)
    control = engine._control
    for name in ("pause", "set_version", "resume", "ask_workers"):
        setattr(control, name, strike.around(getattr(control, name), name))
    readings = [
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
    tasks = [asyncio.create_task(reading.run(engine)) for reading in readings]
    for reading in readings:
        await reading.begun.wait()
    swapped = await swap(engine, strike, directory)
    _, late = await asyncio.wait(tasks, timeout=120.0)
    for task in late:
        task.cancel()
    wrong += [f"{len(late)} streams had no end"] if late else []
    bound = LOUD_S + (LOADING_S if strike.phase in ("stage", "look", "switch") else 0.0)
    for reading in readings:
        if not reading.whole and strike.at and reading.at - strike.at > bound:
            wrong.append(
                f"{reading.request.request_id} ended {reading.at - strike.at:.1f} s after: {reading.end}"
            )
        if not reading.whole and reading.end in ("", "length", "stop"):
            wrong.append(f"{reading.request.request_id} ended short: {reading.end!r}, {len(reading.records)}")
    await engine.close()
    left = [pid for pid, start in born.items() if start and started_at(pid) == start]
    wrong += [f"processes were left: {[cmdline(pid) for pid in left]}"] if left else []
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
        self.tally.update(("rounds", f"{strike.victim} {strike.how.name}", f"in {strike.phase}"))
        self.tally["struck"] += bool(strike.at)
        said = f"{len(ended)} of {STREAMS} streams ended, {worst:.1f} s after at most, {swapped}"
        print(f"seed {seed}: {strike}: {said}{''.join(f'; WRONG: {w}' for w in wrong)}", flush=True)
        self.wrong += [f"seed {seed}: {w}" for w in wrong]

    def __str__(self) -> str:
        numbers = f"{self.tokens} tokens computed again; at most {self.slowest_s:.1f} s"
        return f"{dict(self.tally)}; {numbers}; {len(self.wrong)} wrong"


async def one_after_another(
    engine: VllmEngine, seeds: Iterator[int], until: float, directory: Path, found: Found
) -> None:
    while time.monotonic() < until and (seed := next(seeds, None)) is not None:
        await found.take(seed, *await one_round(engine, seed, directory))


async def run(seeds: range, until: float, beside: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        places = {}
        for number, name in enumerate(("base", "next")):
            config, model = CLASSES["qwen3"]
            torch.manual_seed(number)
            places[name] = Path(folder) / name
            model(config(**DENSE)).save_pretrained(places[name])
            build_tokenizer().save_pretrained(places[name])
        flags = ["--enforce-eager", "--max-model-len", "2048", "--dtype", "float32"]
        settings = VllmSettings(python=str(PYTHON), args=flags, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
        found, coming = Found(Recomputer(places)), iter(seeds)
        async with asyncio.TaskGroup() as group:
            for number in range(beside):
                engine = VllmEngine(places["base"], settings, Path(folder) / f"cache-{number}")
                group.create_task(one_after_another(engine, coming, until, places["next"], found))
    print(found, flush=True)
    return 1 if found.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:8", help="first:end")
    parser.add_argument("--minutes", type=float, default=1e6, help="no round begins after so long")
    parser.add_argument("--beside", type=int, default=1, help="servers at a time")
    given = parser.parse_args()
    first, end = map(int, given.seeds.split(":"))
    torch.set_num_threads(1)
    return asyncio.run(run(range(first, end), time.monotonic() + 60 * given.minutes, given.beside))


if __name__ == "__main__":
    sys.exit(main())
