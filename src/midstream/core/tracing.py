"""The port to distributed tracing: spans of requests and swaps, from the gateway and replicas. No tracing library, no I/O.

launch/tracing.py has the implementation. Without tracing there is no Tracer, and callers only look for None.
Always holds: attributes are names, numbers and labels, never prompts, answers or keys. Times are seconds since the epoch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from midstream.core.types import Desired

#: W3C Trace Context, version 00: of a client, and between a gateway and its replicas.
HEADER_TRACEPARENT = "traceparent"
HEADER_TRACESTATE = "tracestate"

Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]


@dataclass(frozen=True)
class SpanEvent:
    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True)
class SpanRecord:
    """A span that has ended, with those inside it. error: its status is an error, and this is why; None: it is not.

    kind: server if the parent is in another process.
    """

    name: str
    begin_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    children: Sequence[SpanRecord] = ()
    error: str | None = None
    kind: Literal["internal", "server"] = "internal"


class OpenSpan(ABC):
    """A span that other processes may continue before it ends."""

    #: The value of the header that makes a span of another process its child.
    traceparent: str
    #: It is not exported, so attributes need not be collected.
    unseen: bool = False

    @abstractmethod
    def event(self, name: str, attributes: Attributes) -> None:
        """Something happened now."""

    @abstractmethod
    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """It ends now. To be called once."""


class Tracer(ABC):
    """Takes spans and exports them in the background. No call waits or raises because of a collector."""

    @abstractmethod
    def begin(self, name: str, headers: Mapping[str, str]) -> OpenSpan:
        """A span that begins now. headers: a caller's, with lower-case names; without a valid traceparent it has no parent."""

    @abstractmethod
    def record(
        self, span: SpanRecord, headers: Mapping[str, str] | None = None, trace: bytes | None = None
    ) -> None:
        """A span that has ended. headers: as in `begin`. trace: 16 bytes, the trace's id where there is no parent."""


def trace_of_signal(deployment: str, desired: Desired) -> bytes:
    """The id of the trace that has the swaps of all replicas to what one signal asked for. 16 bytes.

    Files, and when a policy was made, distinguish servers and runs that share a collector and have equal generations."""
    fields = (
        desired.policy,
        desired.made,
        desired.generation,
        desired.snapshot,
        desired.url,
        desired.fingerprint,
    )
    made_of = "\0".join((deployment, *map(str, fields)))
    return hashlib.sha256(made_of.encode()).digest()[:16]
