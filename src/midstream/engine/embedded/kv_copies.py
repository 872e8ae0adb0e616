"""Blocks of the KV cache for another engine, and from one: read where they are found, and put where they would be found.

Owns: the form in which the content of blocks is written one behind the other.
Always holds:
- What is given is what a request with these tokens would find now, and says which commits computed it.
- What is taken stands below the very blocks that it was computed on, under the caller's salt and tokens. Each position has the
  commit here that has the age it had there. That is the same snapshot, as the last commits of both engines are the same.
- A block is taken whole, with keys and values of all layers, commits and scores, or not at all. Its place is cached KV as any
  other: evicted in its order, and pinned by nothing.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.claims import Return, SaltParts
from midstream.engine.embedded import weights_digest
from midstream.engine.embedded.blocks import OutOfBlocks, Prefix
from midstream.engine.embedded.device import is_cuda
from midstream.engine.embedded.host_blocks import HostBlocks
from midstream.engine.embedded.provenance import Provenance
from midstream.engine.embedded.scheduler import WIDTH, Scheduler
from midstream.engine.embedded.scheduler import Sequence as Choice
from midstream.engine.embedded.token_scores import NO_SNAPSHOT, ScoreStore
from midstream.engine.embedded.track import Track
from midstream.engine.embedded.weights import WeightStore
from midstream.engine.kv_copies import COMMITS_MAX, KvForm, KvPiece, KvPlace, KvRefused

#: The label of weights that nothing is known of, or whose check failed.
UNKNOWN = "?"
#: Bytes of each weight that tell one base model from another.
SAMPLE_BYTES = 64


class CoreCopies:
    def __init__(
        self,
        scheduler: Scheduler,
        store: WeightStore,
        host: HostBlocks,
        scores: ScoreStore,
        provenance: Provenance,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._pool, self._store = scheduler, scheduler.pool, store
        self._host, self._scores, self._provenance = host, scores, provenance
        self._clock = clock
        size = self._pool.block_size
        # In the order in which they stand, the bytes of each section for a block.
        self._sections = (host.row_bytes, 4 * size, 4 * size, size, scores.route_bytes * size)

    @property
    def block_bytes(self) -> int:
        return sum(self._sections)

    def form(self, kind: str) -> KvForm:
        return KvForm(kind=kind, block_tokens=self._pool.block_size, block_bytes=self.block_bytes)

    def give(
        self, place: KvPlace, first: int, most: int, kv_age_max: int | None, content: np.ndarray
    ) -> KvPiece:
        """content: bytes that take `most` blocks. Where `most` is 0, the piece says what there is."""
        track = self._store.policies.get(place.policy)
        chain = [] if track is None else self._chain(place, track, kv_age_max)
        if track is None or not chain:
            return KvPiece()
        taken = chain[first : first + most]
        spans = _spans(chain[: first + len(taken)] if most else chain)
        commits = track.last(COMMITS_MAX)
        oldest = spans[0][1]
        if oldest not in commits or len(spans) > COMMITS_MAX:
            return KvPiece()
        commits = commits[commits.index(oldest) :]
        named = self._named(commits)
        if any(label == UNKNOWN or not (files or commit == 0) for commit, (label, files) in named):
            # Nobody could say whether another engine's weights are the same.
            return KvPiece()
        self._read([prefix.block for prefix in taken], commits, content)
        return KvPiece(
            total=len(chain),
            first=first,
            count=len(taken),
            spans=tuple((at, len(commits) - 1 - commits.index(epoch)) for at, epoch in spans),
            commits=tuple(name for _, name in named),
        )

    def take(self, place: KvPlace, part: KvPiece, content: np.ndarray, session: str, kept_s: float) -> int:
        """See KvCopies. Raises KvRefused."""
        commits, reach = self._checked(place, part, len(content))
        tokens, epochs = self._blocks_of(place.tokens, reach), self._epochs_of(part, commits, reach)
        path = self._here(place.salt, tokens, epochs)
        if not part.count or len(path) < part.first:
            return len(path)
        # Without a claim, the pool would evict its first blocks for its last ones.
        claims = bool(session and kept_s) and not any(self._pool.offloaded(prefix) for prefix in path)
        # Its turn waits already, so others are given up before it.
        parts, returns = SaltParts.of(place.salt), Return(-kept_s, kept_s)
        if claims and path:
            self._scheduler.claims.grow(session, parts, path, returns, self._clock())
        for number in range(len(path), reach):
            parent = path[-1] if path else self._pool.root(place.salt)
            try:
                block = self._scheduler.allocate()
            except OutOfBlocks:
                break
            # It may have given way to itself.
            claims = claims and not (path and self._pool.offloaded(path[-1]))
            try:
                self._write(block, number - part.first, part.count, epochs[number], commits, content)
                prefix = self._pool.index(block, parent, tokens[number], epochs[number])
            finally:
                self._pool.release(block)
            if prefix.block != block:
                # What it stands on went for it, or there are younger histories enough.
                break
            path.append(prefix)
            self._pool.travelled += 1
            if claims:
                self._scheduler.claims.grow(session, parts, path, returns, self._clock())
        return len(path)

    # -- inside

    def _chain(self, place: KvPlace, track: Track, kv_age_max: int | None) -> list[Prefix]:
        """What a request with these tokens would find."""
        tokens = array("i")
        # No chain is longer than both tiers.
        most = (self._pool.total + self._host.total) * self._pool.block_size
        tokens.frombytes(place.tokens[: min(most, len(place.tokens) // WIDTH) * WIDTH])
        request = GenerateRequest(
            request_id="",
            prompt=tuple(tokens),
            sampling=SamplingParams(max_tokens=1),
            salt=place.salt,
            kv_age_max=kv_age_max,
        )
        return self._scheduler.match(Choice(request, 0, track=track))

    def _named(self, commits: Sequence[int]) -> list[tuple[int, tuple[str, str]]]:
        return [(commit, (self._store.labels[commit], self._store.files[commit])) for commit in commits]

    def _checked(self, place: KvPlace, part: KvPiece, size: int) -> tuple[list[int], int]:
        """The commits here that the piece names, and up to which block it says something. Raises KvRefused."""
        reach = part.first + part.count if part.count else part.total
        track = self._store.policies.get(place.policy)
        commits = [] if track is None else track.last(len(part.commits))
        if not part.commits or tuple(name for _, name in self._named(commits)) != part.commits:
            raise KvRefused("other weights serve here")
        starts, ages = zip(*part.spans, strict=True) if part.spans else ((), ())
        whole = (
            reach <= min(part.total, self._pool.total, len(place.tokens) // (self._pool.block_size * WIDTH))
            and starts[:1] == (0,)
            and ages[:1] == (len(commits) - 1,)
            and list(starts) == sorted(set(starts))
            and list(ages) == sorted(set(ages), reverse=True)
            and starts[-1] < reach * self._pool.block_size
            and size == part.count * self.block_bytes
        )
        if not whole:
            raise KvRefused("the piece contradicts itself")
        return commits, reach

    def _blocks_of(self, tokens: bytes, blocks: int) -> list[bytes]:
        width = self._pool.block_size * WIDTH
        return [tokens[at * width : (at + 1) * width] for at in range(blocks)]

    def _epochs_of(self, part: KvPiece, commits: Sequence[int], blocks: int) -> list[tuple[int, ...]]:
        """Of each block."""
        size = self._pool.block_size
        epochs = np.empty(blocks * size, dtype=np.int64)
        for start, age in part.spans:
            epochs[start:] = commits[-1 - age]
        return [tuple(row) for row in epochs.reshape(blocks, size).tolist()]

    def _here(self, salt: bytes, tokens: list[bytes], epochs: list[tuple[int, ...]]) -> list[Prefix]:
        """Of this very chain, the places that there are."""
        prefix, path = self._pool.root(salt), list[Prefix]()
        for block, computed_by in zip(tokens, epochs, strict=True):
            siblings = prefix.children.get(block, ())
            found = next((one for one in siblings if one.epochs == computed_by), None)
            if found is None:
                break
            path.append(found)
            prefix = found
        return path

    def _parts(self, content: np.ndarray, blocks: int) -> list[np.ndarray]:
        """The sections of a piece, each with a row for each block."""
        ends = np.cumsum([each * blocks for each in self._sections]).tolist()
        starts = [0, *ends[:-1]]
        sections = zip(starts, ends, self._sections, strict=True)
        return [content[start:end].reshape(blocks, each) for start, end, each in sections]

    def _read(self, blocks: Sequence[int], commits: Sequence[int], content: np.ndarray) -> None:
        if not blocks:
            return
        rows, *kept = self._parts(content, len(blocks))
        for at, block in enumerate(blocks):
            self._host.read(block, torch.from_numpy(rows[at]))
        size = self._pool.block_size
        slots = (np.array(blocks)[:, None] * size + np.arange(size)).reshape(-1)
        logprobs, routes, scored_by, ties = self._scores.rows(slots)
        ages = np.full(len(slots), NO_SNAPSHOT, dtype=np.int32)
        for age, commit in enumerate(reversed(commits)):
            ages[scored_by == commit] = age
        for section, values in zip(kept, (logprobs, ages, ties, routes), strict=True):
            section[:] = np.ascontiguousarray(values).reshape(len(blocks), -1).view(np.uint8)

    def _write(
        self,
        block: int,
        at: int,
        blocks: int,
        epochs: tuple[int, ...],
        commits: Sequence[int],
        content: np.ndarray,
    ) -> None:
        """Block `at` of a piece becomes the content of `block`."""
        row, logprobs, ages, ties, routes = (section[at] for section in self._parts(content, blocks))
        self._host.write(block, torch.from_numpy(row))
        size = self._pool.block_size
        slots = block * size + np.arange(size)
        self._provenance.write(slots, np.array(epochs, dtype=np.int32))
        by_age = ages.view(np.int32)
        known = (by_age >= 0) & (by_age < len(commits))
        newest_first = np.array(commits[::-1], dtype=np.int32)
        scored_by = np.where(known, newest_first[np.where(known, by_age, 0)], NO_SNAPSHOT)
        per_token = routes.reshape(size, -1) if len(routes) else None
        self._scores.write(slots, logprobs.view(np.float32), per_token, scored_by, ties)


def _spans(chain: Sequence[Prefix]) -> list[tuple[int, int]]:
    """First position and epoch of each run of positions that one epoch computed."""
    spans: list[tuple[int, int]] = []
    at = 0
    for prefix in chain:
        alike = prefix.epochs[0] == prefix.epochs[-1]
        for offset, epoch in enumerate(prefix.epochs[:1] if alike else prefix.epochs):
            if not spans or spans[-1][1] != epoch:
                spans.append((at + offset, epoch))
        at += len(prefix.epochs)
    return spans


def kind_of(weights: weights_digest.Tensors, decoder: object, model_dir: Path) -> str:
    """A digest of what has to be equal for the KV of one engine to be that of another. weights: of the start."""
    whole = hashlib.blake2b(weights_digest.kind(weights).encode(), digest_size=16)
    level = os.environ.get("MIDSTREAM_KERNELS_LEVEL", "")
    device = weights[0][1].device
    processor = torch.cuda.get_device_name(device) if is_cuda(device) else ""
    whole.update(repr((type(decoder).__name__, level, processor)).encode())
    config = model_dir / "config.json"
    whole.update(config.read_bytes() if config.is_file() else b"")
    for _, tensor in weights:
        data = tensor.detach().reshape(-1).view(torch.uint8)
        middle = len(data) // 2
        for sample in (data[:SAMPLE_BYTES], data[middle : middle + SAMPLE_BYTES]):
            whole.update(sample.cpu().numpy().tobytes())
    return whole.hexdigest()
