"""From a Hugging Face directory to a decoder that may serve.

Owns: reading checkpoints, the choice between the fused decoder and the module itself, and the check that what will serve
computes what transformers computes.
Always holds: a model beside a serving one has its dtypes, its shapes and its kind of decoder, and has been run once;
nothing is unpickled (safetensors only).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from midstream.config import EngineSettings
from midstream.engine.embedded.attention import IMPLEMENTATION
from midstream.engine.embedded.batch import StepBatch, alone
from midstream.engine.embedded.device import check_device, loading
from midstream.engine.embedded.fused import GROUP, FusedDecoder, NotFused, Pieces
from midstream.engine.embedded.mapped import MappedCheckpoint, assembled
from midstream.engine.embedded.modules import ModuleDecoder, UnsupportedModel

logger = logging.getLogger(__name__)

CHECK_TOKENS = 48
CHECK_KL_MAX = 0.1  # nats; bfloat16 rounding gives under 0.01
# How far logits may be off, as a share of their own spread: a model that has learned little has a divergence near zero
# whatever is computed. Rounding gives under 0.05 in bfloat16 and 1e-5 in float32; a wrong window, scale or norm 0.3 to 1.
CHECK_SHARE_MAX = {torch.float32: 0.01}
CHECK_SHARE_MAX_HALF = 0.25

Shapes = dict[str, tuple[torch.Size, torch.dtype]]


class Cache(Protocol):
    @property
    def bytes_per_token(self) -> int: ...


class Decoder(Protocol):
    """A model that runs packed batches over a cache of its own making."""

    moe_layers: int
    top_k: int  # 0 on a dense model
    num_experts: int
    router_ties: (
        np.ndarray
    )  # [tokens] of the last forward, uint8: 1 where a router's choice was a near tie (ties.py)

    def new_cache(self, slots: int) -> Any: ...

    def forward(
        self, batch: StepBatch, cache: Any, rows: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Logits [len(rows), vocab] of packed rows (int64) in the model's dtype, and routes [tokens, moe_layers, top_k]."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that a forward reads but the batch and the cache, always in the same order."""

    def release(self) -> None: ...


@dataclass
class LoadedModel:
    name: str  # of its class
    config: Any
    generation_config: Any
    shapes: Shapes
    decoder: Decoder


def load_model(directory: Path, settings: EngineSettings) -> LoadedModel:
    """The first model of an engine. Raises UnsupportedModel."""
    check_device(settings.device)
    dtype = "auto" if settings.dtype is None else getattr(torch, settings.dtype)
    with loading(settings.device):
        module = _placed(_read(directory, dtype), settings.device)
        loaded = _loaded(module, checked_decoder(module, settings))
        probe(loaded)
    return loaded


def batch_invariant(model: LoadedModel, settings: EngineSettings) -> bool:
    """Whether a token's logits are the same to the last bit whatever else is in the batch and wherever a prompt was cut.

    Of torch's own kernels nobody can say so for every processor, not in bfloat16 either.
    """
    return settings.device == "cpu" and isinstance(model.decoder, FusedDecoder)


def load_beside(serving: LoadedModel, directory: Path, settings: EngineSettings) -> LoadedModel:
    """Load a snapshot to take the serving model's place while that one serves. Raises UnsupportedModel, SnapshotError."""
    if isinstance(serving.decoder, FusedDecoder):
        loaded = _mapped(serving, directory, settings) or _fused_beside(
            serving, _read_beside(serving, directory, settings), settings
        )
        probe_beside(loaded, serving.decoder)
    else:
        with loading(settings.device):
            module = _read_beside(serving, directory, settings)
            loaded = _loaded(module, ModuleDecoder(module))
            probe(loaded)
    return loaded


def _mapped(serving: LoadedModel, directory: Path, settings: EngineSettings) -> LoadedModel | None:
    """Packed straight from the files; None: they have to be read by transformers."""
    files = MappedCheckpoint(directory)
    try:
        dtypes = {name: dtype for name, (_, dtype) in serving.shapes.items()}
        found = assembled(directory, files.tensors, dtypes) if files.tensors is not None else None
        if found is None:
            return None
        module, pieces = found
        loaded = _fused_beside(serving, module, settings, pieces)
    finally:
        files.close()
    try:
        loaded.generation_config = GenerationConfig.from_pretrained(directory)
    except OSError:
        loaded.generation_config = GenerationConfig.from_model_config(module.config)
    return loaded


def _fused_beside(
    serving: LoadedModel, module: Any, settings: EngineSettings, pieces: Pieces | None = None
) -> LoadedModel:
    _check_shapes(module, serving)
    try:
        return _loaded(module, _fused(module, settings, pieces))
    except NotFused as error:
        raise UnsupportedModel(f"it cannot run as the serving model does: {error}") from error


def _read_beside(serving: LoadedModel, directory: Path, settings: EngineSettings) -> Any:
    """The module as transformers reads it.

    It sets the process-wide default dtype to the one it loads in while it builds the module, which a step on another
    thread would see. So load in float32, the default anyway, and cast each tensor: casting up and back is exact.
    It is cast before it is placed, so a device never holds the snapshot in float32.
    """
    module = _read(directory, torch.float32)
    _check_shapes(module, serving)
    for name, tensor in _tensors(module):
        tensor.data = tensor.data.to(serving.shapes[name][1])
    return _placed(module, settings.device)


def _check_shapes(module: Any, serving: LoadedModel) -> None:
    if {n: s for n, (s, _) in _shapes(module).items()} != {n: s for n, (s, _) in serving.shapes.items()}:
        raise UnsupportedModel("its parameters are not those of the serving model")


def probe_beside(model: LoadedModel, serving: FusedDecoder) -> None:
    """As `probe`, without the threads that steps run on; and what the first step needs is at hand."""
    decoder = model.decoder
    assert isinstance(decoder, FusedDecoder)
    threads, decoder.threads = decoder.threads, 1
    probe(model)
    decoder.threads = threads
    decoder.get_ready(serving)


def probe(model: LoadedModel) -> None:
    """One token through the model. Raises UnsupportedModel on logits not finite."""
    if not torch.isfinite(logits_alone(model.decoder, np.zeros(1, dtype=np.int64))).all():
        raise UnsupportedModel("the model's logits are not finite")


@torch.inference_mode()
def logits_alone(decoder: Decoder, ids: np.ndarray) -> torch.Tensor:
    """Float32 logits [tokens, vocab] of one sequence over a cache of its own. ids: [tokens] int64."""
    cache = decoder.new_cache(-(-len(ids) // 16) * 16)
    return decoder.forward(alone(ids, 16), cache, np.arange(len(ids)))[0].float()


@torch.inference_mode()
def disagreement(module: Any, decoder: Decoder) -> str | None:
    """How the decoder's logits on a short sequence differ from the module's own eager forward; None: by rounding only."""
    ids = np.arange(CHECK_TOKENS) * 7919 % module.config.vocab_size
    ours = logits_alone(decoder, ids)
    module.set_attn_implementation("eager")
    try:
        inputs = torch.from_numpy(ids).to(ours.device).unsqueeze(0)
        output = module(input_ids=inputs, use_cache=False).logits[0]
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    plain = output.float().log_softmax(-1)
    nats = float((plain.exp() * (plain - ours.log_softmax(-1))).sum(-1).mean().item())
    if not nats < CHECK_KL_MAX:
        return f"differ from the model's own by {nats:.3g} nats"
    spread, off = _spread(output.float()), _spread(ours - output.float())
    if not off <= CHECK_SHARE_MAX.get(output.dtype, CHECK_SHARE_MAX_HALF) * spread:
        return f"differ from the model's own by {off:.3g}, where those spread by {spread:.3g}"
    return None


def _spread(logits: torch.Tensor) -> float:
    """Root mean square about each row's mean: adding a constant to a row changes no probability."""
    return float((logits - logits.mean(-1, keepdim=True)).square().mean().sqrt().item())


def checked_decoder(module: Any, settings: EngineSettings) -> Decoder:
    """The fastest decoder whose numbers are the module's own. Raises UnsupportedModel."""
    if settings.kernels == "native" or (settings.kernels == "auto" and settings.device == "cpu"):
        try:
            fused = _fused(module, settings)
            differs = disagreement(module, fused)
            if differs is None:
                return fused
            raise NotFused(f"its logits {differs}")
        except NotFused as error:
            if settings.kernels == "native":
                raise UnsupportedModel(f"kernels = native, but {error}") from error
            logger.warning("the native kernels are not used, steps will be slower: %s", error)
    decoder = ModuleDecoder(module)
    differs = disagreement(module, decoder)
    if differs is not None:
        raise UnsupportedModel(f"{type(module).__name__}: logits over the paged cache {differs}")
    return decoder


def _fused(module: Any, settings: EngineSettings, pieces: Pieces | None = None) -> FusedDecoder:
    if settings.block_size % GROUP:
        raise NotFused(f"block_size {settings.block_size} is not a multiple of {GROUP}")
    positions = int(module.config.max_position_embeddings)
    if settings.kv_cache_memory is None:
        positions = min(positions, settings.kv_cache_tokens)
    return FusedDecoder(module, max(positions, CHECK_TOKENS), max(1, settings.threads), pieces or {})


def _read(directory: Path, dtype: torch.dtype | str) -> Any:
    module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=IMPLEMENTATION, use_safetensors=True
    )
    return module.eval().requires_grad_(False)


def _placed(module: Any, device: str) -> Any:
    """Its tensors on the device, off the file mapping: the first step must not wait for the disk."""
    module = module.to(device)
    for parameter in module.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    return module


def _loaded(module: Any, decoder: Decoder) -> LoadedModel:
    shapes = _shapes(module)
    if isinstance(decoder, FusedDecoder):  # has its own copy
        for _, tensor in _tensors(module):
            tensor.data = tensor.data.new_empty(0)
    return LoadedModel(type(module).__name__, module.config, module.generation_config, shapes, decoder)


def _shapes(module: Any) -> Shapes:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(module)}


def _tensors(module: Any) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
