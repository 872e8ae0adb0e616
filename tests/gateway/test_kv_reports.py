"""A replica that reports nonsense of its KV cache: what is no number is refused, and what is too much draws nothing to it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from midstream.core.kv import KvStats, KvWaits
from midstream.core.reports import ReplicaReport
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.placement import Candidate, Fleet

MOST = 2**63 - 1


def report_of(**waits: int) -> ReplicaReport:
    return ReplicaReport(
        replica="r", boot="b", alive=True, in_flight=0, policies=(), kv_waits=KvWaits(**waits)
    )


@pytest.mark.parametrize("value", [-1, MOST + 1, 0.5, "many", None])
@pytest.mark.parametrize("place", [("kv_waits", "claimed_tokens"), ("engine", "kv", "used")])
def test_a_report_with_what_is_no_count_of_tokens_is_refused_by_the_name_of_its_field(
    value: Any, place: tuple[str, ...]
) -> None:
    told = msgspec.to_builtins(report_of())
    inside = told
    for name in place[:-1]:
        inside = inside.setdefault(name, {})
    inside[place[-1]] = value
    with pytest.raises(msgspec.ValidationError, match=r"\.".join(place)):
        msgspec.json.decode(msgspec.json.encode(told), type=ReplicaReport)


@pytest.mark.parametrize(
    "waits",
    [
        {"budget_tokens": 1, "claimed_tokens": MOST},
        {"budget_tokens": 1, "waiting": MOST},
        {"budget_tokens": MOST, "claimed_tokens": MOST, "waiting": MOST},
    ],
)
def test_a_replica_that_says_too_much_gets_no_new_session_while_another_has_room(
    waits: dict[str, int],
) -> None:
    replica = KnownReplica("r", "http://r")
    replica.hear(report_of(**waits))
    assert replica.kv_filled is not None
    assert math.isfinite(replica.kv_filled)
    fleet = Fleet([Candidate("a", 0, filled=replica.kv_filled), Candidate("b", 0, filled=0.1)])
    placed = {fleet.place_session(("", f"s{n}"), 1.0)[0].name for n in range(20)}  # type: ignore[index]
    assert placed == {"b"}


def test_a_replica_that_says_that_it_has_no_budget_is_judged_by_its_sessions() -> None:
    replica = KnownReplica("r", "http://r")
    replica.hear(report_of(claimed_tokens=MOST, waiting=MOST))
    assert replica.kv_filled is None


def test_blocks_that_are_owned_more_than_once_are_reported_as_none_free() -> None:
    assert KvStats(block_tokens=16, total=10, used=MOST, held=MOST, loose=MOST).free == 0
