"""Records of finished turns and of rewards, kept on disk until the bucket has them: no trainer that was down loses any.

Owns: one directory of segments, files of JSON lines, and the two threads that write and upload them.

Always holds:
- Whoever adds a record never waits. A thread encodes it, appends it and syncs it, a batch at a time.
- A segment has whole lines. One is closed by its size or age, goes into the bucket under its own name, and is removed here
  only when the bucket has it. The next start uploads what a crash left, without a torn last line.
- One process at a time has the directory (launch/replica.py). What a replica leaves that never starts again, the supervisor
  uploads (launch/stranded.py).
- Records have numbers that count up, within one boot. A record that finds no room is counted, its number is left out, and the
  next one that finds room stands behind a record of the gap.
- Threads share counters alone, and each counter has one writer.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from midstream.core.errors import SnapshotError
from midstream.core.private import FILE_MODE, private_directory
from midstream.core.reports import RecordsStats
from midstream.core.retry import Backoff
from midstream.snapshots.durable import sync_directory
from midstream.snapshots.store.upload import put_file

log = logging.getLogger(__name__)

BYTES_MAX = 2**30
SEGMENT_BYTES = 8 * 2**20
SEGMENT_AGE_S = 10.0
#: Records in memory. More come only while the disk hangs.
QUEUED_MAX = 10_000
#: For the last uploads. What is not up by then, the next start uploads.
CLOSE_S = 5.0
#: The segments of a directory, in the order of their boots.
SEGMENTS = "*.jsonl"
_BACKOFF = Backoff(first_s=0.5, last_s=30.0)

#: Makes the fields of a record; the writer's thread calls it.
Make = Callable[[], dict[str, Any]]


def records_url(url: str, deployment: str) -> str:
    """Where a deployment's segments lie in the bucket of records. deployment: its bare name."""
    return f"{url.rstrip('/')}/records/{deployment}"


class Journal:
    """url: of the directory in the bucket. name: of the replica, which is part of each segment's name. about: fields of every
    record. bytes_max: of all segments here."""

    def __init__(
        self,
        directory: Path,
        url: str,
        name: str,
        about: dict[str, Any],
        *,
        bytes_max: int = BYTES_MAX,
        segment_bytes: int = SEGMENT_BYTES,
        segment_age_s: float = SEGMENT_AGE_S,
    ) -> None:
        self._directory = directory
        self._url = url
        self._name = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        # Boots in the order of their starts, as names are sorted.
        self.boot = f"{int(time.time() * 1000):013d}{uuid.uuid4().hex[:6]}"
        self._about = {**about, "replica": name, "boot": self.boot}
        self._bytes_max, self._segment_bytes, self._segment_age_s = bytes_max, segment_bytes, segment_age_s
        self._made: queue.Queue[Make | None] = queue.Queue(QUEUED_MAX)
        self._sealed: queue.Queue[Path | None] = queue.Queue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, name="records writer", daemon=True),
            threading.Thread(target=self._upload, name="records upload", daemon=True),
        ]
        self._open: _Segment | None = None
        self._segments = 0
        self._number = 0
        self._gap = 0
        #: Bytes of all segments that were begun here or found, and of those that are in the bucket.
        self._begun_bytes = self._gone_bytes = 0
        self._durable = self._refused = self._dropped = 0

    def __repr__(self) -> str:
        return f"Journal({self._directory}, {self.stats()})"

    def start(self) -> None:
        """Raises ConfigError and OSError when the directory cannot be used."""
        private_directory(self._directory)
        for path in sorted(self._directory.glob(SEGMENTS)):
            if size := whole_lines(path):
                self._begun_bytes += size
                self._sealed.put(path)
        for thread in self._threads:
            thread.start()

    def add(self, make: Make) -> None:
        """From one thread only. make: gives what it is given always, whenever it is called."""
        try:
            self._made.put_nowait(make)
        except queue.Full:
            self._dropped += 1

    def stats(self) -> RecordsStats:
        return RecordsStats(
            durable=self._durable,
            lost=self._refused + self._dropped,
            waiting_bytes=self._begun_bytes - self._gone_bytes,
        )

    def close(self) -> None:
        """Sync what was added, and upload it if that takes no longer than CLOSE_S. Idempotent; blocks."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._made.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CLOSE_S)

    # -- the writer's thread

    def _write(self) -> None:
        counted, last = 0, False
        while not last:
            batch = list(self._batch())
            last = None in batch
            dropped = self._dropped
            self._gap, counted = self._gap + dropped - counted, dropped
            self._append([make for make in batch if make is not None], last)
            segment = self._open
            due = segment is not None and (
                segment.size >= self._segment_bytes or segment.age_s >= self._segment_age_s
            )
            if segment is not None and (due or last):
                self._open = None
                segment.close()
                self._sealed.put(segment.path)
        self._sealed.put(None)

    def _batch(self) -> Iterator[Make | None]:
        """What was added since, or nothing once the open segment is old."""
        wait_s = None if self._open is None else max(0.0, self._segment_age_s - self._open.age_s)
        try:
            yield self._made.get(timeout=wait_s)
            while True:
                yield self._made.get_nowait()
        except queue.Empty:
            return

    def _append(self, makes: list[Make], last: bool) -> None:
        if not makes and not (last and self._gap):
            return
        lines = bytearray()
        if self._gap:
            lines += self._line({"kind": "gap", "lost": self._gap})
        for make in makes:
            lines += self._line(make())
        try:
            if self._begun_bytes - self._gone_bytes + len(lines) > self._bytes_max:
                raise OSError(f"{self._bytes_max} bytes wait for the bucket already")
            if self._open is None:
                self._segments += 1
                self._open = _Segment(
                    self._directory / f"{self._name}-{self.boot}-{self._segments:08d}.jsonl"
                )
            self._open.append(bytes(lines))
        except OSError as error:
            if not self._gap:
                log.error("records are being lost: %s: %s", self._directory, error.strerror or error)
            self._gap += len(makes)
            self._refused += len(makes)
            if self._open is not None and not self._open.sound:
                # The next start cuts its end.
                self._open.close()
                self._open = None
            return
        if self._gap:
            log.error("records are kept again; %d were lost", self._gap)
            self._gap = 0
        self._begun_bytes += len(lines)
        self._durable += len(makes)

    def _line(self, fields: dict[str, Any]) -> bytes:
        self._number += 1
        return msgspec.json.encode({"n": self._number, **self._about, **fields}) + b"\n"

    # -- the uploader's thread

    def _upload(self) -> None:
        failures = 0
        while (path := self._sealed.get()) is not None:
            while not self._uploaded(path):
                failures += 1
                if self._stopping.wait(_BACKOFF.pause_s(failures)):
                    return
            failures = 0

    def _uploaded(self, path: Path) -> bool:
        try:
            size = path.stat().st_size
            put_file(self._url, path)
            path.unlink()
        except (SnapshotError, OSError) as error:
            log.warning("records wait for the bucket: %s", error)
            return False
        self._gone_bytes += size
        return True


class _Segment:
    """An open file of whole, synced lines."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.size = 0
        #: Nothing stands behind its last whole line.
        self.sound = True
        self._began = time.monotonic()
        self._file = os.open(
            path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, FILE_MODE
        )
        sync_directory(path.parent)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    def append(self, lines: bytes) -> None:
        """All of them or, with OSError, none, if it is still sound."""
        self.sound = False
        try:
            left = memoryview(lines)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self.size)
            self.sound = True
            raise
        self.sound = True
        self.size += len(lines)

    def close(self) -> None:
        os.close(self._file)


def whole_lines(path: Path) -> int:
    """Cut a torn last line; an empty segment is removed. How many bytes are left. Raises OSError."""
    data = path.read_bytes()
    size = data.rfind(b"\n") + 1
    if size < len(data):
        os.truncate(path, size)
    if not size:
        path.unlink()
    return size
