"""The kinds of histories. Each history is of one."""

from __future__ import annotations

import enum


class HistoryKind(enum.Enum):
    PLAIN = "plain"
    #: All signals are pushes, and somebody is struck in a phase of a push.
    PUSHES = "pushes"
    #: There are more deltas, and each chain of one or two of them is long.
    REBASES = "rebases"
    #: Beside the other clients there are some whose sessions do not fit into the caches.
    AGENTS = "agents"
    #: Machines of replicas are taken away on a notice, and come back.
    LEAVES = "leaves"
    #: Clients want records by reference, and their bucket has troubles of its own.
    RECORDS = "records"


#: Of those that an option of simulate.py asks for.
WORDS = {
    HistoryKind.PUSHES: "histories of pushes, with kills and stalls in each phase of them",
    HistoryKind.REBASES: "histories of long chains of deltas, which are rebased",
    HistoryKind.AGENTS: "histories with agents, whose sessions wait for room in KV caches",
    HistoryKind.LEAVES: "histories in which replicas are asked to leave, and come back",
    HistoryKind.RECORDS: "histories of records by reference, whose bucket fails, tears files and forgets",
}
