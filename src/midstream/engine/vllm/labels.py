"""Which snapshot each token is of, while weights are switched under running streams. Pure.

The proof, without a label in vLLM's stream chunks: a switch is pause, reload, new weight version, resume. After `pause`
returned, and everything written before it was read (see swap.py), every token that has arrived was sampled before the switch;
after `resume` was sent, every token that arrives was sampled after it. So a token's label is the epoch in which it arrives. At
the end of each choice vLLM itself says which of its weight versions sampled which token (`weight_versions`), and that must be
the same.

Always holds: epochs only grow; an epoch names one load of one snapshot, also when files or names are loaded twice; a choice
whose labels are not what vLLM says ends with an error, never with a wrong label.
"""

from __future__ import annotations

UNKNOWN = "?"  # for KV whose snapshot cannot be told; no snapshot is called so

Spans = tuple[tuple[str, int, int], ...]


class Epochs:
    """The loads of one boot, in order; the last one serves."""

    def __init__(self, snapshot: str) -> None:
        self._snapshots = [snapshot]

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
        """What vLLM is told to call the weights."""
        return f"{epoch}:{snapshot}"

    def begin(self, snapshot: str) -> None:
        """From now on tokens that arrive are of `snapshot`."""
        self._snapshots.append(snapshot)


class Told:
    """The labels that the tokens of one choice were given, and what is known of the KV behind them."""

    def __init__(self, epochs: Epochs, prompt: int, *, clean: bool) -> None:
        """prompt: tokens before the first that is generated. clean: what is cached for them, if anything, is of this epoch."""
        self._epochs = epochs
        self._prompt = prompt
        self._runs: list[tuple[int, int]] = []  # epoch, first token of it
        self._kv: int | None = (
            epochs.now if clean else None
        )  # the one epoch that computed all KV; None: unknown
        self.count = 0

    def take(self, tokens: int) -> str:
        """So many tokens arrived; the snapshot they are of."""
        now = self._epochs.now
        if not self._runs or self._runs[-1][0] != now:
            self._runs.append((now, self.count))
        self.count += tokens
        return self._epochs.snapshot

    def switched(self) -> None:
        """A new epoch began. From now on vLLM may preempt the choice and compute its KV again, or take what others of its
        salt computed before or after the switch, and it tells nobody."""
        self._kv = None

    def problem(self, spans: Spans | None) -> str | None:
        """What is wrong with the labels given, by what vLLM says at the end; None: nothing."""
        ends = [start for _, start in self._runs[1:]] + [self.count]
        ours = [
            (self._epochs.version(epoch, self._epochs.snapshot_of(epoch)), start, end)
            for (epoch, start), end in zip(self._runs, ends, strict=False)
        ]
        if spans is None:  # it did not say: no doubt without a switch
            return (
                None
                if len(ours) <= 1
                else "vLLM did not say which weights sampled a choice that crossed a switch"
            )
        theirs = [span for span in spans if span[1] < span[2]]
        return None if theirs == ours else f"labels {ours} were given, and vLLM says {theirs}"

    def kv(self) -> Spans:
        """What computed the KV of all positions but the last token's, as far as is known."""
        end = self._prompt + max(self.count - 1, 0)
        return ((UNKNOWN if self._kv is None else self._epochs.snapshot_of(self._kv), 0, end),)
