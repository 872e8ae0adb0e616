"""What the tokens of a real server must be: each one looked up or computed anew by plain transformers, under its label.

Owns: a process that computes, at low priority; the table of what it has computed.
Always holds: a sequence of equal tokens over KV of equal weights has equal numbers, so it is computed once and looked up after.
What the process has not come to by the end of its time is counted as unchecked, and told.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from simclient import Oracle, Turn, Wrong

#: Of a logprob. Another snapshot's are off by more in nearly every token: the weights are drawn anew for each.
ERROR = 2e-4
#: Sequences in the table; beyond that it is emptied.
KEPT_MAX = 20_000
#: Turns that are given to the process at once.
BATCH = 64

Span = tuple[str, int, int]


@dataclass(frozen=True)
class Job:
    """A whole answer. labels, kv: names of weights, not of snapshots: many snapshots have the same. told: for a finding."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    logprobs: tuple[float, ...]
    parts: tuple[tuple[int, tuple[Span, ...]], ...]
    greedy: bool
    told: str


@dataclass
class Judged:
    wrong: str | None = None
    looked_up: int = 0
    computed: int = 0


class Numbers:
    """Lives in the process of its own. weights: a directory for each name."""

    def __init__(self, weights: Mapping[str, Path]) -> None:
        import torch
        from recompute import Recomputer

        torch.set_num_threads(1)
        self._torch = torch
        self._recomputer = Recomputer(weights, attention="sdpa")
        #: Of each token of a part, its logprob and by how much the likeliest one is above it.
        self._known: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

    def judge(self, job: Job) -> Judged:
        found, first = Judged(), 0
        for until, spans in job.parts:
            if until > first and found.wrong is None:
                self._judge_part(job, first, until, merged(spans), found)
            first = until
        return found

    def _judge_part(self, job: Job, first: int, until: int, spans: tuple[Span, ...], found: Judged) -> None:
        kv = [name for name, start, end in spans for _ in range(start, end)]
        last = len(job.prompt) - 1
        again = {}
        if kv[last + first] != job.labels[first] and (first == 0 or len(job.parts) > 1):
            # All KV was there: only the pass over the last token is of what serves now.
            again = {last + first: job.labels[first]}
        begin = last + first + bool(again)
        if kv[begin : last + until] != list(job.labels[first + bool(again) : until]):
            found.wrong = f"a label is not of the pass that gave the token: {spans}; {job.told}"
            return
        ids = (*job.prompt, *job.tokens[:until])
        key = (ids, first, spans, job.labels[first])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= KEPT_MAX:
                self._known.clear()
            known = self._known[key] = self._compute(ids, last + first, kv, again)
            found.computed += until - first
        else:
            found.looked_up += until - first
        off = np.abs(np.array(job.logprobs[first:until]) - known[0])
        if off.max() > ERROR:
            at = int(np.flatnonzero(off > ERROR)[0])
            found.wrong = (
                f"{int((off > ERROR).sum())} of {until - first} logprobs are not those of their labels, the first of token "
                f"{first + at}, by {off[at]:.4f} ({job.labels[first + at]}); KV {spans}; {job.told}"
            )
        elif job.greedy and known[1].max() > ERROR:
            found.wrong = f"a greedy token is not the likeliest one, by {known[1].max():.4f}; {job.told}"

    def _compute(
        self, ids: tuple[int, ...], row: int, kv: list[str], again: Mapping[int, str]
    ) -> tuple[np.ndarray, np.ndarray]:
        made = self._recomputer.passes(ids[:-1], kv, again=again).logprobs[row:]
        said = made.gather(1, self._torch.tensor(ids[row + 1 :])[:, None])[:, 0]
        return said.numpy(), (made.max(1).values - said).numpy()


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """With neighbours of the same weights as one span."""
    found = []
    for name, group in itertools.groupby(spans, key=lambda span: span[0]):
        own = list(group)
        found.append((name, own[0][1], own[-1][2]))
    return tuple(found)


_numbers: Numbers | None = None


def _begin(weights: Mapping[str, Path], path: list[str]) -> None:
    from midstream.client.checkpoint import no_progress_bars

    global _numbers
    sys.path[:] = path
    with no_progress_bars():
        _numbers = Numbers(weights)
    os.nice(5)


def _judge(jobs: list[Job]) -> list[Judged]:
    assert _numbers is not None
    return [_numbers.judge(job) for job in jobs]


def in_a_process(weights: Mapping[str, Path]) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _begin, (weights, list(sys.path)))


class RealOracle(Oracle):
    """The simulation's oracle with a real model's numbers. names: of the weights, by the number that `weights` has for them.

    found: what is wrong. counts: of tokens: looked up, computed, unchecked.
    """

    def __init__(self, names: Mapping[int, str], executor: Executor, found: list[str]) -> None:
        super().__init__()
        self._names, self._executor, self._found = names, executor, found
        self.counts: Counter[str] = Counter()
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        #: What equal requests drew over KV of the same weights.
        self._drawn: dict[Any, tuple[int, ...]] = {}

    def weights_of(self, snapshot: str) -> str:
        return self._names[self.weights[snapshot]]

    def _check_numbers(self, turn: Turn, parts: list[tuple[int, list[Span]]]) -> None:
        named = tuple(
            (until, tuple((self.weights_of(name), start, end) for name, start, end in spans))
            for until, spans in parts
        )
        labels = tuple(map(self.weights_of, turn.labels))
        told = f"labels {[*dict.fromkeys(turn.labels)]}, cached {turn.cached}, resumed {turn.resumed}, {turn.replica}"
        numbers = tuple(turn.logprobs)
        self._jobs.put_nowait(
            Job(tuple(turn.prompt), tuple(turn.tokens), labels, numbers, named, turn.greedy, told)
        )

    def check_drawn(self, turn: Turn, asked: tuple[Any, ...]) -> None:
        """That the same request over KV of the same weights alone has the same tokens. Raises Wrong."""
        used = {self.weights_of(name) for name in turn.labels}
        used |= {self.weights_of(name) for name, _, _ in turn.kv or ()}
        if len(used) > 1 or turn.earlier or turn.kv is None:
            return
        key = (tuple(turn.prompt), asked, *used)
        known = self._drawn.get(key)
        if known is None:
            self._drawn[key] = tuple(turn.tokens)
        elif known == tuple(turn.tokens):
            self.counts["drawn as before"] += len(known)
        else:
            raise Wrong(f"an equal request drew other tokens, {turn.tokens} instead of {known}: {turn}")

    async def run(self) -> None:
        """Has the process judge what has come, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            taken = [await self._jobs.get()]
            while len(taken) < BATCH and not self._jobs.empty():
                taken.append(self._jobs.get_nowait())
            for judged in await loop.run_in_executor(self._executor, _judge, taken):
                self.counts["looked up"] += judged.looked_up
                self.counts["computed"] += judged.computed
                if judged.wrong is not None:
                    self._found.append(f"wrong number: {judged.wrong}")
                self._jobs.task_done()

    async def finished(self) -> None:
        """Until all that has come is judged."""
        await self._jobs.join()

    @property
    def unchecked(self) -> int:
        """Tokens whose numbers nobody has come to yet."""
        return self.checked_tokens - self.counts["looked up"] - self.counts["computed"]
