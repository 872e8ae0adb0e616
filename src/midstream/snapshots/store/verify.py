"""Checks that a snapshot can replace the served model. Pure.

Always holds: two specs that pass have the same tensors (name, shape, dtype) and the same architecture.
"""

from __future__ import annotations

from typing import Any

from midstream.core.errors import SnapshotIncompatible
from midstream.snapshots.layout import CheckpointSpec, TensorSpec
from midstream.snapshots.messages import and_more, listed, shown, shown_value

#: As publishers take them.
_DTYPE_NAMES = {"BF16": "bfloat16", "F32": "float32"}

#: Fields of config.json that say how a model was saved or trained, not what it computes. The dtype is one of them, because the
#: tensors' own dtypes are compared.
IGNORED_FIELDS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "output_router_logits",
        "router_aux_loss_coef",
    }
)


def check_compatible(base: CheckpointSpec, new: CheckpointSpec, ignore: frozenset[str] = frozenset()) -> None:
    """Raise SnapshotIncompatible unless `new` can replace `base`.

    The message names the first field or tensor that differs. `ignore` names top-level configuration fields to
    skip besides IGNORED_FIELDS.
    """
    skipped = IGNORED_FIELDS | ignore
    _check_config(
        {name: value for name, value in base.config.items() if name not in skipped},
        {name: value for name, value in new.config.items() if name not in skipped},
        at="",
    )
    _check_tensors(base.tensors, new.tensors)


def _check_config(base: dict[str, Any], new: dict[str, Any], at: str) -> None:
    if extra := sorted(base.keys() - new.keys()):
        raise SnapshotIncompatible(
            f"Extra base model config options: {listed([at + name for name in extra])}"
        )
    if extra := sorted(new.keys() - base.keys()):
        raise SnapshotIncompatible(
            f"Extra snapshot model config options: {listed([at + name for name in extra])}"
        )
    for name in sorted(base):
        _check_value(base[name], new[name], at + name)


def _check_value(base: Any, new: Any, field: str) -> None:
    if _kind(base) != _kind(new):
        raise SnapshotIncompatible(
            f"Types mismatch for {shown(field)}: {_kind(base)} in the base model, {_kind(new)} in the snapshot"
        )
    if isinstance(base, dict):
        _check_config(base, new, at=f"{field}.")
    elif isinstance(base, list) and len(base) == len(new):
        for i, (b, n) in enumerate(zip(base, new, strict=True)):
            _check_value(b, n, f"{field}[{i}]")
    elif base != new:
        raise SnapshotIncompatible(
            f"Config value mismatch for {shown(field)}: {shown_value(base)} in the base model, "
            f"{shown_value(new)} in the snapshot"
        )


def _kind(value: Any) -> str:
    """JSON has one kind of number: 10000 and 10000.0 are the same setting, but true and 1 are not."""
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, int | float) else type(value).__name__


def _check_tensors(base: dict[str, TensorSpec], new: dict[str, TensorSpec]) -> None:
    if absent := sorted(base.keys() - new.keys()):
        more = and_more(len(absent) - 1)
        raise SnapshotIncompatible(f"tensor {shown(absent[0])} is missing from the snapshot{more}")
    if extra := sorted(new.keys() - base.keys()):
        more = and_more(len(extra) - 1)
        raise SnapshotIncompatible(f"tensor {shown(extra[0])} is not in the base model{more}")
    for name in sorted(base):
        b, n = base[name], new[name]
        if b.shape != n.shape:
            has, expected = shown_value(list(n.shape)), shown_value(list(b.shape))
            raise SnapshotIncompatible(f"tensor {shown(name)} has shape {has}, the base model {expected}")
        if b.dtype != n.dtype:
            # Trainers often keep float32 weights of what is served in bfloat16.
            meant = f"; publish the weights as {_DTYPE_NAMES[b.dtype]}" if b.dtype in _DTYPE_NAMES else ""
            raise SnapshotIncompatible(
                f"tensor {shown(name)} has dtype {n.dtype}, the base model {b.dtype}{meant}"
            )
