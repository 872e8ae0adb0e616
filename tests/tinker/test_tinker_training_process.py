"""Training calls with the real trainer process, which is killed in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from training_fakes import TENANT, World, world

from midstream_tinker import messages
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.process import Trainer
from midstream_tinker.types import LoadWeightsBody, SaveWeightsBody

pytestmark = pytest.mark.slow

KEY = "tml-key"


async def loss(at: World, model: str, seq_id: int) -> float:
    outcome = (await at.ended(await at.loss(model, seq_id))).outcome
    assert outcome is not None
    value: float = messages.ForwardBackwardOutput.FromString(outcome.body).metrics["loss:sum"]
    return value


async def test_a_killed_trainer_is_started_again_and_goes_on_from_a_saved_state(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    async def scene(at: World, trainer: Trainer) -> None:
        model = await at.model(rank=4)
        other = await at.model(1, rank=0)
        first = await loss(at, model, 1)
        await at.result(await at.step(model, 2, 0.01))
        save = SaveWeightsBody(model_id=model, seq_id=3, path="s")
        path = str((await at.result(await at.training.submit(TENANT, KEY, save)))["path"])
        saved = await loss(at, model, 4)
        assert saved < first
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        pending = [await at.step(model, 5), await at.step(other, 1)]
        for request in pending:
            message, category = await at.error(request)
            assert "was killed" in message
            assert category == "server"
        load = LoadWeightsBody(model_id=model, seq_id=6, path=path, optimizer=True)
        await at.result(await at.training.submit(TENANT, KEY, load))
        assert await loss(at, model, 7) == pytest.approx(saved, abs=1e-5)
        assert "was killed" in (await at.error(await at.step(other, 2)))[0]

    trainer = Trainer(m.StartTrainer(directory=str(tiny_model())))
    async with world(tmp_path, trainer=trainer) as at:
        await scene(at, trainer)
    assert trainer.pid is None
