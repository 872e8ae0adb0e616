"""Imported by each Python process of a server that walk.py started: notes which functions of midstream run.

A file `on` in MIDSTREAM_WALK says since when, and into which file of each process the functions are written once it is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PLACE = Path(os.environ["MIDSTREAM_WALK"])
INSIDE = tuple(
    f"{os.sep}src{os.sep}{package}{os.sep}"
    for package in ("midstream", "midstream_kernels", "midstream_tinker")
)
LOOK_EVERY_S = 0.02

_seen: set[CodeType] = set()
_noting = False


def is_ours(code: CodeType) -> bool:
    return any(package in code.co_filename for package in INSIDE)


def _profile(frame: FrameType, event: str, _: Any) -> None:
    if _noting and event == "call":
        _seen.add(frame.f_code)


def _watch() -> None:
    global _noting
    name = ""
    while True:
        time.sleep(LOOK_EVERY_S)
        switch = PLACE / "on"
        asked = switch.read_text() if switch.exists() else ""
        if asked and not _noting:
            name = asked
            _seen.clear()
            _noting = True
        elif _noting and not asked:
            _noting = False
            found = sorted(f"{c.co_filename}:{c.co_qualname}" for c in list(_seen) if is_ours(c))
            written = PLACE / f"{name}-{os.getpid()}.json"
            # What sys.argv no longer says.
            command = Path("/proc/self/cmdline").read_text().split("\0")
            written.with_suffix(".part").write_text(json.dumps({"command": command, "functions": found}))
            written.with_suffix(".part").rename(written)


threading.setprofile(_profile)
sys.setprofile(_profile)
# Its own thread is of no interest.
threading.Thread(target=_watch, name="walk", daemon=True).start()
