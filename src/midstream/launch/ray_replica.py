"""A replica's process under an actor of a Ray cluster: `replica`, and it does not outlive the actor's process.

Owns: nothing else. Run as `python -m midstream.launch.ray_replica` by the actor; does not import ray.
Always holds: when the actor's process is gone, however it went, so are this one and what it started, at once: Ray gives its
GPUs and its room to others from then on. Only a server that stops leaves time to finish streams.
"""

from __future__ import annotations

import os
import signal
import threading
import time

LOOK_S = 0.2


def end_with(parent: int) -> None:
    """Ends this process group, which is the replica's own, when its parent is another process than that."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), name="leash", daemon=True).start()
    from midstream.launch.replica import main  # takes seconds, in which the actor may end

    raise SystemExit(main())
