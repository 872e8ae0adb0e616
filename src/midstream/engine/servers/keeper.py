"""The keeper: a process between a replica and its engine's server. No process of the server outlives the replica.

Owns: the server process and all processes below it, orphans included: the kernel makes them children of the keeper.
server.py runs this file, which imports the standard library alone.
Always holds: when the keeper has ended by itself, no process of the server is left. It kills them as soon as its standard
input ends, which only the replica holds open.
Standard input has one JSON line with the command to run, and then at most one line that asks the server to leave. Standard
output has JSON lines: that the server runs or why it does not, and then how it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRACKER = b"multiprocessing.resource_tracker"
#: The tracker removes what killed processes left in shared memory, once all of them are gone.
TRACKER_GRACE_S = 1.0
ROUND_S = 0.02
CONTROL, REPORT = 0, 1


def say(**message: Any) -> None:
    # The replica may be gone.
    with contextlib.suppress(BrokenPipeError):
        os.write(REPORT, json.dumps(message).encode() + b"\n")


def read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (more := os.read(CONTROL, 65536)):
        line += more
    return line


def become_subreaper() -> None:
    """Make orphans below this process its children, whatever their session is. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER is not available")


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the server. It dies when this process dies, even when that is killed."""
    libc, keeper = ctypes.CDLL(None), os.getpid()

    def die_with_keeper() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)

    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=die_with_keeper
    )


def reap(server: int) -> int | None:
    """Reap every child that has ended. Returns the exit code of the server if it is among them, negative for a signal."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def stat_of(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on; None when the process is gone, or another user's and hidden."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def started_at(pid: int) -> int | None:
    """The start of a process in clock ticks, which distinguishes it from a later process with the same id. None if it has
    ended."""
    stat = stat_of(pid)
    return None if stat is None or stat[0] == b"Z" else int(stat[19])


def is_stopped(pid: int, start: int) -> bool:
    """Whether the process that began at `start` is, as a whole. Its other states say nothing of what it waits for."""
    # Without a free descriptor, for one, that cannot be seen.
    with contextlib.suppress(OSError):
        return (stat := stat_of(pid)) is not None and stat[0] == b"T" and int(stat[19]) == start
    return False


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := stat_of(int(entry))) is not None:
            children.setdefault(int(stat[1]), []).append(int(entry))
    found, waiting = [], [root]
    while waiting:
        under = children.get(waiting.pop(), [])
        found += under
        waiting += under
    return found


def is_tracker(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end_all(server: int) -> int | None:
    """Kill every process that is left, and return when none is. Returns the server's exit code if it ended now."""
    code, deadline = None, time.monotonic() + TRACKER_GRACE_S
    while left := descendants(os.getpid()):
        for pid in left:
            if time.monotonic() > deadline or not is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        found = reap(server)
        code = found if found is not None else code
        time.sleep(ROUND_S)
    return code


def woken_by_signals() -> int:
    """A descriptor that is readable after SIGCHLD, SIGTERM and SIGINT, which then do nothing else."""
    wake, raised = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(raised, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        # The server does not inherit a handler, but it would inherit an ignored signal.
        signal.signal(number, lambda *_: None)
    return wake


def until_ended(server: int, wake: int, grace_s: float) -> int | None:
    """The server's exit code. None when it has to be killed: the replica is gone, or has asked for its end in vain."""
    deadline: float | None = None
    while (code := reap(server)) is None:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return None
        asked = False
        readable, _, _ = select.select([CONTROL, wake], [], [], left_s)
        if CONTROL in readable:
            asked = bool(os.read(CONTROL, 4096))
            if not asked:
                return None
        if wake in readable:
            asked = asked or signal.SIGTERM in os.read(wake, 4096)
        if asked and deadline is None:
            deadline = time.monotonic() + grace_s
            os.kill(server, signal.SIGTERM)
    return code


def main() -> None:
    wake = woken_by_signals()
    if not (line := read_line()):
        # The replica has ended, or does not want the server any more.
        return
    spec = json.loads(line)
    try:
        become_subreaper()
        server = start(spec["command"], spec["env"])
    except OSError as error:
        say(error=str(error))
        return
    # A kill of the replica's process group takes the server, but not the keeper, which kills the rest.
    os.setpgid(0, 0)
    say(pid=server.pid)
    code = until_ended(server.pid, wake, spec["grace_s"])
    if code is not None:
        say(code=code)
    killed = end_all(server.pid)
    server.returncode = code if code is not None else killed
    if code is None:
        say(code=killed)


if __name__ == "__main__":
    main()
