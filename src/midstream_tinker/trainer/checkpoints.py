"""What a trained model leaves on disk: states to continue from, and weights to serve.

A state is a directory with `meta.json`, the trained weights (`model.safetensors`; for LoRA `adapter_model.safetensors` and
`adapter_config.json`, as peft has them) and, if asked for, `optimizer.safetensors`.

Always holds:
- A directory is whole and on disk, or not there. One that is replaced stays, under another name, until the new one is in place.
- Nothing is unpickled; a state is taken on only by a model with its base, its LoRA settings, and its names and shapes.
- Exported weights are an adapter as peft writes it. Otherwise they have the base checkpoint's files, names, shapes and dtypes,
  whatever transformers calls them in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from midstream.client.checkpoint import copy_matching
from midstream.core.decoding import NOT_JSON
from midstream.core.private import DIRECTORY_MODE, FILE_MODE, private_directory
from midstream.snapshots.durable import sync_directory, sync_tree
from midstream.snapshots.layout import COMPANION_FILES, INDEX_FILE, read_file_layout, read_spec
from midstream_tinker.trainer.model import BaseModel, TrainedModel
from midstream_tinker.trainer.types import LoraConfig, WorkFailed

META_FILE = "meta.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
FORMAT = 1
# Sampled of each tensor of a base, at its beginning and its end.
SAMPLE_BYTES = 64


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """base: what `fingerprint` says of the base model."""

    format: int
    base: str
    lora: LoraConfig
    steps: int
    optimizer: bool


def fingerprint(directory: Path) -> str:
    """Of a base model: its tensors' names, shapes and dtypes, and some bytes of each."""
    digest = hashlib.sha256()
    files = sorted({spec.file for spec in read_spec(directory).tensors.values()})
    for file in files:
        layout = read_file_layout(directory / file)
        with (directory / file).open("rb") as data:
            for name, (begin, end) in sorted(layout.ranges.items()):
                spec = layout.tensors[name]
                digest.update(repr((name, spec.dtype, spec.shape)).encode())
                for at in (begin, max(begin, end - SAMPLE_BYTES)):
                    data.seek(at)
                    digest.update(data.read(min(SAMPLE_BYTES, end - begin)))
    return digest.hexdigest()


def save_state(model: TrainedModel, directory: Path, optimizer: bool) -> int:
    """Bytes written. Raises OSError, with what was there before still there."""
    meta = Meta(
        format=FORMAT,
        base=fingerprint(model.base.directory),
        lora=model.lora,
        steps=model.optimizer.steps,
        optimizer=optimizer,
    )

    def write(into: Path) -> None:
        _write_trainable(model, into)
        if optimizer:
            save_file(model.optimizer.state(), into / OPTIMIZER_FILE)
        (into / META_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(meta)))

    return write_directory(directory, write)


def _write_trainable(model: TrainedModel, into: Path) -> None:
    weights = {name: parameter.detach().contiguous() for name, parameter in model.trainable.items()}
    save_file(weights, into / (MODEL_FILE if model.adapter is None else ADAPTER_FILE), {"format": "pt"})
    if model.adapter is not None:
        model.adapter.save_pretrained(str(into))


def read_meta(directory: Path) -> Meta:
    """Raises WorkFailed."""
    _recover(directory)
    try:
        meta = msgspec.json.decode((directory / META_FILE).read_bytes(), type=Meta)
    except FileNotFoundError as error:
        raise WorkFailed("the checkpoint is not there") from error
    except NOT_JSON as error:
        raise WorkFailed(f"the checkpoint's {META_FILE} cannot be read: {error}") from error
    if meta.format != FORMAT:
        raise WorkFailed(f"the checkpoint has format {meta.format}, this server reads {FORMAT}")
    return meta


def load_state(model: TrainedModel, directory: Path, optimizer: bool) -> None:
    """Raises WorkFailed, with the model as it was."""
    meta = read_meta(directory)
    _check_meta(meta, model, optimizer)
    weights = _read(directory / (ADAPTER_FILE if meta.lora.rank else MODEL_FILE))
    state = _read(directory / OPTIMIZER_FILE) if optimizer else {}
    if weights.keys() != model.trainable.keys():
        other = sorted(weights.keys() ^ model.trainable.keys())[0]
        raise WorkFailed(f"the checkpoint's tensors are not those of the model: {other}")
    for name, parameter in model.trainable.items():
        if weights[name].shape != parameter.shape:
            has, expected = list(weights[name].shape), list(parameter.shape)
            raise WorkFailed(f"the checkpoint's {name} has shape {has}, the model {expected}")
    if optimizer:
        model.optimizer.load(state, meta.steps)
    else:
        model.optimizer.reset()
    with torch.no_grad():
        for name, parameter in model.trainable.items():
            parameter.copy_(weights[name])


def _check_meta(meta: Meta, model: TrainedModel, optimizer: bool) -> None:
    """Raises WorkFailed."""
    if meta.base != fingerprint(model.base.directory):
        raise WorkFailed("the checkpoint was made from another base model")
    saved, own = (msgspec.structs.replace(lora, seed=None) for lora in (meta.lora, model.lora))
    if saved != own:
        raise WorkFailed(f"the checkpoint is of {_described(saved)}, the model of {_described(own)}")
    if optimizer and not meta.optimizer:
        raise WorkFailed("the checkpoint has no optimizer state")


def _described(lora: LoraConfig) -> str:
    if lora.rank == 0:
        return "all weights (rank 0)"
    off = [name for name in ("train_attn", "train_mlp", "train_unembed") if not getattr(lora, name)]
    return f"LoRA of rank {lora.rank}" + (f" without {', '.join(off)}" if off else "")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WorkFailed(f"the checkpoint's {path.name} cannot be read: {error}", "server") from error
    return tensors


def export_weights(model: TrainedModel, directory: Path) -> int:
    """A checkpoint that the engine loads in the base's place.

    Bytes written. Raises OSError; WorkFailed for a tensor not finite.
    """
    base = model.base.directory
    state = served_names(
        model.base, model.module if model.adapter is None else model.base.frozen, model.merged()
    )
    spec = read_spec(base).tensors

    def write(into: Path) -> None:
        for file in sorted({tensor.file for tensor in spec.values()}):
            with safe_open(base / file, framework="pt") as original:
                names = list(original.keys())
                tensors = {name: _as_served(name, state, original) for name in names}
                save_file(tensors, into / file, original.metadata() or {"format": "pt"})
        if (base / INDEX_FILE).exists():
            shutil.copyfile(base / INDEX_FILE, into / INDEX_FILE)
        copy_matching(base, into, COMPANION_FILES)

    return write_directory(directory, write, replace=False)


def export_adapter(model: TrainedModel, directory: Path) -> int:
    """A LoRA model's adapter, in peft's files, for replicas that have its base. Bytes written. Raises as `export_weights`."""
    assert model.adapter is not None
    for name, parameter in model.trainable.items():
        if not torch.isfinite(parameter).all():
            raise WorkFailed(f"{name} is not finite: these weights cannot be served")
    return write_directory(directory, lambda into: _write_trainable(model, into), replace=False)


def _as_served(name: str, state: Mapping[str, Tensor], original: Any) -> Tensor:
    """The tensor in the base's dtype; the base's own where the model in memory has none of that name."""
    if name not in state:
        kept: Tensor = original.get_tensor(name)
        return kept
    kind = original.get_tensor(name).dtype
    tensor = state[name].detach().to("cpu", kind).contiguous()
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise WorkFailed(f"{name} is not finite in {kind}: these weights cannot be served")
    return tensor


def served_names(base: BaseModel, module: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that the base checkpoint has: transformers keeps some fused in memory."""
    named: dict[str, Tensor] = revert_weight_conversion(module, dict(state))
    spec = read_spec(base.directory).tensors
    tied = {tensor.data_ptr() for name, tensor in named.items() if name in spec}
    for name, tensor in named.items():
        if name in spec and tuple(tensor.shape) != spec[name].shape:
            raise WorkFailed(
                f"{name} has shape {list(tensor.shape)}, the base {list(spec[name].shape)}", "server"
            )
        if name not in spec and tensor.data_ptr() not in tied:
            raise WorkFailed(f"{name} is trained, but the base checkpoint has no such tensor", "server")
    return named


# -- directories


def write_directory(directory: Path, write: Callable[[Path], None], *, replace: bool = True) -> int:
    """What `write` puts into a directory, as `directory`, on disk. Bytes. Raises OSError."""
    made = [at for at in directory.parents if not at.exists()]
    private_directory(directory.parent)
    for at in made:
        at.chmod(DIRECTORY_MODE)
        sync_directory(at.parent)
    _recover(directory)
    if not replace and directory.exists():
        raise FileExistsError(f"{directory.name} is there already")
    prefix = f".{directory.name}.writing-"
    for left in directory.parent.iterdir():
        if left.name.startswith(prefix):
            # Left by a process that died.
            shutil.rmtree(left)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    try:
        write(staging)
        staging.chmod(DIRECTORY_MODE)
        for file in staging.iterdir():
            file.chmod(FILE_MODE)
        size = sum(file.stat().st_size for file in staging.iterdir())
        sync_tree(staging)
        with _aside(directory):
            staging.rename(directory)
        sync_directory(directory.parent)
    except SafetensorError as error:
        # Its writer says of a full disk in this way.
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return size


@contextlib.contextmanager
def _aside(directory: Path) -> Iterator[None]:
    """Within: what was at `directory` is under another name, from which `_recover` brings it back."""
    old = _old(directory)
    if not directory.exists():
        yield
        return
    directory.rename(old)
    try:
        yield
    except BaseException:
        old.rename(directory)
        raise
    sync_directory(directory.parent)
    shutil.rmtree(old)


def _recover(directory: Path) -> None:
    """After a crash between the two renames, the older one counts; after one behind them, the newer."""
    old = _old(directory)
    if not old.exists():
        return
    if directory.exists():
        shutil.rmtree(old)
    else:
        old.rename(directory)


def _old(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")
