"""Record files of a replica in the bucket of records: written before their reference is handed out, removed when they are old.

Owns: the threads that write files and look after those of the deployment.
Always holds:
- A reference is given for a file that the bucket has whole, and that a crash does not take. A file that was written and whose
  answer never came is removed with those of its age.
- Nothing here blocks the event loop.
- A bucket that does not answer holds no request much longer than the store's own retries: those that waited meanwhile fail
  with the first one. They hold up synchronous switches.
- Only files with the name of a SHA-256, and what a writer that died left, are removed. Their age is by the bucket's clock, as
  that of this machine may be wrong.
- Every replica looks after all files of its deployment. They may do so at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from midstream.core import extras
from midstream.core.beside import lower_priority
from midstream.core.errors import RecordsNotStored, SnapshotError
from midstream.core.record_files import is_file_name, path_of
from midstream.core.references import FORMAT, RecordReference, ReferencedRows, SharedFile
from midstream.core.reports import RecordFilesStats
from midstream.replica.held_bytes import HeldBytes
from midstream.replica.shared_rows import WrittenRows
from midstream.snapshots.store.objects import (
    CLOCK,
    WRITING_PREFIX,
    FileSeen,
    files_seen,
    is_there,
    put_bytes,
    remove_files,
    time_there,
)

log = logging.getLogger(__name__)

PARAM = "return_record_reference"
BYTES_MAX = 100 * 2**30
SWEEP_S = 60.0
#: At most one part of so many of a thread's time goes into looks.
LOOKS_EVERY = 20
#: A write that failed after so long says that the bucket does not answer.
STUCK_S = 5.0
#: No write takes so long.
LEFT_S = 3600.0
#: Files on their way into the bucket: those that are synced at the same time take hardly longer than one.
WRITERS = 16
#: Of the writers: tokens of other answers go first. On a busy core they get a quarter of it.
NICENESS = 5
#: Threads that make files at the same time. More would only wait for the interpreter.
ENCODERS = 2
NO_BUCKET = f"{PARAM}: this server has no bucket for records: start it with --records URL"


class Encoded(NamedTuple):
    """A file, whole, and the rows of its choices."""

    data: bytes
    rows: int
    choices: list[ReferencedRows]


class RecordFiles:
    """bucket: URL of the bucket of records. deployment: its bare name. keep_s: the age at which files are removed; None: never.
    bytes_max: of all files of the deployment. monotonic: seconds of any clock that does not jump."""

    def __init__(
        self,
        bucket: str,
        deployment: str,
        *,
        keep_s: float | None = None,
        bytes_max: int = BYTES_MAX,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        #: The URL of the bucket, which is what clients call it, too.
        self.store_id = bucket.rstrip("/")
        self._deployment = deployment
        self._url = f"{self.store_id}/{path_of(deployment, '').rpartition('/')[0]}"
        self.keep_s, self._bytes_max = keep_s, bytes_max
        self._monotonic = monotonic
        #: What no file can be made without; None: nothing is missing.
        self.lacking = extras.advice(extras.missing(["pyarrow"]))
        self.written = WrittenRows()
        self._writers = ThreadPoolExecutor(WRITERS, "record files", lower_priority, (NICENESS,))
        self._encoders = threading.Semaphore(ENCODERS)
        self._sweeper = threading.Thread(target=self._look_after, name="record files age", daemon=True)
        self._stopping = threading.Event()
        #: Guards the numbers.
        self._lock = threading.Lock()
        self._written = self._failed = self._expired = 0
        self._held = HeldBytes()
        self._is_full = False
        #: How far the bucket's clock is behind ours, as it was last asked; None: it never was.
        self._behind: float | None = None
        #: When the bucket last did not answer, and what it was.
        self._stuck: tuple[float, str] = (-math.inf, "")

    def __repr__(self) -> str:
        return f"RecordFiles({self._deployment}, {self.stats()})"

    def start(self) -> None:
        self._sweeper.start()

    def close(self) -> None:
        """Waits for files that are being written. Blocks."""
        self._stopping.set()
        self._writers.shutdown(cancel_futures=True)
        if self._sweeper.ident is not None:
            self._sweeper.join()

    def stats(self) -> RecordFilesStats:
        with self._lock:
            return RecordFilesStats(
                written=self._written,
                failed=self._failed,
                expired=self._expired,
                held_bytes=self._held.total,
            )

    def check(self) -> None:
        """Before anything is generated. Raises RecordsNotStored for want of room."""
        held = self._held.total
        if held >= self._bytes_max:
            raise RecordsNotStored(self._full(held), param=PARAM, retry_after_s=int(SWEEP_S))

    async def put(self, encode: Callable[[], Encoded]) -> RecordReference:
        """The reference of a file that the bucket has. encode: a thread calls it. Raises RecordsNotStored, MidstreamError."""
        return await asyncio.get_running_loop().run_in_executor(
            self._writers, self._put, encode, self._monotonic()
        )

    def _put(self, encode: Callable[[], Encoded], asked: float) -> RecordReference:
        """asked: when. Raises RecordsNotStored, MidstreamError."""
        began = self._monotonic()
        try:
            with self._encoders:
                stuck, told = self._stuck
                if asked <= stuck:
                    raise RecordsNotStored(told, param=PARAM)
                encoded = encode()
            size = len(encoded.data)
            digest = hashlib.sha256(encoded.data).hexdigest()
            path = path_of(self._deployment, digest)
            began = self._monotonic()
            self._write(path.rpartition("/")[2], encoded.data)
        except (SnapshotError, RecordsNotStored) as error:
            now = self._monotonic()
            with self._lock:
                self._failed += 1
                if isinstance(error, SnapshotError) and now - began >= STUCK_S:
                    self._stuck = (now, str(error))
            log.error("a record file is not stored, and its request fails: %s", error)
            message = f"the records of this answer cannot be stored, so there is no answer: {error}"
            raise RecordsNotStored(message, param=PARAM) from error
        with self._lock:
            self._written += 1
        return RecordReference(
            format=FORMAT, file=path, sha256=digest, bytes=size, rows=encoded.rows, choices=encoded.choices
        )

    def _write(self, name: str, data: bytes) -> None:
        """Raises SnapshotError."""
        size = None
        self._held.begin(name)
        try:
            put_bytes(self._url, name, data)
            size = len(data)
        finally:
            self._held.end(name, size)

    def _full(self, held: int) -> str:
        return (
            f"{PARAM}: record files of this deployment have {held} bytes, and records.files_max is {self._bytes_max}: raise "
            "it, lower records.files_keep_s, or remove files"
        )

    def is_there(self, file: SharedFile) -> bool:
        """Of a file that was written. Blocks."""
        return is_there(self._url, file.file.rpartition("/")[2], file.bytes)

    def stays_until(self, seconds: float | None = None) -> float:
        """When something written now may go, by our clock. seconds: it has to stay; None: as files do."""
        stays = self.keep_s if seconds is None else seconds
        return math.inf if stays is None else self._monotonic() + stays

    # -- the thread that looks after files

    def _look_after(self) -> None:
        while not self._stopping.wait(self.look()):
            pass

    def look(self) -> float:
        """Sweeps. Returns in how many seconds to look again."""
        began = self._monotonic()
        try:
            self.sweep()
        except SnapshotError as error:
            log.warning("old record files stay: %s", error)
        # Where there are millions of files, looking at them takes long. A small part of the time goes into it.
        return max(SWEEP_S, LOOKS_EVERY * (self._monotonic() - began))

    def sweep(self) -> None:
        """Removes what is too old, and counts the rest. Raises SnapshotError."""
        self._held.begin_listing()
        held, old, failed = 0, list[FileSeen](), None
        for one in files_seen(self._url):
            if not _is_own(one):
                continue
            held += one.size
            self._held.listed(one.path)
            try:
                # Once the bucket has refused to say its time, the other files are counted only.
                if failed is None and self._is_old(one):
                    old.append(one)
            except SnapshotError as error:
                failed = error
        try:
            if failed is not None:
                raise failed
            held -= self._remove(old) if old else 0
        finally:
            self._hold(held)

    def _hold(self, held: int) -> None:
        """held: bytes of all files that a listing had, and that were not removed."""
        self._held.end_listing(held)
        is_full = held >= self._bytes_max
        if is_full and not self._is_full:
            log.error("no more record files are written: %s", self._full(held))
        self._is_full = is_full

    def _is_old(self, one: FileSeen) -> bool:
        """What a dead writer left is of no use. Raises SnapshotError if the bucket has never said its time, nor does now."""
        keep_s = LEFT_S if one.path.startswith(WRITING_PREFIX) else self.keep_s
        if keep_s is None:
            return False
        behind = self._ask_time() if self._behind is None else self._behind
        return keep_s < self._monotonic() - behind - one.modified

    def _ask_time(self) -> float:
        """Seconds that the bucket's clock is behind ours, or more by what the answer took. Raises SnapshotError."""
        there = time_there(self._url)
        self._behind = self._monotonic() - there
        return self._behind

    def _remove(self, seen: list[FileSeen]) -> int:
        """Those that are still old when the bucket is asked again. Returns how many bytes they had. Raises SnapshotError."""
        self._ask_time()
        old = [one for one in seen if self._is_old(one)]
        remove_files(self._url, [one.path for one in old])
        if old:
            with self._lock:
                self._expired += len(old)
            log.info("removed %d record files for their age", len(old))
        return sum(one.size for one in old)


def _is_own(one: FileSeen) -> bool:
    return is_file_name(one.path) or (one.path.startswith(WRITING_PREFIX) and one.path != CLOCK)
