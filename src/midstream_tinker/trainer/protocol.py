"""The messages between the front and the trainer process. `http/ipc.py` frames them. Imports no torch.

Always holds: the first command is StartTrainer, and its answer is TrainerReady or Refused. Every later command is answered
once, in the order of the commands.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from midstream_tinker.trainer.types import AdamParams, Category, ForwardBackward, LoraConfig, LossOutputs


class StartTrainer(msgspec.Struct, tag=True, frozen=True):
    """directory: of the base model. batch_tokens: of a forward pass, with its padding, unless one sequence is longer."""

    directory: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    threads: int = 1
    batch_tokens: int = 8192


class CreateModel(msgspec.Struct, tag=True, frozen=True):
    """-> ModelState. lora.rank 0: all weights are trained. A model of that id must not be there."""

    model_id: str
    lora: LoraConfig


class DropModel(msgspec.Struct, tag=True, frozen=True):
    """-> TrainerDone, also when there is no such model."""

    model_id: str


class LoadState(msgspec.Struct, tag=True, frozen=True):
    """-> ModelState. A model of that id is made, as the state says, or takes the state on; its gradients are dropped.

    optimizer: with the optimizer's state, which must have been saved; without it the optimizer starts from zero.
    """

    model_id: str
    directory: str
    optimizer: bool


class RunForwardBackward(msgspec.Struct, tag=True, frozen=True):
    """-> LossReply. Gradients are added to those since the last OptimStep; after an error they are as before."""

    request: ForwardBackward


class OptimStep(msgspec.Struct, tag=True, frozen=True):
    """-> Metrics. Without gradients nothing changes."""

    model_id: str
    adam: AdamParams


class SaveState(msgspec.Struct, tag=True, frozen=True):
    """-> Written. The directory appears whole or not at all; one that is there is replaced. Gradients are not saved."""

    model_id: str
    directory: str
    optimizer: bool = True


class ExportWeights(msgspec.Struct, tag=True, frozen=True):
    """-> Written. The merged weights in the base checkpoint's files, names, shapes and dtypes, with its companion files. The
    directory must not be there. adapter: of a LoRA model, the adapter alone, as peft writes it."""

    model_id: str
    directory: str
    adapter: bool = False


Command = (
    StartTrainer
    | CreateModel
    | DropModel
    | LoadState
    | RunForwardBackward
    | OptimStep
    | SaveState
    | ExportWeights
)


class TrainerInfo(msgspec.Struct, frozen=True):
    """The base model. moe_layers, top_k, experts: 0 on a dense model, or where routing matrices cannot be replayed."""

    model_type: str
    vocab_size: int
    max_positions: int
    moe_layers: int
    top_k: int
    experts: int


class TrainerReady(msgspec.Struct, tag=True, frozen=True):
    info: TrainerInfo


class TrainerDone(msgspec.Struct, tag=True, frozen=True):
    pass


class ModelState(msgspec.Struct, tag=True, frozen=True):
    """trainable: how many numbers are trained. steps: optimizer steps taken."""

    model_id: str
    lora: LoraConfig
    trainable: int
    steps: int


class LossReply(msgspec.Struct, tag=True, frozen=True):
    result: LossOutputs


class Metrics(msgspec.Struct, tag=True, frozen=True):
    """Named `name:reduction`."""

    metrics: dict[str, float]


class Written(msgspec.Struct, tag=True, frozen=True):
    """Bytes of all files."""

    size: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The command failed and changed nothing; the trainer continues."""

    message: str
    category: Category


Reply = TrainerReady | TrainerDone | ModelState | LossReply | Metrics | Written | Refused

command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
