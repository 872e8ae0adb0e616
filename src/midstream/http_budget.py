"""What the connections of one port hold together, and how much that may be: bytes of bodies that are still arriving; of each
tenant also connections, and requests in flight.

Owns: the counts (Budget), and what one connection has in them (Share). A tenant is whoever an API key stands for.
Always holds: a refusal changes no count; all counts are zero again once the connections are gone; a bound of 0 is no bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from midstream.errors import BodiesTooLarge, Overloaded, PayloadTooLarge


@dataclass(slots=True, frozen=True)
class Bounds:
    """Of one process. Without API keys all clients are one tenant."""

    unfinished_body_bytes: int = 0
    unfinished_body_bytes_per_tenant: int = 0
    connections_per_tenant: int = 0
    requests_per_tenant: int = 0


class Member(Protocol):
    """A connection."""

    @property
    def idle(self) -> bool:
        """No request is under way or waits on it."""

    def drain(self) -> None: ...


class Budget:
    """Use from one event loop."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.held_bytes = 0
        self._held_by: dict[str, int] = {}  # tenant -> bytes
        self._requests: Counter[str] = Counter()
        self._members: dict[str, dict[Member, None]] = {}  # the oldest connection first

    def __repr__(self) -> str:
        connections = sum(len(members) for members in self._members.values())
        return (
            f"Budget({self.held_bytes} bytes, {connections} connections, {self._requests.total()} requests)"
        )

    def check_room(self, tenant: str, more: int) -> None:
        """Raises PayloadTooLarge unless `more` bytes of a body could have room; BodiesTooLarge unless they have it now."""
        bounds = self._bounds
        together, of_one = bounds.unfinished_body_bytes, bounds.unfinished_body_bytes_per_tenant
        if together and more > together:
            raise PayloadTooLarge(f"the request body is over {together} bytes")
        if together and self.held_bytes + more > together:
            raise _no_room("all clients", together, "max_unfinished_body_bytes")
        if of_one and self._held_by.get(tenant, 0) + more > of_one:
            raise _no_room("this tenant's clients", of_one, "max_unfinished_body_bytes_per_tenant")

    def hold(self, tenant: str, more: int) -> None:
        """Count bytes, or no longer count them (below 0)."""
        self.held_bytes += more
        held = self._held_by.get(tenant, 0) + more
        if held:
            self._held_by[tenant] = held
        else:
            self._held_by.pop(tenant, None)

    def join(self, member: Member, tenant: str) -> None:
        """The connection is this tenant's. Closes the oldest idle one to make room; raises Overloaded when none is idle."""
        bound = self._bounds.connections_per_tenant
        if not bound:
            return
        members = self._members.setdefault(tenant, {})
        if len(members) >= bound:
            idle = next((one for one in members if one.idle), None)
            if idle is None:
                raise Overloaded(
                    f"this tenant has {len(members)} connections with requests on them, as many as "
                    "max_connections_per_tenant allows; retry when one of them is done"
                )
            del members[idle]
            idle.drain()
        members[member] = None

    def leave(self, member: Member, tenant: str) -> None:
        """Idempotent."""
        members = self._members.get(tenant)
        if members is not None:
            members.pop(member, None)
            if not members:
                del self._members[tenant]

    @property
    def counts_requests(self) -> bool:
        return self._bounds.requests_per_tenant > 0

    def begin_request(self, tenant: str) -> None:
        """Raises Overloaded."""
        bound = self._bounds.requests_per_tenant
        if bound and self._requests[tenant] >= bound:
            raise Overloaded(
                f"this tenant has {bound} requests in flight, as many as max_requests_per_tenant allows; "
                "retry when one of them is done"
            )
        self._requests[tenant] += 1

    def end_request(self, tenant: str) -> None:
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]


def _no_room(whose: str, bound: int, setting: str) -> BodiesTooLarge:
    return BodiesTooLarge(
        f"the request bodies of {whose} that are still arriving would be over {bound} bytes together ({setting}); "
        "this body is not too large by itself: retry later"
    )


class Share:
    """One connection's part."""

    def __init__(self, budget: Budget, member: Member) -> None:
        self._budget = budget
        self._member = member
        self._tenant: str | None = None
        self.held_bytes = 0
        self.counted_for: str | None = None  # the tenant whose request in flight is on the connection

    def __repr__(self) -> str:
        return f"Share({self.held_bytes} bytes{', a request' if self.counted_for is not None else ''})"

    @property
    def _name(self) -> str:
        return self._tenant or ""

    def is_of(self, tenant: str | None) -> None:
        """Who sent the last head; None: nobody. Raises Overloaded when it has as many connections as it may have."""
        if tenant == self._tenant:
            return
        before = self._name
        if self._tenant is not None:
            self._budget.leave(self._member, before)
            self._tenant = None
        try:
            if tenant is not None:
                self._budget.join(self._member, tenant)
                self._tenant = tenant
        finally:
            if self.held_bytes:
                self._budget.hold(before, -self.held_bytes)
                self._budget.hold(self._name, self.held_bytes)

    def check_room(self, more: int) -> None:
        """Raises BodiesTooLarge."""
        self._budget.check_room(self._name, more)

    def holds(self, count: int) -> None:
        """So many bytes of bodies by now."""
        if count != self.held_bytes:
            self._budget.hold(self._name, count - self.held_bytes)
            self.held_bytes = count

    def begin_request(self) -> None:
        """Raises Overloaded."""
        self._budget.begin_request(self._name)
        self.counted_for = self._name

    def end_request(self) -> None:
        if self.counted_for is not None:
            self._budget.end_request(self.counted_for)
            self.counted_for = None
