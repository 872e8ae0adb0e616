"""Which replicas are to serve what is desired: here all of them; of a policy those with demand for it (policies.py)."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.fleet.view import ReplicaView


class Holding:
    """What the reconciler and requests ask of a set of replicas. Nothing here follows demand."""

    views: tuple[ReplicaView, ...]

    @property
    def by_demand(self) -> bool:
        """Whether a replica serves it only where there is demand."""
        return False

    @property
    def at_work(self) -> bool:
        """Whether a replica is to serve what is desired, or may have to at any time."""
        return True

    @property
    def holders(self) -> Sequence[ReplicaView]:
        """Those that are to serve what is desired."""
        return self.views

    def ask(self, home: str | None = None, *, retry_failed: bool = False) -> None:
        """There is demand. home: the replica of a session that wants it. retry_failed: earlier failures do not count."""

    def is_loading(self, name: str) -> bool:
        """Whether this replica does not serve it yet, and was asked to."""
        return False

    def mark_missing(self, view: ReplicaView) -> None:
        """The replica refused a request because it does not hold what it reported."""

    def judged(self, view: ReplicaView, *, failed: bool) -> None:
        """Whether the replica failed on what is desired."""
