"""From a Hugging Face directory to a decoder that may serve.

Owns: reading checkpoints, the choice between the CPU kernels and the PyTorch module, and the check that the decoder computes
what transformers computes.
Always holds: a model that is loaded beside the serving one has the same dtypes, shapes and kind of decoder. The canary has
been scored with it. Nothing is unpickled (safetensors only).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from midstream.core.config import EngineSettings, parse_size
from midstream.core.errors import ConfigError, SnapshotIncompatible, SnapshotNotFinite
from midstream.engine.adapter import LowRanks
from midstream.engine.base import canary_ids
from midstream.engine.embedded.attention import IMPLEMENTATION
from midstream.engine.embedded.batch import alone
from midstream.engine.embedded.device import loading, use_device
from midstream.engine.embedded.growing_files import GrowingFiles
from midstream.engine.embedded.modules import ModuleDecoder, UnsupportedModel
from midstream.engine.step import StepBatch, near_tie
from midstream.snapshots.layout import read_checkpoint
from midstream_kernels import (
    GROUP,
    CpuDecoder,
    KernelsUnavailable,
    Pieces,
    Skeletons,
    Spare,
    asked_level,
    mapped_module,
)

logger = logging.getLogger(__name__)

#: The memory of a model that was replaced is kept for so long, for the next one.
SPARE_S = 600.0
CHECK_TOKENS = 48
#: In nats. Rounding in bfloat16 gives less than 0.01.
CHECK_KL_MAX = 0.1
#: How far logits may be off, as a share of their own spread. The divergence alone does not show a fault: in a model that has
#: learned little it is near zero whatever is computed. Rounding gives less than 0.05 in bfloat16 and 1e-5 in float32; a wrong
#: window, scale or norm gives 0.3 to 1.
CHECK_SHARE_MAX = {torch.float32: 0.01}
CHECK_SHARE_MAX_HALF = 0.25

Shapes = dict[str, tuple[torch.Size, torch.dtype]]
#: See CpuDecoder.
Ready = Callable[[str], None]


class Decoder(Protocol):
    """A model that runs packed batches over a KV cache of its own kind. top_k is 0 on a dense model.

    router_ties: [tokens] uint8, of the last forward pass: 1 where a router's choice was a near tie.
    gives_router_weights: whether `forward` can write them.
    """

    moe_layers: int
    top_k: int
    num_experts: int
    router_ties: np.ndarray
    gives_router_weights: bool

    def new_cache(self, slots: int) -> Any:
        """An empty cache; its `bytes_per_token` says what a token takes."""

    def forward(
        self, batch: StepBatch, cache: Any, rows: np.ndarray, router_weights: np.ndarray | None = None
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Logits [len(rows), vocab] of the batch's tokens `rows` (int64), in the model's dtype; and the routes of all tokens,
        [tokens, moe_layers, top_k] uint8 or uint16, None on a dense model.

        router_weights: float32 of the routes' shape, to which is written what each expert's output is multiplied by."""

    def adapter(self, maps: LowRanks) -> Any:
        """A LoRA adapter in the form that a batch has it (StepBatch.adapters), for every model of these shapes. Raises
        UnsupportedModel, naming a map that this decoder does not adapt."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that a forward pass reads, except the batch and the cache, always in the same order."""

    def release(self) -> None: ...


@dataclass
class LoadedModel:
    config: Any
    generation_config: Any
    shapes: Shapes
    decoder: Decoder
    #: Of the models that this one serves after.
    skeletons: Skeletons = field(default_factory=Skeletons)

    def release(self) -> None:
        self.decoder.release()

    def tidy(self) -> None:
        """Give back the memory that a model before this one left, when no model has needed it for long."""
        if isinstance(self.decoder, CpuDecoder):
            self.decoder.spare.give_back(SPARE_S)


def load_model(directory: Path, settings: EngineSettings) -> LoadedModel:
    """Load the first model of an engine. Raises UnsupportedModel, and the errors of `probe`."""
    use_device(settings.device)
    dtype = "auto" if settings.dtype is None else getattr(torch, settings.dtype)
    with loading(settings.device):
        module = _placed(_read(directory, dtype), settings.device)
        loaded = _loaded(module, checked_decoder(module, settings))
        if settings.router_weights and loaded.decoder.moe_layers and not loaded.decoder.gives_router_weights:
            raise UnsupportedModel(
                f"embedded.router_weights: not with {type(module).__name__}, which hides them"
            )
        probe(loaded)
    return loaded


def batch_invariant(model: LoadedModel, settings: EngineSettings) -> bool:
    """Whether no bit of a token's logits depends on the rest of the batch, or on where its prompt was cut.

    PyTorch's own kernels do not promise this on every processor, not even in bfloat16.
    """
    return settings.device == "cpu" and isinstance(model.decoder, CpuDecoder)


def load_beside(serving: LoadedModel, directory: Path, settings: EngineSettings) -> LoadedModel:
    """Load a snapshot while `serving` serves, to take its place. Raises UnsupportedModel, SnapshotError.

    SnapshotNotFinite is one of them.
    """
    if isinstance(serving.decoder, CpuDecoder):
        return _load_beside_cpu(serving, serving.decoder, directory, settings)
    with loading(settings.device):
        module = _read_beside(serving, directory, settings)
        loaded = _loaded(module, ModuleDecoder(module))
        probe(loaded)
    return loaded


def load_ahead(serving: LoadedModel, growing: GrowingFiles, settings: EngineSettings) -> LoadedModel:
    """As `load_beside`, of files that are still being made. Nothing is computed before they are whole and proved. Raises
    GrowingFilesEnded, too, and UnsupportedModel for files that are read whole or not at all."""
    decoder = serving.decoder
    if not isinstance(decoder, CpuDecoder):
        raise UnsupportedModel("only models of the native kernels are packed tensor by tensor")
    loaded = _mapped_beside(serving, decoder, growing.directory, settings, growing)
    if loaded is None:
        raise UnsupportedModel("its tensors cannot be used where they lie")
    return _proved_beside(loaded, serving, decoder, growing.whole())


def _load_beside_cpu(
    serving: LoadedModel, decoder: CpuDecoder, directory: Path, settings: EngineSettings
) -> LoadedModel:
    """Packs the weights straight from the files where that can be done."""
    loaded = _mapped_beside(serving, decoder, directory, settings)
    if loaded is not None:
        return _proved_beside(loaded, serving, decoder, directory)
    loaded = _packed_beside(serving, decoder, _read_beside(serving, directory, settings), settings)
    return _proved_beside(loaded, serving, decoder, None)


def _mapped_beside(
    serving: LoadedModel,
    decoder: CpuDecoder,
    directory: Path,
    settings: EngineSettings,
    growing: GrowingFiles | None = None,
) -> LoadedModel | None:
    dtypes = {name: dtype for name, (_, dtype) in serving.shapes.items()}
    files = read_checkpoint(directory)[1]
    names = [name for layout in files.values() for name in layout.tensors]

    def ready(prefix: str) -> None:
        if growing is not None:
            growing.wait_for([name for name in names if name.startswith(prefix)])

    with mapped_module(directory, files, dtypes, serving.skeletons) as mapped:
        if mapped is None:
            return None
        return _packed_beside(serving, decoder, mapped[0], settings, mapped[1], ready)


def _proved_beside(
    loaded: LoadedModel, serving: LoadedModel, decoder: CpuDecoder, directory: Path | None
) -> LoadedModel:
    """directory: where its generation config is; None if it has been read."""
    if directory is not None:
        try:
            loaded.generation_config = GenerationConfig.from_pretrained(directory)
        except OSError:
            loaded.generation_config = GenerationConfig.from_model_config(loaded.config)
    probe(loaded)
    assert isinstance(loaded.decoder, CpuDecoder)
    loaded.skeletons = serving.skeletons
    loaded.decoder.share_scratch(decoder)
    return loaded


def _packed_beside(
    serving: LoadedModel,
    decoder: CpuDecoder,
    module: Any,
    settings: EngineSettings,
    pieces: Pieces | None = None,
    ready: Ready = lambda prefix: None,
) -> LoadedModel:
    _check_shapes(module, serving)
    try:
        return _loaded(module, _cpu_decoder(module, settings, pieces, decoder.spare, ready))
    except KernelsUnavailable as error:
        raise UnsupportedModel(f"it cannot run as the serving model does: {error}") from error


def _read_beside(serving: LoadedModel, directory: Path, settings: EngineSettings) -> Any:
    """The module as transformers reads it.

    While transformers builds a module, it sets the default dtype of the whole process to the one it loads in. A step on
    another thread would see that. So the module is loaded in float32, which is the default anyway, and each tensor is cast:
    casting up and back is exact. It is cast before it is placed, so a device never holds the snapshot in float32.
    """
    module = _read(directory, torch.float32)
    _check_shapes(module, serving)
    for name, tensor in _tensors(module):
        tensor.data = tensor.data.to(serving.shapes[name][1])
    return _placed(module, settings.device)


def _check_shapes(module: Any, serving: LoadedModel) -> None:
    if {n: s for n, (s, _) in _shapes(module).items()} != {n: s for n, (s, _) in serving.shapes.items()}:
        raise UnsupportedModel("its parameters are not those of the serving model")


def probe(model: LoadedModel, adapter: Any = None) -> None:
    """Score the canary with the model, or with an adapter on it. Not while another thread runs this model.

    adapter: the decoder's own form. Raises SnapshotNotFinite when a log-probability is not finite,
    SnapshotIncompatible when the logits of each token are all equal.
    """
    config, experts = model.config, model.decoder.num_experts
    context = int(config.max_position_embeddings)
    ids = canary_ids(int(config.vocab_size), context, experts, of_policy=adapter is not None)
    logits = logits_alone(model.decoder, np.array(ids, dtype=np.int64), adapter)
    # Log-probabilities are finite if the distance of the least logit to the largest one is. Either is NaN if a logit is.
    least, largest = torch.aminmax(logits, dim=-1)
    if not (largest.float() - least.float()).isfinite().all():
        raise SnapshotNotFinite("the log-probabilities of a fixed prompt are not finite")
    if adapter is None and (largest == least).all():
        raise SnapshotIncompatible(
            "the logits of a fixed prompt are all equal, so the weights cannot distinguish tokens"
        )


@torch.inference_mode()
def logits_alone(decoder: Decoder, ids: np.ndarray, adapter: Any = None) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence over a cache of its own, in the model's dtype. ids: [tokens] int64."""
    cache = decoder.new_cache(-(-len(ids) // 16) * 16)
    batch = alone(ids, 16)
    if adapter is not None:
        batch = replace(batch, adapters=(adapter,))
    return decoder.forward(batch, cache, np.arange(len(ids)))[0]


@torch.inference_mode()
def disagreement(module: Any, decoder: Decoder) -> str | None:
    """How the decoder's logits differ from the module's own eager forward pass on a short sequence.

    None when rounding explains the difference.
    """
    ids = np.arange(CHECK_TOKENS) * 7919 % module.config.vocab_size
    ours = logits_alone(decoder, ids).float()
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
    """Root mean square about each row's mean, since a constant added to a row changes no probability."""
    return float((logits - logits.mean(-1, keepdim=True)).square().mean().sqrt().item())


def check_kernels() -> None:
    """Raises ConfigError when the environment asks for kernels of a level that this machine cannot run."""
    try:
        asked_level()
    except KernelsUnavailable as error:
        raise ConfigError(str(error)) from error


def checked_decoder(module: Any, settings: EngineSettings) -> Decoder:
    """The fastest decoder with the same numbers as the module. Raises UnsupportedModel, and ConfigError as check_kernels."""
    check_kernels()
    if settings.kernels == "native" or (settings.kernels == "auto" and settings.device == "cpu"):
        try:
            fast = _cpu_decoder(module, settings)
            differs = disagreement(module, fast)
            if differs is None:
                return fast
            raise KernelsUnavailable(f"its logits {differs}")
        except KernelsUnavailable as error:
            if settings.kernels == "native":
                raise UnsupportedModel(f"kernels = native, but {error}") from error
            logger.warning("the native kernels are not used, steps will be slower: %s", error)
    decoder = ModuleDecoder(module)
    differs = disagreement(module, decoder)
    if differs is not None:
        raise UnsupportedModel(f"{type(module).__name__}: logits over the paged cache {differs}")
    return decoder


def _cpu_decoder(
    module: Any,
    settings: EngineSettings,
    pieces: Pieces | None = None,
    spare: Spare | None = None,
    ready: Ready = lambda prefix: None,
) -> CpuDecoder:
    if settings.block_size % GROUP:
        raise KernelsUnavailable(f"block_size {settings.block_size} is not a multiple of {GROUP}")
    positions = int(module.config.max_position_embeddings)
    if settings.kv_cache_memory is None:
        positions = min(positions, settings.kv_cache_tokens)
    tie = near_tie(next(module.parameters()).dtype)
    threads = max(1, settings.threads)
    return CpuDecoder(module, max(positions, CHECK_TOKENS), threads, tie, pieces or {}, spare, ready)


def _read(directory: Path, dtype: torch.dtype | str) -> Any:
    module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=IMPLEMENTATION, use_safetensors=True
    )
    return module.eval().requires_grad_(False)


def _placed(module: Any, device: str) -> Any:
    """The module with its tensors on the device, and not in mapped files: the first step must not wait for the disk, and a
    later write to a file must not serve."""
    module = module.to(device)
    for _, tensor in _tensors(module):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    return module


def _loaded(module: Any, decoder: Decoder) -> LoadedModel:
    shapes = _shapes(module)
    if isinstance(decoder, CpuDecoder):
        # The decoder has its own copy.
        for _, tensor in _tensors(module):
            tensor.data = tensor.data.new_empty(0)
    return LoadedModel(module.config, module.generation_config, shapes, decoder)


def _shapes(module: Any) -> Shapes:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(module)}


def _tensors(module: Any) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def cache_tokens(model: LoadedModel, settings: EngineSettings) -> int:
    """How many tokens the KV cache holds. Raises ConfigError when that is less than two blocks."""
    if settings.kv_cache_memory is None:
        return settings.kv_cache_tokens
    per_token: int = model.decoder.new_cache(settings.block_size).bytes_per_token
    tokens = parse_size("kv_cache_memory", settings.kv_cache_memory) // per_token
    if tokens < 2 * settings.block_size:
        raise ConfigError(
            f"kv_cache_memory {settings.kv_cache_memory}: holds {tokens} tokens of {per_token} bytes, "
            f"fewer than two blocks of {settings.block_size}"
        )
    return tokens
