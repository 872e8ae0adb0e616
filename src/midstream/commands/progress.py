"""The progress that a long command shows.

Always holds: it is on standard error, and only on a terminal unless --progress asks for it. On a terminal it is one line that
is written over, counts the seconds, and is gone at the end. Elsewhere lines follow each other.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from types import TracebackType

#: Between two lines of `often`: on a terminal, and elsewhere.
TERMINAL_EVERY_S = 0.2
FILE_EVERY_S = 5.0
TICK_S = 1.0


def add_progress_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="say on standard error what is being done (default: on a terminal)",
    )


class ProgressLine:
    """A context manager. wanted: as --progress says; None is what the terminal says. tick_s: between two counts of seconds."""

    def __init__(self, wanted: bool | None = None, *, tick_s: float = TICK_S) -> None:
        self._terminal = sys.stderr.isatty()
        self._silent = not (self._terminal if wanted is None else wanted)
        self._last = time.monotonic()
        self._began, self._text = self._last, ""
        self._tick_s = tick_s
        # Two threads write the line.
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> ProgressLine:
        if self._terminal and not self._silent:
            self._ticker = threading.Thread(target=self._tick, daemon=True, name="progress")
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._ticker is not None:
            self._ticker.join()
        if self._terminal and not self._silent:
            self._write("\r\x1b[K")

    def show(self, text: str) -> None:
        """A new line, or a new text on the line. Its seconds begin at 0."""
        with self._lock:
            self._began = self._last = time.monotonic()
            self._text = text
            self._write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")

    def often(self, text: str) -> None:
        """Show it, unless a line was shown a moment ago."""
        if time.monotonic() - self._last >= (TERMINAL_EVERY_S if self._terminal else FILE_EVERY_S):
            self.show(text)

    def _tick(self) -> None:
        while not self._over.wait(self._tick_s):
            with self._lock:
                passed = time.monotonic() - self._began
                if self._text and passed >= self._tick_s:
                    self._write(f"\r\x1b[K{self._text} ({passed:.0f} s)")

    def _write(self, text: str) -> None:
        if not self._silent:
            print(text, end="", file=sys.stderr, flush=True)
