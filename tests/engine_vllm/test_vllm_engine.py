"""The Engine port over a scripted vLLM server: content and order of what comes, ends, what is left behind, death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_vllm import (
    MAX_MODEL_LEN,
    VOCAB,
    FakeVllm,
    logprob_at,
    route_bytes,
    token_at,
    until,
    write_model,
    write_weights,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import examples
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.core.server_settings import VllmSettings
from midstream.core.types import TokenRecord
from midstream.engine.base import EngineDied, StagingFailed
from midstream.engine.vllm.arguments import TRANSFER_WORKER, WORKER
from midstream.engine.vllm.engine import VllmEngine


def expected(
    prompt: int, count: int, weights: int = 0, snapshot: str = "base"
) -> list[tuple[int, float, str]]:
    at = range(prompt, prompt + count)
    return [(token_at(i, weights), logprob_at(i, weights), snapshot) for i in at]


def seen(records: list[TokenRecord]) -> list[tuple[int, float, str]]:
    return [(r.token_id, r.logprob, r.snapshot) for r in records]


async def test_what_an_attached_server_is_and_where_a_boot_begins(tmp_path: Path) -> None:
    fake = FakeVllm()
    await fake.start()
    # By one who died in a switch.
    fake.paused, fake.weights, fake.version = True, 7, "3:left-behind"
    engine = VllmEngine(write_model(tmp_path), VllmSettings(), tmp_path / "cache", url=fake.url)
    info = await engine.start()
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (MAX_MODEL_LEN, VOCAB, (258,))
    assert (info.moe_layers, info.top_k, info.num_experts, info.grammars) == (2, 2, 8, True)
    assert (info.card.kind, info.card.version, info.card.has("routes")) == ("vllm", "0.32.0", True)
    assert (fake.paused, fake.weights, fake.version) == (False, 0, "0:base")
    reading, (request,) = await begun(engine, fake, asking())
    request.to_the_end()
    assert seen((await reading.ended()).records()) == expected(3, 4)
    await engine.close()
    await fake.stop()


@pytest.mark.parametrize(
    ("extension", "fits"), [(WORKER, True), (TRANSFER_WORKER, True), ("other.Worker", False)]
)
def test_a_server_on_a_cpu_needs_an_extension_that_packs_reloaded_experts(
    tmp_path: Path, extension: str, fits: bool
) -> None:
    """The one for transfers loads the other one."""

    def on_a_cpu(fake: FakeVllm) -> None:
        fake.cpu, fake.extension = True, extension

    async def main() -> None:
        async with attached(tmp_path, set_up=on_a_cpu) as (_, fake):
            # Once, and again to compare the digests.
            assert fake.loads == 2

    if fits:
        asyncio.run(main())
    else:
        with pytest.raises(EngineDied, match="a form that it cannot compute with"):
            asyncio.run(main())


@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 40),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_tokens_come_whole_and_in_order_however_they_are_cut(
    tmp_path: Path, sizes: list[list[int]], cut: int, routes: bool, random: object
) -> None:
    """Choices of different lengths, chunks of several tokens, HTTP chunks that cut anywhere, choices interleaved."""

    async def main() -> None:
        async with attached(tmp_path) as (engine, fake):
            fake.cut = cut
            longest = max(map(sum, sizes))
            asked = asking(max_tokens=longest, n=len(sizes), want_routes=routes)
            reading, requests = await begun(engine, fake, asked)
            turns = [i for i, each in enumerate(sizes) for _ in each]
            random.shuffle(turns)  # type: ignore[attr-defined]
            left = [iter(each) for each in sizes]
            for turn in turns:
                requests[turn].step(next(left[turn]))
            for request in requests:
                if not request.over:
                    request.end("stop", 0)
            await reading.ended()
            assert reading.errors == []
            for i, each in enumerate(sizes):
                assert seen(reading.records(i)) == expected(3, sum(each))
                assert reading.finishes[i] == ("length" if sum(each) == longest else "stop")
                wanted = [route_bytes(p - 1) if routes else None for p in range(3, 3 + sum(each))]
                assert [r.route for r in reading.records(i)] == wanted
                last = [e for e in reading.events if e.index == i][-1]
                assert last.finish is not None

    asyncio.run(main())


async def test_tokens_come_as_they_are_sampled_but_with_routes_at_the_end(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        plain, (one,) = await begun(engine, fake, asking("plain"))
        routed, (two,) = await begun(engine, fake, asking("routed", want_routes=True))
        for request in (one, two):
            request.step(1, 2)
        await until(lambda: len(plain.records()) == 3)
        assert routed.events == []
        for request in (one, two):
            request.step()
        await plain.ended()
        await routed.ended()
        assert seen(plain.records()) == seen(routed.records()) == expected(3, 4)
        fake.routes = False
        bare, (three,) = await begun(engine, fake, asking("bare", want_routes=True))
        three.to_the_end()
        assert "returned no routes" in (await bare.ended()).errors[0]
        assert bare.records() == []


@pytest.mark.parametrize(
    ("changed", "follows"),
    [
        ({}, True),
        ({"temperature": 0.7}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, False),
        ({"logit_bias": {5: 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": -0.5}, False),
    ],
)
async def test_a_sampling_logprob_is_told_only_where_it_follows(
    tmp_path: Path, changed: dict[str, object], follows: bool
) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(**changed))
        request.to_the_end()
        records = (await reading.ended()).records()
        told = [r.sampling_logprob == r.logprob for r in records]
        unknown = [r.sampling_logprob is None or r.sampling_logprob != r.sampling_logprob for r in records]
        assert (told, unknown) == ([follows] * 4, [not follows] * 4)
        reading, (request,) = await begun(engine, fake, asking(temperature=0.0, top_p=0.5))
        request.to_the_end()
        assert {r.sampling_logprob for r in (await reading.ended()).records()} == {0.0}


async def test_a_client_that_leaves_leaves_nothing_behind(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, requests = await begun(engine, fake, asking(n=3, max_tokens=50))
        other, (kept,) = await begun(engine, fake, asking("other"))
        requests[0].step()
        await until(lambda: reading.records())
        await reading.stop()
        await until(lambda: all(request.gone for request in requests), "vLLM sees that the client left")
        assert engine.stats().running + engine.stats().waiting == 1
        kept.to_the_end()
        assert len((await other.ended()).records()) == 4
        fake.hold_scores = True
        scoring = Reading(engine, asking("scored", prompt_records=3))
        await until(lambda: fake.scores)
        await scoring.stop()
        await until(lambda: fake.scores[0].gone)


async def test_a_choice_that_is_ended_is_closed_and_says_nothing_more(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (one, two) = await begun(engine, fake, asking(n=2, max_tokens=50))
        one.step(3)
        two.step(2)
        await until(lambda: len(reading.records(0)) == 3 and len(reading.records(1)) == 2)
        engine.end_choice("r", 0)
        engine.end_choice("r", 0)
        engine.end_choice("nobody", 0)
        await until(lambda: one.gone)
        two.step(48)
        await reading.ended()
        assert (len(reading.records(0)), len(reading.records(1))) == (3, 50)
        assert reading.finishes == {1: "length"}
        reading, (one,) = await begun(engine, fake, asking())
        engine.end_choice("r", 0)
        assert (await reading.ended()).events == []


async def test_what_arrived_before_a_choice_was_ended_is_not_told_after(tmp_path: Path) -> None:
    """Nobody iterates while tokens arrive: they wait in the engine, and end_choice takes them back."""

    async with attached(tmp_path) as (engine, fake):
        stream = engine.generate(asking(n=2, max_tokens=9))
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: len(fake.requests) == 2)
        fake.requests[0].step(2)
        assert (await first).index == 0
        fake.requests[0].step(2)
        fake.requests[1].step(4)
        await until(lambda: engine.stats().running == 2)
        engine.end_choice("r", 0)
        fake.requests[1].step(5)
        rest = [event async for event in stream]
        assert {event.index for event in rest} == {1}
        assert sum(len(event.tokens) for event in rest) == 9


async def test_a_choice_that_is_ended_while_it_connects_is_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midstream.engine.servers import engine as module

    connect, connected = module.open_stream, asyncio.Event()

    async def slowly(*given: object) -> object:
        stream = await connect(*given)  # type: ignore[arg-type]
        connected.set()
        await gate.wait()
        return stream

    gate = asyncio.Event()
    monkeypatch.setattr(module, "open_stream", slowly)
    async with attached(tmp_path) as (engine, fake):
        reading = Reading(engine, asking(max_tokens=50))
        await connected.wait()
        engine.end_choice("r", 0)
        gate.set()
        assert (await reading.ended()).events == []
        await until(lambda: fake.requests and fake.requests[0].gone, "its connection is closed")


async def test_a_resumed_request_goes_on_behind_what_was_emitted(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        stop, base = (77,), asking(n=5, max_tokens=6, stop_token_ids=(77,), want_routes=True)
        emitted = ((1, 2), None, (1, 2, 3, 4, 5, 6), (9, *stop), ())
        asked = asking(n=5, max_tokens=6, stop_token_ids=stop, want_routes=True, emitted=emitted)
        assert asked.prompt == base.prompt
        reading = Reading(engine, asked)
        await until(lambda: len(fake.requests) == 2)
        one, two = fake.requests
        assert (one.prompt, one.sampling["max_tokens"]) == ([5, 6, 7, 1, 2], 4)
        assert (two.prompt, two.sampling["max_tokens"]) == ([5, 6, 7], 6)
        one.to_the_end()
        two.to_the_end()
        await reading.ended()
        assert reading.finishes == {0: "length", 2: "length", 3: "stop", 4: "length"}
        assert seen(reading.records(0)) == expected(5, 4)
        assert [r.route for r in reading.records(0)] == [route_bytes(p - 1) for p in range(5, 9)]
        assert seen(reading.records(4)) == expected(3, 6)
        assert [reading.records(i) for i in (1, 2, 3)] == [[], [], []]


async def test_errors_end_the_request_with_words_and_the_others_go_on(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        other, (kept,) = await begun(engine, fake, asking("other"))
        fake.refuse = (400, {"error": {"message": "the prompt is too long", "code": 400}})
        refused = await Reading(engine, asking("refused", n=2)).ended()
        assert refused.errors == ["vLLM answered 400: the prompt is too long"]
        fake.refuse = None
        failed, (bad, beside) = await begun(engine, fake, asking("failed", n=2, max_tokens=9))
        bad.step()
        await until(lambda: failed.records())
        bad.event({"error": {"message": "EngineCore had a bad day"}})
        assert (await failed.ended()).errors == ["vLLM: EngineCore had a bad day"]
        await until(lambda: beside.gone, "the other choice is not left running")
        for name, what in (
            ("cut", lambda r: r.cut()),
            ("early", lambda r: (r.raw(b"data: [DONE]\n\n"), r.writer.write(b"0\r\n\r\n"))),
            ("short", lambda r: r.writer.write(b"0\r\n\r\n")),
            ("odd", lambda r: r.raw(b"data: {nonsense\n\n")),
            ("lines", lambda r: r.raw(b"<html>\n")),
            ("abort", lambda r: r.end("abort", 0)),
            ("other", lambda r: r.end("repetition", 0)),
        ):
            broken, (request,) = await begun(engine, fake, asking(name, max_tokens=9))
            request.step(2)
            await until(lambda broken=broken: len(broken.records()) == 2)
            what(request)
            await broken.ended()
            if name == "abort":
                assert (broken.errors, broken.finishes) == ([], {0: "abort"})
            else:
                assert len(broken.errors) == 1, name
                assert broken.finishes == {}
            assert broken.died is None, name
        kept.to_the_end()
        assert len((await other.ended()).records()) == 4


async def test_an_error_of_a_server_whose_engine_core_died_is_the_servers_end(tmp_path: Path) -> None:
    """Its streams can go on elsewhere then; an error event would end them."""

    async with attached(tmp_path) as (engine, fake):
        lost, (request,) = await begun(engine, fake, asking("lost"))
        request.step()
        await until(lambda: lost.records())
        fake.healthy = False
        request.event({"error": {"message": "EngineCore encountered an issue."}})
        await lost.ended()
        assert lost.errors == []
        assert lost.died is not None
        assert "EngineCore encountered an issue" in str(lost.died)


async def test_a_finish_without_its_last_lines_is_no_finish(tmp_path: Path) -> None:
    """The last tokens are told when all that vLLM says of the choice was read."""

    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=2))
        request.step()
        request.write(request.sample(), "length")
        request.cut()
        await reading.ended()
        assert (reading.finishes, len(reading.errors)) == ({}, 1)


async def test_counts(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        prompt = list(range(10))
        for name in ("first", "second"):
            reading, requests = await begun(engine, fake, asking(name, prompt, n=2, max_tokens=3))
            for request in requests:
                request.to_the_end()
            await reading.ended()
            cached = [e.cached_tokens for e in reading.events if e.cached_tokens is not None]
            # Whichever is sent first.
            assert sorted(cached) == ([0, 8] if name == "first" else [8, 8])
        waiting, (_,) = await begun(engine, fake, asking("third", n=1))
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (20, 8, 12)
        assert (stats.running, stats.waiting) == (0, 1)
        await waiting.stop()
        assert engine.stats().waiting == 0


async def test_equal_salts_share_and_others_do_not_nor_do_two_boots(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):

        async def salt(**more: object) -> str:
            reading, (request,) = await begun(engine, fake, asking(max_tokens=1, **more))
            request.step()
            await reading.ended()
            assert len(request.salt) <= 128
            assert request.salt.isalnum()
            return request.salt

        salts = [await salt(), await salt(salt=b"a"), await salt(salt=b"b"), await salt(salt=b"\0a")]
        assert len(set(salts)) == len(salts)
        # Nothing there is old yet.
        assert await salt(salt=b"a", kv_age_max=0) == salts[1]
        assert await salt(salt=b"a") == salts[1]
        # Anew: what the server has in its cache is of another boot.
        await engine.start()
        assert await salt(salt=b"a") not in salts


class Lost:
    """on_death's callback."""

    def __init__(self, engine: VllmEngine) -> None:
        self.reasons: list[str] = []
        engine.on_death(self)

    async def __call__(self, reason: str) -> None:
        self.reasons.append(reason)


async def test_a_lost_server_ends_every_request_and_a_new_start_serves_again(tmp_path: Path) -> None:
    async with attached(tmp_path, load_s_max=0.5) as (engine, fake):
        lost = Lost(engine)
        snapshot = await swap(engine, tmp_path, 1)
        readings = [(await begun(engine, fake, asking(f"r{i}", max_tokens=50)))[0] for i in range(3)]
        fake.requests[0].step(2)
        await until(lambda: readings[0].labels() == [snapshot] * 2)
        port = int(fake.url.rpartition(":")[2])
        await fake.stop()
        for reading in readings:
            assert (await reading.ended()).died is not None
        await until(lambda: lost.reasons, "the replica is told, and not after a minute of silence")
        with pytest.raises(EngineDied):
            await anext(engine.generate(asking("late")))
        with pytest.raises(EngineDied, match="load_s_max"):
            await engine.start()
        await fake.start(port)
        await engine.start()
        reading, (request,) = await begun(engine, fake, asking())
        request.to_the_end()
        assert seen((await reading.ended()).records()) == expected(3, 4)
        assert len(lost.reasons) == 1


async def test_a_server_that_was_restarted_under_us_is_a_lost_one(tmp_path: Path) -> None:
    """It answers /health and serves the base weights: nothing may be labelled with what served before."""

    async with attached(tmp_path) as (engine, fake):
        lost = Lost(engine)
        await swap(engine, tmp_path, 1)
        reading, _ = await begun(engine, fake, asking("crossing"))
        await fake.restart()
        assert (await reading.ended()).died is not None
        await until(lambda: lost.reasons)


async def test_a_restart_between_requests_is_noticed_before_a_label_is_proved(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        lost = Lost(engine)
        await swap(engine, tmp_path, 1)
        await fake.restart()
        reading, (request,) = await begun(engine, fake, asking())
        request.to_the_end()
        await reading.ended()
        assert reading.finishes == {}
        assert reading.died is not None or reading.errors
        await until(lambda: lost.reasons, "every further request would fail alike")


async def test_an_attached_server_that_does_not_tell_what_was_cached_is_refused(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        fake.tells_cached = False
        with pytest.raises(EngineDied, match="--enable-prompt-tokens-details"):
            await engine.start()
        fake.tells_cached = True
        await engine.start()


async def test_a_server_that_is_sick_for_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its workers answer, which are asked often here."""
    monkeypatch.setattr("midstream.engine.servers.watch.POLL_S", 0.1)

    async with attached(tmp_path, silence_s_max=1.5) as (engine, fake):
        lost = Lost(engine)
        reading, _ = await begun(engine, fake, asking())
        fake.healthy = False
        assert (await reading.ended()).died is not None
        await until(lambda: lost.reasons)
        assert "did not answer /health for 1.5 s (vllm.silence_s_max)" in lost.reasons[0]


@pytest.mark.parametrize("busy", ["stream", "waiting", "score", "commit", "stage", "pause"])
async def test_closing_ends_whatever_is_under_way(
    tmp_path: Path, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a server that is attached to and lives on: nothing more is sent to it."""

    async with attached(tmp_path) as (engine, fake):
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        fake.hold_scores = True
        fake.fault("/collective_rpc", "hang")
        fake.fault("/pause", *([None] if busy == "commit" else ["hang"]))
        gate = asyncio.Event()
        if busy in ("stream", "waiting"):
            reading, (request,) = await begun(engine, fake, asking())
            if busy == "stream":
                request.step()
                await until(lambda: reading.records())
            task: asyncio.Task[object] = reading.task
        elif busy == "score":
            reading = Reading(engine, asking(prompt_records=3))
            await until(lambda: fake.scores)
            task = reading.task
        elif busy == "commit":
            task = asyncio.create_task(engine.commit("step-1"))
            await until(lambda: any("collective_rpc" in call for call in fake.calls))
        elif busy == "pause":
            task = asyncio.create_task(engine.pause())
            await until(lambda: fake.calls)
        else:

            async def slow(directory: Path) -> Path:
                await gate.wait()
                return directory

            monkeypatch.setattr(engine._staging, "put", slow)
            task = asyncio.create_task(engine.stage("step-2", tmp_path))
            await asyncio.sleep(0)
        await engine.close()
        gate.set()
        async with asyncio.timeout(120):
            await asyncio.wait((task,))
        if busy in ("stream", "waiting", "score"):
            assert reading.died is not None
            assert len(fake.requests) == (busy != "score")
        else:
            assert isinstance(task.exception(), EngineDied)
        calls = list(fake.calls)
        await engine.close()
        assert fake.calls == calls


async def test_before_a_start_everything_says_that_the_engine_does_not_run(tmp_path: Path) -> None:
    engine = VllmEngine(write_model(tmp_path), VllmSettings(), tmp_path / "cache", url="http://127.0.0.1:9")
    for calling in (
        engine.pause(),
        engine.resume(),
        engine.commit("x"),
        anext(engine.generate(asking())),
    ):
        with pytest.raises(EngineDied, match="not running"):
            await calling
    engine.end_choice("r", 0)
    engine.drop_staged()
    assert engine.stats().running == 0
    await engine.close()
    await engine.close()


async def test_a_server_that_cannot_be_taken_over_is_not_served_from(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        for path in ("/pause", "/is_paused", "/collective_rpc", "/update_weight_version", "/resume"):
            for kind in ("refuse", "close", *(["odd"] if path == "/is_paused" else [])):
                fake.fault(path, kind)
                with pytest.raises(EngineDied):
                    await engine.start()
                with pytest.raises(EngineDied):
                    await anext(engine.generate(asking()))
        await engine.start()
        assert not fake.paused


async def test_a_pause_holds_and_a_resume_loses_nothing(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking())
        request.step()
        for _ in range(2):
            await engine.pause()
            assert fake.paused
        assert "mode=keep" in fake.calls[0]
        for _ in range(2):
            await engine.resume()
            assert not fake.paused
        request.to_the_end()
        assert seen((await reading.ended()).records()) == expected(3, 4)


async def test_what_is_staged_and_what_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with attached(tmp_path) as (engine, fake):
        one, two = (write_weights(tmp_path / f"step-{i}", i) for i in (1, 2))
        with pytest.raises(StagingFailed, match="not staged"):
            await engine.commit("step-1")
        with pytest.raises(StagingFailed):
            await engine.stage("nowhere", tmp_path / "nowhere")
        await engine.stage("step-1", one)
        await engine.stage("step-2", two)
        with pytest.raises(StagingFailed):
            await engine.commit("step-1")
        engine.drop_staged()
        with pytest.raises(StagingFailed):
            await engine.commit("step-2")
        assert fake.calls == []
        results = await asyncio.gather(
            engine.stage("step-2", two), engine.stage("step-1", one), return_exceptions=True
        )
        assert [type(result) for result in results] == [StagingFailed, type(None)]
        await engine.commit("step-1")
        assert fake.weights == 1
        gate, put = asyncio.Event(), engine._staging.put
        slow_targets: list[Path] = []

        async def slow(directory: Path) -> Path:
            slow_targets.append(await put(directory))
            await gate.wait()
            return slow_targets[-1]

        monkeypatch.setattr(engine._staging, "put", slow)
        staging = asyncio.create_task(engine.stage("step-2", two))
        await until(lambda: slow_targets)
        # While it is being staged.
        engine.drop_staged()
        gate.set()
        with pytest.raises(StagingFailed):
            await staging
        with pytest.raises(StagingFailed):
            await engine.commit("step-2")
        assert fake.weights == 1


@pytest.mark.parametrize("readable", [True, False])
async def test_a_snapshot_under_way_when_the_boot_ends_was_staged_for_a_dead_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    async with attached(tmp_path) as (engine, fake):
        begun, gate, put = asyncio.Event(), asyncio.Event(), engine._staging.put

        async def slow(directory: Path) -> Path:
            begun.set()
            await gate.wait()
            return await put(directory)

        monkeypatch.setattr(engine._staging, "put", slow)
        step = write_weights(tmp_path / "step-1", 1) if readable else tmp_path / "nowhere"
        staging = asyncio.create_task(engine.stage("step-1", step))
        await begun.wait()
        fake.fault("/pause", "refuse")
        with pytest.raises(EngineDied):
            await engine.pause()
        gate.set()
        with pytest.raises(EngineDied):
            await staging
        await engine.start()
        with pytest.raises(StagingFailed, match="not staged"):
            await engine.commit("step-1")


async def test_what_vllm_cannot_do_is_an_error_of_the_request(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading = await Reading(engine, asking(temperature=0.001)).ended()
        assert len(reading.errors) == 1
        assert "temperature" in reading.errors[0]
        assert fake.requests == []


async def test_a_client_that_leaves_while_it_connects_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the very step in which the connection is there."""
    from midstream.engine.servers import engine as module

    connect, readings = module.open_stream, []

    async def and_leave(*given: object) -> object:
        stream = await connect(*given)  # type: ignore[arg-type]
        readings[0].task.cancel()
        return stream

    monkeypatch.setattr(module, "open_stream", and_leave)
    async with attached(tmp_path) as (engine, fake):
        readings.append(Reading(engine, asking(max_tokens=50)))
        await asyncio.wait((readings[0].task,))
        await until(lambda: fake.requests and fake.requests[0].gone, "its connection is closed")


@pytest.mark.parametrize("how", ["refuse", "close", "odd"])
async def test_a_lost_connection_is_lost_alone_when_the_server_is_only_too_busy_to_say_more(
    tmp_path: Path, how: str
) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking())
        other, (kept,) = await begun(engine, fake, asking("other"))
        fake.watched.clear()
        # The watch for a restart asks, too.
        fake.fault("/weight_info", *[how] * 9)
        request.cut()
        await reading.ended()
        assert (reading.died, len(reading.errors)) == (None, 1)
        assert "/weight_info" in fake.watched
        kept.to_the_end()
        assert len((await other.ended()).records()) == 4


async def test_a_server_whose_weights_others_changed_is_a_lost_one(
    tmp_path: Path,
) -> None:
    """Another client of the same server changed them."""

    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking())
        fake.version = "1:theirs"
        request.cut()
        died = (await reading.ended()).died
        assert "given weights by others: it has '1:theirs', not '0:base'" in str(died)


def test_alternatives_without_names_of_their_own_are_refused(tmp_path: Path) -> None:
    """As vLLM 0.20 gives them."""

    async def refused(folder: Path, *, named: bool) -> str | None:
        def older(fake: FakeVllm) -> None:
            fake.names_alternatives = named

        async with attached(folder, set_up=older) as (engine, _):
            asked = asking(want_logprobs=True, top_logprobs=2)
            assert engine.refuses(asking(want_logprobs=True)) is None
            return engine.refuses(asked)

    assert asyncio.run(refused(tmp_path / "named", named=True)) is None
    assert "top_logprobs" in (asyncio.run(refused(tmp_path / "nameless", named=False)) or "")
