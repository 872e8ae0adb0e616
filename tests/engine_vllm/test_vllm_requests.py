"""Requests of VllmEngine over many switches: how old the cached KV is that each may find; what is told of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fake_vllm import FakeRequest, until
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiers import examples
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.core.types import GenerationEvent
from midstream.engine.servers.labels import UNKNOWN, Epochs
from midstream.engine.servers.requests import ServedWeights, ServerRequest

WEIGHTS = ServedWeights("theirs", Epochs("base"))
PROMPTS = (tuple(range(20)), tuple(range(40)), tuple(range(100, 130)))
AGES = st.none() | st.integers(0, 3)
ASKS = st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 2), AGES, st.booleans(), st.integers(0, 2))
OPS = st.lists(ASKS | st.just(("commit",)) | st.just(("serve",)), min_size=3, max_size=25)


@given(OPS)
@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example([("ask", 0, 0, None, False, 0), ("serve",), ("ask", 0, 0, 0, False, 0), ("commit",), ("serve",)])
def test_no_request_finds_kv_that_is_older_than_it_takes(tmp_path: Path, ops: list[tuple]) -> None:
    """In any order of commits, of requests of two namespaces, and of their getting a place in vLLM's batch; some go on with
    tokens that another engine emitted, some have two choices. And what is told of the KV's snapshots is true."""

    async def main() -> None:
        async with attached(tmp_path) as (engine, fake):
            # And how many choices.
            waiting: list[tuple[Reading, int]] = []
            first_load = fake.loads

            def live() -> list[FakeRequest]:
                return [request for request in fake.requests if not request.gone and not request.over]

            async def settled() -> None:
                await until(lambda: len(live()) == sum(count for _, count in waiting), "vLLM has them all")

            async def serve() -> None:
                now, served = fake.loads, live()
                for request in served:
                    request.place()
                    bound = bounds[request.sampling["presence_penalty"]]
                    assert bound is None or all(now - load <= bound for load in request.reused)
                for request in served:
                    request.to_the_end()
                for reading, count in waiting:
                    await reading.ended()
                    assert reading.errors == []
                    assert len(reading.finishes) == count
                    told = [e.kv_snapshots[0][0] for e in reading.events if e.kv_snapshots is not None]
                    found = {load for request in served for load in request.reused}
                    for snapshot in set(told) - {UNKNOWN}:
                        load = (
                            first_load if snapshot == "base" else int(snapshot.partition("-")[2]) + first_load
                        )
                        assert load == now
                        assert len(served) > 1 or found <= {now}
                waiting.clear()

            bounds: dict[float, int | None] = {}
            for number, op in enumerate(ops):
                if op[0] == "commit":
                    await swap(engine, tmp_path, fake.loads - first_load + 1)
                elif op[0] == "serve":
                    await serve()
                else:
                    _, namespace, prompt, age, many, emitted = op
                    # The request's bound is found by what it carries to vLLM.
                    mark = (number + 1) / 1000
                    more = {"emitted": tuple((1,) * emitted for _ in range(1 + many))} if emitted else {}
                    bounds[mark] = age
                    # No penalty goes with emitted tokens.
                    if emitted:
                        mark = 0.0
                        bounds[mark] = 0
                        age = 0
                    asked = asking(
                        f"r{number}",
                        PROMPTS[prompt],
                        n=1 + many,
                        max_tokens=4,
                        salt=bytes([namespace]),
                        kv_age_max=age,
                        want_kv_snapshots=True,
                        presence_penalty=mark,
                        **more,
                    )
                    waiting.append(((await begun(engine, fake, asked))[0], 1 + many))
                await settled()
            await serve()

    asyncio.run(main())


async def test_a_request_that_waits_across_a_switch_begins_anew_if_its_cache_is_too_old(
    tmp_path: Path,
) -> None:
    async with attached(tmp_path) as (engine, fake):
        prompt = range(20)
        filling, (filler,) = await begun(engine, fake, asking("filling", prompt, max_tokens=1))
        filler.to_the_end()
        await filling.ended()
        asked = asking("r", prompt, n=2, kv_age_max=0, want_kv_snapshots=True)
        reading, requests = await begun(engine, fake, asked)
        begun_one, (running,) = await begun(engine, fake, asking("running", prompt, kv_age_max=0))
        running.step()
        await until(lambda: begun_one.records())
        await swap(engine, tmp_path, 1)
        await until(lambda: len(fake.requests) == 6, "both choices are sent again, and only they")
        assert all(request.gone for request in requests)
        fake.requests[4].place()
        assert fake.requests[4].reused == []
        for request in (running, *fake.requests[4:]):
            request.to_the_end()
        await reading.ended()
        assert reading.labels(0) == reading.labels(1) == ["step-1"] * 4
        assert next(e.kv_snapshots for e in reading.events if e.finish) == (("step-1", 0, 23),)
        assert (await begun_one.ended()).labels() == ["base"] + ["step-1"] * 3
        assert engine.stats().running == engine.stats().waiting == 0


async def test_a_choice_that_is_to_begin_anew_may_be_ended_or_left(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        ended, _ = await begun(engine, fake, asking("ended", kv_age_max=0))
        left, _ = await begun(engine, fake, asking("left", kv_age_max=0))

        def now() -> None:
            engine.end_choice("ended", 0)
            left.task.cancel()

        fake.before["/resume"] = now
        await swap(engine, tmp_path, 1)
        assert (await ended.ended()).events == []
        await asyncio.wait((left.task,))
        other, (request,) = await begun(engine, fake, asking("other"))
        request.to_the_end()
        await other.ended()
        await until(lambda: all(r.gone for r in fake.requests if not r.over), "nothing is left running")


async def test_a_run_tells_events_in_order_and_nothing_after_its_end() -> None:
    run = ServerRequest(asking(n=3), WEIGHTS)
    ends = [GenerationEvent(index=i, finish="stop") for i in range(3)]
    for event in (ends[0], ends[0], ends[1]):
        run.put(event)
    assert [await run.next(), await run.next()] == [ends[0], ends[1]]
    waiting = asyncio.ensure_future(run.next())
    await asyncio.sleep(0)
    run.put(ends[2])
    assert await waiting == ends[2]
    assert await run.next() is None
    failing = ServerRequest(asking(n=2), WEIGHTS)
    failing.put(GenerationEvent(index=1, error="broken"))
    failing.put(ends[0])
    assert [(await failing.next()).error, await failing.next()] == ["broken", None]  # type: ignore[union-attr]
    ending = ServerRequest(asking(), WEIGHTS)
    waiting = asyncio.ensure_future(ending.next())
    await asyncio.sleep(0)
    ending.end_choice(0)
    assert await waiting is None
