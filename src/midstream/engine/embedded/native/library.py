"""The compiled kernels: the C signatures of the C++ beside this file, which compiled.py builds and loads. No torch."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

from midstream.compiled import load

SOURCE = Path(__file__).with_name("kernels.cpp")

_POINTER, _SIZE, _INT, _FLOAT = c_void_p, c_int64, c_int, c_float
SIGNATURES: dict[str, list[type]] = {
    "pack": [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER],
    "linear": [_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT, _POINTER, _SIZE, _INT],
    "rms_norm": [_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _FLOAT, _POINTER, _INT],
    "prepare": [
        *(_POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _FLOAT, _POINTER, _POINTER, _SIZE),
        *(_POINTER, _POINTER, _POINTER, _POINTER, _INT),
    ],
    "attention": [
        *(_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER),
        *(_SIZE, _FLOAT, _INT),
    ],
    "moe": [
        *(
            _POINTER,
            _POINTER,
            _POINTER,
            _POINTER,
            _SIZE,
            _SIZE,
            _SIZE,
            _SIZE,
            _SIZE,
            _INT,
            _FLOAT,
            _POINTER,
            _POINTER,
        ),
        *(_SIZE, _POINTER, _INT),
    ],
    "sample": [
        *(
            _POINTER,
            _SIZE,
            _SIZE,
            _POINTER,
            _POINTER,
            _POINTER,
            _POINTER,
            _FLOAT,
            _POINTER,
            _POINTER,
            _POINTER,
        ),
        *(_POINTER, _SIZE, _POINTER, _POINTER, _INT),
    ],
}


class Kernels:
    """The kernels for one element type: `suffix` is "bf16" or "f32"."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        for name, arguments in SIGNATURES.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(name)


@cache
def kernels(suffix: str) -> Kernels:
    """Raises NoCompiler."""
    return Kernels(load(SOURCE), suffix)
