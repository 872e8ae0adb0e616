"""Labels: which snapshot each token is of, while weights are switched under running streams. Pure.

The chunks of a stream carry no label of each token, so a token's label is the epoch in which it arrives. The proof: a switch is
pause, reload, new weight version, resume. When `pause` has returned and everything written before it was read (as a control's
`pause` does), every token that has arrived was sampled before the switch. Every token that arrives after `resume` was sent is
sampled after it. At the end of each choice the server says which of its weight versions sampled which token
(`weight_versions`). That must be the same. A server that does not say it, as older versions of vLLM, leaves the order of
arrival as the only proof.

Which weights computed the KV behind a token, a server says whose scheduler is midstream's and has proved it
(vllm/provenance_proof.py). Without that it is known for a choice that began with nothing cached of other weights, until a
switch.

Always holds: epochs only grow. An epoch names one load of one snapshot, even when files or names are loaded twice. Every switch
gives the server another version, whatever it switches: so a choice has a version for each token, also of switches that are none
of its own. What a server says of KV are numbers of versions, each of the last switch of what the choice ran under. A choice
ends with an error if its labels differ from what the server says, never with a wrong label.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from midstream.core.types import BASE_SNAPSHOT

#: Stands for the snapshot of KV when it cannot be known. No snapshot has this name.
UNKNOWN = "?"

Spans = tuple[tuple[str, int, int], ...]
#: The number of a version of the server, and the first position, of each run of positions, in their order.
KvSpans = tuple[tuple[int, int], ...]


class ServerVersion:
    """What the server calls what serves. switches: of whatever weights, since the server started.

    names: one for each, and one for the start.
    """

    def __init__(self, snapshot: str) -> None:
        self.switches = 0
        self.name = f"0:{snapshot}"
        self.names = [self.name]

    def coming(self, snapshot: str, policy: str = "") -> str:
        """The next name. policy: its adapter alone is switched. The scheduler reads that, too."""
        number = self.switches + 1
        return f"{number} {policy}:{snapshot}" if policy else f"{number}:{snapshot}"

    def enter(self, name: str) -> None:
        self.name = name
        self.names.append(name)
        self.switches += 1


class Epochs:
    """The loads of weights since the server started, in order. The last one serves.

    first: the number of the first one, and of the server's version then.
    """

    def __init__(self, snapshot: str, server: ServerVersion | None = None, first: int = 0) -> None:
        self._first = first
        self._snapshots = [snapshot]
        # The one that serves, and its snapshot.
        self.now, self.snapshot = first, snapshot
        # Of each, what its files are; "": not known.
        self._files = [""]
        # Of each, what its KV is called: the snapshot, or another label if the name means other weights now.
        self._labels = [snapshot]
        # Of each, the version of the server that it began with.
        self._versions = [first]
        #: (name, label) of each such change, in order.
        self.renamed: list[tuple[str, str]] = []
        self.server = server or ServerVersion(snapshot)
        # The server says at the end of a choice which of its versions sampled which token.
        self.confirmed = True

    def __repr__(self) -> str:
        return f"Epochs({self.now}: {self.snapshot})"

    def next_version(self, snapshot: str) -> str:
        """The name that the server is given at the next switch."""
        return self.server.coming(snapshot)

    def next_of(self, policy: str) -> str:
        """The same, where this policy's adapter alone is switched."""
        return self.server.coming(self.snapshot, policy)

    @property
    def serving_version(self) -> str:
        return self.server.name

    def versions_since(self, switches: int) -> Collection[str]:
        """What the server has been called since so many switches, none of which began an epoch of the base."""
        return self.server.names[switches:]

    @property
    def began(self) -> int:
        """The version of the server that the last one began with."""
        return self._versions[-1]

    def begin(self, snapshot: str, files: str = "", overwritten: Sequence[tuple[str, str]] = ()) -> None:
        """Tokens that arrive from now on are of `snapshot`. files, overwritten: see engine.base.Slot.announce."""
        for name, label in overwritten:
            self._labels = [label if known == name else known for known in self._labels]
        self.renamed += overwritten
        self.server.enter(self.next_version(snapshot))
        self._enter(snapshot, files)

    def switched(self, policy: str) -> None:
        """The server has another version now, by an adapter of this policy."""
        self.server.enter(self.next_of(policy))

    def announced(self, files: str) -> None:
        """What the files of the snapshot that serves are, before anything is computed with it."""
        self._files[-1] = files

    def files_of(self, version: int) -> str:
        index = self._index(version)
        return "" if index is None else self._files[index]

    def label_of(self, version: int) -> str:
        """What KV is called now that was computed with a version of the server."""
        index = self._index(version)
        return UNKNOWN if index is None else self._labels[index]

    def serve(self, version: int) -> bool:
        """Whether the weights that serve are those of this version of the server."""
        return self._index(version) == len(self._versions) - 1

    def _index(self, version: int) -> int | None:
        """None: the server had no such version. Nothing was computed before the first epoch."""
        if not 0 <= version <= self.server.switches:
            return None
        return max(bisect_right(self._versions, version) - 1, 0)

    def _enter(self, snapshot: str, files: str = "") -> None:
        self._labels.append(snapshot)
        self._snapshots.append(snapshot)
        self._files.append(files)
        self._versions.append(self.server.switches)
        self.now, self.snapshot = self.now + 1, snapshot


class AdapterEpochs(Epochs):
    """What requests under one adapter's name compute with. base: the epochs of the weights that it stands on."""

    def __init__(self, adapter: str, base: Epochs) -> None:
        # No epoch of an earlier adapter of the policy has a greater number.
        super().__init__(label_on(adapter, base.snapshot), base.server, base.server.switches)
        self._adapter, self._base = adapter, base
        self.confirmed = base.confirmed

    def overwrite(self, adapters: Collection[str] = (), bases: Collection[str] = ()) -> None:
        """These names mean other weights from now on, so earlier KV of their labels has no name."""
        for label in dict.fromkeys(self._snapshots):
            adapter, _, base = label.partition("@")
            if adapter in adapters or (base or BASE_SNAPSHOT) in bases:
                self._labels = [UNKNOWN if known == label else known for known in self._labels]
                self.renamed.append((label, UNKNOWN))

    def moved(self, adapter: str = "") -> None:
        """The base, or the adapter, is another one now."""
        self._adapter = adapter or self._adapter
        self._enter(label_on(self._adapter, self._base.snapshot))


def label_on(adapter: str, base: str) -> str:
    """The label of a policy's token: both computed it. An adapter of the weights of the start has its own name alone."""
    return adapter if base == BASE_SNAPSHOT else f"{adapter}@{base}"


class ChoiceLabels:
    """The labels given to the tokens of one choice, and what is known of the KV behind them."""

    def __init__(self, epochs: Epochs, prompt: int, *, clean: bool = False, told: bool = False) -> None:
        """prompt: the number of tokens before the first generated one. clean: all KV cached for them is of this epoch.

        told: the server says which weights computed its KV.
        """
        self._epochs = epochs
        self._prompt = prompt
        self.told = told
        #: The server has to say something of KV with the next token.
        self.expects = told
        #: What it said and nobody asked for yet: a token, and what computed the KV before it. None: it is not known.
        self.coming: list[tuple[int, KvSpans | None]] = []
        # Spans of one version of the server: the version, and the first token.
        self._spans: list[tuple[str, int]] = []
        # Which versions computed all KV; None when that is not known.
        self._kv: KvSpans | None = ((epochs.server.switches, 0),) if clean and not told else None
        # How many changes of names were reported.
        self._renamed = len(epochs.renamed)
        self.count = 0

    def take(self, tokens: int) -> str:
        """Label the tokens that arrived. Returns their snapshot."""
        epochs, version = self._epochs, self._epochs.server.name
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, self.count))
        self.count += tokens
        return epochs.snapshot

    def switched(self) -> None:
        """Record that a new epoch began.

        From now on the server may preempt the choice and compute its KV again. It may also use KV that others of its salt
        computed before or after the switch. Unless it says so, nothing is known.
        """
        if self.told:
            self.expects = True
        else:
            self._kv = None

    def hear(self, tokens: int, told: Sequence[tuple[int, KvSpans]]) -> str | None:
        """Take what the server said of KV with the newest tokens, which are labelled: tokens before, and spans.

        Returns how it contradicts the labels; None if it does not. The pass that gave a token is of the token's label, and
        computed the position before it.
        """
        first = self.count - tokens
        if self.expects and (not told or told[0][0] != first):
            # It said nothing.
            self.coming.append((first, None))
        self.expects = False
        for at, spans in told:
            version, start = spans[-1]
            fits = first <= at < self.count and start < self._prompt + at
            if not fits or not self._epochs.serve(version):
                newest = f"tokens {first} to {self.count} of {self._epochs!r} behind {self._prompt}"
                return f"the server says {spans} of the KV before token {at}, with {newest}"
            self.coming.append((at, spans))
        return None

    def changes(self) -> list[tuple[int, KvSpans | None]]:
        """What was heard since this was asked for."""
        coming, self.coming = self.coming, []
        return coming

    def computed(self, kv: KvSpans | None) -> None:
        """A change is reported."""
        self._kv = kv

    def problem(self, spans: Spans | None) -> str | None:
        """How the labels differ from what the server said at the end of the choice; None if they do not."""
        epochs, ends = self._epochs, [start for _, start in self._spans[1:]] + [self.count]
        ours = [(version, start, end) for (version, start), end in zip(self._spans, ends, strict=False)]
        if spans is None:
            # Without a switch, the server's silence leaves no doubt. Nor does that of a version that never says it.
            unproved = "the server did not say which weights sampled a choice that crossed a switch"
            return unproved if len(ours) > 1 and epochs.confirmed else None
        theirs = [span for span in spans if span[1] < span[2]]
        return None if theirs == ours else f"labels {ours} were given, and the server says {theirs}"

    def kv(self, later: int = 0) -> Spans:
        """The snapshots that computed the KV of all positions but the last token's, as far as they are known.

        later: how many of the newest tokens came behind the last one.
        """
        end = self._prompt + max(self.count - later - 1, 0)
        if self._kv is None:
            return ((UNKNOWN, 0, end),)
        named: list[tuple[str, int]] = []
        for version, start in self._kv:
            label = self._epochs.label_of(version)
            if not named or named[-1][0] != label:
                named.append((label, start))
        ends = [start for _, start in named[1:]] + [end]
        return tuple([(label, start, stop) for (label, start), stop in zip(named, ends, strict=True)])

    def kv_files(self) -> str:
        """What the files of the last one are; "": not known."""
        return "" if self._kv is None else self._epochs.files_of(self._kv[-1][0])

    def renamed(self) -> tuple[tuple[str, str], ...]:
        """The labels that changed since this was asked for."""
        known, self._renamed = self._renamed, len(self._epochs.renamed)
        return tuple(self._epochs.renamed[known:])
