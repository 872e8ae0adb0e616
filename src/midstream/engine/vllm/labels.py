"""Labels: which snapshot each token is of, while weights are switched under running streams. Pure.

The chunks of a vLLM stream carry no label, so a token's label is the epoch in which it arrives. The proof: a switch is pause,
reload, new weight version, resume. When `pause` has returned and everything written before it was read (swap.py), every token
that has arrived was sampled before the switch. Every token that arrives after `resume` was sent is sampled after it. At the
end of each choice vLLM says which of its weight versions sampled which token (`weight_versions`). That must be the same. Older
versions of vLLM do not say it. With them the order of arrival is the only proof.

Always holds: epochs only grow. An epoch names one load of one snapshot, even when files or names are loaded twice. A choice
ends with an error if its labels differ from what vLLM says, never with a wrong label.
"""

from __future__ import annotations

#: Stands for the snapshot of KV when it cannot be known. No snapshot has this name.
UNKNOWN = "?"

Spans = tuple[tuple[str, int, int], ...]


class Epochs:
    """The loads of weights since the server started, in order. The last one serves."""

    def __init__(self, snapshot: str) -> None:
        self._snapshots = [snapshot]
        # The one that serves, and its snapshot.
        self.now, self.snapshot = 0, snapshot
        # Of each, what its files are; "": not known.
        self._files = [""]
        # vLLM says at the end of a choice which of its versions sampled which token.
        self.confirmed = True

    def __repr__(self) -> str:
        return f"Epochs({self.now}: {self.snapshot})"

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
        self.now, self.snapshot = self.now + 1, snapshot

    def announced(self, files: str) -> None:
        """What the files of the snapshot that serves are, before anything is computed with it."""
        self._files[-1] = files

    def files_of(self, epoch: int) -> str:
        return self._files[epoch]


class OneEpoch(Epochs):
    """The epoch of an adapter, which never changes. version: vLLM's name of the base weights that it stands on."""

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
        epochs = self._epochs
        if not self._spans or self._spans[-1][0] != epochs.now:
            self._spans.append((epochs.now, self.count))
        self.count += tokens
        return epochs.snapshot

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
            # Without a switch, vLLM's silence leaves no doubt. Nor does that of a version that never says it.
            unproved = "vLLM did not say which weights sampled a choice that crossed a switch"
            return unproved if len(ours) > 1 and epochs.confirmed else None
        theirs = [span for span in spans if span[1] < span[2]]
        return None if theirs == ours else f"labels {ours} were given, and vLLM says {theirs}"

    def kv(self) -> Spans:
        """The snapshots that computed the KV of all positions but the last token's, as far as they are known."""
        end = self._prompt + max(self.count - 1, 0)
        return ((UNKNOWN if self._kv is None else self._epochs.snapshot_of(self._kv), 0, end),)

    def kv_files(self) -> str:
        """What the files of that snapshot are; "": not known."""
        return "" if self._kv is None else self._epochs.files_of(self._kv)
