"""Which GPUs a server sees. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.core.errors import ConfigError

GPUS = "CUDA_VISIBLE_DEVICES"


def visible(setting: str, gpus: Sequence[int], ours: str | None) -> str:
    """gpus: indices among those that this process sees, which are `ours`. Raises ConfigError when it does not see so many."""
    if ours is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in ours.split(",") if name.strip()]
    if max(gpus) >= len(names):
        raise ConfigError(f"{setting}: GPU {max(gpus)}, counted from 0, is not among {GPUS}={ours}")
    return ",".join(names[gpu] for gpu in gpus)
