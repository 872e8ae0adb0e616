"""The clock of deadlines and claims, which several gateways have to read alike.

Always holds: with a database server it is the server's clock, whatever the machines of the gateways show. Between two looks at
it, time passes as this process's own clock says that cannot jump. Without a server there is one machine, all of whose processes
read its clock that cannot jump. The ledger notes once per start of the machine what time of day that began at.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from midstream.ledger.schema import machine_clock, upsert
from midstream.snapshots.durable import boot_id

#: The server's clock is looked at again after so long.
LOOK_S = 10.0
_SERVER_TIME = sa.text("SELECT extract(epoch FROM clock_timestamp())")


class LedgerClock:
    """Seconds since the epoch.

    own: this machine's clock. server: the database has a clock of its own. ahead_s: as machine_ahead_s found it; None: `own`
    counts.
    """

    def __init__(self, own: Callable[[], float], *, server: bool, ahead_s: float | None = None) -> None:
        self._own = own
        self._server = server
        # The time, and our own when it was read.
        self._seen: tuple[float, float] | None = None if ahead_s is None else (ahead_s, 0.0)

    def __repr__(self) -> str:
        return f"<LedgerClock of the {'database' if self._server else 'machine'}>"

    def __call__(self) -> float:
        """The time, as `read` found it last."""
        if self._seen is None:
            return self._own()
        theirs, ours = self._seen
        return theirs + time.monotonic() - ours

    def read(self, db: sa.Connection) -> float:
        """The time, in a transaction."""
        if self._server and (self._seen is None or time.monotonic() - self._seen[1] > LOOK_S):
            self._seen = float(db.scalar(_SERVER_TIME) or 0.0), time.monotonic()
        return self()


def machine_ahead_s(db: sa.Connection) -> float:
    """How far the time of day is ahead of the clock that cannot jump, alike for all processes since the machine started.

    Where the start of the machine has no name, each process has its own answer.
    """
    ahead_s, boot = time.time() - time.monotonic(), boot_id()
    if boot is None:
        return ahead_s
    noted = db.execute(sa.select(machine_clock)).first()
    if noted is not None and noted.boot == boot:
        return float(noted.ahead_s)
    upsert(db, machine_clock, [{"id": 1, "boot": boot, "ahead_s": ahead_s}])
    return ahead_s
