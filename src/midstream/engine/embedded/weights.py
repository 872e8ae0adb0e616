"""All weights that an engine holds: what each policy serves, what is staged, and snapshots that stay resident.

Owns: the models and the adapters, from the moment they are staged until a thread beside the steps frees them.
Always holds:
- An adapter stands on the base weights of the start, whatever its deployment serves otherwise. They stay as long as an adapter
  does.
- Weights are freed only when nothing of this holds: a policy serves them, they are resident, a sequence runs under them.
- A policy that is made again has other commits than the one of the same name before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from midstream.core.config import EngineSettings
from midstream.core.errors import SnapshotError, SnapshotIncompatible, SnapshotNotFinite
from midstream.core.types import BASE_SNAPSHOT
from midstream.engine.adapter import load_adapter
from midstream.engine.embedded.device import loading
from midstream.engine.embedded.loading import LoadedModel, probe
from midstream.engine.embedded.modules import UnsupportedModel
from midstream.engine.embedded.track import Track
from midstream_kernels import KernelsUnavailable


class Unservable(str):
    """A reason that lies in the weights: to load them again changes nothing."""


def reason(error: BaseException) -> str:
    """Why weights cannot be staged."""
    kind = Unservable if isinstance(error, SnapshotIncompatible | SnapshotNotFinite) else str
    return kind(f"{type(error).__name__}: {error}")


class Retired(Protocol):
    """A model or an adapter that nothing reads any more."""

    def release(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Weights:
    """What a forward pass takes. adapter: the decoder's own form of a LoRA adapter on the model, or None."""

    model: LoadedModel
    adapter: Any = None

    def unfit(self) -> str | None:
        """Why an adapter cannot serve; None if it can. It runs on weights that others use, so only between two steps."""
        if self.adapter is None:
            return None
        try:
            probe(self.model, self.adapter)
        # The pass itself may fail, for want of memory or in a kernel. The steps of others continue.
        except (SnapshotError, RuntimeError) as error:
            return reason(error)
        return None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What was loaded for it: of an adapter its own numbers, as the base weights were digested at the start."""
        yield from (self.model.decoder if self.adapter is None else self.adapter).weights()


class WeightStore:
    """policies: the track of each; "" is the default one. labels: by commit, the snapshot's name, or another label
    if the name means other weights now. renamed: policy, name and label of each such change, in order. files: by commit,
    what its files are; "": not known.

    retired: models and adapters that `take_retired` will return.
    in_use: the commits that sequences stay with, as it is at the moment it is asked.
    """

    def __init__(self, base: LoadedModel, in_use: Callable[[], set[int]]) -> None:
        self._in_use = in_use
        self.labels = [BASE_SNAPSHOT]
        self.files = [""]
        self.policies: dict[str, Track] = {"": Track(0)}
        self._held: dict[int, Weights] = {0: Weights(base)}
        self._owner = {0: ""}
        self.renamed: list[tuple[str, str, str]] = []
        self._staged: dict[str, Weights] = {}
        self._retained: dict[str, frozenset[str]] = {}
        # The base weights, while something holds them, and the adapters that are being read for them.
        self._base: LoadedModel | None = base
        self._coming: set[int] = set()
        self.retired: list[Retired] = []

    def __repr__(self) -> str:
        held = {epoch: f"{self._owner[epoch]}@{self.labels[epoch]}" for epoch in self._held}
        return f"WeightStore({held}, staged={sorted(self._staged)})"

    @property
    def serving(self) -> Weights:
        """What the default policy serves."""
        return self._held[self.policies[""].epoch]

    @property
    def base(self) -> LoadedModel | None:
        return self._base

    def of(self, epoch: int) -> Weights:
        return self._held[epoch]

    def owner(self, epoch: int) -> str:
        """The policy whose commit it is."""
        return self._owner[epoch]

    def label(self, policy: str) -> str:
        return self.labels[self.policies[policy].epoch]

    def track(self, policy: str, snapshot: str | None) -> Track | None:
        """What a request runs under: the policy's newest, or the one snapshot of it that is named. None: it is not here."""
        track = self.policies.get(policy)
        if track is None or snapshot is None:
            return track
        own = [e for e in self._held if e in track and self.labels[e] == snapshot]
        return track.fixed_at(max(own)) if own else None

    def expect_adapter(self, call: int) -> None:
        """An adapter is going to be read: the base weights stay until `adapter_came`."""
        self._coming.add(call)

    def adapter_came(self, call: int) -> None:
        """It is staged, or will not be. Calls that read no adapter are passed over."""
        self._coming.discard(call)
        base = self._base
        held = [*self._held.values(), *self._staged.values()]
        if not self._coming and base is not None and not any(weights.model is base for weights in held):
            self._base = None
            self.retired.append(base)

    def set_staged(self, weights: Weights | None, policy: str = "") -> None:
        """Set what `commit` will serve. What was staged for the policy before is retired."""
        before = self._staged.pop(policy, None)
        if weights is not None:
            self._staged[policy] = weights
            if weights.adapter is not None:
                self._base = weights.model
        self._retire(before)

    def drop(self, weights: Weights) -> None:
        """Weights that were read in vain."""
        self._retire(weights)

    def _rename(self, policy: str, snapshot: str, label: str) -> None:
        self.renamed.append((policy, snapshot, label))
        for epoch, owner in self._owner.items():
            if (owner, self.labels[epoch]) == (policy, snapshot):
                self.labels[epoch] = label

    def commit(
        self, snapshot: str, policy: str, files: str = "", overwritten: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Serve what is staged for the policy. files, overwritten: see engine.base.Slot.announce."""
        for name, label in overwritten:
            self._rename(policy, name, label)
        epoch = len(self.labels)
        self.labels.append(snapshot)
        self.files.append(files)
        self._owner[epoch] = policy
        self._held[epoch] = self._staged.pop(policy)
        if policy in self.policies:
            self.policies[policy].commit(epoch)
        else:
            self.policies[policy] = Track(epoch)
        self.sweep()

    def retain(self, policy: str, snapshots: Collection[str]) -> None:
        """Keep these of the snapshots that the policy has served."""
        self._retained[policy] = frozenset(snapshots)
        self.sweep()

    def end(self, policy: str) -> None:
        self._retained.pop(policy, None)
        self.policies.pop(policy, None)
        self.set_staged(None, policy)
        self.sweep()

    @property
    def spare(self) -> bool:
        """Whether `sweep` may find something."""
        return len(self._held) > len(self.policies)

    def sweep(self) -> None:
        kept = {track.epoch for track in self.policies.values()} | self._in_use()
        # Of a snapshot that served twice, the newer commit.
        names = {(self._owner[e], self.labels[e]): e for e in sorted(self._held)}
        kept |= {e for (policy, name), e in names.items() if name in self._retained.get(policy, ())}
        for epoch in [e for e in self._held if e not in kept]:
            self._retire(self._held.pop(epoch))

    def take_retired(self) -> list[Retired]:
        retired, self.retired = self.retired, []
        return retired

    def _retire(self, weights: Weights | None) -> None:
        if weights is None:
            return
        others = [*self._held.values(), *self._staged.values()]
        if weights.adapter is not None and not any(o.adapter is weights.adapter for o in others):
            self.retired.append(weights.adapter)
        if any(o.model is weights.model for o in others):
            return
        if weights.model is self._base:
            if self._coming:
                return
            self._base = None
        self.retired.append(weights.model)


def _finite(tensor: torch.Tensor) -> bool:
    """True if every number is finite. A finite sum proves it; another sum may only have overflowed."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(torch.isfinite(tensor).all())


def load_adapter_beside(
    base: LoadedModel, directory: Path, base_directory: Path, settings: EngineSettings
) -> Weights:
    """Read an adapter on `base`, the model in `base_directory`, beside the steps. Raises SnapshotError."""
    dtype = next(dtype for _, dtype in base.shapes.values() if dtype.is_floating_point)
    maps = load_adapter(directory, base_directory, dtype)
    for module, low in maps.items():
        if not (_finite(low.a) and _finite(low.b)):
            raise SnapshotNotFinite(f"the adapter of {module} has numbers that are not finite")
    try:
        with loading(settings.device):
            return Weights(base, base.decoder.adapter(maps))
    except (KernelsUnavailable, UnsupportedModel) as error:
        raise SnapshotIncompatible(f"this engine does not run {error}: see exclude_modules") from error
