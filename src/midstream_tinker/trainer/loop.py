"""The trainer process: take a command, do it, answer; one after another.

Owns: the models being trained, by id. Started by process.py with one end of a socket pair.
Always holds: a command that fails is answered and changes nothing. The process ends when the socket closes, also in the middle
of a command, so it never outlives the front.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from pathlib import Path

import msgspec
import torch
import transformers

from midstream.core.logs import configure_as_parent
from midstream.http.ipc import Channel, Disconnected
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.checkpoints import (
    export_adapter,
    export_weights,
    load_state,
    read_meta,
    save_state,
)
from midstream_tinker.trainer.model import BaseModel, TrainedModel
from midstream_tinker.trainer.types import WorkFailed

logger = logging.getLogger(__name__)


class TrainerLoop:
    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._models: dict[str, TrainedModel] = {}

    def answer(self, command: m.Command) -> m.Reply:
        """Never raises: the answer has the failure, and the models are as they were."""
        try:
            return self._do(command)
        except WorkFailed as error:
            return m.Refused(error.message, error.category)
        except OSError as error:
            # The disk's fault, as when it is full.
            logger.error("%s failed: %s", type(command).__name__, error)
            return m.Refused(f"{type(error).__name__}: {error}", "server")
        except Exception as error:
            # A bug, or no memory left. The models are whole, so the others can continue.
            logger.exception("%s failed", type(command).__name__)
            # One line, whatever the library wrote.
            reason = " ".join(str(error).split())
            return m.Refused(f"{type(error).__name__}: {reason}", "server")

    def _do(self, command: m.Command) -> m.Reply:
        match command:
            case m.CreateModel(model_id, lora):
                if model_id in self._models:
                    raise WorkFailed(f"model {model_id} is there already", "server")
                self._models[model_id] = TrainedModel(self._base, model_id, lora)
                return self._models[model_id].state()
            case m.DropModel(model_id):
                self._models.pop(model_id, None)
                return m.TrainerDone()
            case m.LoadState(model_id, directory, optimizer):
                return self._load(model_id, Path(directory), optimizer)
            case m.RunForwardBackward(request):
                return m.LossReply(self._model(request.model_id).forward_backward(request))
            case m.OptimStep(model_id, adam):
                return m.Metrics(self._model(model_id).optim_step(adam))
            case m.SaveState(model_id, directory, optimizer):
                return m.Written(save_state(self._model(model_id), Path(directory), optimizer))
            case m.ExportWeights(model_id, directory, adapter):
                export = export_adapter if adapter else export_weights
                return m.Written(export(self._model(model_id), Path(directory)))
            case m.StartTrainer():
                raise WorkFailed("the trainer has started already", "server")

    def _load(self, model_id: str, directory: Path, optimizer: bool) -> m.ModelState:
        model = self._models.get(model_id) or TrainedModel(self._base, model_id, read_meta(directory).lora)
        load_state(model, directory, optimizer)
        self._models[model_id] = model
        return model.state()

    def _model(self, model_id: str) -> TrainedModel:
        if model_id not in self._models:
            raise WorkFailed(f"the trainer has no model {model_id}", "server")
        return self._models[model_id]


def receive(channel: Channel[m.Command], commands: queue.SimpleQueue[m.Command]) -> None:
    """Runs on a thread of its own. Ends the process when the other end closes: there is nothing to save."""
    code = 1
    try:
        while True:
            for command in channel.receive(None):
                commands.put(command)
    except Disconnected:
        code = 0
    except msgspec.DecodeError:
        logger.exception("the front sent a command that cannot be read; ending")
    os._exit(code)


def main() -> int:
    channel = Channel.of_child(m.command_decoder)
    transformers.utils.logging.disable_progress_bar()
    configure_as_parent("trainer")
    commands: queue.SimpleQueue[m.Command] = queue.SimpleQueue()
    threading.Thread(target=receive, args=(channel, commands), daemon=True, name="receive").start()
    start = commands.get()
    assert isinstance(start, m.StartTrainer)
    torch.set_num_threads(max(1, start.threads))
    try:
        base = BaseModel(start)
    except Exception as error:
        # The front gets any error of the loader. Then this process ends.
        logger.debug("the trainer cannot start", exc_info=True)
        reason = " ".join(str(error).split())
        channel.send(m.Refused(f"{type(error).__name__}: {reason}", "server"))
        return 1
    channel.send(m.TrainerReady(base.info()))
    loop = TrainerLoop(base)
    while True:
        channel.send(loop.answer(commands.get()))


if __name__ == "__main__":
    sys.exit(main())
