"""The trainer in its own process, as the front sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from trainer_helpers import FULL, array, request, text

from midstream.http.ipc import frame
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.process import Trainer, TrainerDied, ending
from midstream_tinker.trainer.types import AdamParams, LoraConfig, WorkFailed

pytestmark = pytest.mark.slow

Models = Callable[..., Path]
DATA = [text("a line to learn"), text("and another")]
LEARN = m.RunForwardBackward(request(DATA))
STEP = m.OptimStep("m", AdamParams(learning_rate=3e-3))


@asynccontextmanager
async def with_trainer(model: Path) -> AsyncIterator[Trainer]:
    trainer = Trainer(m.StartTrainer(str(model)))
    try:
        yield trainer
    finally:
        await trainer.close()
    assert trainer.pid is None


async def test_a_model_is_made_trained_saved_taken_up_and_exported(
    tiny_model: Models, tmp_path: Path
) -> None:
    async with with_trainer(tiny_model()) as trainer:
        info = await trainer.start()
        assert (info.model_type, info.moe_layers, info.top_k, info.experts) == ("qwen3_moe", 4, 2, 8)
        made = await trainer.call(m.CreateModel("m", LoraConfig(rank=4, seed=1)))
        assert (made.lora.rank, made.steps) == (4, 0)
        # All in flight at once, and answered in their order.
        first, metrics, second, saved = await asyncio.gather(
            trainer.call(LEARN),
            trainer.call(STEP),
            trainer.call(LEARN),
            trainer.call(m.SaveState("m", str(tmp_path / "state"))),
        )
        assert second.result.metrics["loss:sum"] < first.result.metrics["loss:sum"]
        assert array(first.result.outputs[0]["logprobs"]).shape == (len(DATA[0].tokens),)
        assert metrics.metrics["grad_norm:mean"] > 0
        assert saved.size > 0
        loaded = await trainer.call(m.LoadState("other", str(tmp_path / "state"), True))
        assert (loaded.lora, loaded.steps, loaded.trainable) == (made.lora, 1, made.trainable)
        written = await trainer.call(m.ExportWeights("other", str(tmp_path / "export")))
        assert written.size > saved.size
        assert (tmp_path / "export" / "config.json").exists()


async def test_a_command_that_fails_is_told_and_the_others_go_on(tiny_model: Models, tmp_path: Path) -> None:
    async with with_trainer(tiny_model()) as trainer:
        await trainer.start()
        await trainer.call(m.CreateModel("m", FULL))
        wrong = request(DATA, "gspo")
        with pytest.raises(WorkFailed, match="'gspo' is not supported here") as refused:
            await trainer.call(m.RunForwardBackward(wrong))
        assert refused.value.category == "user"
        for command, says in [
            (m.CreateModel("m", FULL), "model m is there already"),
            (m.OptimStep("nobody", AdamParams()), "the trainer has no model nobody"),
            (m.SaveState("m", "/dev/null/state"), "FileExistsError"),
        ]:
            with pytest.raises(WorkFailed, match=says) as refused:
                await trainer.call(command)
            assert refused.value.category == "server"
        with pytest.raises(WorkFailed, match="is not there"):
            await trainer.call(m.LoadState("new", str(tmp_path / "nothing"), False))
        with pytest.raises(WorkFailed, match="the trainer has no model new"):
            await trainer.call(m.OptimStep("new", AdamParams()))
        assert (await trainer.call(LEARN)).result.metrics["loss:sum"] > 0
        assert await trainer.call(m.DropModel("m")) == m.TrainerDone()
        assert await trainer.call(m.DropModel("m")) == m.TrainerDone()
        with pytest.raises(WorkFailed, match="the trainer has no model m"):
            await trainer.call(LEARN)


async def test_calls_of_a_trainer_that_is_killed_fail_and_a_new_one_starts_empty(tiny_model: Models) -> None:
    async with with_trainer(tiny_model()) as trainer:
        with pytest.raises(TrainerDied, match="is not running"):
            await trainer.call(LEARN)
        await trainer.start()
        pid = trainer.pid
        await trainer.call(m.CreateModel("m", FULL))
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        calls = [asyncio.create_task(trainer.call(LEARN)) for _ in range(3)]
        # They are on their way.
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(TrainerDied, match="was killed, perhaps because the machine had no memory"):
                await call
        assert not trainer.running
        with pytest.raises(TrainerDied, match="was killed"):
            await trainer.call(LEARN)
        await asyncio.gather(trainer.start(), trainer.start())
        assert trainer.pid not in (None, pid)
        again = trainer.pid
        await trainer.start()
        assert trainer.pid == again
        with pytest.raises(WorkFailed, match="the trainer has no model m"):
            await trainer.call(LEARN)


async def test_closing_ends_calls_under_way_and_a_cancelled_call_does_not_shift_replies(
    tiny_model: Models,
) -> None:
    async with with_trainer(tiny_model()) as trainer:
        await trainer.start()
        await trainer.call(m.CreateModel("m", FULL))
        gone = asyncio.create_task(trainer.call(LEARN))
        await asyncio.sleep(0)
        gone.cancel()
        metrics = await trainer.call(STEP)
        # What was cancelled was done all the same.
        assert metrics.metrics["grad_norm:mean"] > 0
        late = asyncio.create_task(trainer.call(LEARN))
        await asyncio.sleep(0)
        await trainer.close()
        with pytest.raises(TrainerDied, match="was closed"):
            await late


async def test_a_model_that_cannot_be_read_is_said_and_no_process_is_left(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    async with with_trainer(tmp_path) as trainer:
        with pytest.raises(WorkFailed, match="the model cannot be trained: ") as refused:
            await trainer.start()
        assert refused.value.category == "server"
        assert trainer.pid is None


def test_the_process_ends_when_the_front_is_gone_even_within_a_command(tiny_model: Models) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "midstream_tinker.trainer.loop", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
    with ours:
        ours.sendall(frame(m.StartTrainer(str(tiny_model()))))
        assert ours.recv(1)
        ours.sendall(frame(m.CreateModel("m", FULL)))
        long = request([text("x" * 4000)] * 64)
        ours.sendall(frame(m.RunForwardBackward(long)))
    assert process.wait(60) == 0


def test_what_a_process_said_at_its_end() -> None:
    assert ending(3) == "ended with code 3"
    assert ending(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert "no memory" in ending(-signal.SIGKILL)
