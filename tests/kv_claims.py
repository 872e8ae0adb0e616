"""What an engine says of the KV behind each record, and whether plain forward passes over exactly that KV bear the records out.

Shared by the storms of the embedded engine and of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from recompute import Passes, Recomputer

from midstream.core.types import GenerateRequest, GenerationEvent, TokenRecord


@dataclass
class Era:
    """Tokens from `first` on stand on this KV; it grows by what the last snapshot computes."""

    first: int
    kv: list[str]


@dataclass
class Stream:
    """One choice of one request, and what it was told."""

    request: GenerateRequest
    index: int
    tokens: list[TokenRecord] = field(default_factory=list)
    prompt: tuple[TokenRecord, ...] = ()
    eras: list[Era] = field(default_factory=list)
    cached: int = 0
    over: bool = False

    @property
    def ids(self) -> list[int]:
        before = [*self.request.prompt, *self.request.emitted_of(self.index)]
        return before + [record.token_id for record in self.tokens]

    def take(self, event: GenerationEvent) -> None:
        assert event.error is None
        assert not self.over
        if event.kv_snapshots is not None:
            kv = [name for name, start, end in event.kv_snapshots for _ in range(start, end)]
            known = self.eras[-1].kv if self.eras else []
            if self.eras and kv[: len(known)] == known:
                self.eras[-1].kv = kv
            else:
                self.eras.append(Era(len(self.tokens), kv))
        self.tokens += event.tokens
        self.prompt = event.prompt or self.prompt
        self.cached = event.cached_tokens if event.cached_tokens is not None else self.cached
        kv = self.eras[-1].kv
        kv += kv[-1:] * (len(self.ids) - 1 - len(kv))
        self.over = event.finish is not None

    @property
    def cached_kv(self) -> list[str]:
        return self.eras[0].kv[: self.cached]

    def claims(self) -> Iterator[tuple[list[str], list[tuple[int, TokenRecord]]]]:
        """KV, and the records that stand on it with the positions of their passes."""
        before = len(self.ids) - len(self.tokens)
        first = len(self.request.prompt) - len(self.prompt)
        echoed = [(first + i - 1, record) for i, record in enumerate(self.prompt) if first + i > 0]
        for number, era in enumerate(self.eras):
            last = self.eras[number + 1].first if number + 1 < len(self.eras) else len(self.tokens)
            made = [(before + i - 1, self.tokens[i]) for i in range(era.first, last)]
            yield era.kv, (made if number else echoed + made)


@dataclass
class Verdict:
    """Of all records of a storm. wrong: (snapshots of the KV, by how much a logprob is off) of each that is not borne out.

    worst: by how much one that is borne out is off, at most.
    """

    checked: int = 0
    # Over KV of several snapshots.
    mixed: int = 0
    wrong: list[tuple[str, float]] = field(default_factory=list)
    worst: float = 0.0

    def add(self, other: Verdict) -> None:
        self.checked += other.checked
        self.mixed += other.mixed
        self.wrong += other.wrong
        self.worst = max(self.worst, other.worst)

    def __str__(self) -> str:
        worst = max((error for _, error in self.wrong), default=0.0)
        return f"{self.checked} tokens, {len(self.wrong)} wrong, by {worst:.3f} at most: {self.wrong[:3]}"


def judge(streams: Sequence[Stream], recomputer: Recomputer, error: float) -> Verdict:
    verdict = Verdict()
    for stream in streams:
        ids, off = stream.ids, partial(_error, error=error, routed=stream.request.want_routes)
        for kv, records in stream.claims():
            if not records:
                continue
            inputs = max(position for position, _ in records) + 1
            again = {position: r.snapshot for position, r in records if r.snapshot != kv[position]}

            def fits(
                passes: Passes,
                records: Sequence[tuple[int, TokenRecord]] = records,
                off: Callable[..., float] = off,
            ) -> bool:
                return not any(off(passes, position, record) for position, record in records)

            made = recomputer.first_that(fits, ids[:inputs], kv, again=again)
            if made is not None:
                verdict.worst = max(
                    verdict.worst, *(_off(made, position, record) for position, record in records)
                )
            else:
                made = recomputer.passes(ids[:inputs], kv, again)
                errors = [off(made, position, record) for position, record in records]
                verdict.wrong += [(">".join(dict.fromkeys(kv)), each) for each in errors if each]
            verdict.checked += len(records)
            verdict.mixed += len(records) if len(set(kv[:inputs])) > 1 else 0
    return verdict


def _off(passes: Passes, position: int, record: TokenRecord) -> float:
    return abs(float(passes.logprobs[position, record.token_id]) - record.logprob)


def _error(passes: Passes, position: int, record: TokenRecord, error: float, *, routed: bool) -> float:
    """By how much the record is off; 0.0: it is borne out. Infinite: another route."""
    off = _off(passes, position, record)
    if off > error:
        return off
    route = passes.routes[position]
    if route.size and routed:
        assert record.route is not None
        told = np.frombuffer(record.route, dtype=np.uint8).reshape(route.shape)
        if (np.sort(told) != np.sort(route)).any():
            return float("inf")
    return 0.0
