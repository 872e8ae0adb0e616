"""Faults that are put into parsers, to show that fuzzing finds such faults.

Always holds: each is of the kind that tests with chosen inputs miss: a bound, a cut in the wrong place, an error that escapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from midstream.engine.vllm import protocol
from midstream.replica.text import toolcalls
from midstream.snapshots import layout
from midstream.snapshots.arc2 import blob


class Planted(NamedTuple):
    """target: which finds it, in at most `runs` executions."""

    target: str
    runs: int
    put_in: Callable[[], None]


def _ranges_unbounded() -> None:
    """A tensor may end behind its file's end."""

    def check_ranges(file: str, ranges: Any, data_bytes: int, gaps: bool) -> None:
        pass

    layout._check_ranges = check_ranges


def _tag_cut_short() -> None:
    """A tag that is cut before its last character is shown as text."""
    whole = toolcalls.unfinished
    toolcalls.unfinished = lambda text, tag: size if (size := whole(text, tag)) < len(tag) - 1 else 0


def _frames_unchecked() -> None:
    """A blob whose last frame is cut short is taken."""
    blob._check_frames = lambda blob, empty: None


def _line_forgotten() -> None:
    """The rest of a line that was cut after its first byte is read without that byte."""
    feed = protocol.ChunkReader.feed

    def forgetful(self: protocol.ChunkReader, data: bytes) -> Any:
        if self._held == 1:
            self._parts, self._held = [], 0
        return feed(self, data)

    protocol.ChunkReader.feed = forgetful  # type: ignore[method-assign]


FAULTS = {
    "ranges_unbounded": Planted("safetensors", 100_000, _ranges_unbounded),
    "tag_cut_short": Planted("tool_calls", 100_000, _tag_cut_short),
    "frames_unchecked": Planted("arc2_blobs", 100_000, _frames_unchecked),
    "line_forgotten": Planted("vllm_streams", 100_000, _line_forgotten),
}
