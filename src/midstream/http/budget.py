"""What the connections of one port hold together, and how much that may be.

Counted are bytes of bodies that are still arriving, and for each tenant also its connections and its requests in flight.
Owns: the counts (Budget), and what one connection has in them (Share). A tenant is the owner of one or more API keys.
Always holds: a refusal changes no count. All counts are zero again once the connections are gone. A bound of 0 is no bound.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from midstream.core.errors import BodiesTooLarge, Overloaded, PayloadTooLarge


@dataclass(slots=True, frozen=True)
class BudgetBounds:
    """The bounds of one process. Without API keys all clients are one tenant."""

    unfinished_body_bytes: int = 0
    unfinished_body_bytes_per_tenant: int = 0
    connections_per_tenant: int = 0
    requests_per_tenant: int = 0


class BudgetedConnection(Protocol):
    """A connection."""

    @property
    def idle(self) -> bool:
        """No request is under way or waits on it."""

    def drain(self) -> None: ...


class TenantAccount:
    """What a tenant has of it all."""

    __slots__ = ("held_bytes", "members", "requests")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.requests = 0
        # The oldest connection comes first.
        self.members: dict[BudgetedConnection, None] = {}


class Budget:
    """Use from one event loop."""

    def __init__(self, bounds: BudgetBounds) -> None:
        self._bounds = bounds
        self.together = bounds.unfinished_body_bytes or sys.maxsize
        self.of_one = bounds.unfinished_body_bytes_per_tenant or sys.maxsize
        self.counts_requests = bounds.requests_per_tenant > 0
        self.held_bytes = 0
        # There are at most as many tenants as keys.
        self._accounts: dict[str, TenantAccount] = {}

    def __repr__(self) -> str:
        connections = sum(len(account.members) for account in self._accounts.values())
        requests = sum(account.requests for account in self._accounts.values())
        return f"Budget({self.held_bytes} bytes, {connections} connections, {requests} requests)"

    def account(self, tenant: str) -> TenantAccount:
        found = self._accounts.get(tenant)
        if found is None:
            found = self._accounts[tenant] = TenantAccount()
        return found

    def no_room(self, more: int) -> PayloadTooLarge:
        """Why `more` bytes of a body have no room."""
        if more > self.together:
            return PayloadTooLarge(f"the request body is over {self.together} bytes")
        if self.held_bytes + more > self.together:
            senders, bound, setting = "all clients", self.together, "max_unfinished_body_bytes"
        else:
            senders, bound, setting = (
                "this tenant's clients",
                self.of_one,
                "max_unfinished_body_bytes_per_tenant",
            )
        return BodiesTooLarge(
            f"the request bodies of {senders} that are still arriving would be over {bound} bytes together ({setting}); "
            "this body is not too large by itself: retry later"
        )

    def join(self, member: BudgetedConnection, account: TenantAccount) -> None:
        """The connection is this tenant's. Closes the oldest idle one to make room; raises Overloaded when none is idle."""
        bound = self._bounds.connections_per_tenant
        if not bound:
            return
        members = account.members
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

    def begin_request(self, account: TenantAccount) -> None:
        """Raises Overloaded."""
        bound = self._bounds.requests_per_tenant
        if bound and account.requests >= bound:
            raise Overloaded(
                f"this tenant has {bound} requests in flight, as many as max_requests_per_tenant allows; "
                "retry when one of them is done"
            )
        account.requests += 1


class Share:
    """One connection's part."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.tenant: str | None = None
        self._account = budget.account("")
        self.held_bytes = 0
        # The account of the connection's request in flight.
        self.counted_for: TenantAccount | None = None

    def __repr__(self) -> str:
        return f"Share({self.held_bytes} bytes{', a request' if self.counted_for is not None else ''})"

    def is_of(self, tenant: str | None, member: BudgetedConnection) -> None:
        """Note the tenant that sent the last head on the connection `member`; None: none. Raises Overloaded if it has as many
        connections as it may have."""
        if tenant == self.tenant:
            return
        if self.tenant is not None:
            self._account.members.pop(member, None)
            self.tenant = None
        account = self._budget.account(tenant or "")
        self._account.held_bytes -= self.held_bytes
        account.held_bytes += self.held_bytes
        self._account = account
        if tenant is not None:
            self._budget.join(member, account)
            self.tenant = tenant

    def check_room(self, more: int) -> None:
        """Raises PayloadTooLarge unless `more` bytes of a body could have room; BodiesTooLarge unless they have it now."""
        budget = self._budget
        if budget.held_bytes + more > budget.together or self._account.held_bytes + more > budget.of_one:
            raise budget.no_room(more)

    def holds(self, count: int) -> None:
        """Note that it holds so many bytes of bodies."""
        more = count - self.held_bytes
        self.held_bytes = count
        self._budget.held_bytes += more
        self._account.held_bytes += more

    def begin_request(self) -> None:
        """Raises Overloaded."""
        self._budget.begin_request(self._account)
        self.counted_for = self._account

    def end_request(self) -> None:
        if self.counted_for is not None:
            self.counted_for.requests -= 1
            self.counted_for = None
