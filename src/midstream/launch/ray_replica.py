"""A replica process under an actor of a Ray cluster.

Runs the module `replica`. Started as `python -m midstream.launch.ray_replica` by the actor; does not import ray.
Always holds: this process and its children do not outlive the actor's process. They end at once then, because Ray gives their
GPUs and their room to others. Only a server that stops leaves time to finish streams.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from midstream.core.child import importing

LOOK_S = 0.2


def end_with(parent: int) -> None:
    """End this process group, which is the replica's own, once its parent is another process. Blocks."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    threading.Thread(target=end_with, args=(os.getppid(),), name="leash", daemon=True).start()
    # Imported here: that takes seconds, in which the actor may end.
    with importing():
        from midstream.launch import replica
    return replica.main()


if __name__ == "__main__":
    raise SystemExit(main())
