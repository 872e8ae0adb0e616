"""A CPU as a platform of verl 0.9, which has none of its own: `VERL_PLATFORM=cpu`.

Importing this module registers it; `VERL_USE_EXTERNAL_MODULES` must name it first. With it verl's FSDP engine trains on a CPU
(`VERL_ENGINE_DEVICE=cuda` picks that engine; it computes on the platform's device), one process, for tests and small models.
Ray must be given a GPU (`num_gpus=1`), since verl counts nothing else; it is a number, and nothing looks for a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device(ModuleType):
    """What verl asks of `torch.cuda`, answered for a CPU: nothing is allocated, and nothing has to be waited for."""

    def is_available(self) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def get_device_name(self) -> str:
        return "CPU"

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def _zero(self, *_: Any) -> int:
        return 0

    def _nothing(self, *_: Any) -> None:
        pass

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _zero
    empty_cache = synchronize = set_device = manual_seed = manual_seed_all = _nothing


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        # verl hands it to PyTorch as a device.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        """Gloo. A worker's process group is made here: verl would name the CPU's backend twice, which PyTorch refuses."""
        if "RANK" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method=os.environ.get("DIST_INIT_METHOD"))
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
