"""Other weights made of a checkpoint, without torch: signs of its numbers are flipped in the files themselves.

Always holds: equal arguments give equal bytes. Names, shapes, dtypes and files are the checkpoint's. A sign is one bit in every
floating-point format, so nothing is rounded, and flipping twice gives the checkpoint again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import numpy as np

from midstream.client.checkpoint import Source
from midstream.core.errors import ConfigError
from midstream.snapshots.layout import DTYPE_BITS, FileLayout, read_file_layout, read_spec

#: same: the checkpoint. head: the norm before the output layer differs, so logits do and KV does not. all: everything differs.
Variant = Literal["same", "head", "all"]
VARIANTS: tuple[Variant, ...] = ("same", "head", "all")

# Share of the numbers.
FLIPPED = 0.25
# Numbers at once.
PIECE = 1 << 22
_FLOATING = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_FINAL_NORM = re.compile(r"(^|\.)(norm|ln_f|final_layer_?norm|final_norm|norm_f)\.weight$")
_OF_A_LAYER = re.compile(r"\.\d+\.")


def write_variant(checkpoint: Path, variant: Variant, directory: Path) -> None:
    """Into `directory`, which is there and empty. Raises ConfigError when nothing of the checkpoint could differ."""
    Source(checkpoint).write(directory)
    if variant == "same":
        return
    files = sorted({spec.file for spec in read_spec(directory).tensors.values()})
    flipped = sum(_flip_file(directory / file, variant) for file in files)
    if not flipped:
        raise ConfigError(
            f"--checkpoint {checkpoint}: has no floating-point tensor for the variant {variant!r}"
        )


def _flip_file(path: Path, variant: Variant) -> int:
    """How many tensors were changed."""
    layout = read_file_layout(path)
    names = [name for name in layout.tensors if _belongs(name, layout, variant)]
    for name in names:
        begin, end = layout.ranges[name]
        if end > begin:
            _flip(path, begin, end, DTYPE_BITS[layout.tensors[name].dtype] // 8, name)
    return len(names)


def _belongs(name: str, layout: FileLayout, variant: Variant) -> bool:
    if layout.tensors[name].dtype not in _FLOATING:
        return False
    if variant == "all":
        return True
    return bool(_FINAL_NORM.search(name)) and not _OF_A_LAYER.search(name)


def _flip(path: Path, begin: int, end: int, width: int, name: str) -> None:
    """The sign bit is the highest of a number's last byte."""
    numbers = np.memmap(path, np.uint8, "r+", begin, (end - begin,)).reshape(-1, width)
    random = np.random.default_rng(list(name.encode()))
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE, -1]
        piece ^= np.where(random.random(len(piece)) < FLIPPED, np.uint8(0x80), np.uint8(0))
    numbers.base.flush() if isinstance(numbers.base, np.memmap) else None
