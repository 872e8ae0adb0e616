"""A replica process that imports everything with the lowest priority, and then waits for its settings.

Owns: its engine process, until the replica takes it. Run as `python -m midstream.launch.spare_replica` by the supervisor
(launch/spare.py), for the embedded engine.
Always holds: once it has said that it waits, the replica that it becomes imports nothing more.
"""

from __future__ import annotations

import os
import select
import sys

from midstream.core.child import imported_beside
from midstream.core.private import UMASK
from midstream.engine.embedded import engine
from midstream.http.channel import raise_file_limit


def main() -> int:
    # The engine process inherits both.
    os.umask(UMASK)
    raise_file_limit()
    begun = engine.begin(beside=True)
    try:
        replica = imported_beside("midstream.launch.replica")
        # Its first message, or its end: the replica begins another one then. Or the end of the supervisor.
        select.select([begun.sock, sys.stdin], [], [])
        code: int = replica.main(begun)
    finally:
        # An engine that still imports does not see that its socket is closed.
        begun.process.kill()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
