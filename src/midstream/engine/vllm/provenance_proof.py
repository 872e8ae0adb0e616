"""The proof, at every start, that a vLLM server says which weights computed KV, and bounds the age of cached KV.

midstream's scheduler says it (worker_extension/midstream_vllm_provenance.py). Here the weights get another name for a moment. A
stream that crosses this must be told so with its first token behind it. A prompt that was cached before must be found, and said
to be of the first name. With a bound on its age it must not be found.

Always holds: a server that fails is used without the feature, and the reason is on its card. The weights have their name again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import SCHEDULER, UNTOLD
from midstream.engine.vllm.labels import Epochs, KvSpans
from midstream.engine.vllm.scoring import ANSWER_S_MAX
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.swap import Control
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import ANY_AGE
from midstream.http.call import CallFailed, ResponseStream, call, open_stream

logger = logging.getLogger(__name__)

#: Tokens of the prompt: more than two blocks of the usual sizes. Tokens of a stream: so many that it crosses a pause.
PROMPT, STREAM = 300, 400
#: Streams that are begun until one crosses. A short one may end before.
TRIES = 3
CONNECT_S_MAX = 30.0


class NotTold(Exception):
    """The server does not say it. The message says why."""


async def prove_provenance(
    server: VllmServer, control: Control, epochs: Epochs, sizes: tuple[int, int]
) -> str:
    """Why it is unknown which weights computed KV; "" if the server says so. sizes: of the vocabulary and of the context.

    Raises CallFailed, VllmRefused.
    """
    if server.scheduler != SCHEDULER:
        return UNTOLD
    asking = _Asking(server, sizes)
    now, other = epochs.now, epochs.now + 1
    try:
        _expect("a new prompt", await asking.once(), (0, ((now, 0),)))
        try:
            if await _prove_crossing(asking, control, epochs) == now:
                await _name(control, f"{other}:proof")
            cached, told = await asking.once()
            kv: KvSpans = ((now, 0), (other, cached)) if cached else ((other, 0),)
            _expect(f"{cached} cached tokens", (cached, told), (cached, kv))
            _expect("cached tokens that are too old", await asking.once(age_max=0), (0, ((other, 0),)))
        finally:
            await _name(control, epochs.serving_version)
    except NotTold as error:
        logger.warning("this vLLM has no kv_provenance: %s", error)
        return f"{UNTOLD}: {error}"
    return ""


async def _prove_crossing(asking: _Asking, control: Control, epochs: Epochs) -> int:
    """Which epoch the weights are of behind it. Raises NotTold, CallFailed, VllmRefused."""
    now = epochs.now
    for _ in range(TRIES):
        before, now = now, 2 * epochs.now + 1 - now
        stream = await asking.begin()
        try:
            await stream.until_told(1)
            await _name(control, f"{now}:proof")
            await stream.until_told(2)
        finally:
            stream.close()
        _expect("a stream's first token", stream.told[:1], [(0, ((before, 0),))])
        if len(stream.told) > 1:
            count = stream.told[1][0]
            # The pass that gave this token computed the position before it.
            start = asking.of_stream + count - 1
            _expect("a stream that crossed", stream.told[1:2], [(count, ((before, 0), (now, start)))])
            return now
    raise NotTold("no stream ran for long enough to cross a pause")


async def _name(control: Control, version: str) -> None:
    await control.pause()
    await control.set_version(version)
    await control.resume()


def _expect(what: str, found: object, expected: object) -> None:
    """Raises NotTold."""
    if found != expected:
        raise NotTold(f"of {what} it said {found}, not {expected}")


class _Asking:
    """Requests whose tokens nobody sees."""

    def __init__(self, server: VllmServer, sizes: tuple[int, int]) -> None:
        vocab_size, context = sizes
        self._server = server
        self._salt = secrets.token_hex(16)
        size = max(2, min(PROMPT, context - 1))
        self._prompt = tuple((i * 7919 + 17) % vocab_size for i in range(size))
        #: Tokens before the first one of a stream.
        self.of_stream = 2
        self._stream_tokens = max(1, min(STREAM, context - self.of_stream))

    async def once(self, age_max: int = ANY_AGE) -> tuple[int, KvSpans]:
        """How much of the prompt was cached, and what computed it. Raises NotTold, CallFailed."""
        data = self._body(self._prompt, 1, self._salt, age_max, stream=False)
        server = self._server
        answer = await call(server.url, "POST", protocol.PATH, data, ANSWER_S_MAX, server.headers)
        if answer.status != 200:
            raise NotTold(protocol.error_of(answer.status, answer.body))
        try:
            chunk = protocol.read_answer(answer.body, kv=True)
        except protocol.InvalidAnswer as error:
            raise NotTold(str(error)) from error
        if [count for count, _ in chunk.kv] != [0]:
            raise NotTold(f"it said {list(chunk.kv)} of the KV of a token")
        return chunk.cached or 0, chunk.kv[0][1]

    async def begin(self) -> _Stream:
        """Raises CallFailed."""
        prompt = self._prompt[: self.of_stream]
        data = self._body(prompt, self._stream_tokens, secrets.token_hex(16), ANY_AGE, stream=True)
        stream, server = _Stream(), self._server
        stream.response = await open_stream(
            server.url, "POST", protocol.PATH, data, stream.take, CONNECT_S_MAX, server.headers
        )
        return stream

    def _body(self, prompt: tuple[int, ...], tokens: int, salt: str, age_max: int, *, stream: bool) -> bytes:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        request = GenerateRequest(request_id="kv", prompt=prompt, sampling=sampling, reproducible=False)
        name = self._server.served_name
        return protocol.body(request, 0, model=name, salt=salt, stream=stream, kv=(1, age_max))


class _Stream:
    """told: what it was told of KV so far."""

    response: ResponseStream

    def __init__(self) -> None:
        self.told: list[tuple[int, KvSpans]] = []
        self._reader = protocol.ChunkReader(kv=True)
        self._moved = asyncio.Event()

    def take(self, data: bytes) -> None:
        # An exception ends the response, and an error has no event in it.
        for chunk in self._reader.feed(data):
            self.told += chunk.kv
        self._moved.set()

    async def until_told(self, times: int) -> None:
        """Or until it has ended. Raises CallFailed."""
        ended = self.response.ended
        ended.add_done_callback(lambda _: self._moved.set())
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                while len(self.told) < times and not ended.done():
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError as error:
            raise CallFailed("vLLM did not go on with a stream") from error

    def close(self) -> None:
        self.response.abort()
