"""The snapshots of one training run: RUN/0, RUN/1, ... in their order, and which of them rollouts must come from.

Always holds: RUN/0, the run's own first weights, is served before `publish` returns, so no rollout is of an earlier run. At
most one publication is under way. A publication that failed is raised by the next `publish` or `wait`, once. Its snapshot still
counts where the signal was sent, or may have been: some replica may serve it.
"""

from __future__ import annotations

import secrets
import time
from types import TracebackType
from typing import Any, Unpack

from midstream.client.errors import NotReadyInTime, SnapshotFailed, Unanswered
from midstream.client.publication import Publication
from midstream.client.publish import How, SnapshotPublisher


class TrainingRun:
    """The snapshots of one training run, RUN/0, RUN/1 and so on. A context manager, which waits for the last publication.
    Publish from one thread; any thread may read `at_least`, `signalled` and `name`.

    publisher: it stays the caller's to close. name: None makes one of the time, with four digits for runs of one second.
    behind: 0 means that `publish` returns when every replica serves the snapshot; with 1 it returns when it has a copy of the
    weights, and rollouts continue with the snapshot before. how: arguments of each publication, see `How`. Raises ValueError
    for another `behind`.

    The attribute `signalled` has the identities in their order, the newest last. `staleness` and `fresh` take it. The run's own
    first weights, RUN/0, are its first entry, so rollouts of them are known. The attribute `name` is the run's.
    """

    def __init__(
        self, publisher: SnapshotPublisher, name: str | None = None, *, behind: int = 1, **how: Unpack[How]
    ) -> None:
        if behind not in (0, 1):
            raise ValueError(f"behind must be 0 or 1, got {behind}")
        self.name = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}" if name is None else name
        #: Identities in their order, the newest last.
        self.signalled: list[str] = []
        self._publisher, self._behind, self._how = publisher, behind, how
        self._begun = 0
        self._running: Publication | None = None
        self._served: str | None = None

    def __repr__(self) -> str:
        return f"<TrainingRun {self.name!r}, {len(self.signalled)} snapshots>"

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()

    def publish(self, weights: Any = None, **how: Unpack[How]) -> Publication:
        """The next snapshot. The first call returns when every replica serves it.

        weights, how: as SnapshotPublisher.publish takes them, over the run's own `how`.
        Raises the errors of SnapshotPublisher.publish, those of the publication before among them.
        """
        self.wait()
        identity = f"{self.name}/{self._begun}"
        self._begun += 1
        publication = self._running = self._publisher.begin(identity, weights, **(self._how | how))
        self.signalled.append(identity)
        if self._behind == 0 or self._served is None:
            self.wait()
        return publication

    def wait(self) -> None:
        """Returns when every replica serves the newest snapshot. Raises the errors of SnapshotPublisher.publish."""
        running = self._running
        if running is None:
            return
        try:
            running.wait()
        except (NotReadyInTime, SnapshotFailed, Unanswered):
            self._running = None
            raise
        # Whatever else the publisher's thread ended with, no signal was taken. It is the caller's to handle.
        except Exception:
            self._running = None
            self.signalled.remove(running.identity)
            raise
        # In this order: a thread that reads `at_least` between the two lines never sees the snapshot before again.
        self._served = running.identity
        self._running = None

    @property
    def at_least(self) -> str:
        """What to ask rollouts for: the newest snapshot that every replica serves. Any thread may read it.

        Raises ValueError before the first. Raises the errors of SnapshotPublisher.publish while a publication that failed was
        not raised by `publish` or `wait`.
        """
        running = self._running
        if running is not None and running.done():
            running.wait()
            return running.identity
        if self._served is None:
            raise ValueError(f"{self.name}: publish the run's own weights before the first rollout")
        return self._served
