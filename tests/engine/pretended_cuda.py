"""Tensors that say they are on a CUDA device while they are computed with on the CPU, on a machine without one.

Owns: what PyTorch refuses: an operation on tensors of both devices, and numpy on a tensor of the device. Numbers and tensors
without a dimension may be on either. It does not show what only a device does: other rounding, streams, memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
#: Plain methods may take an index of the CPU into a tensor of a device.
INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_real_device = torch.Tensor.device.__get__


class DevicesMixed(Exception):
    """What PyTorch would raise on a device."""


class OnDevice(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _called(func, args, kwargs or {})


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(OnDevice)


def _called(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    ours = [each for each in given if isinstance(each, OnDevice)]
    with torch._C.DisableTorchFunctionSubclass():
        if func == _real_device:
            return DEVICE if ours else func(*args)
        to, args, kwargs = _target(name, args, kwargs)
        if ours and name in ("numpy", "data_ptr", "__array__"):
            raise DevicesMixed(f"{name} of a tensor that is on {DEVICE}")
        if ours and not any(func == f for f in INDEXED) and name not in ("copy_", "set_"):
            others = [each for each in given if not isinstance(each, OnDevice) and each.ndim]
            if others:
                raise DevicesMixed(f"{name}: tensors of {DEVICE} and of the CPU, {[e.shape for e in others]}")
        # Of integers there is none on a CPU.
        if name == "histc":
            return on_device(func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype))
        result = func(*args, **kwargs)
        there = bool(ours) if to is None else to.type == DEVICE.type
        return tree_map(lambda each: _put(each, there), result)


def _put(each: Any, there: bool) -> Any:
    if not isinstance(each, torch.Tensor) or isinstance(each, OnDevice) == there:
        return each
    return each.as_subclass(OnDevice if there else torch.Tensor)


def _target(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, Any, dict[str, Any]]:
    """Where the result is asked to be, if that is said, and the call without it."""
    if name == "cpu":
        return torch.device("cpu"), args, kwargs
    to = kwargs.get("device")
    if name == "to" and to is None:
        to = next((a for a in args[1:] if isinstance(a, str | torch.device)), None)
        to = next((a.device for a in args[1:] if isinstance(a, torch.Tensor)), to)
    if to is None:
        return None, args, kwargs
    cpu = torch.device("cpu")
    there = torch.device(to)
    if there.type != DEVICE.type:
        return there, args, kwargs
    if "device" in kwargs:
        return there, args, {**kwargs, "device": cpu}
    changed = tuple(cpu if isinstance(a, str | torch.device) else a for a in args[1:])
    return there, (args[0], *changed), kwargs


class PretendedCuda(TorchFunctionMode):
    """Within, the device's name makes such tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _called(func, args, kwargs or {})


def placed(module: Any, _device: str) -> Any:
    """As loading.py places a module."""
    # A tied one has several places.
    seen: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                new = torch.nn.Parameter(on_device(parameter), requires_grad=False)
                part._parameters[name] = seen.setdefault(parameter, new)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = on_device(buffer)
    return module
