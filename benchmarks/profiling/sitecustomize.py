"""Imported by each Python process of a server that hot_functions.py started: profiles its threads with cProfile.

While a file `on` is in MIDSTREAM_PROFILE, a window is open, which its text names. Each process that has opened it leaves a
file that ends in `.open`. Once `on` is gone, each process writes how often each function was called in the window, and how much
CPU time it took itself, in seconds.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PLACE = Path(os.environ["MIDSTREAM_PROFILE"])
LOOK_EVERY_S = 0.02

_profiles: list[cProfile.Profile] = []
_local = threading.local()


def _profile_this_thread(_frame: FrameType | None = None, _event: str = "", _argument: Any = None) -> None:
    """Takes the place of itself as the thread's profiler."""
    # A thread's profiler ends with it.
    _local.profile = cProfile.Profile(time.thread_time)
    _profiles.append(_local.profile)
    _local.profile.enable()


def _name(code: CodeType | str) -> str:
    return code if isinstance(code, str) else f"{code.co_filename}:{code.co_qualname}"


def _so_far() -> tuple[Counter[str], Counter[str]]:
    """Calls and own CPU time by function, since the process started. Functions that still run are not in it."""
    calls, own_s = Counter[str](), Counter[str]()
    gc.disable()
    for profile in _profiles:
        for entry in profile.getstats():
            name = _name(entry.code)
            calls[name] += entry.callcount
            # It is below zero by rounding, now and then.
            own_s[name] += max(0.0, entry.inlinetime)
    gc.enable()
    return calls, own_s


def _write(name: str, calls: Counter[str], own_s: Counter[str]) -> None:
    # What sys.argv no longer says.
    command = Path("/proc/self/cmdline").read_text().split("\0")
    functions = {function: (count, own_s[function]) for function, count in calls.items()}
    written = PLACE / f"{name}-{os.getpid()}.json"
    written.with_suffix(".part").write_text(json.dumps({"command": command, "functions": functions}))
    written.with_suffix(".part").rename(written)


def _watch() -> None:
    name = ""
    calls, own_s = Counter[str](), Counter[str]()
    while True:
        time.sleep(LOOK_EVERY_S)
        switch = PLACE / "on"
        asked = switch.read_text() if switch.exists() else ""
        if asked and not name:
            calls, own_s = _so_far()
            name = asked
            (PLACE / f"{name}-{os.getpid()}.open").touch()
        elif name and not asked:
            calls_after, own_after = _so_far()
            # What Counter's subtraction leaves is above zero.
            _write(name, calls_after - calls, own_after - own_s)
            name = ""


# Its own thread is of no interest.
threading.Thread(target=_watch, name="profile", daemon=True).start()
threading.setprofile(_profile_this_thread)
_profile_this_thread()
