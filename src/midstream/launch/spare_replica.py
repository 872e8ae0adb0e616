"""A replica process that imports everything with the lowest priority, and then waits for its settings.

Owns: its engine process, until the replica takes it. Run as `python -m midstream.launch.spare_replica` by the supervisor
(launch/spare.py), for the embedded engine.
Always holds: once it has said that it waits, the replica that it becomes imports nothing more.
"""

from __future__ import annotations

import os
import select

from midstream.core.child import imported_beside
from midstream.core.private import UMASK
from midstream.engine.embedded import engine
from midstream.http.channel import raise_file_limit


def main() -> int:
    # The engine process inherits both.
    os.umask(UMASK)
    raise_file_limit()
    begun = engine.begin(beside=True)
    replica = imported_beside("midstream.launch.replica")
    # Its first message, or its end. The replica begins another one then.
    select.select([begun.sock], [], [])
    code: int = replica.main(begun)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
