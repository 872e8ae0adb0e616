"""The messages between a replica process and its engine process. `http/ipc.py` frames them.

The replica sends commands, the engine process sends replies. The number of a call pairs a CallDone with its command.

The features that the embedded engine declares. Imports no torch.

Always holds: a declared feature holds for the serving model, its tokenizer and the device.
"""

from __future__ import annotations

import os

import msgspec

from midstream import __version__
from midstream.core.config import EngineSettings
from midstream.core.logs import Logging
from midstream.core.types import (
    ENGINE_FEATURES,
    EngineCard,
    EngineStats,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    SwapTiming,
)
from midstream.engine.kv_copies import KvForm, KvPiece


def embedded_card(settings: EngineSettings, *, grammars: bool, reproducible: bool) -> EngineCard:
    """grammars: the tokenizer works with grammars. reproducible: no bit of a token's logits depends on the batch."""
    kept = settings.router_weights
    has = {
        "grammars": grammars,
        "reproducible_sampling": reproducible,
        "router_weights": kept,
        "kv_travel": copies_kv(),
    }
    features = tuple(feature for feature in ENGINE_FEATURES if has.get(feature, True))
    why = {} if kept else {"router_weights": "the setting embedded.router_weights is off"}
    return EngineCard(kind="embedded", version=__version__, features=features, why=why)


def copies_kv() -> bool:
    """Whether this system has what kv_files.py needs."""
    return hasattr(os, "memfd_create")


class Start(msgspec.Struct, tag=True, frozen=True):
    """folder: for a file that the engine may have, if its settings ask for one. log: how it logs."""

    model_dir: str
    settings: EngineSettings
    folder: str | None
    log: Logging = Logging()


class Generate(msgspec.Struct, tag=True, frozen=True):
    request: GenerateRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """index: one choice; None: the whole request."""

    request_id: str
    index: int | None = None


class StageSnapshot(msgspec.Struct, tag=True, frozen=True):
    """policy: "" is the deployment's own, here and below."""

    call: int
    snapshot: str
    directory: str
    policy: str = ""


class StageAhead(msgspec.Struct, tag=True, frozen=True):
    """See engine.base.Slot.stage_ahead. No CallDone answers it."""

    snapshot: str
    directory: str
    policy: str = ""


class TensorsMade(msgspec.Struct, tag=True, frozen=True):
    """Of the files of the policy's last StageAhead. No CallDone answers it."""

    policy: str
    tensors: tuple[str, ...]


class DropStaged(msgspec.Struct, tag=True, frozen=True):
    """Drop what is staged or being staged for the policy. No CallDone answers it."""

    policy: str = ""


class Commit(msgspec.Struct, tag=True, frozen=True):
    """files, overwritten: see engine.base.Slot.announce."""

    call: int
    snapshot: str
    policy: str = ""
    files: str = ""
    overwritten: tuple[tuple[str, str], ...] = ()


class Retain(msgspec.Struct, tag=True, frozen=True):
    """The snapshots of the policy that stay resident besides what it serves. No CallDone answers it."""

    policy: str
    snapshots: tuple[str, ...]


class EndPolicy(msgspec.Struct, tag=True, frozen=True):
    """No CallDone answers it."""

    policy: str


class EndSession(msgspec.Struct, tag=True, frozen=True):
    """No CallDone answers it."""

    session: str


class AbandonKv(msgspec.Struct, tag=True, frozen=True):
    """See engine.base.Slot.abandon_kv. No CallDone answers it."""

    policy: str


class PauseSteps(msgspec.Struct, tag=True, frozen=True):
    call: int


class ResumeSteps(msgspec.Struct, tag=True, frozen=True):
    call: int


class DigestWeights(msgspec.Struct, tag=True, frozen=True):
    call: int
    policy: str = ""


class KvFile(msgspec.Struct, frozen=True):
    """A file of the replica's process, by its number there. tokens: so many bytes of them come first; KV is behind them."""

    process: int
    number: int
    device: int
    inode: int
    size: int
    tokens: int


class GiveKv(msgspec.Struct, tag=True, frozen=True):
    """See engine.kv_copies. The engine writes into the file."""

    call: int
    file: KvFile
    salt: bytes
    policy: str
    first: int
    most: int
    kv_age_max: int | None


class TakeKv(msgspec.Struct, tag=True, frozen=True):
    call: int
    file: KvFile
    salt: bytes
    policy: str
    part: KvPiece
    session: str
    kept_s: float


Command = (
    Start
    | Generate
    | Abort
    | StageSnapshot
    | StageAhead
    | TensorsMade
    | DropStaged
    | Commit
    | Retain
    | EndPolicy
    | EndSession
    | AbandonKv
    | PauseSteps
    | ResumeSteps
    | DigestWeights
    | GiveKv
    | TakeKv
)


class Imported(msgspec.Struct, tag=True, frozen=True):
    """The first message: everything is imported."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: ModelInfo
    kv: KvForm


class Events(msgspec.Struct, tag=True, frozen=True):
    """All events of one step, in order."""

    events: list[tuple[str, GenerationEvent]]
    stats: EngineStats


class CallDone(msgspec.Struct, tag=True, frozen=True):
    """The end of a call: `error` if it failed, `timing` of a commit, `digest` of the weights, `kv` that was given, `kv_blocks`
    that are here.

    refused: the weights to be staged are at fault.
    """

    call: int
    error: str | None = None
    refused: bool = False
    timing: SwapTiming | None = None
    digest: str | None = None
    kv: KvPiece | None = None
    kv_blocks: int = 0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start; the process ends."""

    error: str


Reply = Imported | Ready | Events | CallDone | Failed

command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
