"""The compiled kernels as Python functions: their C signatures. Imports no torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from midstream.engine.cpu.build import load

SOURCE = Path(__file__).parent / "kernels" / "kernels.cpp"

#: Letters of the signatures: P pointer, S int64, I int, F float.
C_TYPES: dict[str, Any] = {"P": ctypes.c_void_p, "S": ctypes.c_int64, "I": ctypes.c_int, "F": ctypes.c_float}
SIGNATURES = {
    "pack": "PPSSP",
    "linear": "PPPSSSIPSI",
    "rms_norm": "PPPSSFPI",
    "prepare": "PSSSSPPSFPPSPPPPI",
    "attention": "PSPSSSPPPSPSFI",
    "moe": "PPPPSSSSSIFPPSPI",
    "sample": "PSSPPPPFPPPPSPPI",
}


@cache
def kernels(suffix: str) -> SimpleNamespace:
    """The kernels of one element type, "bf16" or "f32". Raises KernelsUnavailable."""
    library, functions = load(SOURCE), {}
    for name, signature in SIGNATURES.items():
        function = library[f"{name}_{suffix}"]
        function.argtypes, function.restype = [C_TYPES[letter] for letter in signature], None
        functions[name] = function
    return SimpleNamespace(**functions)
