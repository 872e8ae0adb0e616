"""The bucket of records of a simulated history, with obstore's calls as midstream uses them, and who looks after it.

Always holds: time passes within the calls of a thread, before and behind what they do. So a process may be killed between a put
and its answer, and files come and go while another process lists them. What has to be true of a removal, and of the record of a
turn, is checked as it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from obstore.exceptions import GenericError
from simclock import EPOCH_S
from simloop import PROCESS, SimLoop
from simprocess import Process

from midstream.core.reports import RecordsStats
from midstream.replica.record_files import RecordFiles

#: What the server is given as `--records`, and where its files lie.
RECORDS = "s3://sim/records"
FILES = f"{RECORDS}/record-files/default/"
#: Between two looks at the files, and the part of the time that looks may take.
LOOK_S = 1.0
LOOKS_EVERY = 2
#: A put that is repeated comes again within so many seconds.
AGAIN_S = 8.0
#: A replica looks at the bucket at least as often, whatever the weather.
LOOKS_S = 60.0
#: Files that a list has at a time.
BATCH = 8


@dataclass
class Trouble:
    """What calls meet: the share that fails, before or behind what it does; of puts that fail, the share that leaves half a
    file; the share of puts that is repeated; of reads, the share that gets other bytes; and the most that a call takes."""

    fails: float = 0.0
    torn: float = 0.0
    again: float = 0.0
    wrong: float = 0.0
    seconds: float = 0.02


@dataclass(frozen=True)
class Kept:
    """at: when it was put, in seconds since the history began."""

    data: bytes
    at: float


class RecordBucket:
    """wrong: gets what is. keep_s, bytes_max: of the server's settings. may_remove: whether its key allows that."""

    def __init__(self, rng: random.Random, loop: SimLoop, wrong: list[str]) -> None:
        self._rng, self._loop, self.wrong = rng, loop, wrong
        self._outside = Process("bucket of records")
        self.trouble = Trouble()
        self.keep_s: float | None = None
        self.bytes_max = 0
        self.may_remove = True
        #: By URL.
        self.objects: dict[str, Kept] = {}
        #: Until when a file has to stay, by its path, as a client asked for it.
        self.stays: dict[str, float] = {}
        #: When a call failed last, and when a replica could last think that there was no room.
        self.failed_at = self.full_at = -math.inf
        # When bytes went, or were put again. A replica that has not looked since counts them beside what is there.
        self._more: list[tuple[float, int]] = []
        #: Paths of files that went when they might.
        self.gone: set[str] = set()
        #: Is called when a put is there that waits for it, with the process whose put it is.
        self.struck: dict[str, Callable[[Process], None]] = {}
        self.looks: list[asyncio.Task[None]] = []

    @property
    def now(self) -> float:
        return self._loop.now

    @property
    def size(self) -> int:
        return sum(len(kept.data) for kept in self.objects.values())

    def open(self, url: str) -> RecordStore:
        return RecordStore(self, url.rstrip("/") + "/")

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Whoever calls meanwhile meets no trouble."""
        trouble, self.trouble = self.trouble, Trouble()
        try:
            yield
        finally:
            self.trouble = trouble

    def why_not_whole(self, path: str, sha256: str, size: int) -> str | None:
        """None: the file has these bytes now."""
        kept = self.objects.get(f"{RECORDS}/{path}")
        if kept is None:
            return f"{path} is not in the bucket"
        found = hashlib.sha256(kept.data).hexdigest()
        if (found, len(kept.data)) != (sha256, size):
            return f"{path} has {len(kept.data)} bytes of sha256 {found}, not {size} of {sha256}"
        return None

    # -- what its calls do

    def takes(self) -> None:
        self._loop.pause(self._rng.random() * self.trouble.seconds)

    def happens(self, share: float) -> bool:
        return self._rng.random() < share

    def answers(self) -> None:
        """Raises GenericError when the bucket is out of order."""
        if self.happens(self.trouble.fails):
            self.failed_at = self.now
            raise GenericError("Generic S3 error: the bucket of records is out of order")

    def strike(self, phase: str) -> None:
        if (struck := self.struck.pop(phase, None)) is not None:
            struck(PROCESS.get())

    def place(self, url: str, data: bytes) -> None:
        if url in self.objects:
            self._more.append((self.now, len(data)))
        self.objects[url] = Kept(data, self.now)
        self.note_size()

    def place_again(self, url: str, data: bytes) -> None:
        """What comes of a put that was repeated, whatever became of its process."""
        context = self._outside.context.copy()
        self._loop.call_later(self._rng.random() * AGAIN_S, self.place, url, data, context=context)

    def remove(self, url: str) -> None:
        self.note_size()
        kept = self.objects.pop(url, None)
        if kept is None:
            return
        self._more.append((self.now, len(kept.data)))
        path = url.removeprefix(f"{RECORDS}/")
        self.gone.add(path)
        until = self.stays.get(path, 0.0)
        if self.keep_s is None or self.now < max(until, kept.at + self.keep_s):
            age_s = self.now - kept.at
            said = f"kept for {self.keep_s} s, and by a client until {until:.3f}"
            self.wrong.append(f"{PROCESS.get()} removed {url} at the age of {age_s:.3f} s: {said}")

    def note_size(self) -> None:
        """To be called before it becomes smaller."""
        more = sum(size for at, size in self._more if at > self.now - LOOKS_S)
        if self.size + more >= self.bytes_max:
            self.full_at = self.now

    def delivered(self, data: bytes) -> bytes:
        if not self.happens(self.trouble.wrong):
            return data
        at = self._rng.randrange(len(data))
        return data[:at] if self.happens(0.5) else data[:at] + bytes((data[at] ^ 0x40,)) + data[at + 1 :]


class RecordStore:
    """prefix: the URL of the directory."""

    def __init__(self, bucket: RecordBucket, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix

    def put(self, name: str, data: bytes, **_: Any) -> None:
        bucket, url = self._bucket, self._prefix + name
        bucket.strike("begun")
        bucket.takes()
        try:
            bucket.answers()
        except GenericError:
            if bucket.happens(bucket.trouble.torn):
                bucket.place(url, data[: len(data) // 2])
            raise
        bucket.place(url, data)
        if bucket.happens(bucket.trouble.again):
            bucket.place_again(url, data)
        bucket.strike("placed")
        bucket.takes()
        bucket.answers()

    def head(self, name: str) -> dict[str, Any]:
        # Its callers hold a lock.
        self._bucket.answers()
        return self._meta(self._prefix + name)

    def get(self, name: str) -> Any:
        bucket, url = self._bucket, self._prefix + name
        bucket.answers()
        meta = self._meta(url)
        return SimpleNamespace(meta=meta, bytes=lambda: bucket.delivered(bucket.objects[url].data))

    def list(self) -> Iterator[list[dict[str, Any]]]:
        names = sorted(url for url in self._bucket.objects if url.startswith(self._prefix))
        for at in range(0, len(names), BATCH):
            self._bucket.takes()
            self._bucket.answers()
            yield [self._meta(url) for url in names[at : at + BATCH] if url in self._bucket.objects]

    def delete(self, name: str) -> None:
        self._bucket.takes()
        self._bucket.answers()
        if not self._bucket.may_remove:
            raise GenericError("Generic S3 error: AccessDenied")
        self._bucket.remove(self._prefix + name)
        self._bucket.takes()
        self._bucket.answers()

    def _meta(self, url: str) -> dict[str, Any]:
        kept = self._bucket.objects.get(url)
        if kept is None:
            raise FileNotFoundError(url)
        at = datetime.datetime.fromtimestamp(EPOCH_S + kept.at, datetime.UTC)
        return {"path": url.removeprefix(self._prefix), "size": len(kept.data), "last_modified": at}


class SimJournal:
    """In place of the journal, whose threads write to a disk: what a record refers to is there when the record is added."""

    def __init__(
        self, bucket: RecordBucket, directory: Path, url: str, name: str, *_: Any, **__: Any
    ) -> None:
        self._bucket, self._name = bucket, name

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> RecordsStats:
        return RecordsStats()

    def add(self, make: Callable[[], dict[str, Any]]) -> None:
        turn = make().get("turn")
        if turn is not None and turn.record_reference is not None:
            reference = turn.record_reference.reference
            wrong = self._bucket.why_not_whole(reference.file, reference.sha256, reference.bytes)
            if wrong is not None and reference.file not in self._bucket.gone:
                self._bucket.wrong.append(
                    f"the record of a turn on {self._name} comes before its file: {wrong}"
                )


def look_on(files: RecordFiles) -> None:
    """In place of RecordFiles.start, which begins a thread. Called in a thread's work."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        task = loop.run_in_executor(None, files.look)
        task.add_done_callback(lambda done: loop.call_later(done.result(), look))

    look()
