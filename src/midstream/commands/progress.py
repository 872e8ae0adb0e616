"""Progress of a subcommand: one line on standard error.

Always holds: on a terminal the line is written over, and is gone at the end. Elsewhere lines follow each other.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

#: Between two lines of `often`: on a terminal, and elsewhere.
TERMINAL_EVERY_S = 0.2
FILE_EVERY_S = 5.0


class ProgressLine:
    """A context manager."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            self._write("\r\x1b[K")

    def show(self, text: str) -> None:
        self._last = time.monotonic()
        self._write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")

    def often(self, text: str) -> None:
        """Show it, unless a line was shown a moment ago."""
        if time.monotonic() - self._last >= (TERMINAL_EVERY_S if self._terminal else FILE_EVERY_S):
            self.show(text)

    def _write(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)
