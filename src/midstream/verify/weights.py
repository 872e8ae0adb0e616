"""The weights of each snapshot, loaded for the embedded engine's model code, a few at a time.

Owns: which models are in memory. Always holds: all of them have the shapes of the first one, and adapters stand on the base. A
model that is let go is not used again.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from midstream.core.config import EngineSettings
from midstream.core.errors import SnapshotIncompatible
from midstream.core.types import BASE_SNAPSHOT
from midstream.engine.embedded.loading import load_beside, load_model
from midstream.engine.embedded.modules import UnsupportedModel
from midstream.engine.embedded.weights import Weights, load_adapter_beside
from midstream.snapshots.adapter import is_adapter
from midstream.verify.jobs import Files

#: Full models in memory, beside the first one. Adapters are small: more of them stay.
MODELS_KEPT, ADAPTERS_KEPT = 2, 64


class LoadedSnapshots:
    """files: of each snapshot, and of BASE_SNAPSHOT where it is known. first: any snapshot with full weights."""

    def __init__(self, files: Files, first: str, settings: EngineSettings) -> None:
        self._files, self._settings, self._first_name = files, settings, first
        directory = files(first)
        if is_adapter(directory):
            raise SnapshotIncompatible(
                f"{first}: is an adapter; --base names the checkpoint that it stands on"
            )
        try:
            self.first = load_model(directory, settings)
        except UnsupportedModel as error:
            raise SnapshotIncompatible(f"{first}: {error}") from error
        self._models: OrderedDict[str, Weights] = OrderedDict()
        self._adapters: OrderedDict[str, Weights] = OrderedDict()

    def __repr__(self) -> str:
        return f"LoadedSnapshots({self._first_name}, {[*self._models]}, {len(self._adapters)} adapters)"

    def here(self, snapshot: str) -> bool:
        """Whether it takes no time to use it."""
        return snapshot in (self._first_name, *self._models, *self._adapters)

    def of(self, snapshot: str) -> Weights:
        """Whoever keeps it longer than until the next call must not. Raises SnapshotError."""
        if snapshot == self._first_name:
            return Weights(self.first)
        for kept in (self._models, self._adapters):
            if snapshot in kept:
                kept.move_to_end(snapshot)
                return kept[snapshot]
        directory = self._files(snapshot)
        try:
            if is_adapter(directory):
                return self._keep(self._adapters, snapshot, self._adapter(directory), ADAPTERS_KEPT)
            self._make_room()
            weights = Weights(load_beside(self.first, directory, self._settings))
        except UnsupportedModel as error:
            raise SnapshotIncompatible(f"{snapshot}: {error}") from error
        return self._keep(self._models, snapshot, weights, MODELS_KEPT)

    def _adapter(self, directory: Path) -> Weights:
        if self._first_name != BASE_SNAPSHOT:
            raise SnapshotIncompatible(
                f"{directory.name}: is an adapter; --base names the checkpoint that it stands on"
            )
        return load_adapter_beside(self.first, directory, self._files(BASE_SNAPSHOT), self._settings)

    def _make_room(self) -> None:
        while len(self._models) >= MODELS_KEPT:
            _, oldest = self._models.popitem(last=False)
            oldest.model.release()

    @staticmethod
    def _keep(kept: OrderedDict[str, Weights], name: str, weights: Weights, most: int) -> Weights:
        kept[name] = weights
        while len(kept) > most:
            _, oldest = kept.popitem(last=False)
            held: Any = oldest.model if oldest.adapter is None else oldest.adapter
            held.release()
        return weights
