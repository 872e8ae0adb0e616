"""The names of delta formats: those that users give, and the internal ones. Pure.

Always holds: a name means the same in a request and on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeGuard

from midstream.core.types import ArcFormat, CompressionFormat

FORMATS: Mapping[str, CompressionFormat] = MappingProxyType(
    {
        "arc_v1": "arc_v1",
        "arc_v2": "arc_v2",
        "xor_one_to_one_zlib": "arc_v1",
        "xor_one_to_one_zstd": "arc_v2",
        "miles_delta": "miles_delta",
        "skyrl_delta": "skyrl_delta",
    }
)
#: The public clients spell it in the first way.
CHECKSUM_FORMATS = ("alder32", "adler32")


def compression_format(name: str) -> CompressionFormat:
    """The format that `name` stands for, in any case. Raises ValueError that lists the formats."""
    found = FORMATS.get(name.lower())
    if found is not None:
        return found
    why = " its blobs hold pickles, which are never loaded;" if name.lower() == "arc_v3" else ""
    raise ValueError(
        f"{name[:80]!r} is not supported:{why} use arc_v2 or arc_v1, or miles_delta or skyrl_delta for their trainers'"
    )


def is_arc(compression: CompressionFormat) -> TypeGuard[ArcFormat]:
    """Whether it is one of ARC2's formats, which are the ones that midstream writes, too."""
    return compression in ("arc_v1", "arc_v2")


def check_checksum_format(name: str | None, compression: CompressionFormat = "arc_v2") -> None:
    """Raise ValueError unless the checksums of such a delta may be called `name`.

    None: what the format has. Those of ARC2 are Adler-32, in either spelling and any case. The files of trainers' own formats
    say it themselves.
    """
    if name is None:
        return
    if not is_arc(compression):
        raise ValueError(f"{name[:80]!r}: leave it out, the files of a {compression} say it")
    if name.lower() not in CHECKSUM_FORMATS:
        raise ValueError(f"{name[:80]!r} is not supported: use {CHECKSUM_FORMATS[0]}")
