"""Labels: which snapshot each token is of, while weights are switched under running streams. Pure.

The chunks of a vLLM stream carry no label, so a token's label is the epoch in which it arrives. The proof: a switch is pause,
reload, new weight version, resume. When `pause` has returned and everything written before it was read (swap.py), every token
that has arrived was sampled before the switch. Every token that arrives after `resume` was sent is sampled after it. At the
end of each choice vLLM says which of its weight versions sampled which token (`weight_versions`). That must be the same.

Always holds: epochs only grow. An epoch names one load of one snapshot, even when files or names are loaded twice. A choice
whose labels are not what vLLM says ends with an error, never with a wrong label.

The cache_salt of each request: requests of one salt share vLLM's cached blocks. Pure.

vLLM does not say how old cached KV is. So a cache namespace keeps its salt only while nothing under it can be older than a
request allows. Then the namespace gets a new salt, and its cache begins empty.

Always holds: KV found under a salt was computed since this server started, for the same namespace, and at most `age_max`
switches ago.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

#: Namespaces that are remembered. A namespace that was forgotten begins with an empty cache.
NAMESPACES_MAX = 100_000


class Salts:
    """boot: random bytes, so that requests never find what an earlier boot left in the server's cache."""

    def __init__(self, boot: bytes, namespaces_max: int = NAMESPACES_MAX) -> None:
        self._boot = boot
        # Of each namespace, the epoch in which its salt was first used.
        self._began: OrderedDict[bytes, int] = OrderedDict()
        self._namespaces_max = namespaces_max

    def of(
        self, namespace: bytes, now: int, age_max: int | None, *, passing: bool = False
    ) -> tuple[str, bool]:
        """The salt, and whether all KV that can be found under it is of epoch `now`.

        age_max: in switches; None allows any age. passing: the bound is this request's alone, so the salt of its namespace
        does not change.
        """
        began = self._began.get(namespace, now)
        if age_max is not None and now - began > age_max:
            began = now
        if not passing:
            self._began[namespace] = began
            self._began.move_to_end(namespace)
            if len(self._began) > self._namespaces_max:
                self._began.popitem(last=False)
        digest = hashlib.blake2b(self._boot + began.to_bytes(8, "little") + namespace, digest_size=16)
        return digest.hexdigest(), began == now


#: Stands for the snapshot of KV when it cannot be known. No snapshot has this name.
UNKNOWN = "?"

Spans = tuple[tuple[str, int, int], ...]


class Epochs:
    """The loads of weights since the server started, in order. The last one serves."""

    def __init__(self, snapshot: str) -> None:
        self._snapshots = [snapshot]
        # Of each, what its files are; "": not known.
        self._files = [""]

    def __repr__(self) -> str:
        return f"Epochs({self.now}: {self.snapshot})"

    @property
    def now(self) -> int:
        return len(self._snapshots) - 1

    @property
    def snapshot(self) -> str:
        return self._snapshots[-1]

    def snapshot_of(self, epoch: int) -> str:
        return self._snapshots[epoch]

    def version(self, epoch: int, snapshot: str) -> str:
        """The name that vLLM is given for the weights."""
        return f"{epoch}:{snapshot}"

    @property
    def serving_version(self) -> str:
        return self.version(self.now, self.snapshot)

    def begin(self, snapshot: str, files: str = "") -> None:
        """Tokens that arrive from now on are of `snapshot`. files: see engine.base.Slot.announce."""
        self._snapshots.append(snapshot)
        self._files.append(files)

    def announced(self, files: str) -> None:
        """What the files of the snapshot that serves are, before anything is computed with it."""
        self._files[-1] = files

    def files_of(self, epoch: int) -> str:
        return self._files[epoch]


class OneEpoch(Epochs):
    """Of an adapter, which never changes. version: of the base weights that it stands on, as vLLM names them."""

    def __init__(self, snapshot: str, version: str) -> None:
        super().__init__(snapshot)
        self._version = version

    def version(self, epoch: int, snapshot: str) -> str:
        return self._version


class ChoiceLabels:
    """The labels given to the tokens of one choice, and what is known of the KV behind them."""

    def __init__(self, epochs: Epochs, prompt: int, *, clean: bool) -> None:
        """prompt: the number of tokens before the first generated one. clean: all KV cached for them is of this epoch."""
        self._epochs = epochs
        self._prompt = prompt
        # Spans of one epoch: the epoch and its first token.
        self._spans: list[tuple[int, int]] = []
        # The one epoch that computed all KV; None when that is not known.
        self._kv: int | None = epochs.now if clean else None
        self.count = 0

    def take(self, tokens: int) -> str:
        """Label the tokens that arrived. Returns their snapshot."""
        now = self._epochs.now
        if not self._spans or self._spans[-1][0] != now:
            self._spans.append((now, self.count))
        self.count += tokens
        return self._epochs.snapshot

    def switched(self) -> None:
        """Record that a new epoch began.

        From now on vLLM may preempt the choice and compute its KV again. It may also use KV that others of its salt computed
        before or after the switch. It reports neither.
        """
        self._kv = None

    def problem(self, spans: Spans | None) -> str | None:
        """How the labels differ from what vLLM said at the end of the choice; None if they do not."""
        epochs, ends = self._epochs, [start for _, start in self._spans[1:]] + [self.count]
        ours = [
            (epochs.version(epoch, epochs.snapshot_of(epoch)), start, end)
            for (epoch, start), end in zip(self._spans, ends, strict=False)
        ]
        if spans is None:
            # Without a switch, vLLM's silence leaves no doubt.
            unproved = "vLLM did not say which weights sampled a choice that crossed a switch"
            return unproved if len(ours) > 1 else None
        theirs = [span for span in spans if span[1] < span[2]]
        return None if theirs == ours else f"labels {ours} were given, and vLLM says {theirs}"

    def kv(self) -> Spans:
        """The snapshots that computed the KV of all positions but the last token's, as far as they are known."""
        end = self._prompt + max(self.count - 1, 0)
        return ((UNKNOWN if self._kv is None else self._epochs.snapshot_of(self._kv), 0, end),)

    def kv_files(self) -> str:
        """What the files of that snapshot are; "": not known."""
        return "" if self._kv is None else self._epochs.files_of(self._kv)
