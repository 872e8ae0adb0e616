"""What the scheduler puts into a step, without a model: sequences are advanced by hand."""

from __future__ import annotations

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.embedded.blocks import BlockPool
from midstream.engine.embedded.scheduler import Scheduler, Sequence, StepWork


def make_scheduler(
    *, blocks: int = 129, max_batch_tokens: int = 256, max_prefill_tokens: int = 64
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, 16),
        max_batch_tokens=max_batch_tokens,
        max_prefill_tokens=max_prefill_tokens,
        max_running=8,
        scored=lambda block, offset, epoch: False,
        on_allocate=lambda block: None,
    )


def sequence(
    name: str, prompt: int, max_tokens: int = 100, urgent: bool = False, priority: int = 0
) -> Sequence:
    """A salt of its own, so that no prefix is shared."""
    sampling = SamplingParams(max_tokens=max_tokens)
    request = GenerateRequest(
        request_id=name,
        prompt=tuple(range(prompt)),
        sampling=sampling,
        salt=name.encode(),
        urgent=urgent,
        priority=priority,
    )
    return Sequence(request, 0)


def step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Plan a step and pretend it was computed; (request, tokens of it in this step), in the plan's order."""
    works = scheduler.plan()
    for work in works:
        scheduler.advance(work)
        if work.last == len(work.seq.tokens):
            work.seq.tokens.append(0)
    return [(work.seq.request.request_id, work.size) for work in works]


def test_a_long_prompt_beside_a_decoding_stream_is_computed_in_chunks_of_the_prefill_budget() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence("stream", 10))
    assert step(scheduler) == [("stream", 10)]
    scheduler.add(sequence("long", 150))
    assert [step(scheduler) for _ in range(4)] == [
        [("stream", 1), ("long", 64)],
        [("stream", 1), ("long", 64)],
        [("stream", 1), ("long", 22)],
        [("stream", 1), ("long", 1)],
    ]


def test_prompts_share_the_prefill_budget_in_the_order_they_came() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence("stream", 10))
    step(scheduler)
    scheduler.add(sequence("first", 40))
    scheduler.add(sequence("second", 40))
    assert step(scheduler) == [("stream", 1), ("first", 40), ("second", 24)]
    assert step(scheduler) == [("stream", 1), ("first", 1), ("second", 16)]


def test_without_a_decoding_stream_prompts_take_the_whole_batch() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence("a", 200))
    scheduler.add(sequence("b", 200))
    assert step(scheduler) == [("a", 200), ("b", 56)]
    assert step(scheduler) == [("a", 1), ("b", 64)]


def test_a_sequence_preempted_for_one_before_it_is_in_no_later_place_of_the_same_plan() -> None:
    scheduler = make_scheduler(blocks=4)
    for name in ("old", "young"):
        scheduler.add(sequence(name, 16, max_tokens=30))
    assert step(scheduler) == [("old", 16), ("young", 16)]
    # Both need a second block, one is left.
    works = scheduler.plan()
    assert [(w.seq.request.request_id, w.size) for w in works] == [("old", 1)]
    assert [s.request.request_id for s in scheduler.waiting] == ["young"]
    assert isinstance(works[0], StepWork)
    assert works[0].seq.blocks != []
    scheduler.pool.check()


def test_a_sequence_knows_how_long_it_waited_for_its_first_step() -> None:
    scheduler = make_scheduler(blocks=5)
    first, second = sequence("first", 40), sequence("second", 40)
    first.arrived -= 1.0
    second.arrived -= 60.0
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == [("first", 40)]
    assert (1.0 <= first.queued_s < 60.0, second.queued_s) == (True, 0.0)
    waited = first.queued_s
    scheduler.remove(first)
    assert step(scheduler) == [("second", 40)]
    assert second.queued_s >= 60.0
    assert first.queued_s == waited


def test_an_urgent_prompt_goes_before_others_and_beside_streams_in_small_pieces() -> None:
    scheduler = make_scheduler(max_batch_tokens=32)
    scheduler.add(sequence("stream", 10))
    step(scheduler)
    scheduler.add(sequence("long", 50))
    assert step(scheduler) == [("stream", 1), ("long", 31)]
    scheduler.add(sequence("canary", 20, max_tokens=0, urgent=True))
    assert step(scheduler) == [("stream", 1), ("canary", 8), ("long", 19)]
    scheduler.add(sequence("longer", 70))
    assert step(scheduler) == [("stream", 1), ("long", 1), ("canary", 8), ("longer", 22)]
    assert step(scheduler) == [("stream", 1), ("long", 1), ("canary", 4), ("longer", 26)]
    alone = make_scheduler()
    alone.add(sequence("canary", 20, max_tokens=0, urgent=True))
    assert step(alone) == [("canary", 20)]


def test_an_urgent_prompt_does_not_wait_behind_a_sequence_that_is_preempted_after_it_came() -> None:
    """Else a check waits until a stream ends, and one that waits too long has failed."""
    scheduler = make_scheduler(blocks=9)
    for name in ("old", "young"):
        scheduler.add(sequence(name, 64))
    assert step(scheduler) == [("old", 64), ("young", 64)]
    scheduler.add(sequence("canary", 20, max_tokens=0, urgent=True))
    # The last block went to it.
    assert step(scheduler) == [("old", 1)]
    assert [s.request.request_id for s in scheduler.waiting] == ["canary", "young"]
    assert step(scheduler) == [("old", 1), ("canary", 8)]
    scheduler.pool.check()


def test_an_urgent_prompt_does_not_wait_for_streams_or_prompts_that_take_all_of_a_step() -> None:
    full = make_scheduler(max_batch_tokens=2)
    for name in ("a", "b"):
        full.add(sequence(name, 1))
    assert step(full) == [("a", 1), ("b", 1)]
    full.add(sequence("canary", 10, max_tokens=0, urgent=True))
    assert [step(full)[2:] for _ in range(2)] == [[("canary", 8)], [("canary", 2)]]
    long = make_scheduler()
    long.add(sequence("stream", 10))
    step(long)
    long.add(sequence("long", 150))
    step(long)
    long.add(sequence("canary", 10, max_tokens=0, urgent=True))
    assert step(long) == [("stream", 1), ("canary", 8), ("long", 56)]


def test_waiting_requests_are_admitted_by_priority_and_equal_ones_as_they_came() -> None:
    scheduler = make_scheduler()
    given = [("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1), ("f", 5), ("g", 1)]
    for name, priority in given:
        scheduler.add(sequence(name, 10, priority=priority))
    scheduler.add(sequence("urgent", 10, urgent=True, priority=9))
    assert [name for name, _ in step(scheduler)] == ["urgent", "c", "e", "a", "d", "g", "b", "f"]


def test_a_preempted_sequence_waits_behind_lower_numbers_and_before_its_own() -> None:
    scheduler = make_scheduler(blocks=4)
    scheduler.add(sequence("first", 16, max_tokens=32))
    scheduler.add(sequence("second", 16, max_tokens=32))
    step(scheduler)
    for name, priority in (("late", 0), ("better", -1), ("worse", 1)):
        scheduler.add(sequence(name, 40, priority=priority))
    while len(scheduler.running) > 1:
        step(scheduler)
    waiting = [seq.request.request_id for seq in scheduler.waiting]
    assert waiting == ["better", "second", "late", "worse"]
