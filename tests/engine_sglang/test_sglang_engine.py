"""SglangEngine on a server that computes (fake_sglang.py): its proofs, labels, switches, aborts, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import EOS, VOCAB, FakeSglang, fake_python, logprobs_of, until, weights_of, write_model

from midstream.core.server_settings import SglangSettings
from midstream.core.types import BASE_SNAPSHOT, GenerateRequest, GenerationEvent, SamplingParams, TokenRecord
from midstream.engine.base import EngineDied, StagingFailed
from midstream.engine.sglang.engine import SglangEngine

PROMPT = tuple(range(10, 30))


@asynccontextmanager
async def attached(
    folder: Path, set_up: Callable[[FakeSglang], None] = lambda fake: None, *, experts: bool = False
) -> AsyncIterator[tuple[SglangEngine, FakeSglang]]:
    model = write_model(folder / "model", experts=experts)
    fake = FakeSglang(model)
    set_up(fake)
    await fake.start()
    engine = SglangEngine(model, SglangSettings(), folder / "cache", url=fake.url)
    try:
        await engine.start()
        fake.calls.clear()
        yield engine, fake
    finally:
        await engine.close()
        await fake.close()


def asking(name: str = "r", count: int = 8, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"max_tokens": count, **more.pop("sampling", {})})
    return GenerateRequest(
        request_id=name, prompt=PROMPT, sampling=sampling, salt=more.pop("salt", b"s"), **more
    )


class Stream:
    """Reads the events of one request."""

    def __init__(self, engine: SglangEngine, request: GenerateRequest) -> None:
        self.events: list[GenerationEvent] = []
        self.task = asyncio.create_task(self._read(engine, request))

    async def _read(self, engine: SglangEngine, request: GenerateRequest) -> None:
        async for event in engine.generate(request):
            self.events.append(event)

    @property
    def tokens(self) -> list[TokenRecord]:
        return [token for event in self.events for token in event.tokens]

    async def until(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count or self.task.done())
        assert not self.task.done(), self.events[-1:]

    async def end(self) -> GenerationEvent:
        await self.task
        return self.events[-1]


async def switched(engine: SglangEngine, folder: Path, name: str, *, experts: bool = False) -> bytes:
    directory = write_model(folder / name, name, experts=experts)
    await engine.stage(name, directory)
    await engine.commit(name)
    engine.settle(name, sound=True)
    return weights_of(directory)


class TestStart:
    async def test_a_server_that_passes_its_proofs_declares_what_it_has(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            card = engine._info().card
            assert (card.kind, card.version) == ("sglang", "0.5.23")
            assert card.features == (
                *("prompt_logprobs", "grammars", "constrained_logprobs", "logit_bias", "priorities"),
                *("cache_policies", "max_cache_age", "resume", "weights_digest", "freeze", "full_snapshots"),
            )
            assert fake.cache == [], "what the proofs left is gone"
            assert engine._epochs.serving_version == fake.version == "1:base"

    @pytest.mark.parametrize(
        ("fault", "why"),
        [
            ("deaf_to_key", "does not keep KV apart by extra_key: a new extra_key finds cached KV"),
            ("keeps_over_flush", "keeps cached KV over /flush_cache"),
            ("mislabels", "labels .* were given, and the server says"),
            ("silent_of_version", "its scores are of weights 'default', and '0:base' serve"),
            ("tempered", "SGLANG_RETURN_ORIGINAL_LOGPROB=1"),
            ("shuffles", "log-probabilities of tokens .* beside tokens"),
            ("spoils_loads", "does not load weights in place correctly"),
            ("not_finite", "is not finite"),
        ],
    )
    async def test_a_server_with_a_fault_is_refused(self, tmp_path: Path, fault: str, why: str) -> None:
        def plant(fake: FakeSglang) -> None:
            setattr(fake, fault, True)

        with pytest.raises(EngineDied, match=why):
            async with attached(tmp_path, plant):
                pass

    async def test_a_stream_that_loses_a_token_is_refused(self, tmp_path: Path) -> None:
        def plant(fake: FakeSglang) -> None:
            fake.drops_token = 7

        with pytest.raises(EngineDied, match="8 tokens were generated, and 7 were sent"):
            async with attached(tmp_path, plant):
                pass

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
            ({"skip_tokenizer_init": False}, "--skip-tokenizer-init"),
            ({"incremental_streaming_output": False}, "--incremental-streaming-output"),
            ({"allow_auto_truncate": True}, "without --allow-auto-truncate"),
            ({"dp_size": 2}, "without --dp-size"),
            ({"enable_hierarchical_cache": None}, "without --enable-hierarchical-cache"),
            ({"speculative_algorithm": "EAGLE"}, "without --speculative-algorithm"),
            ({"max_req_input_len": None}, "does not say how long a prompt may be"),
        ],
    )
    async def test_a_server_of_other_flags_is_refused_by_name(
        self, tmp_path: Path, change: dict[str, Any], why: str
    ) -> None:
        with pytest.raises(EngineDied, match=why):
            async with attached(tmp_path, lambda fake: fake.info.update(change)):
                pass

    async def test_a_field_or_an_endpoint_that_is_missing_is_named(self, tmp_path: Path) -> None:
        def plant(fake: FakeSglang) -> None:
            del fake.info["stream_interval"]

        with pytest.raises(EngineDied, match="a version whose /server_info has stream_interval"):
            async with attached(tmp_path, plant):
                pass

        def unlist(fake: FakeSglang) -> None:
            del fake.paths["/pause_generation"]

        with pytest.raises(EngineDied, match="has no /pause_generation: a newer version has"):
            async with attached(tmp_path, unlist):
                pass

    async def test_one_that_its_last_user_left_paused_with_other_weights_begins_anew(
        self, tmp_path: Path
    ) -> None:
        def leave(fake: FakeSglang) -> None:
            fake.weights, fake.version = b"other", "7:theirs"
            fake.pause({"mode": "in_place"})

        async with attached(tmp_path, leave) as (engine, fake):
            assert fake.weights == weights_of(tmp_path / "model")
            assert (fake.paused, fake.version) == (False, "1:base")
            assert (await Stream(engine, asking()).end()).finish == "length"

    async def test_one_without_a_cache_or_an_order_serves(self, tmp_path: Path) -> None:
        def plant(fake: FakeSglang) -> None:
            fake.info |= {"disable_radix_cache": True, "enable_priority_scheduling": False}

        async with attached(tmp_path, plant) as (engine, fake):
            assert not engine._info().card.has("priorities")
            await Stream(engine, asking(priority=3)).end()
            assert "priority" not in fake.calls[-1][1]


async def test_a_server_is_started_and_ends_with_its_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "model")
    settings = SglangSettings(python=fake_python(tmp_path), args=("--tp-size", "1"), env={"MARK": "here"})
    engine = SglangEngine(model, settings, tmp_path / "cache")
    await engine.start()
    given = json.loads((tmp_path / "given").read_text())
    try:
        assert "never on a GPU" in caplog.text
        assert engine.pid == given["pid"]
        assert given["argv"][-2:] == ["--tp-size", "1"]
        assert (given["env"]["MARK"], given["env"]["SGLANG_RETURN_ORIGINAL_LOGPROB"]) == ("here", "1")
        assert (await Stream(engine, asking()).end()).finish == "length"
    finally:
        await engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(given["pid"], 0)


class TestRequests:
    async def test_tokens_have_the_numbers_of_what_computed_them(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            stream = Stream(engine, asking(count=12, want_kv_snapshots=True, top_logprobs=3))
            last = await stream.end()
            ids = [token.token_id for token in stream.tokens]
            expected = logprobs_of(PROMPT, [(i, fake.weights) for i in ids])
            assert [token.logprob for token in stream.tokens] == pytest.approx(expected, abs=1e-9)
            assert [token.sampling_logprob for token in stream.tokens] == [t.logprob for t in stream.tokens]
            assert all(len(token.top_logprobs) == 3 for token in stream.tokens)
            assert last.finish == "length"
            assert last.kv_snapshots == ((BASE_SNAPSHOT, 0, len(PROMPT) + 11),)

    async def test_namespaces_share_no_kv_and_one_does(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            found = [
                (await Stream(engine, asking(name, 1, salt=salt)).end()).cached_tokens
                for name, salt in (("a", b"x"), ("b", b"x"), ("c", b"y"))
            ]
            assert found == [0, len(PROMPT) - 1, 0]

    async def test_a_prompt_is_scored(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            stream = Stream(engine, asking(count=0, prompt_records=4, top_logprobs=2))
            prompt = (await stream.end()).prompt
            assert prompt is not None
            expected = logprobs_of(PROMPT[:16], [(token, fake.weights) for token in PROMPT[16:]])
            assert [record.logprob for record in prompt] == pytest.approx(expected, abs=1e-9)
            assert [len(record.top_logprobs) for record in prompt] == [2] * 4

    async def test_a_prompt_with_the_last_id_of_the_vocabulary_is_scored(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            prompt = (VOCAB - 1, 5, VOCAB - 1, 0)
            sampling = SamplingParams(max_tokens=0)
            request = GenerateRequest(request_id="r", prompt=prompt, sampling=sampling, prompt_records=4)
            records = (await Stream(engine, request).end()).prompt
            assert records is not None
            assert [record.token_id for record in records] == [*prompt]
            expected = logprobs_of(prompt[:1], [(token, fake.weights) for token in prompt[1:]])
            assert [record.logprob for record in records[1:]] == pytest.approx(expected, abs=1e-9)

    async def test_the_longest_prompt_is_served(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            prompt = (7,) * (engine._info().max_model_len - 1)
            sampling = SamplingParams(max_tokens=1)
            longest = GenerateRequest(request_id="l", prompt=prompt, sampling=sampling)
            assert (await Stream(engine, longest).end()).finish == "length"
            longer = GenerateRequest(request_id="m", prompt=(*prompt, 7), sampling=sampling)
            assert "Input length exceeds" in str((await Stream(engine, longer).end()).error)

    async def test_stops_hold_as_asked(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            greedy = Stream(engine, asking(count=20, sampling={"temperature": 0.0}))
            assert (await greedy.end()).finish == "length"
            third = greedy.tokens[2].token_id
            stops = {"temperature": 0.0, "stop_token_ids": (third, EOS)}
            stopped = Stream(engine, asking("t", 20, sampling=stops))
            assert (await stopped.end()).finish == "stop"
            first = [token.token_id for token in greedy.tokens].index(third)
            assert stopped.tokens == greedy.tokens[: first + 1]
            refused = Stream(engine, asking("u", sampling={"stop_token_ids": (third,)}))
            assert (await refused.end()).error is not None
            assert str(refused.events[-1].error).startswith("ignore_eos: ")

    async def test_what_filters_leave_is_not_made_up(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            stream = Stream(engine, asking(sampling={"top_k": 3}))
            await stream.end()
            assert all(isnan(token.sampling_logprob or 0) for token in stream.tokens)

    @pytest.mark.parametrize("how", ["abort", "end_choice", "leave"])
    async def test_what_is_given_up_ends_at_the_server(self, tmp_path: Path, how: str) -> None:
        async with attached(tmp_path) as (engine, fake):
            fake.hold_at = 3
            stream = Stream(engine, asking(count=100))
            await stream.until(3)
            (name,) = fake.running
            if how == "leave":
                stream.task.cancel()
            elif how == "abort":
                engine.abort("r")
                assert (await stream.end()).finish == "abort"
            else:
                engine.end_choice("r", 0)
                await stream.task
            await until(lambda: not fake.running)
            assert name in fake.aborted

    async def test_a_token_that_is_lost_later_ends_its_stream_with_an_error(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            fake.drops_token = 4
            stream = Stream(engine, asking())
            assert "5 tokens were generated, and 4 were sent" in str((await stream.end()).error)

    async def test_a_resumed_stream_continues_behind_its_tokens(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            stream = Stream(engine, asking(count=6, emitted=((5, 6),), kv_age_max=0))
            await stream.end()
            ids = [token.token_id for token in stream.tokens]
            assert len(ids) == 4
            expected = logprobs_of((*PROMPT, 5, 6), [(i, fake.weights) for i in ids])
            assert [token.logprob for token in stream.tokens] == pytest.approx(expected, abs=1e-9)


class TestSwap:
    async def test_a_stream_crosses_a_swap_with_right_labels_and_its_kv(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            old = fake.weights
            fake.hold_at = 5
            stream = Stream(engine, asking(count=20, want_kv_snapshots=True))
            await stream.until(5)
            new = await switched(engine, tmp_path, "step-1")
            fake.go.set()
            last = await stream.end()
            labels = [token.snapshot for token in stream.tokens]
            assert labels == [BASE_SNAPSHOT] * 5 + ["step-1"] * 15
            made = [(t.token_id, new if t.snapshot == "step-1" else old) for t in stream.tokens]
            assert [t.logprob for t in stream.tokens] == pytest.approx(logprobs_of(PROMPT, made), abs=1e-9)
            assert last.kv_snapshots == (("?", 0, len(PROMPT) + 19),)
            loads = [given for path, given in fake.calls if path == "/update_weights_from_disk"]
            assert [given["flush_cache"] for given in loads] == [False], "streams keep their KV"

    async def test_kv_of_old_weights_is_found_only_as_far_as_the_policy_lets(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            await Stream(engine, asking("a")).end()
            await switched(engine, tmp_path, "step-1")
            young = await Stream(engine, asking("b", kv_age_max=0, want_kv_snapshots=True)).end()
            assert young.kv_snapshots == (("step-1", 0, len(PROMPT) + 7),)
            found = [
                (await Stream(engine, asking(name, 1, kv_age_max=age)).end()).cached_tokens
                for name, age in (("c", 0), ("d", 5))
            ]
            assert found == [len(PROMPT) - 1] * 2

    async def test_what_waits_when_kv_gets_too_old_is_sent_again(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            fake.hold_at = 0
            stream = Stream(engine, asking(kv_age_max=0, want_kv_snapshots=True))
            await until(lambda: fake.running)
            new = await switched(engine, tmp_path, "step-1")
            fake.go.set()
            last = await stream.end()
            assert {token.snapshot for token in stream.tokens} == {"step-1"}
            assert last.kv_snapshots == (("step-1", 0, len(PROMPT) + 7),)
            made = [(token.token_id, new) for token in stream.tokens]
            assert [t.logprob for t in stream.tokens] == pytest.approx(logprobs_of(PROMPT, made), abs=1e-9)

    async def test_nothing_of_new_weights_is_seen_before_they_passed(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            fake.hold_at = 2
            stream = Stream(engine, asking(count=6))
            await stream.until(2)
            await engine.stage("step-1", write_model(tmp_path / "one", "one"))
            await engine.commit("step-1")
            fake.go.set()
            await until(lambda: not fake.running)
            assert [token.snapshot for token in stream.tokens] == [BASE_SNAPSHOT] * 2
            engine.settle("step-1", sound=True)
            await stream.end()
            assert [token.snapshot for token in stream.tokens] == [BASE_SNAPSHOT] * 2 + ["step-1"] * 4

    async def test_files_that_do_not_load_leave_the_old_weights(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            old = fake.weights
            fake.refuses_loads = 1
            await engine.stage("step-1", write_model(tmp_path / "one", "one"))
            with pytest.raises(StagingFailed, match="could not load the snapshot"):
                await engine.commit("step-1")
            assert (fake.weights, fake.version, fake.paused) == (old, "1:base", False)
            assert (await Stream(engine, asking()).end()).finish == "length"

    async def test_a_way_back_that_fails_ends_the_boot(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            fake.refuses_loads = 2
            await engine.stage("step-1", write_model(tmp_path / "one", "one"))
            with pytest.raises(EngineDied, match="left SGLang in doubt"):
                await engine.commit("step-1")
            with pytest.raises(EngineDied):
                await Stream(engine, asking()).end()

    async def test_files_beside_the_snapshots_are_refused(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            directory = write_model(tmp_path / "one", "one")
            (directory / "other.safetensors").write_text("other")
            with pytest.raises(StagingFailed, match=r"other\.safetensors"):
                await engine.stage("step-1", directory)

    async def test_a_pause_keeps_requests_and_a_swap_in_it_stays_paused(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            fake.hold_at = 3
            stream = Stream(engine, asking(count=9))
            await stream.until(3)
            await engine.pause()
            fake.go.set()
            await switched(engine, tmp_path, "step-1")
            assert fake.paused
            assert len(stream.tokens) == 3
            await engine.resume()
            await stream.end()
            assert [t.snapshot for t in stream.tokens] == [BASE_SNAPSHOT] * 3 + ["step-1"] * 6

    async def test_digests_are_those_of_the_weights(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            base = await engine.weights_digest()
            await switched(engine, tmp_path, "step-1")
            other = await engine.weights_digest()
            await switched(engine, tmp_path, "base")
            assert base is not None
            assert base.startswith("sglang-0.5.23-float32-")
            assert await engine.weights_digest() == base != other

    async def test_a_server_that_others_gave_weights_ends_the_boot(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, fake):
            died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def told(reason: str) -> None:
                died.set_result(reason)

            engine.on_death(told)
            fake.version = "theirs"
            assert "given weights by others: it has 'theirs'" in await died
