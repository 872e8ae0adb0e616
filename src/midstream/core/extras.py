"""Packages that not every part of midstream needs, and what to install where one is missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

#: The import name of a package: the extra that brings it. Empty: it comes with midstream itself.
EXTRA_OF = {
    **dict.fromkeys(
        ("torch", "transformers", "tokenizers", "safetensors", "jinja2", "llguidance", "peft"), "engine"
    ),
    "ray": "ray",
    "psycopg": "postgres",
    "xxhash": "deltas",
    "blake3": "deltas",
    "pyarrow": "parquet",
    "rich": "",
    "shtab": "",
}
#: What a replica imports, whatever computes behind it; and what the embedded engine imports beside.
REPLICA = ("tokenizers", "jinja2", "llguidance", "transformers")
EMBEDDED = ("torch", *REPLICA, "safetensors")
TORCH_FIRST = "; install torch before, from the index that fits this machine (CPU, CUDA, ROCm)"


def missing(packages: Iterable[str]) -> list[str]:
    """The packages that are not installed. It imports none of them."""
    return [package for package in packages if find_spec(package) is None]


def advice(packages: Iterable[str]) -> str | None:
    """The end of a message: what is missing, and what installs it. None: no package of EXTRA_OF is among them."""
    known = [package for package in packages if package in EXTRA_OF]
    if not known:
        return None
    extras = sorted({EXTRA_OF[package] for package in known} - {""})
    wanted = f"'midstream[{','.join(extras)}]'" if extras else " ".join(known)
    hint = TORCH_FIRST if "torch" in known else ""
    return f"needs {', '.join(known)}, not installed here: pip install {wanted}{hint}"
