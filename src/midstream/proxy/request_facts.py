"""What is known of one request for inference: what its client asked for, the replica that it is at, and those it was at.

Always holds: these are facts, without judgement; replica_route.py judges by them. Most requests never set most of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from midstream.core.headers import (
    HEADER_DEPLOYMENT,
    HEADER_EXPECTED_TOKENS,
    HEADER_FOLLOW_PREFIX,
    HEADER_HISTORY,
    HEADER_MODEL,
    HEADER_RECORDS,
)
from midstream.core.reports import Reported
from midstream.core.resumption import HEADER_FAILOVER
from midstream.core.tracing import Attribute
from midstream.core.types import Session
from midstream.core.versions import CONSTRAINT_HEADERS
from midstream.core.wires import UserField
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.prefixes import PromptBeginnings
from midstream.fleet.view import ReplicaView
from midstream.proxy.heads import moved_line, placed_line, replica_lines, wishes_lines
from midstream.proxy.request_state import RequestEvent, RequestPhase, Ruling, ruling

if TYPE_CHECKING:
    from midstream.fleet.registry import Deployment
    from midstream.proxy.proxy import AtReplica, Placed

#: Replicas that fail with a request before a client has to ask again.
LOST_SENDS_MAX = 2
#: How often a request is placed again after refusals before its client has to ask again.
PLACED_AGAIN_MAX = 8
#: Replicas with too much to do that are asked.
BUSY_MAX = 2
#: Headers by which a client asks for more than an answer. Most requests have none.
WISHES = frozenset(
    name.encode()
    for name in (
        *(HEADER_DEPLOYMENT, HEADER_MODEL, *CONSTRAINT_HEADERS),
        *(HEADER_FAILOVER, HEADER_FOLLOW_PREFIX, HEADER_HISTORY, HEADER_RECORDS, HEADER_EXPECTED_TOKENS),
    )
)


class ClientAsked(msgspec.Struct):
    """in_path: the session that the path named. user_field: of the body, that names the session where no other one does.
    wishes: it has headers of WISHES. session: None: it has none. prompt: its beginning, of
    a request that may follow it. mode: what the client wants done when its stream is lost. resumable: the client can take a
    stream that another replica continues, and wants it."""

    in_path: bytes | None = None
    user_field: UserField = "user"
    wishes: bool = False
    session: Session | None = None
    prompt: PromptBeginnings | None = None
    mode: str = "exact"
    resumable: bool = True


class Sending:
    """The replica that was chosen last, and the request as it is counted there.

    replica: counts the request. report: what the replica had reported when the request came there; a report
    that comes while it connects was not judged. boot: the boot that the request is meant for. here: the request, while it is
    on the replica.
    """

    placed: Placed | None = None
    replica: KnownReplica
    report: Reported | None = None
    boot = ""
    here: AtReplica | None = None

    @property
    def chosen(self) -> Placed:
        """Only asked once a replica was chosen."""
        assert self.placed is not None
        return self.placed

    @property
    def view(self) -> ReplicaView:
        return self.chosen.view

    @property
    def name(self) -> str | None:
        return None if self.placed is None else self.placed.view.name


class Tries(msgspec.Struct):
    """replicas: the names of those that are not asked again. lost: how many failed with the request. refused: why replicas
    refused it, in their order. why: why the last one could not take it, as the beginning of a sentence."""

    replicas: frozenset[str] = frozenset()
    lost: int = 0
    refused: tuple[RequestEvent, ...] = ()
    why: str = ""
    #: Where it goes next, whatever placement says. A turn is handed over once.
    ordered: Placed | None = None
    handed: bool = False

    @property
    def too_many_lost(self) -> bool:
        return self.lost >= LOST_SENDS_MAX

    @property
    def placed_too_often(self) -> bool:
        again = sum(ruling(RequestPhase.SENT, reason) is Ruling.PLACE_AGAIN for reason in self.refused)
        return again > PLACED_AGAIN_MAX

    def is_last(self, refusal: RequestEvent) -> bool:
        """True if no further replica is asked after this refusal."""
        if refusal is RequestEvent.BUSY:
            return self.refused.count(refusal) >= BUSY_MAX
        return self.lost + 1 >= LOST_SENDS_MAX


def asked_lines(
    token_line: bytes, asked: ClientAsked, at: Sending, first: Mapping[bytes, bytes], *, begun: bool
) -> list[bytes]:
    """Lines for the replica: which boot is meant, what the client asks for, and where its session lives. begun: it is the rest
    of a stream."""
    placed, session = at.placed, asked.session
    assert placed is not None
    key = None if session is None else session[1]
    lines = [replica_lines(token_line, at.boot, not begun and asked.resumable, key)]
    if session is not None:
        if placed.stamp is not None:
            lines.append(placed_line(placed.stamp))
        if placed.moved is not None:
            lines.append(moved_line(placed.moved))
    if asked.wishes or asked.in_path is not None:
        lines += wishes_lines(first, asked.in_path is not None)
    return lines


def way_of(deployment: Deployment, session: Session | None, placed: Placed | None) -> dict[str, Attribute]:
    """What a span says of a request's way."""
    attributes: dict[str, Attribute] = {
        "midstream.deployment": deployment.host.name,
        "gen_ai.request.model": deployment.model,
    }
    if deployment.policy:
        attributes["midstream.policy"] = deployment.policy
    if session is not None:
        attributes["midstream.session"] = session[1]
    if placed is not None:
        attributes["midstream.replica"] = placed.view.name
        attributes["midstream.route_reason"] = placed.decision.reason
    return attributes
