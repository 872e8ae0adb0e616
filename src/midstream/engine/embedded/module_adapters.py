"""LoRA adapters over a model that runs as PyTorch modules: many in one step, each on its own rows.

Always holds: a row's addition is computed from that row and its own adapter. Modules without an adapted row return what they
returned before. Hooks are set on the thread that steps, before the first batch that needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from midstream.engine.adapter import LowRank, LowRanks

#: The parameters of an experts' module that an adapter may add to.
EXPERT_PARTS = ("gate_up_proj", "down_proj")


class ModuleAdapter:
    """maps: by the path of the module, on the module's device."""

    def __init__(self, maps: LowRanks, device: torch.device) -> None:
        self.maps = {path: LowRank(low.a.to(device), low.b.to(device)) for path, low in maps.items()}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, low in self.maps.items():
            yield f"{path}.a", low.a
            yield f"{path}.b", low.b

    def release(self) -> None:
        self.maps = {}


class AdapterHooks:
    """Adds to the outputs of the modules of one model. dense_experts: its experts are computed by modules.dense_experts."""

    def __init__(self, module: Any, *, dense_experts: bool) -> None:
        self._modules = dict(module.named_modules())
        self._dense_experts = dense_experts
        self._hooked: set[str] = set()
        # Of the step: each adapter with its rows, among all tokens and among those that get logits.
        self._rows: list[tuple[ModuleAdapter, torch.Tensor, torch.Tensor]] = []

    def refuses(self, path: str, low: LowRank) -> str | None:
        """Why this map cannot be adapted, or None."""
        if low.a.ndim == 2:
            plain = isinstance(self._modules.get(path), torch.nn.Linear)
            return None if plain else f"an adapter of {path}, which is no plain linear map of this model"
        experts, _, part = path.rpartition(".")
        known = experts in self._modules and part in EXPERT_PARTS
        if known and self._dense_experts and not getattr(self._modules[experts], "is_transposed", False):
            return None
        return f"an adapter of {path}, the experts of a model that runs as a PyTorch module with many of them"

    def begin(self, adapters: tuple[Any, ...], sizes: np.ndarray, logit_rows: np.ndarray) -> None:
        """adapters: of each sequence of the step, or empty; sizes: their tokens. logit_rows: as in Decoder.forward."""
        self._rows = []
        if not adapters:
            return
        distinct = {id(a): a for a in adapters if a is not None}
        of_token = np.repeat(np.array([id(a) for a in adapters]), sizes)
        for number, adapter in distinct.items():
            for path, low in adapter.maps.items():
                self._hook(path, low)
            device = next(iter(adapter.maps.values())).a.device
            own = torch.from_numpy(np.flatnonzero(of_token == number)).to(device)
            heads = torch.from_numpy(np.flatnonzero(of_token[logit_rows] == number)).to(device)
            self._rows.append((adapter, own, heads))

    def _hook(self, path: str, low: LowRank) -> None:
        if path in self._hooked:
            return
        self._hooked.add(path)
        if low.a.ndim == 3:
            experts, _, part = path.rpartition(".")
            module = self._modules[experts]
            module.midstream_adapt = {
                **getattr(module, "midstream_adapt", {}),
                part: lambda inputs, output: self._add(path, inputs, output),
            }
        else:
            self._modules[path].register_forward_hook(
                lambda _module, inputs, output: self._add(path, inputs[0], output)
            )

    def _add(self, path: str, inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """inputs: [.., tokens, inputs]; output: [.., tokens, outputs]. Of experts: [1 or experts, tokens, ..]."""
        for adapter, tokens, heads in self._rows:
            low = adapter.maps.get(path)
            rows = heads if path == "lm_head" else tokens
            if low is None or not len(rows):
                continue
            flat = inputs if low.a.ndim == 3 else inputs.reshape(-1, inputs.shape[-1])
            added = flat[..., rows, :] @ low.a.transpose(-1, -2) @ low.b.transpose(-1, -2)
            whole = output if low.a.ndim == 3 else output.view(-1, output.shape[-1])
            whole[..., rows, :] += added
        return output
