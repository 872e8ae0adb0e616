"""Records that replicas left on this machine when they went: they go to the bucket.

Owns: the segments in directories that no replica process holds, and the thread that uploads them for a supervisor.
Always holds:
- Whoever takes a segment out of a directory holds that directory, as its replica does while it lives.
- A segment has the name that its replica gave it, here and in the bucket. It is removed here only when the bucket has it.
- One process at a time uploads them. It holds no replica's directory meanwhile, so a replica of that name can start.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import ConfigError, SnapshotError
from midstream.core.retry import Backoff
from midstream.launch.caches import LOCK, held
from midstream.replica.journal import SEGMENTS, records_url, whole_lines
from midstream.snapshots.store.upload import put_file

logger = logging.getLogger(__name__)

#: Has the segment that is on its way to the bucket.
ADOPTED = ".adopted"
#: Ends the name of a file that names no deployment.
UNREADABLE = ".unreadable"
BACKOFF = Backoff(first_s=0.5, last_s=30.0)
_DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Record(msgspec.Struct):
    deployment: str


def upload_stranded(root: Path, url: str) -> bool:
    """Upload what replicas left in directories of `root`, the records' directory of this machine, to the bucket `url`.

    Returns whether nothing is left. Else the reason is logged, or another process uploads, and the caller tries again later.
    """
    if not root.is_dir():
        return True
    adopted, whole = root / ADOPTED, True
    try:
        with held(adopted):
            _put_all(adopted, url)
            for directory in sorted(root.iterdir()):
                try:
                    while directory != adopted and _taken(directory, adopted):
                        _put_all(adopted, url)
                except (ConfigError, OSError) as error:
                    # It cannot be held or read. The others need not wait for it.
                    logger.warning("records of a replica that is gone stay in %s: %s", directory, error)
                    whole = False
    except BlockingIOError:
        return False
    except (ConfigError, SnapshotError, OSError) as error:
        logger.warning("records of replicas that are gone wait for the bucket: %s", error)
        return False
    return whole


def say_what_waits(root: Path) -> None:
    """Warn, in a server that keeps no records, if replicas of an earlier server left some."""
    if files := len([*root.glob(f"*/{SEGMENTS}"), *root.glob(f"*/*/{SEGMENTS}")]):
        logger.warning(
            "%d files of records wait in %s: start with the --records URL they were kept for, to upload them",
            files,
            root,
        )


class StrandedRecords:
    """The thread that uploads them for as long as a supervisor runs."""

    def __init__(self, upload: Callable[[], bool]) -> None:
        """upload: as `upload_stranded`; called in the thread."""
        self._upload = upload
        self._changed = threading.Condition()
        #: How often it was woken, and how often it had been when the last upload began that has ended.
        self._woken = self._done = 0
        self._closed = False
        # A server that ends does not wait for a bucket: the next one continues the upload.
        self._thread = threading.Thread(target=self._run, name="stranded records", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """A replica may have gone. Any thread."""
        with self._changed:
            self._woken += 1
            self._changed.notify_all()

    def settled(self, timeout_s: float) -> bool:
        """Wait until an upload that began after this call has ended, whatever it left. False: none has. Any thread."""
        with self._changed:
            self._woken += 1
            mine = self._woken
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._done >= mine, timeout_s)
            return self._done >= mine

    def close(self) -> None:
        """Begin no further upload. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        failures = 0
        while True:
            pause_s = BACKOFF.pause_s(failures) if failures else None
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._woken > self._done, pause_s)
                if self._closed:
                    return
                woken = self._woken
            failures = 0 if self._upload() else failures + 1
            with self._changed:
                self._done = woken
                self._changed.notify_all()


def _taken(directory: Path, adopted: Path) -> bool:
    """Move the oldest segment of a directory that no process holds into `adopted`. A directory without one is removed.

    Returns False when there is none, or a process holds the directory. Raises OSError.
    """
    if not _is_journal(directory):
        return False
    try:
        with held(directory):
            for path in sorted(directory.glob(SEGMENTS)):
                if whole_lines(path):
                    path.rename(adopted / path.name)
                    return True
            if [path.name for path in directory.iterdir()] == [LOCK]:
                (directory / LOCK).unlink()
                directory.rmdir()
    except BlockingIOError:
        pass
    return False


def _is_journal(directory: Path) -> bool:
    """True if the directory has or had segments. Other directories stay, such as a node's, which holds those of its
    replicas."""
    if not directory.is_dir():
        return False
    return any(directory.glob(SEGMENTS)) or [path.name for path in directory.iterdir()] == [LOCK]


def _put_all(adopted: Path, url: str) -> None:
    """Raises SnapshotError, ConfigError, OSError."""
    for path in sorted(adopted.glob(SEGMENTS)):
        deployment = _deployment(path)
        if deployment is None:
            aside = path.with_name(path.name + UNREADABLE)
            path.rename(aside)
            logger.error("%s: its first line is no record of a deployment; it stays here", aside)
            continue
        put_file(records_url(url, deployment), path)
        path.unlink()
        logger.info("records that a replica left are in the bucket: %s", path.name)


def _deployment(path: Path) -> str | None:
    """The deployment that the records of a segment name. Raises OSError."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        name = msgspec.json.decode(line, type=_Record).deployment
    except NOT_JSON:
        return None
    return name if _DEPLOYMENT.fullmatch(name) else None
