"""An output layer that is tied to the embedding, and the copy of the embedding that some checkpoints ship for it.

Always holds: a tied checkpoint with `lm_head.weight` and one without it are the same model. A copy with other numbers than the
embedding's is refused by that name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from midstream.core.errors import SnapshotIncompatible
from midstream.snapshots.layout import CheckpointSpec, TensorSpec, read_file_layout
from midstream.snapshots.meaning import TIED
from midstream.snapshots.messages import shown, shown_value

#: The tensor of the output layer, and the end of the embedding's name.
HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_READ_BYTES = 2**20


def says_tied(config: Mapping[str, Any]) -> bool | None:
    """What `config` says of it; None if it says nothing."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        if isinstance(value := part.get(TIED), bool):
            return value
    return None


def ties_head(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether the output layer is the embedding. names: of the checkpoint's tensors.

    Versions of transformers before 5 leave the field out where it is true. So without the field, a checkpoint without
    `lm_head.weight` is a tied one.
    """
    tied = says_tied(config)
    return HEAD not in names if tied is None else tied


def embedding_of(names: Iterable[str]) -> str | None:
    """The name of the embedding's tensor, the shortest if there are several."""
    return min((name for name in names if name.endswith(_EMBEDDING)), key=len, default=None)


def without_head(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in tensors.items() if name != HEAD}


def check_tied(directory: Path, spec: CheckpointSpec) -> None:
    """Raise SnapshotIncompatible unless the output layer in `directory`, if it is there, is the embedding to the byte.

    spec: of `directory`, which ties the two. Reads both tensors, if there are two.
    """
    head = spec.tensors.get(HEAD)
    name = embedding_of(spec.tensors)
    if head is None or name is None:
        return
    own = spec.tensors[name]
    if (head.dtype, head.shape) != (own.dtype, own.shape):
        raise _differs(
            name,
            f"has {head.dtype} {shown_value(list(head.shape))} and {own.dtype} {shown_value(list(own.shape))}",
        )
    at = _first_difference(directory, (head.file, HEAD), (own.file, name))
    if at is not None:
        row_bytes = max(1, _size(directory, head) // max(1, head.shape[0]))
        raise _differs(name, f"first in row {at // row_bytes}")


def untied(embedding: str, how: str) -> str:
    """The message about a copy that is none. how: where the two differ."""
    return (
        f"tensor {HEAD} differs from {shown(embedding)} ({how}), to which {TIED} in config.json ties it;"
        f" leave {HEAD} out, or make them equal"
    )


def _differs(embedding: str, how: str) -> SnapshotIncompatible:
    return SnapshotIncompatible(untied(embedding, how))


def _size(directory: Path, tensor: TensorSpec) -> int:
    begin, end = read_file_layout(directory / tensor.file).ranges[HEAD]
    return end - begin


def _first_difference(directory: Path, one: tuple[str, str], other: tuple[str, str]) -> int | None:
    """The first byte in which two tensors of one size differ. Each is given as the names of its file and of itself."""
    with (directory / one[0]).open("rb") as a, (directory / other[0]).open("rb") as b:
        begin, end = read_file_layout(directory / one[0]).ranges[one[1]]
        start = read_file_layout(directory / other[0]).ranges[other[1]][0]
        for at in range(0, end - begin, _READ_BYTES):
            count = min(_READ_BYTES, end - begin - at)
            left = os.pread(a.fileno(), count, begin + at)
            right = os.pread(b.fileno(), count, start + at)
            if left != right:
                return at + next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
    return None
