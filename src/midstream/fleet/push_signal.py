"""What becomes of a trainer's update: the port to the signal that makes a snapshot of it, and the result of the call.

Always holds: an update whose bytes differ between its replicas never comes here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from midstream.core.types import Content, Desired
from midstream.ledger import Committing, SignalResult


class UpdateSignal(Protocol):
    """What makes a snapshot of an update whose bytes are the same on all replicas."""

    async def sign(self, content: Content, committing: Committing) -> SignalResult:
        """Take the signal, and commit the update with it. Raises MidstreamError; nothing is signalled then."""

    async def served(self, desired: Desired, replicas: Collection[str], within_s: float) -> None:
        """Returns when these replicas serve it. Raises MidstreamError."""


@dataclass(frozen=True)
class Finished:
    """fenced: replicas that the update did not reach, with the reasons."""

    desired: Desired
    replicas: tuple[str, ...]
    fenced: dict[str, str]
