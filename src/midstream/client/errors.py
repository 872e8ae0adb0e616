"""The errors of publishing a snapshot, of asking a server and of sampling.

PublishError
  SignalRefused      the server does not take the signal; no replica loads the snapshot
    Unanswered       the server could not be reached, or could not answer, for too long
  PushFailed         pushed weights did not arrive; replicas serve those before
  SnapshotFailed     a replica could not load the snapshot; it still serves the one before
  ReplicasSilent     some replicas did not answer, so sessions or turns may be missing; a retry may cure it
  NotReadyInTime     replicas were still loading at the deadline (also a TimeoutError)
"""

from __future__ import annotations

from collections.abc import Sequence


class RecordFileError(ValueError):
    """A file of records that is gone, or is not what its reference says. The message names the file."""


class RecordFileGone(RecordFileError):
    """The bucket answers that it has no such file, as when it was removed for its age."""


class PublishError(Exception):
    """Any failure to publish, to ask the server or to sample. The message is for the person who runs the trainer."""


class SignalRefused(PublishError):
    """The server does not take a request, and a repeated one would not help. `status`: the HTTP status, None when no answer
    came."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class Unanswered(SignalRefused):
    """The server could not be reached, or could not answer, until the deadline. It may have taken the request all the same."""


class PushFailed(PublishError):
    """Weights that were pushed did not arrive: a receiver was lost, or a deadline passed. Replicas serve those before. The next
    publication forms a group of its own."""


class SnapshotFailed(PublishError):
    """`replica` could not load `identity`. It still serves the snapshot before."""

    def __init__(self, identity: str, replica: str, message: str) -> None:
        super().__init__(f"{replica} could not load snapshot {identity!r}: {message}")
        self.identity = identity
        self.replica = replica


class NotReadyInTime(PublishError, TimeoutError):
    """Replicas were still loading the snapshot at the deadline, and continue to. Also a TimeoutError."""


class ReplicasSilent(PublishError):
    """`replicas` did not answer the gateway: they restart, or are gone. What they hold is missing."""

    def __init__(self, message: str, replicas: Sequence[str]) -> None:
        super().__init__(message)
        self.replicas = tuple(replicas)
