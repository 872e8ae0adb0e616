"""Makes a whole checkpoint directory from a state dict, a Hugging Face model, or a directory.

Always holds: the weights are written first, then their index, then configuration and tokenizer. The source is never changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from midstream.client.weights import Cast, save_hugging_face_model, write_weights
from midstream.snapshots.layout import COMPANION_FILES, WEIGHT_FILES, is_snapshot_file

Weights = Mapping[str, Any] | str | PathLike[str]


@dataclass(frozen=True)
class Source:
    """Where the weights of a snapshot are. Raises ValueError when the parts do not go together.

    weights: checkpoint tensors by name (numpy arrays or torch tensors), or the directory of a checkpoint. model: instead of
    weights, a Hugging Face model. config_dir: the directory of config.json and the tokenizer's files; must be given with
    tensors. With a model it wins over the model's own: with the served model's directory, settings for training do not fail the
    server's configuration check. dtype: floating-point tensors are cast to this on the way to disk; not for a directory.
    """

    weights: Weights | None = None
    model: Any = None
    config_dir: str | PathLike[str] | None = None
    dtype: Cast | None = None

    def __post_init__(self) -> None:
        if (self.weights is None) == (self.model is None):
            raise ValueError("give either weights or model")
        if isinstance(self.weights, Mapping) and self.config_dir is None:
            raise ValueError("config_dir must be given with tensors: a snapshot has a config.json")
        if isinstance(self.weights, str | PathLike) and self.dtype is not None:
            raise ValueError("dtype cannot be given with a directory: its files are copied as they are")

    def write(self, directory: Path) -> None:
        """Write the checkpoint into `directory`, which exists and is empty."""
        config_dir = self.config_dir
        if self.model is not None:
            save_hugging_face_model(directory, self.model, self.dtype)
        elif isinstance(self.weights, Mapping):
            write_weights(directory, self.weights, self.dtype)
        else:
            assert self.weights is not None
            copy_matching(Path(self.weights), directory, WEIGHT_FILES)
            config_dir = config_dir or self.weights
        if config_dir is not None:
            copy_matching(Path(config_dir), directory, COMPANION_FILES)


def copy_matching(source: Path, directory: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if is_snapshot_file(file.name) and file.is_file():
                shutil.copyfile(file, directory / file.name)
