"""What an engine's server says of one choice, whatever its dialect: chunks of tokens, from an event stream. No I/O.

Always holds: what does not look as expected raises InvalidAnswer. A log-probability is never made up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.types import GenerateRequest, TopLogprob
from midstream.engine.servers.labels import KvSpans

#: In bytes. The routes of a long sequence take some 20 MB.
LINE_MAX = 1 << 28
#: Characters of an error that are shown.
MESSAGE_MAX = 1000


class InvalidAnswer(Exception):
    """The server's bytes are not what such a server sends. The message says how."""


class Token(msgspec.Struct, frozen=True, gc=False):
    """logprob: of the raw model, in nats. top: the best alternatives asked for, best first.

    sampling: the log-probability with which it was drawn, if the request asked for both. near_tie: as of a TokenRecord.
    """

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    sampling: float | None = None
    near_tie: int = 0


class RoutedPasses(msgspec.Struct, frozen=True, gc=False):
    """What the routers chose in `count` passes, from that over position `first` on. data: bytes of [passes, layers, experts per
    token], uint8 up to 256 experts, else little-endian uint16; filled up to words of 32 bits. Behind them the weights of the
    routers may follow, of the same shape, in little-endian float32."""

    first: int
    count: int
    data: bytes


class Chunk(msgspec.Struct, frozen=True):
    """The content of one message about a choice.

    finish: the server's reason. spans, with the last chunk: its tokens by weight version, as (version, start, end).
    routes, with the last chunk: `routed_experts` (routes.py). cached: prompt tokens with reused KV.
    error: a message for the user, after which nothing useful follows. not_finite: it says that a number of the model is not.
    done: nothing follows. kv: which weights computed the KV, each time the server says so: tokens before, and spans.
    masks, passes: of the tokens, if the request asked for them. version: of the server's weights when it wrote this.
    """

    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    spans: tuple[tuple[str, int, int], ...] | None = None
    routes: str | None = None
    cached: int | None = None
    error: str | None = None
    done: bool = False
    not_finite: bool = False
    kv: tuple[tuple[int, KvSpans], ...] = ()
    masks: tuple[bytes, ...] = ()
    passes: tuple[RoutedPasses, ...] = ()
    version: str | None = None


_ANYTHING = msgspec.json.Decoder(dict[str, Any])
DONE = Chunk(done=True)


def alternatives(request: GenerateRequest) -> int:
    """The number of alternatives per token in the answer to a request. The token's own log-probability is always there."""
    return request.top_logprobs if request.want_logprobs else 0


class EventReader:
    """Reads the chunks of one event stream, cut anywhere. read: of the data of one event, a chunk. Raises InvalidAnswer."""

    def __init__(self, read: Callable[[bytes], Chunk]) -> None:
        self._read = read
        # The parts of a line that is not complete, and their bytes.
        self._parts: list[bytes] = []
        self._held = 0

    def feed(self, data: bytes) -> list[Chunk]:
        """The chunks that these bytes complete. Raises InvalidAnswer, after which nothing may be fed."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts, self._held = [], 0
        if rest:
            self._parts.append(rest)
            self._held += len(rest)
            if self._held > LINE_MAX:
                raise InvalidAnswer(f"a line of more than {LINE_MAX} bytes")
        chunks = []
        for line in lines:
            if line.startswith(b"data:"):
                message = line[5:].strip()
                chunks.append(DONE if message == b"[DONE]" else self._read(message))
            elif line:
                _check_other(line)
        return chunks


def _check_other(line: bytes) -> None:
    """A line without data. Raises InvalidAnswer unless it is one of an event stream."""
    line = line.rstrip(b"\r")
    if line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
        raise InvalidAnswer(f"a line of the stream is no event: {excerpt(line)}")


def choice_seed(seed: int, choice: int, emitted: int) -> int:
    """A seed of 63 bits. It differs for every choice and number of emitted tokens, so that no random stream is used twice."""
    digest = hashlib.blake2b(f"{seed} {choice} {emitted}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def error_of(who: str, status: int, data: bytes) -> str:
    """The text of an answer with an error status, for the user. who: the engine."""
    text = error_text(data)
    return f"{who} answered {status}: {text}" if text else f"{who} answered {status} without a word"


def error_text(data: bytes) -> str:
    try:
        answer = _ANYTHING.decode(data)
    except NOT_JSON:
        return tidy(data.decode("utf-8", "replace"))
    error = answer.get("error", answer)
    text = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return tidy("" if text is None else str(text))


def tidy(message: str) -> str:
    """The message on one line of bounded length, with printable characters only."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message[: 4 * MESSAGE_MAX]).split())
    return line if len(line) <= MESSAGE_MAX else line[: MESSAGE_MAX - 1] + "…"


def excerpt(data: bytes) -> str:
    return ascii(data[:120].decode("utf-8", "replace"))
