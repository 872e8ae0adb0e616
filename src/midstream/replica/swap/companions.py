"""What lies beside a snapshot's weights and is not served: its tokenizer, its chat template, its settings of generation.

Always holds: a file that says the same as the served model's is not mentioned. One that differs is said in one warning, and not
again while it has the same content.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midstream.snapshots.layout import COMPANION_FILES, CONFIG_FILE
from midstream.snapshots.meaning import TOKENS
from midstream.snapshots.messages import listed, shown

log = logging.getLogger(__name__)

_OTHERS = (CONFIG_FILE, "adapter_config.json")
_PATTERNS = tuple(pattern for pattern in COMPANION_FILES if pattern not in _OTHERS)
#: How a file was written says nothing of what it means.
_STAMPS = frozenset({"transformers_version", "_from_model_config"})
#: Larger files are not read for a warning.
BYTES_MAX = 64 * 2**20


class Companions:
    """base_directory: of the served model."""

    def __init__(self, base_directory: Path) -> None:
        self._base = base_directory
        self._reported: set[str] = set()
        # Digests of files that are written in another way and say the same.
        self._alike: set[str] = set()

    def look(self, snapshot: str, directory: Path) -> None:
        """Warn of the files in `directory` that are not served, unless that was said already."""
        found = dict(self._different(directory))
        fresh = sorted(name for name, digest in found.items() if digest not in self._reported)
        self._reported.update(found.values())
        if fresh:
            log.warning(
                "%s: its %s differ from the served model's and are not served; the server goes on with those of %s",
                shown(snapshot),
                listed(fresh),
                self._base,
            )

    def _different(self, directory: Path) -> Iterator[tuple[str, str]]:
        """Name and digest of each file that says something else than the served model's."""
        names = sorted({file.name for pattern in _PATTERNS for file in directory.glob(pattern)})
        for name in names:
            data, own = _read(directory / name), _read(self._base / name)
            if data is None or data == own:
                continue
            digest = _digest(name, data)
            # Reading JSON takes the interpreter lock, for a large tokenizer longer than streams may wait.
            if digest not in self._alike and _content(data) != _content(own):
                yield name, digest
            else:
                self._alike.add(digest)
        tokens = _tokens(_read(directory / CONFIG_FILE))
        if tokens and tokens != _tokens(_read(self._base / CONFIG_FILE)):
            yield (
                f"{CONFIG_FILE} ({', '.join(sorted(tokens))})",
                _digest("tokens", json.dumps(tokens).encode()),
            )


def _digest(name: str, data: bytes) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass") + b"\0" + data).hexdigest()


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes() if file.is_file() and file.stat().st_size <= BYTES_MAX else None
    except OSError:
        # Whoever needs the file says what is wrong with it.
        return None


def _content(data: bytes | None) -> Any:
    """What the file says: of JSON its values, whatever its layout."""
    if data is None:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return {k: v for k, v in value.items() if k not in _STAMPS} if isinstance(value, dict) else value


def _tokens(data: bytes | None) -> dict[str, Any]:
    value = _content(data)
    return (
        {k: v for k, v in value.items() if k in TOKENS and v is not None} if isinstance(value, dict) else {}
    )
