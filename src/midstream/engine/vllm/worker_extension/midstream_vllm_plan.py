"""The part of the worker extension that plans a switch of a model to its twin (midstream_vllm_staged.py).

Owns: the comparison of both, once vLLM has processed the weights of the twin.
Always holds: a plan brings everything that vLLM has set on a twin, or there is none. On a device it replaces no tensor that a
graph may know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

#: Tensors up to this size are copied on a CPU, too. Others may look at their memory, and it takes no time.
SMALL = 1 << 20
NUMBERS = (int, float, str, type(None))


class NotStaged(Exception):
    """Weights cannot be staged here. vLLM may still load them in place."""


def is_helper(value: Any) -> bool:
    """vLLM may set what it derives from weights on it, as on a module."""
    return callable(getattr(type(value), "process_weights_after_loading", None))


def planned(
    pairs: Mapping[str, tuple[Any, Any]], began: Mapping[int, dict[str, Any]], *, on_cpu: bool
) -> list[tuple[str, Callable[[], None]]]:
    """What a switch does, each with the kind of its module. pairs: modules that serve with their twins, by name.

    began: what each twin had before vLLM processed it, by its id. Raises NotStaged.
    """
    shared = _shared(pairs)
    moved: set[int] = set()
    plan: list[tuple[str, Callable[[], None]]] = []
    for name, (live, twin) in pairs.items():
        kind = next((part for part in reversed(name.split(".")) if part and not part.isdigit()), "model")
        if _names(live) != _names(twin):
            raise NotStaged(f"vLLM gave {name} other parameters than at its start")
        for key, staged in twin._parameters.items():
            serving = live._parameters[key]
            if serving is None or id(serving) in moved or not serving.numel():
                continue
            moved.add(id(serving))
            _check_alike(f"{name}.{key}", serving, staged)
            others = shared.get(address(serving), 0) > 1
            by_copy = not on_cpu or others or serving.nbytes <= SMALL
            plan.append((kind, _moving(serving, staged, by_copy=by_copy)))
        for key, staged in twin._buffers.items():
            serving = live._buffers.get(key)
            if staged is None or serving is None or staged is serving:
                continue
            if key not in twin._non_persistent_buffers_set and not torch.equal(serving, staged):
                plan.append((kind, _moving(serving, staged, by_copy=True)))
        plan += [(kind, do) for do in _set_on_twin(name, live, twin, began[id(twin)], on_cpu=on_cpu)]
        for key, helper in vars(live).items():
            if is_helper(helper):
                copied = began[id(twin)].get(key)
                plan += [(kind, do) for do in _set_on_helper(f"{name}.{key}", helper, copied, shared)]
    return plan


def _shared(pairs: Mapping[str, tuple[Any, Any]]) -> dict[int, int]:
    """How many tensors of the model that serves lie in each storage."""
    attributes = [vars(live) for live, _ in pairs.values()]
    helpers = [_attributes(value) for own in attributes for value in own.values() if is_helper(value)]
    stores = [store for live, _ in pairs.values() for store in (live._parameters, live._buffers)]
    tensors = {
        id(tensor): tensor
        for store in (*stores, *attributes, *helpers)
        for tensor in store.values()
        if isinstance(tensor, torch.Tensor) and tensor.numel()
    }
    counts: dict[int, int] = {}
    for tensor in tensors.values():
        counts[address(tensor)] = counts.get(address(tensor), 0) + 1
    return counts


def _set_on_twin(
    name: str, live: Any, twin: Any, began: dict[str, Any], *, on_cpu: bool
) -> Iterator[Callable[[], None]]:
    """What vLLM has set on a twin while it processed the weights: packed weights, derived tensors, numbers."""
    for key, staged in twin.__dict__.items():
        if key in began and (staged is began[key] or _equal_numbers(staged, began[key])):
            continue
        serving = live.__dict__.get(key)
        tensors = isinstance(staged, torch.Tensor) and isinstance(serving, torch.Tensor)
        if not tensors:
            if not on_cpu and not (isinstance(staged, NUMBERS) and isinstance(serving, NUMBERS)):
                raise NotStaged(
                    f"vLLM set another {type(staged).__name__} as {name}.{key}, which a graph may know"
                )
            yield _setting(live, twin, key)
            continue
        _check_alike(f"{name}.{key}", serving, staged)
        if not torch.equal(serving, staged):
            yield _moving(serving, staged, by_copy=not on_cpu)


def _set_on_helper(
    name: str, helper: Any, copied: Any, shared: Mapping[int, int]
) -> Iterator[Callable[[], None]]:
    """Likewise of what is no module, such as a method of quantization, of which the twin has a copy. Raises NotStaged."""
    had, has = _attributes(helper), _attributes(copied)
    for key in had.keys() | has.keys():
        serving, staged = had.get(key), has.get(key)
        if serving is staged or _equal_numbers(serving, staged):
            continue
        if not isinstance(serving, torch.Tensor) or not isinstance(staged, torch.Tensor):
            raise NotStaged(f"vLLM set {name}.{key}, which is no tensor, for the weights")
        _check_alike(f"{name}.{key}", serving, staged)
        if shared.get(address(serving), 0) > 1:
            raise NotStaged(f"others look at the memory of {name}.{key}")
        if not torch.equal(serving, staged):
            yield _moving(serving, staged, by_copy=True)


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _moving(serving: Any, staged: Any, *, by_copy: bool) -> Callable[[], None]:
    def copy_over() -> None:
        serving.data.copy_(staged.data)

    def exchange() -> None:
        serving.data, staged.data = staged.data, serving.data

    return copy_over if by_copy else exchange


def _setting(live: Any, twin: Any, key: str) -> Callable[[], None]:
    def exchange() -> None:
        had, before = key in live.__dict__, live.__dict__.get(key)
        live.__dict__[key] = twin.__dict__[key]
        if had:
            twin.__dict__[key] = before

    return exchange


def _check_alike(name: str, serving: Any, staged: Any) -> None:
    """Raises NotStaged."""
    if (serving.shape, serving.dtype, serving.stride()) != (staged.shape, staged.dtype, staged.stride()):
        raise NotStaged(
            f"vLLM made {name} a {staged.dtype} of {list(staged.shape)}, and what serves is a {serving.dtype} of "
            f"{list(serving.shape)}"
        )


def _names(module: Any) -> set[str]:
    return {name for name, parameter in module._parameters.items() if parameter is not None}


def _equal_numbers(one: Any, other: Any) -> bool:
    return isinstance(one, NUMBERS) and isinstance(other, NUMBERS) and one == other


def address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
