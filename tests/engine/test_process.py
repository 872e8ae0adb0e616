"""The Engine port over a real engine process."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from engine_helpers import needs_compiler, request
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiers import variant

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest, GenerationEvent, TokenRecord
from midstream.engine.base import EngineDied, StagingFailed, WeightsRefused
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded.engine import EmbeddedEngine
from midstream.http.ipc import Frames, frame
from midstream.snapshots.layout import read_spec

pytestmark = pytest.mark.slow


Body = Callable[[EmbeddedEngine], Coroutine[Any, Any, None]]


@asynccontextmanager
async def with_engine(model: Path, settings: EngineSettings | None = None) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, settings or EngineSettings(kv_cache_tokens=8192))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
    assert engine.pid is None


@pytest.fixture(scope="module")
def with_shared(tiny_model: Callable[..., Path]) -> Iterator[Callable[[Body], None]]:
    """with_shared(body): with the engine of all tests that leave it idle. Which snapshot it serves, the tests before decide."""
    with asyncio.Runner() as runner:
        engine = EmbeddedEngine(tiny_model(), EngineSettings(kv_cache_tokens=8192))
        runner.run(engine.start())
        yield lambda body: runner.run(body(engine))
        runner.run(engine.close())


async def records(engine: EmbeddedEngine, wanted: GenerateRequest) -> list[TokenRecord]:
    return [record async for event in engine.generate(wanted) for record in event.tokens]


async def blocks_in_use(engine: EmbeddedEngine, expected: int) -> None:
    """Returns once the engine reports that many; the test's timeout is the other way out."""
    while engine.stats().kv.used != expected:  # noqa: ASYNC110 - it reports on its own clock
        await asyncio.sleep(0.01)


def anonymous_bytes(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("unread", [variant(False), True])
def test_an_engine_whose_socket_breaks_says_so_in_one_line_at_most(
    tiny_model: Callable[..., Path], unread: bool
) -> None:
    """A replica that is killed leaves what it has not read: the engine's next read is then an error, not an end."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "midstream.core.child",
                "midstream.engine.embedded.loop",
                str(theirs.fileno()),
            ],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
    with process, ours:
        ours.sendall(frame(m.Start(str(tiny_model()), EngineSettings(kv_cache_tokens=8192), None)))
        arrived = b""
        frames = Frames(m.reply_decoder)
        while not any(isinstance(reply, m.Ready) for reply in frames.feed(arrived)):
            arrived = ours.recv(1 << 20)
            assert arrived
        if unread:
            # It reports on its own clock.
            select.select([ours], [], [])
        ours.close()
        said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 0
    after = said[next((i for i, line in enumerate(said) if "socket" in line), len(said)) :]
    assert not [line for line in said if "Traceback" in line]
    assert len(after) == int(unread), said
    assert not unread or after[0].endswith(
        "its other end is gone ([Errno 104] Connection reset by peer); ending"
    )


def test_a_stream_crosses_a_swap_and_an_unstaged_commit_is_refused(
    with_shared: Callable[[Body], None], tiny_model: Callable[..., Path]
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        other = tiny_model(seed=1)
        stream = engine.generate(request("r", [1, 2, 3], max_tokens=3500, echo=0))
        first = await anext(stream)
        with pytest.raises(StagingFailed, match="not the staged snapshot"):
            await engine.commit("crossed-1")
        await engine.stage("crossed-1", other)
        timing = await engine.commit("crossed-1")
        assert (timing.snapshot, timing.streams_crossed) == ("crossed-1", 1)
        rest: list[GenerationEvent] = [event async for event in stream]
        labels = [r.snapshot for event in (first, *rest) for r in event.tokens]
        assert len(labels) == 3500
        switch = labels.index("crossed-1")
        assert switch > 0
        assert labels == [labels[0]] * switch + ["crossed-1"] * (3500 - switch)
        assert rest[-1].finish == "length"

    with_shared(body)


def test_files_that_are_no_model_are_refused_and_the_old_weights_go_on(
    with_shared: Callable[[Body], None], tmp_path: Path
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        before = await records(engine, request("a", [5, 6], max_tokens=6, echo=0))
        with pytest.raises(StagingFailed):
            await engine.stage("broken", tmp_path)
        after = await records(engine, request("b", [5, 6], max_tokens=6, echo=0))
        assert [r.token_id for r in after] == [r.token_id for r in before]
        assert [r.snapshot for r in after] == [r.snapshot for r in before]

    with_shared(body)


def test_an_adapter_that_computes_no_finite_number_is_refused_beside_a_stream(
    with_shared: Callable[[Body], None], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model()
    inputs = load_file(base / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"].shape[1]
    outputs = load_file(base / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"].shape[0]

    def write(scale: float) -> Path:
        directory = tmp_path / f"adapter-{scale}"
        directory.mkdir()
        name = "base_model.model.model.layers.0.self_attn.o_proj.lora"
        sides = {
            f"{name}_A.weight": torch.full((1, inputs), scale),
            f"{name}_B.weight": torch.ones(outputs, 1),
        }
        save_file(sides, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
        return directory

    async def body(engine: EmbeddedEngine) -> None:
        stream = asyncio.create_task(records(engine, request("r", [1, 2, 3], max_tokens=200)))
        slot = engine.slot("red")
        assert slot.proves_staged
        with pytest.raises(
            WeightsRefused, match="SnapshotNotFinite: the log-probabilities of a fixed prompt"
        ):
            await slot.stage("a1", write(3e38))
        with pytest.raises(StagingFailed, match="not the staged snapshot"):
            await slot.commit("a1")
        await slot.stage("a2", write(0.01))
        assert (await slot.commit("a2")).snapshot == "a2"
        assert len(await stream) == 200

    with_shared(body)


def test_closing_a_stream_frees_its_blocks_and_leaves_the_others_alone(
    with_shared: Callable[[Body], None],
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        other = asyncio.create_task(records(engine, request("other", [9, 9], max_tokens=300, echo=0)))
        stream = engine.generate(request("gone", list(range(200)), max_tokens=4000, echo=0))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert len(await other) == 300
        await blocks_in_use(engine, 0)

    with_shared(body)


def test_a_pause_stops_steps_and_a_resume_loses_nothing(with_shared: Callable[[Body], None]) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        expected = await records(engine, request("a", [4, 4], max_tokens=1500, echo=0))
        task = asyncio.create_task(records(engine, request("b", [4, 4], max_tokens=1500, echo=0)))
        await asyncio.sleep(0)
        await engine.pause()
        assert not task.done()
        await engine.resume()
        assert [r.token_id for r in await task] == [r.token_id for r in expected]

    with_shared(body)


async def test_a_paused_engine_computes_urgent_requests_alone_also_when_they_need_the_blocks_of_others(
    tiny_model: Callable[..., Path],
) -> None:
    long = [i % 250 for i in range(200)]

    async with with_engine(tiny_model(), EngineSettings(kv_cache_tokens=256)) as engine:
        expected = await records(engine, request("a", long, max_tokens=50, echo=0))
        task = asyncio.create_task(records(engine, request("b", long, max_tokens=50, echo=0)))
        await asyncio.sleep(0)
        await engine.pause()
        made = engine.stats().generated_tokens
        for number, size in enumerate((8, 120)):
            urgent = request(f"canary-{number}", [3] * size, max_tokens=0, echo=size)
            events = [event async for event in engine.generate(replace(urgent, urgent=True, salt=b"own"))]
            assert sum(len(event.prompt or ()) for event in events) == size
        assert engine.stats().generated_tokens == made
        assert not task.done()
        await engine.stage("step-1", tiny_model())
        before = time.perf_counter()
        pause_ms = (await engine.commit("step-1")).pause_ms
        assert 0 < pause_ms <= 1e3 * (time.perf_counter() - before), "the pause before it is not the switch's"
        await engine.resume()
        assert [r.token_id for r in await task] == [r.token_id for r in expected]


def test_an_aborted_request_ends_with_what_it_has(with_shared: Callable[[Body], None]) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        expected = await records(engine, request("a", [4, 4], max_tokens=3000, echo=0))
        stream = engine.generate(request("b", [4, 4], max_tokens=3000, echo=0))
        events = [await anext(stream)]
        engine.abort("b")
        events += [event async for event in stream]
        made = [record.token_id for event in events for record in event.tokens]
        assert events[-1].finish == "abort"
        assert 0 < len(made) < 3000
        assert made == [record.token_id for record in expected][: len(made)]
        await blocks_in_use(engine, 0)
        engine.abort("unknown")

    with_shared(body)


async def test_when_the_process_is_killed_streams_raise_and_a_new_start_serves_again(
    tiny_model: Callable[..., Path],
) -> None:
    async with with_engine(tiny_model()) as engine:
        reasons: list[str] = []
        told = asyncio.Event()

        async def note(reason: str) -> None:
            reasons.append(reason)
            told.set()

        engine.on_death(note)
        stream = engine.generate(request("r", [1, 2, 3], max_tokens=4000, echo=0))
        await anext(stream)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            async for _ in stream:
                pass
        await told.wait()
        assert reasons == ["the engine process ended with code -9"]
        with pytest.raises(EngineDied):
            await records(engine, request("early", [1], max_tokens=1, echo=0))
        await engine.start()
        assert len(await records(engine, request("again", [1, 2, 3], max_tokens=5, echo=0))) == 5


@pytest.mark.variant
async def test_a_missing_model_is_reported_with_its_reason(tmp_path: Path) -> None:
    engine = EmbeddedEngine(tmp_path / "nowhere", EngineSettings())
    with pytest.raises(EngineDied, match="nowhere"):
        await engine.start()
    await engine.close()


async def test_an_engine_that_does_not_load_in_time_is_ended_and_the_reason_names_the_limit(
    tiny_model: Callable[..., Path],
) -> None:
    # An interpreter takes longer.
    engine = EmbeddedEngine(tiny_model(), EngineSettings(load_s_max=0.01))
    with pytest.raises(EngineDied, match=r"not loaded within 0\.01 s \(load_s_max\)"):
        await engine.start()
    assert engine.pid is None
    with pytest.raises(EngineDied, match="not running"):
        await engine.pause()


def test_messages_are_whole_however_the_socket_cuts_them() -> None:
    sent: list[m.Command] = [m.PauseSteps(1), m.Abort("r" * 300, 2), m.ResumeSteps(3)]
    data = b"".join(map(frame, sent))
    for size in (1, 3, 5, len(data)):
        frames = Frames(m.command_decoder)
        cut = [data[i : i + size] for i in range(0, len(data), size)]
        assert [command for part in cut for command in frames.feed(part)] == sent


def test_a_newer_staging_supersedes_the_one_before_and_only_it_can_be_committed(
    with_shared: Callable[[Body], None], tiny_model: Callable[..., Path]
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        snapshots = [tiny_model(seed=i) for i in (1, 2, 3)]
        results = await asyncio.gather(
            *(engine.stage(f"newer-{i}", path) for i, path in enumerate(snapshots, start=1)),
            return_exceptions=True,
        )
        assert results[-1] is None
        assert [type(r) for r in results[:-1]] == [StagingFailed, StagingFailed]
        with pytest.raises(StagingFailed):
            await engine.commit("newer-2")
        await engine.commit("newer-3")
        got = await records(engine, request("r", [1, 2], max_tokens=3, echo=0))
        assert {r.snapshot for r in got} == {"newer-3"}

    with_shared(body)


def test_files_that_are_staged_while_they_are_made_serve_as_whole_ones(
    with_shared: Callable[[Body], None], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        whole = tiny_model(seed=1)
        await engine.stage("whole", whole)
        await engine.commit("whole")
        expected, digest = (
            await records(engine, request("r", [1, 2, 3], max_tokens=8)),
            await engine.weights_digest(),
        )
        await engine.stage("between", tiny_model(seed=2))
        await engine.commit("between")
        assert await engine.weights_digest() != digest
        made = shutil.copytree(whole, tmp_path / "made")
        engine.stage_ahead("ahead", made)
        for name in read_spec(whole).tensors:
            engine.tensors_made([name])
        await engine.stage("ahead", made.rename(tmp_path / "proved"))
        await engine.commit("ahead")
        found = await records(engine, request("r", [1, 2, 3], max_tokens=8))
        assert [replace(record, snapshot="whole") for record in found] == expected
        assert {record.snapshot for record in found} == {"ahead"}
        assert await engine.weights_digest() == digest

    with_shared(body)


def test_files_that_are_never_finished_hold_up_nothing(
    with_shared: Callable[[Body], None], tiny_model: Callable[..., Path]
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        engine.stage_ahead("unfinished", tiny_model(seed=3))
        assert await engine.weights_digest() is not None
        # As when the rebuild has failed.
        engine.drop_staged()
        engine.stage_ahead("unfinished too", tiny_model(seed=3))
        await engine.stage("finished", tiny_model(seed=1))
        await engine.commit("finished")
        got = await records(engine, request("r", [1, 2], max_tokens=3, echo=0))
        assert {record.snapshot for record in got} == {"finished"}

    with_shared(body)


async def test_an_engine_that_dies_while_files_are_made_refuses_the_snapshot_and_starts_again(
    tiny_model: Callable[..., Path],
) -> None:
    async with with_engine(tiny_model()) as engine:
        engine.stage_ahead("lost", tiny_model(seed=1))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await engine.stage("lost", tiny_model(seed=1))
        engine.tensors_made(["model.norm.weight"])
        engine.stage_ahead("lost", tiny_model(seed=1))
        await engine.start()
        await engine.stage("again", tiny_model(seed=1))


def test_a_choice_that_is_ended_gives_no_further_event_and_the_iterator_ends_with_the_last(
    with_shared: Callable[[Body], None],
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        counts = {0: 0, 1: 0}
        async for event in engine.generate(request("r", [1, 2], n=2, max_tokens=60, echo=0)):
            counts[event.index] += len(event.tokens)
            if counts[1] == 3:
                engine.end_choice("r", 1)
        assert counts == {0: 60, 1: 3}
        stream = engine.generate(request("s", [1, 2], max_tokens=4000, echo=0))
        await anext(stream)
        engine.end_choice("s", 0)
        assert [event async for event in stream] == []
        await blocks_in_use(engine, 0)

    with_shared(body)


def test_events_that_have_arrived_of_a_choice_that_is_ended_are_not_given(
    with_shared: Callable[[Body], None], tiny_model: Callable[..., Path]
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        stream = engine.generate(request("r", [1, 2], n=2, max_tokens=2000, echo=0))
        await anext(stream)
        # Steps go on: their events wait for the iterator.
        await engine.stage("late-1", tiny_model())
        engine.end_choice("r", 1)
        assert {event.index async for event in stream} == {0}

    with_shared(body)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the engine's memory from /proc")
@pytest.mark.parametrize("kernels", ["native", variant("torch")])
async def test_swapping_again_and_again_does_not_grow_the_process(
    tmp_path: Path, kernels: Literal["native", "torch"]
) -> None:
    needs_compiler(kernels)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = 2 * model.num_parameters()
    model.save_pretrained(tmp_path)
    # Models.
    held: list[float] = []

    async with with_engine(tmp_path, EngineSettings(kernels=kernels, kv_cache_tokens=64)) as engine:
        for number in range(16):
            await engine.stage(f"step-{number}", tmp_path)
            await engine.commit(f"step-{number}")
            held.append(anonymous_bytes(engine.pid) / size)
    # The allocator takes what it keeps for later swaps within the first three.
    assert min(held[8:]) - min(held[3:8]) < 3, held
