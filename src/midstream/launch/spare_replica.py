"""A replica process that imports everything with the lowest priority, and then waits for its settings.

Owns: its engine process, until the replica takes it. Run as `python -m midstream.launch.spare_replica` by the supervisor
(launch/spare.py), for the embedded engine.
Always holds: once it has said that it waits, the replica that it becomes imports nothing more.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from midstream.core.child import NICENESS, imported_beside
from midstream.core.private import UMASK
from midstream.engine.embedded import engine
from midstream.http.channel import raise_file_limit
from midstream.launch.specs import ReplicaSpec

#: Of a process that waits, in /proc/PID/oom_score_adj: where memory is short, the kernel kills it and no replica.
FIRST_KILLED = 1000
#: Linux shares time among sessions before it looks at the niceness within each, and a child leads a session.
AUTOGROUP = Path("/proc/self/autogroup")


@contextlib.contextmanager
def _behind_other_sessions() -> Iterator[None]:
    lowered = False
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            lowered = _of_session(NICENESS)
    yield
    if lowered:
        _of_session(0)


def _of_session(niceness: int) -> bool:
    while True:
        try:
            AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:
            # The kernel takes few such orders a second, of all users together.
            time.sleep(0.1)
        else:
            return True


def _killed_first(process: str, score: int) -> int:
    """Set `oom_score_adj` of a process, on Linux: the kernel kills the highest first. Returns what it was."""
    with contextlib.suppress(OSError):
        file = Path("/proc", process, "oom_score_adj")
        was = int(file.read_text())
        file.write_text(str(score))
        return was
    return 0


def main() -> int:
    # The engine process inherits all three.
    os.umask(UMASK)
    raise_file_limit()
    before = _killed_first("self", FIRST_KILLED)
    begun = engine.begin(beside=True)
    try:
        with _behind_other_sessions():
            replica = imported_beside("midstream.launch.replica")
            # Its first message, or its end: the replica begins another one then. Or the end of the supervisor.
            select.select([begun.sock, sys.stdin], [], [])

        def around(spec: ReplicaSpec) -> AbstractContextManager[None]:
            # It is a replica now.
            for process in ("self", str(begun.process.pid)):
                _killed_first(process, before)
            held: AbstractContextManager[None] = replica.held_directories(spec)
            return held

        code: int = replica.main(begun, around)
    finally:
        # An engine that still imports does not see that its socket is closed.
        begun.process.kill()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
