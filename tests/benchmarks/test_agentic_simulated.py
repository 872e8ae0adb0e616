"""What the KV budget costs and saves, on a trace of coding agents before simulated replicas. Its seconds are simulated."""

from __future__ import annotations

import pytest
from agentic.bench import SECONDS_SCALE, TOKENS_SCALE, TRACES
from agentic.simulated import rounds
from agentic.trace import Trace, first_groups, read, scaled


@pytest.fixture(scope="module")
def trace() -> Trace:
    return scaled(first_groups(read(TRACES / "coding.jsonl"), 16, 6), TOKENS_SCALE, SECONDS_SCALE)


@pytest.mark.slow
def test_where_the_cache_holds_everything_the_budget_costs_next_to_nothing(trace: Trace) -> None:
    """By the sum of what sessions come to, the second round took a tenth longer."""
    without, ours = rounds(trace, 2.0, 1, budget=False), rounds(trace, 2.0, 1)
    for one, other in zip(ours, without, strict=True):
        assert one.wall_s < 1.05 * other.wall_s
        assert one.over_ideal < 1.01 * other.over_ideal


@pytest.mark.slow
def test_a_cache_of_60_percent_computes_little_again_even_before_any_session_ended(trace: Trace) -> None:
    """The first wave computed 1.7 times the ideal, and the second round took longer than the first one."""
    first, second = rounds(trace, 0.6, 1)
    assert first.over_ideal < 1.3
    assert second.over_ideal < 1.15
    assert first.waited > 0


@pytest.mark.slow
def test_a_group_on_one_replica_computes_its_prompt_less_often(trace: Trace) -> None:
    apart, together = rounds(trace, 2.0, 1, apart=True), rounds(trace, 2.0, 1)
    for one, other in zip(together, apart, strict=True):
        assert one.over_ideal < other.over_ideal - 0.02
        assert one.wall_s < 1.05 * other.wall_s
