"""The trainer process and the models in it.

Owns: when the process is started, which model's command is next, which models it holds.
Always holds: one command at a time, in the order of their requests. Models take turns if a command of each
waits. The process may lose or remove a model. The model's next command fails and says so, until the model is made again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.process import TrainerDied
from midstream_tinker.trainer.types import WorkFailed

logger = logging.getLogger(__name__)

MAX_MODELS = 16
MAKE_AGAIN = "Make a new training client from a saved state"


class TrainerPort(Protocol):
    """trainer.process.Trainer. `call` raises WorkFailed for the command, TrainerDied for the process; then `start` again."""

    @property
    def running(self) -> bool: ...

    async def start(self) -> m.TrainerInfo: ...

    async def close(self) -> None: ...

    async def call(self, command: Any) -> Any: ...


class Loaded:
    """abandoned: the removable ones of the models that it is given. Its flag: there is no room for another model."""

    def __init__(
        self,
        trainer: TrainerPort,
        abandoned: Callable[[Iterable[str], bool], list[str]],
        *,
        max_models: int = MAX_MODELS,
    ) -> None:
        self._trainer = trainer
        self._abandoned = abandoned
        self._max_models = max_models
        self._turn = asyncio.Lock()
        # The models that the process holds.
        self._models: set[str] = set()
        # Model to the reason why it is not there any more.
        self._lost: dict[str, str] = {}

    def holds(self, model_id: str) -> bool:
        return model_id in self._models and self._trainer.running

    async def make(self, model_id: str, command: m.CreateModel | m.LoadState) -> m.ModelState:
        """The process is started if it is not running. Raises WorkFailed."""
        async with self._turn:
            try:
                if not self._trainer.running:
                    self._lose_all("the trainer process had ended")
                    await self._start()
                if model_id not in self._models:
                    await self._make_room()
                state: m.ModelState = await self._ask(command)
            except WorkFailed as error:
                if model_id not in self._models:
                    self._lost[model_id] = f"it could not be made ({error.message})"
                raise
            self._models.add(model_id)
            self._lost.pop(model_id, None)
            return state

    async def call(self, model_id: str, command: Any) -> Any:
        """Raises WorkFailed."""
        async with self._turn:
            if model_id not in self._models:
                raise WorkFailed(self._why_gone(model_id), "server")
            return await self._ask(command)

    async def drop(self, model_id: str, why: str) -> None:
        """Free what it takes. Never raises WorkFailed: what is lost is free."""
        async with self._turn:
            await self._drop(model_id, why)

    async def close(self) -> None:
        await self._trainer.close()

    async def _drop(self, model_id: str, why: str) -> None:
        if model_id in self._models and self._trainer.running:
            try:
                await self._ask(m.DropModel(model_id))
            except WorkFailed as error:
                logger.warning("%s cannot be unloaded: %s", model_id, error)
        self._models.discard(model_id)
        self._lost[model_id] = why

    async def _ask(self, command: Any) -> Any:
        try:
            return await self._trainer.call(command)
        except TrainerDied as error:
            self._lose_all(str(error))
            raise WorkFailed(f"{error}; what was not saved is lost. {MAKE_AGAIN}", "server") from error

    async def _start(self) -> None:
        try:
            await self._trainer.start()
        except TrainerDied as error:
            raise WorkFailed(str(error), "server") from error

    async def _make_room(self) -> None:
        full = len(self._models) >= self._max_models
        for model_id in self._abandoned(self._models, full):
            await self._drop(model_id, "its client had gone, and others needed the room")
        if len(self._models) >= self._max_models:
            raise WorkFailed(
                f"{len(self._models)} models are being trained here, the most this server takes at once; "
                "finish a session that is not needed any more, or try again later"
            )

    def _lose_all(self, why: str) -> None:
        for model_id in self._models:
            self._lost[model_id] = why
        self._models.clear()

    def _why_gone(self, model_id: str) -> str:
        why = self._lost.get(model_id, "the server was restarted")
        return f"the weights of {model_id} are not there any more: {why}. {MAKE_AGAIN}"
