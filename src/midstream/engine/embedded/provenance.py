"""Which weights computed the KV of a sequence: a commit for each slot, and the spans that events report.

Owns: the commit of each slot, as an ordinal.
Always holds: a slot's commit is written in the step that computes its KV. A span that is reported has one label.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from midstream.core.types import FinishReason
from midstream.engine.embedded.blocks import Prefix
from midstream.engine.embedded.scheduler import Sequence
from midstream.engine.embedded.token_scores import NO_SNAPSHOT
from midstream.engine.embedded.weights import WeightStore


class Provenance:
    def __init__(self, blocks: int, block_size: int, store: WeightStore) -> None:
        self._block_size = block_size
        self._store = store
        self._commits = np.full(blocks * block_size, NO_SNAPSHOT, dtype=np.int32)

    def write(self, slots: np.ndarray, commits: np.ndarray) -> None:
        self._commits[slots] = commits

    def move(self, source: int, target: int) -> None:
        """The content of a block is from now on in another."""
        commits = self._commits.reshape(-1, self._block_size)
        commits[target] = commits[source]
        commits[source] = NO_SNAPSHOT

    def check(self, cached: Iterable[Prefix]) -> None:
        """Assert that cached blocks were computed by the weights that they are kept under."""
        commits = self._commits.reshape(-1, self._block_size)
        for prefix in cached:
            assert tuple(commits[prefix.block]) == prefix.epochs, (
                f"block {prefix.block} was not computed by the weights that the tree says"
            )

    def spans(
        self, seq: Sequence, finish: FinishReason | None
    ) -> tuple[tuple[tuple[str, int, int], ...] | None, str]:
        """The snapshots that computed the sequence's KV, and what the last one's files are; None and "" when the last report
        still holds, or none is asked for. Commits of one snapshot are one span."""
        if not seq.request.want_kv_snapshots or (finish is None and seq.reported_epoch == seq.now):
            return None, ""
        size = self._block_size
        slots = np.asarray(seq.blocks, dtype=np.int64)[:, None] * size + np.arange(size)
        # The last token's KV is there only where a choice ended without another token.
        written = min(seq.computed, max(seq.prompt_len, seq.prompt_len + seq.generated - 1))
        ordinals = self._commits[slots.reshape(-1)[:written]]
        # All of the KV may come from the cache. The next position then begins a span that must be reported, too.
        seq.reported_epoch = seq.now if ordinals[-1] == seq.now else -1
        changes = [0, *(np.flatnonzero(np.diff(ordinals)) + 1).tolist()]
        labels = [self._store.labels[ordinals[start]] for start in changes]
        starts = [at for n, at in enumerate(changes) if n == 0 or labels[n] != labels[n - 1]]
        ends = [*starts[1:], written]
        spans = zip(starts, ends, strict=True)
        named = tuple((self._store.labels[ordinals[start]], start, end) for start, end in spans)
        return named, self._store.files[ordinals[-1]]

    def renamed(self, seq: Sequence) -> tuple[tuple[str, str], ...]:
        """The labels that changed since the sequence's last such event."""
        known, seq.renames = seq.renames, len(self._store.renamed)
        if known == seq.renames:
            return ()
        policy = seq.request.policy
        return tuple((name, label) for of, name, label in self._store.renamed[known:] if of == policy)
