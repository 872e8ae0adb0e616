"""Makes a whole checkpoint directory from a state dict, a Hugging Face model, or a directory.

Always holds: the weights are written first, then their index, then configuration and tokenizer. The source is never changed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from midstream.client.names import as_checkpoint, from_memory, in_memory, served_spec
from midstream.client.weights import COMPILED, Cast, SnapshotTensor, TensorCopy, wide_first, write_weights
from midstream.snapshots.adapter import ADAPTER_FILES
from midstream.snapshots.layout import COMPANION_FILES, WEIGHT_FILES, CheckpointSpec, is_snapshot_file
from midstream.snapshots.names import hint


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Within this context transformers draws no progress bar over the caller's output."""
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]


def save_hugging_face_model(
    directory: Path, model: Any, cast: Cast | None, state: Mapping[str, Any] | None = None
) -> None:
    """Write a Hugging Face model under its checkpoint's tensor names, cast on the way. `model` does not change.

    state: its tensors under their names in memory, where the model has not got them whole. Only the model's own
    save_pretrained knows the checkpoint's names: newer versions keep expert weights fused in memory.
    """
    config_before = dict(vars(model.config))
    try:
        if cast:
            state = _cast_state(model.state_dict() if state is None else state, cast)
        with no_progress_bars():
            # It empties the dict that it is given.
            model.save_pretrained(directory, state_dict=None if state is None else dict(state))
    finally:
        vars(model.config).clear()
        vars(model.config).update(config_before)
    if cast:
        config = json.loads((directory / "config.json").read_text())
        config["dtype"] = cast
        (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_adapter(directory: Path, model: Any) -> None:
    """Write the active adapter of a PEFT model, as its own save_pretrained does, and nothing else."""
    name = model.active_adapter
    if not isinstance(name, str):
        raise ValueError(f"adapter: {name!r} are active; set one with set_adapter")
    with tempfile.TemporaryDirectory(dir=directory, prefix=".") as temporary:
        model.save_pretrained(temporary, safe_serialization=True, selected_adapters=[name])
        # PEFT gives adapters with a name of their own a directory of it.
        named = Path(temporary) / name
        copy_matching(named if named.is_dir() else Path(temporary), directory, ADAPTER_FILES)


def _cast_state(state: Mapping[str, Any], cast: Cast) -> dict[str, Any]:
    """Cast copies. Tensors that shared memory still do: save_pretrained finds tied weights by that."""
    import torch

    target = getattr(torch, cast)
    done: dict[Any, Any] = {}

    def converted(tensor: Any) -> Any:
        if not tensor.is_floating_point() or tensor.dtype == target:
            return tensor
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in done:
            done[key] = tensor.detach().to(target)
        return done[key]

    return {name: converted(tensor) for name, tensor in state.items()}


Weights = Mapping[str, Any] | str | PathLike[str]


@dataclass(frozen=True)
class Source:
    """Where the weights of a snapshot are. Raises ValueError when the parts do not go together.

    weights: tensors by name (numpy arrays or torch tensors), or the directory of a checkpoint. model: instead of
    weights, a Hugging Face model; with weights, these are its state dict, as FSDP or DeepSpeed gather it. config_dir: the
    directory of config.json and the tokenizer's files; must be given with tensors. With a model it wins over the model's own:
    with the served model's directory, settings for training do not fail the server's configuration check. dtype:
    floating-point tensors are cast to this on the way to disk; not for a directory.
    adapter: instead of weights, a PEFT model, of which the active adapter is taken. of_policy: it has to be an adapter, which
    may also be the directory of one. to_push: tensors alone are taken, which need no config_dir.
    """

    weights: Weights | None = None
    model: Any = None
    config_dir: str | PathLike[str] | None = None
    dtype: Cast | None = None
    adapter: Any = None
    of_policy: bool = False
    to_push: bool = False

    def __post_init__(self) -> None:
        if self.of_policy or self.adapter is not None:
            self._check_adapter()
            return
        if self.weights is None and self.model is None:
            raise ValueError("give either weights or model")
        if self.model is not None and not isinstance(self.weights, Mapping | None):
            raise ValueError("give either weights or model; with a model, weights are its state dict")
        if self.model is not None and not hasattr(self.model, "save_pretrained"):
            raise ValueError(
                f"model: a {type(self.model).__name__} has no save_pretrained; give the Hugging Face model inside it"
                " (model.module)"
            )
        tensors_alone = isinstance(self.weights, Mapping) and self.model is None and self.config_dir is None
        if tensors_alone and not self.to_push:
            raise ValueError("config_dir must be given with tensors: a snapshot has a config.json")
        if isinstance(self.weights, str | PathLike) and self.dtype is not None:
            raise ValueError("dtype cannot be given with a directory: its files are copied as they are")

    def _check_adapter(self) -> None:
        if not self.of_policy:
            raise ValueError("adapter: is for a policy; give the publisher its name as policy")
        if self.model is not None or self.config_dir is not None or self.dtype is not None:
            raise ValueError(
                "a policy takes no model, config_dir or dtype: give the directory of an adapter, or adapter"
            )
        if (self.weights is None) == (self.adapter is None):
            raise ValueError("give either the directory of an adapter, or adapter")
        if isinstance(self.weights, Mapping):
            raise ValueError("a policy takes no tensors: give the directory of an adapter, or adapter")
        if self.adapter is not None and not hasattr(self.adapter, "peft_config"):
            raise ValueError("adapter: must be a PEFT model, with peft_config and save_pretrained")

    def tensors(self) -> Mapping[str, Any]:
        """The tensors under the checkpoint's names, not cast: the caller's own memory, as far as the names allow. Raises
        ValueError, also for a directory."""
        if isinstance(self.weights, str | PathLike):
            raise ValueError("weights: a directory is published as files; a push takes tensors, or model")
        if self.model is not None:
            assert isinstance(self.weights, Mapping | None)
            return from_memory(getattr(self.model, COMPILED, self.model), self.weights)
        assert self.weights is not None
        # Only the server knows which names it serves. It refuses others before a byte moves.
        if (advice := hint(self.weights, sure=True)) is not None:
            raise ValueError(advice)
        return self.weights

    @property
    def served(self) -> CheckpointSpec | None:
        """The checkpoint beside the configuration that was given, if there is one."""
        return None if self.config_dir is None else served_spec(Path(self.config_dir))

    def lent(self) -> Mapping[str, Any]:
        """The tensors of torch that a copy beside the training reads, under their names in memory. Raises ValueError where the
        copy is made another way."""
        state = self.weights
        if state is None and self.model is not None:
            state = getattr(self.model, COMPILED, self.model).state_dict()
        if not isinstance(state, Mapping) or not all(hasattr(tensor, "detach") for tensor in state.values()):
            raise ValueError(
                "optimizer: is for tensors of torch by name, or a model; publish all else without it"
            )
        if self.config_dir is None and not self.to_push:
            raise ValueError("optimizer: with a model, give config_dir; its own is written with its weights")
        return state

    def copied(self, memory: TensorCopy, *, beside: bool = False) -> Mapping[str, Any] | None:
        """The weights in `memory`, under the checkpoint's names and cast, if they are tensors of torch by name. None: files are
        their copy.

        A model writes its own files, with a configuration that training uses; not `beside` it. Raises ValueError.
        """
        if not isinstance(self.weights, Mapping) or self.of_policy or (self.model is not None and not beside):
            return None
        assert self.config_dir is not None
        own = self.model is not None
        state = self.tensors() if own else as_checkpoint(self.weights, Path(self.config_dir))
        tensors = wide_first([SnapshotTensor(name, value, self.dtype) for name, value in state.items()])
        if not all(tensor.of_torch for tensor in tensors):
            return None
        raw, at, copies = memory.take(tensors), 0, {}
        for tensor in tensors:
            copies[tensor.name] = tensor.over(raw[at : at + tensor.size])
            at += tensor.size
        return copies

    def write(self, directory: Path) -> None:
        """Write the checkpoint into `directory`, which exists and is empty."""
        config_dir = self.config_dir
        if self.adapter is not None:
            save_adapter(directory, self.adapter)
            return
        if self.of_policy:
            assert isinstance(self.weights, str | PathLike)
            copy_matching(Path(self.weights), directory, ADAPTER_FILES)
            return
        if self.model is not None:
            assert isinstance(self.weights, Mapping | None)
            model = getattr(self.model, COMPILED, self.model)
            state = None if self.weights is None else in_memory(self.weights, model)
            save_hugging_face_model(directory, model, self.dtype, state)
        elif isinstance(self.weights, Mapping):
            assert config_dir is not None
            write_weights(directory, as_checkpoint(self.weights, Path(config_dir)), self.dtype)
        else:
            assert self.weights is not None
            copy_matching(Path(self.weights), directory, WEIGHT_FILES)
            config_dir = config_dir or self.weights
        write_companions(directory, config_dir)


def write_companions(directory: Path, config_dir: str | PathLike[str] | None) -> None:
    """Write into `directory` what a checkpoint has beside its weights, as far as `config_dir` has it."""
    if config_dir is not None:
        copy_matching(Path(config_dir), directory, COMPANION_FILES)


def copy_matching(source: Path, directory: Path, patterns: tuple[str, ...]) -> None:
    """Copy the snapshot files of `source` whose names match one of `patterns` into `directory`."""
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if is_snapshot_file(file.name) and file.is_file():
                shutil.copyfile(file, directory / file.name)
