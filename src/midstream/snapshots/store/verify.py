"""Checks that a snapshot can replace the served model. Pure.

Always holds: two specs that pass have the same tensors (name, shape, dtype), but for a tied output layer, and configurations
of one meaning.
"""

from __future__ import annotations

from typing import Any

from midstream.core.errors import SnapshotIncompatible
from midstream.snapshots.layout import CheckpointSpec, TensorSpec
from midstream.snapshots.meaning import DERIVED, meanings
from midstream.snapshots.messages import and_more, listed, shown, shown_value
from midstream.snapshots.names import hint
from midstream.snapshots.tied import HEAD, embedding_of, says_tied, ties_head, untied, without_head

#: As publishers take them.
_DTYPE_NAMES = {"BF16": "bfloat16", "F32": "float32"}

_CONFIG = "publish with the served model's config_dir, or name the field in extra_fields_ignore"


def check_compatible(base: CheckpointSpec, new: CheckpointSpec, ignore: frozenset[str] = frozenset()) -> None:
    """Raise SnapshotIncompatible unless `new` can replace `base`. What the tensors hold is not looked at.

    The message names the first field or tensor that differs, on which side, and what to do. `ignore` names top-level
    configuration fields to skip, besides those that say nothing of the model (meaning.py). An output layer that is tied to the
    embedding may be there or not.
    """
    ours = {name: value for name, value in base.config.items() if name not in ignore}
    theirs = {name: value for name, value in new.config.items() if name not in ignore}
    try:
        _check_config(*meanings(ours, theirs), at="")
    except SnapshotIncompatible as error:
        raise SnapshotIncompatible(f"{error}; {_CONFIG}") from None
    if ties(base, new):
        _check_tied(base, new)
        _check_tensors(without_head(base.tensors), without_head(new.tensors))
    else:
        _check_tensors(base.tensors, new.tensors)


def ties(base: CheckpointSpec, new: CheckpointSpec) -> bool:
    """True if the output layer is the embedding: as one of the two configurations says, else as the base's tensors show."""
    config = next((one.config for one in (base, new) if says_tied(one.config)), base.config)
    return ties_head(config, base.tensors)


def _check_tied(base: CheckpointSpec, new: CheckpointSpec) -> None:
    """A head beside the embedding has to be like it. Whether the numbers are equal is read from the files (tied.py)."""
    head, name = new.tensors.get(HEAD), embedding_of(base.tensors)
    if head is None or name is None:
        return
    if (head.shape, head.dtype) != (base.tensors[name].shape, base.tensors[name].dtype):
        raise SnapshotIncompatible(
            untied(
                name, f"{head.dtype} {shown_value(list(head.shape))} is not the embedding's dtype and shape"
            )
        )


def _check_config(base: dict[str, Any], new: dict[str, Any], at: str) -> None:
    if extra := sorted(base.keys() - new.keys()):
        raise SnapshotIncompatible(
            f"Extra base model config options: {listed([at + name for name in extra])}"
        )
    if extra := sorted(new.keys() - base.keys()):
        raise SnapshotIncompatible(
            f"Extra snapshot model config options: {listed([at + name for name in extra])}"
        )
    for name in sorted(base, key=lambda name: (name in DERIVED, name)):
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
    absent, extra = sorted(base.keys() - new.keys()), sorted(new.keys() - base.keys())
    if strange := absent or extra:
        what = "is missing from the snapshot" if absent else "is not in the base model"
        advice = hint(extra, base)
        because = f": {advice}" if advice else ""
        raise SnapshotIncompatible(f"tensor {shown(strange[0])} {what}{and_more(len(strange) - 1)}{because}")
    for name in sorted(base):
        b, n = base[name], new[name]
        if b.shape != n.shape:
            shape, expected = shown_value(list(n.shape)), shown_value(list(b.shape))
            raise SnapshotIncompatible(f"tensor {shown(name)} has shape {shape}, the base model {expected}")
        if b.dtype != n.dtype:
            # Trainers often keep float32 weights of what is served in bfloat16.
            meant = f"; publish the weights as {_DTYPE_NAMES[b.dtype]}" if b.dtype in _DTYPE_NAMES else ""
            raise SnapshotIncompatible(
                f"tensor {shown(name)} has dtype {n.dtype}, the base model {b.dtype}{meant}"
            )
