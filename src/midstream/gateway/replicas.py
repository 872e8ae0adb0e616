"""What the gateway knows of its replicas, and the event streams it knows it from.

Owns: the views, one long-lived `GET /replica/events` per replica, and delivery of a Desired to a replica.
Always holds:
- A view's report is the last whole report of a live event stream; when the stream is lost, or silent for
  `silence_s`, the report is None at once, so placement never counts on a replica nobody hears.
- A new boot of a replica is not admitted until control/ admits it.
- Subscribers are called after changes, at most once per turn of the event loop, never from within a change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from midstream.errors import ReplicaUnavailable
from midstream.gateway.httpcall import CallFailed, call, open_stream
from midstream.types import Desired, ReplicaReport

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 4 * 2**20
SILENCE_CHECKS = (
    6  # a silent period is counted in this many parts, so that one stall of this loop is not silence
)


@dataclass(eq=False)
class ReplicaView:
    """What the gateway knows of one replica."""

    index: int
    name: str
    url: str
    report: ReplicaReport | None = None  # None: unreachable (event stream down)
    admitted: bool = False  # placement may use it; set by control/, cleared here on a new boot
    in_flight: int = 0  # requests this gateway has on it now

    @property
    def usable(self) -> bool:
        """Placement may send requests to it."""
        return self.admitted and self.report is not None and self.report.ready


class ReplicaSet:
    """All replicas of the deployment, in a fixed order. Use from one event loop."""

    def __init__(
        self,
        replicas: Sequence[tuple[str, str]],
        *,
        silence_s: float = 3.0,
        backoff_s_min: float = 0.05,
        backoff_s_max: float = 0.5,
        call_timeout_s: float = 5.0,
    ) -> None:
        """`replicas`: (name, base URL) of each, e.g. ("replica-0", "http://127.0.0.1:18081")."""
        self.views = tuple(
            ReplicaView(index, name, url.rstrip("/")) for index, (name, url) in enumerate(replicas)
        )
        self._silence_s = silence_s
        self._backoff_s_min = backoff_s_min
        self._backoff_s_max = backoff_s_max
        self._call_timeout_s = call_timeout_s
        self._callbacks: list[Callable[[], None]] = []
        self._notice: asyncio.Handle | None = None
        self._boots: list[str | None] = [None] * len(self.views)

    def __repr__(self) -> str:
        reachable = sum(view.report is not None for view in self.views)
        usable = sum(view.usable for view in self.views)
        return f"ReplicaSet({len(self.views)} replicas, {reachable} reachable, {usable} usable)"

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change of any report or of reachability."""
        self._callbacks.append(callback)

    async def send_desired(self, view: ReplicaView, desired: Desired) -> None:
        """Tell a replica what to serve. Raises ReplicaUnavailable when it did not take it."""
        body = msgspec.json.encode(desired)
        try:
            status, answer = await call(view.url, "POST", "/replica/desired", body, self._call_timeout_s)
        except CallFailed as error:
            raise ReplicaUnavailable(f"{view.name}: {error}") from error
        if status != 202:
            text = answer[:500].decode("utf-8", "replace")
            raise ReplicaUnavailable(f"{view.name} answered {status}: {text}")

    async def run(self) -> None:
        """Watch all event streams until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for view in self.views:
                tasks.create_task(self._watch(view), name=f"events of {view.name}")

    async def _watch(self, view: ReplicaView) -> None:
        backoff_s = self._backoff_s_min
        while True:
            heard = False
            try:
                reason, heard = await self._follow(view)
            except CallFailed as error:
                reason = str(error)
            finally:
                self._lost(view)
            level = logging.WARNING if heard else logging.DEBUG
            logger.log(level, "event stream of %s lost: %s", view.name, reason)
            backoff_s = self._backoff_s_min if heard else min(self._backoff_s_max, 2 * backoff_s)
            await asyncio.sleep(backoff_s)

    async def _follow(self, view: ReplicaView) -> tuple[str, bool]:
        """Read one event stream to its end. Why it ended, and whether it ever said anything."""
        lines = _Lines(lambda line: self._heard(view, line))
        stream = await open_stream(
            view.url, "GET", "/replica/events", None, lines.feed, min(self._call_timeout_s, self._silence_s)
        )
        try:
            seen, quiet_checks = 0, 0
            while quiet_checks < SILENCE_CHECKS:
                await asyncio.wait({stream.ended}, timeout=self._silence_s / SILENCE_CHECKS)
                if stream.ended.done():
                    reason = stream.ended.result() or f"ended with status {stream.status}"
                    return reason, lines.count > 0
                quiet_checks = 0 if lines.count > seen else quiet_checks + 1
                seen = lines.count
            return f"silent for {self._silence_s:g} s", lines.count > 0
        finally:
            stream.abort()

    def _heard(self, view: ReplicaView, line: bytes) -> None:
        report = msgspec.json.decode(line, type=ReplicaReport)
        if report.replica != view.name:
            raise ValueError(f"{view.url} is {report.replica}, expected {view.name}")
        if report.boot != self._boots[view.index]:
            self._boots[view.index] = report.boot
            view.admitted = False
        if report != view.report:
            view.report = report
            self._changed()

    def _lost(self, view: ReplicaView) -> None:
        if view.report is not None:
            view.report = None
            self._changed()

    def _changed(self) -> None:
        if self._notice is None:
            self._notice = asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._notice = None
        for callback in self._callbacks:
            callback()


class _Lines:
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
