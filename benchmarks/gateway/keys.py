"""Which replica a router sends a session to, before and after a change of the replicas."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from gateway.routers import Router
from gateway.tools import Bed

KEYS = 10_000
# A router was told of a change so long ago.
SETTLED_S = 1.5
# And so long that a replica is back.
RETURNED_S = 3.0


def homes(bed: Bed, port: int, request: Path) -> tuple[str, int]:
    """One request for each key. The replica of each, a digit per key, and how many requests failed."""
    record = request.with_suffix(".homes")
    bed.begin(port, request, 64, "requests", KEYS, keys=KEYS, record=record)
    failed: int = bed.end()["failed"]
    return record.read_text(), failed


def decisions(bed: Bed, router: Router, request: Path) -> dict[str, Any]:
    """What became of KEYS sessions: asked twice; without the last replica; with it again; after a restart of the router. And
    of as many new ones once that replica was back."""
    leaver = len(bed.ports) - 1
    newcomers = request.with_suffix(".newcomers")
    newcomers.write_bytes(request.read_bytes().replace(b"trajectory-", b"newcomer-0-"))
    failed = 0

    def passed(file: Path = request, settled_s: float = SETTLED_S) -> str:
        nonlocal failed
        time.sleep(settled_s)
        found, failures = homes(bed, router.port, file)
        failed += failures
        return found

    first, again = passed(settled_s=0.0), passed(settled_s=0.0)
    router.leave(leaver)
    without = passed()
    router.join(leaver)
    back = passed(settled_s=RETURNED_S)
    new = passed(newcomers, settled_s=0.0)
    router.restart(request.read_bytes().replace(b"KKKKKKKK", b"00000000"))
    restarted = passed()
    stayed = [(a, b) for a, b in zip(again, without, strict=True) if a != str(leaver)]
    return {
        "failed": failed,
        "sticky": round(1 - moved(first, again) / KEYS, 4),
        "max_over_mean": round(max(Counter(first).values()) * len(bed.ports) / KEYS, 3),
        "of_leaver": again.count(str(leaver)),
        "to_leaver": without.count(str(leaver)),
        "moved_on_leave": sum(a != b for a, b in stayed),
        "moved_on_return": moved(without, back),
        "new_on_returned": new.count(str(leaver)),
        "moved_on_restart": moved(back, restarted),
    }


def moved(before: str, after: str) -> int:
    """How many keys changed their replica."""
    return sum(a != b for a, b in zip(before, after, strict=True))
