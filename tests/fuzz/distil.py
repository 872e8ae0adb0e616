"""Chooses the inputs that are kept: python tests/fuzz/distil.py [TARGET ...] writes corpora/ from what fuzzing left in .fuzz/

Always holds: what is in corpora/ already stays, so a finding that was put there is a test for ever. An input is added only for
a step from line to line of midstream that no kept input takes, the shortest first.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz import CORPORA, ROOT, find_targets

find_targets()
from targets import TARGETS  # noqa: E402
from targets.target import Target  # noqa: E402

KEPT_MAX = 48
BYTES_MAX = 2048
Steps = set[tuple[str, int, int]]
_SOURCE = f"{ROOT / 'src' / 'midstream'}/"


def steps(target: Target, data: bytes) -> Steps:
    """Which lines of midstream follow one another."""
    taken: Steps = set()

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_SOURCE):
            return None
        last = 0

        def follow(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            taken.add((file, last, frame.f_lineno))
            last = frame.f_lineno
            return follow

        return follow

    sys.settrace(enter)
    try:
        target.run(data)
    finally:
        sys.settrace(None)
    return taken


def inputs(folder: Path) -> list[bytes]:
    found = [file.read_bytes() for file in folder.iterdir()] if folder.is_dir() else []
    return sorted((data for data in found if len(data) <= BYTES_MAX), key=lambda data: (len(data), data))


def chosen(name: str) -> Iterator[bytes]:
    """The inputs to add."""
    target, kept = TARGETS[name], inputs(CORPORA / name)
    taken: Steps = set().union(*(steps(target, data) for data in kept))
    left = KEPT_MAX - len(kept)
    # The first run of all imports and fills caches.
    seeds = [seed for seed in target.seeds() if len(seed) <= BYTES_MAX]
    for data in [*seeds, *inputs(ROOT / ".fuzz" / name / "corpus")]:
        if left <= 0:
            return
        if new := steps(target, data) - taken:
            taken |= new
            left -= 1
            yield data


def main() -> None:
    for name in sys.argv[1:] or TARGETS:
        folder = CORPORA / name
        folder.mkdir(parents=True, exist_ok=True)
        added = [*chosen(name)]
        for data in added:
            (folder / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)
        print(f"{name}: {len(added)} added, {len([*folder.iterdir()])} kept", flush=True)


if __name__ == "__main__":
    main()
