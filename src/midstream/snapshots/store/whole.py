"""Writes a snapshot's directory into a local bucket: all of it at once, or nothing.

Always holds: a directory gets its name after its files and its manifest are written and synced. Its name, and those of the
directories that had to be made for it, are synced before `write_whole` returns.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from midstream.core.types import Content
from midstream.snapshots.content import MANIFEST_FILE, encode_manifest
from midstream.snapshots.durable import sync_directory, sync_tree
from midstream.snapshots.store.local import move_into_place

#: Begins the names of directories that are not in their place yet.
WRITING_PREFIX = ".publish-"


def write_whole(place: Path, fill: Callable[[Path], Content], *, replace: bool) -> None:
    """Let `fill` write a snapshot's files into an empty directory, and move it to `place`. `fill` returns their content.

    replace: what is at `place` already; otherwise that is an OSError, and stays. Raises OSError, and what `fill` raises.
    """
    temporary = place.parent / f"{WRITING_PREFIX}{secrets.token_hex(8)}"
    move = move_into_place if replace else os.rename
    try:
        above = _not_there_yet(place.parent)
        temporary.mkdir(parents=True)
        content = fill(temporary)
        (temporary / MANIFEST_FILE).write_bytes(encode_manifest(content))
        sync_tree(temporary)
        move(temporary, place)
        for name in (place, *above):
            sync_directory(name.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _not_there_yet(directory: Path) -> list[Path]:
    """`directory` and those above it that do not exist, the innermost first."""
    return list(itertools.takewhile(lambda path: not path.exists(), (directory, *directory.parents)))
