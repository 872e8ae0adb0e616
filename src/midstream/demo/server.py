"""The demo's server: a real `midstream serve` in its own process, which SIGTERM ends.

Always holds: the process is gone after `stop`, and after the `with` block, however that ends.
"""

from __future__ import annotations

import contextlib
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

READY = re.compile(
    r"midstream ready on (?P<url>\S+) \((?P<replicas>\d+) replicas?, model (?P<model>\S+), "
    r"deployment (?P<deployment>\S+)\)"
)


class ServerFailed(Exception):
    """The server did not start. The message has the end of its log."""


class ServerProcess:
    """A context manager around a running server. url, model, deployment: from its ready line."""

    def __init__(self, arguments: Sequence[str], log: Path, start_timeout_s: float = 180.0) -> None:
        self._arguments = [sys.executable, "-m", "midstream.cli", "serve", *arguments]
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self.model = self.deployment = ""

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            # It has a session of its own, so that Ctrl-C reaches the demo alone, which then ends the server.
            self._process = subprocess.Popen(
                self._arguments, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, grace_s: float = 20.0) -> int | None:
        """End the server. Returns its exit code; None if it never started."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        if process.poll() is None:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
        return process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        deadline = time.monotonic() + self._start_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([process.stdout], [], [], left)[0]:
                break
            line = process.stdout.readline()
            if not line:
                raise ServerFailed(f"midstream serve ended while starting:\n{self._log_tail()}")
            if found := READY.search(line.decode(errors="replace")):
                self.url, self.model, self.deployment = found["url"], found["model"], found["deployment"]
                return
        raise ServerFailed(
            f"midstream serve was not ready after {self._start_timeout_s:.0f} s:\n{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
