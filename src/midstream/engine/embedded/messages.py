"""What a replica process and its engine process say to each other, and how it is framed.

Frames are a little-endian uint32 length and that many bytes of MessagePack. Commands flow down, replies up; a call
number pairs a Done with its command. Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from midstream.config import EngineSettings
from midstream.types import EngineStats, GenerateRequest, GenerationEvent, ModelInfo, SwapTiming

HEADER = struct.Struct("<I")


class Start(msgspec.Struct, tag=True, frozen=True):
    model_dir: str
    settings: EngineSettings


class Generate(msgspec.Struct, tag=True, frozen=True):
    request: GenerateRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """index: one choice; None: the whole request."""

    request_id: str
    index: int | None = None


class StageSnapshot(msgspec.Struct, tag=True, frozen=True):
    call: int
    snapshot: str
    directory: str


class DropStaged(msgspec.Struct, tag=True, frozen=True):
    """What is staged or being staged is not wanted any more. Has no Done of its own."""


class Commit(msgspec.Struct, tag=True, frozen=True):
    call: int
    snapshot: str


class Pause(msgspec.Struct, tag=True, frozen=True):
    call: int


class Resume(msgspec.Struct, tag=True, frozen=True):
    call: int


class DigestWeights(msgspec.Struct, tag=True, frozen=True):
    call: int


Command = Start | Generate | Abort | StageSnapshot | DropStaged | Commit | Pause | Resume | DigestWeights


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: ModelInfo


class Events(msgspec.Struct, tag=True, frozen=True):
    """Everything one step had to report, in order."""

    events: list[tuple[str, GenerationEvent]]
    stats: EngineStats


class Done(msgspec.Struct, tag=True, frozen=True):
    """The end of a call: `error` when it failed, `timing` after a commit, `digest` of weights."""

    call: int
    error: str | None = None
    timing: SwapTiming | None = None
    digest: str | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start; the process ends."""

    error: str


Reply = Ready | Events | Done | Failed

_encoder = msgspec.msgpack.Encoder()
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: Command | Reply) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class Frames:
    """Cuts what arrives on a socket into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield body
