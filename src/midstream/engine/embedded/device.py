"""Streams and waiting on a CUDA device. On any other device these functions do nothing.

PyTorch launches the work of every thread on the device's default stream. Steps run there.
Always holds:
- Weights are loaded, and read for digests, on another stream. So no step waits for a copy, and no copy waits for a step.
- Work inside `loading` is complete when it returns, so a step may read the results.
- `settle` returns when every kernel that was launched before it has ended, so memory that they read may be freed.
- A step of a shape that was never seen builds no plan of cuDNN. One took 0.1 s on an H200, and new shapes come all the time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from midstream.core.errors import ConfigError


def use_device(name: str) -> None:
    """Make this process ready for it. Raises ConfigError for a name of no device, or of a CUDA device that it cannot use."""
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"embedded.device {name!r}: expected cpu or cuda, or cuda:1 and so on") from error
    if not is_cuda(name):
        return
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)
        return
    build = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
    raise ConfigError(f"embedded.device {name}: PyTorch {torch.__version__} {build}")


def is_cuda(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


@contextlib.contextmanager
def loading(device: torch.device | str) -> Iterator[None]:
    """Within this block, the thread's work on a CUDA device goes to the stream of loads."""
    if not is_cuda(device):
        yield
        return
    index = torch.device(device).index
    stream = _loading_stream(torch.cuda.current_device() if index is None else index)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def settle(device: torch.device | str) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)


@functools.cache
def _loading_stream(index: int) -> torch.cuda.Stream:
    """One stream for all loads: PyTorch keeps freed memory for the stream on which it was allocated."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
