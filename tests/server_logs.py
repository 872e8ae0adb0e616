"""The logs of the servers of a test: what they warn of is shown beside a test that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

#: Lines of each server that are shown, the newest.
SHOWN = 80

_running: dict[Path, None] = {}
_ended: dict[Path, None] = {}


@contextlib.contextmanager
def shown_on_failure(log: Path) -> Iterator[None]:
    _running[log] = None
    try:
        yield
    finally:
        del _running[log]
        _ended[log] = None


def forget_ended() -> None:
    """The next test is not about them."""
    _ended.clear()


def sections() -> Iterator[tuple[str, str]]:
    """Title and text for each server: its lines but for those of level INFO, so that tracebacks are among them."""
    for log in (*_running, *_ended):
        if log.exists():
            lines = [line for line in log.read_text(errors="replace").splitlines() if " INFO " not in line]
            yield f"warnings of the server with the log {log.name}", "\n".join(lines[-SHOWN:])
