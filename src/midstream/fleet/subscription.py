"""How one replica is heard and called: its event stream, cut into lines, the connections for calls, and the header that lets a
gateway call it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from midstream.core.headers import HEADER_BOOT, HEADER_TOKEN
from midstream.http.call import ResponseStream
from midstream.http.upstream import UpstreamPool

MAX_LINE_BYTES = 4 * 2**20


@dataclass(eq=False)
class Subscription:
    """How one replica is heard, and what was heard last. calls: connections for short calls."""

    calls: UpstreamPool
    watch: asyncio.Task[None] | None = None
    # The last event stream.
    stream: ResponseStream | None = None
    # The last report as it came.
    line: bytes = b""
    # The timer that ends the report's grace.
    doubt: asyncio.TimerHandle | None = None

    @property
    def connected(self) -> bool:
        return self.stream is not None and not self.stream.ended.done()

    def calm(self) -> None:
        if self.doubt is not None:
            self.doubt.cancel()
            self.doubt = None


class Lines:
    """Cuts a byte stream into lines. Raises ValueError on an endless one."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self.count = 0

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.strip():
                self._on_line(line)
                self.count += 1


def boot_header(boot: str) -> str:
    """The header line by which a call is for the process of the boot; "" if that is not known."""
    return f"{HEADER_BOOT}: {boot}\r\n" if boot.isascii() and boot.isprintable() and boot else ""


def token_header(token: str | None) -> str:
    """The header line that carries the token; "" without one. Raises ValueError when it cannot be a header's value."""
    if not token:
        return ""
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("the replica token must be printable ASCII without spaces")
    return f"{HEADER_TOKEN}: {token}\r\n"
