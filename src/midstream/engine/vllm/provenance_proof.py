"""The proof, at every start, that a vLLM server says which weights computed KV, and bounds the age of cached KV.

midstream's scheduler says it (worker_extension/midstream_vllm_provenance.py). Here the weights get another name. A stream that
crosses this must say so with its first token behind it. A prompt that was cached before must be found, and said to be of
the first name. With a bound on its age it must not be found.

With policies all of this must hold for an adapter, when the name says that all weights were switched, and when it says that
the adapter alone was. For the base, only the first may be said.

Always holds: a server that fails is used without the feature, and the reason is on its card. Each name is an epoch.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.base import spread_ids
from midstream.engine.servers.chunks import InvalidAnswer
from midstream.engine.servers.engine import CONNECT_S_MAX
from midstream.engine.servers.labels import Epochs, KvSpans
from midstream.engine.servers.scoring import ANSWER_S_MAX
from midstream.engine.servers.switching import adopt
from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import SCHEDULER, UNTOLD
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.swap import Control
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import ANY_AGE
from midstream.http.call import CallFailed, ResponseStream, open_stream

logger = logging.getLogger(__name__)

#: Tokens of the prompt: more than two blocks of the usual sizes. Tokens of a stream: so many that it crosses a pause.
PROMPT, STREAM = 300, 400
#: Streams that are begun until one crosses. A short one may end before.
TRIES = 3


class NotTold(Exception):
    """The server does not say it. The message says why."""


#: Gives the weights another name, in a pause.
Rename = Callable[[], Awaitable[None]]


async def prove_provenance(
    server: VllmServer,
    control: Control,
    epochs: Epochs,
    sizes: tuple[int, int],
    adapter: tuple[str, str] | None = None,
) -> str:
    """Why it is unknown which weights computed KV; "" if the server says so. sizes: of the vocabulary and of the context.

    adapter: the policy and the name of one that the server has, if it serves policies. Raises CallFailed, ServerRefused.
    """
    if server.scheduler != SCHEDULER:
        return UNTOLD
    policy, name = adapter or ("", "")
    base, other = (_Asking(server, model, epochs.began, sizes) for model in (server.served_name, name))

    async def rename_all() -> None:
        await _name(control, epochs.next_version(epochs.snapshot), lambda: epochs.begin(epochs.snapshot))
        base.version = other.version = epochs.server.switches

    async def rename_one() -> None:
        await _name(control, epochs.next_of(policy), lambda: epochs.switched(policy))
        other.version = epochs.server.switches

    try:
        await _prove(base, rename_all)
        if adapter is not None:
            await _prove(other, rename_all)
            base.begin_anew()
            await base.once()
            await _prove(other, rename_one)
            cached, _ = await base.once()
            of_base = (cached, ((base.version, 0),))
            _expect("the base, whose weights are the same", await base.once(age_max=0), of_base)
    except NotTold as error:
        logger.warning("this vLLM has no kv_provenance: %s", error)
        return f"{UNTOLD}: {error}"
    return ""


async def _prove(asking: _Asking, rename: Rename) -> None:
    """Raises NotTold, CallFailed, ServerRefused."""
    asking.begin_anew()
    now = asking.version
    _expect("a new prompt", await asking.once(), (0, ((now, 0),)))
    await _prove_crossing(asking, rename)
    cached, told = await asking.once()
    later = asking.version
    kv: KvSpans = ((now, 0), (later, cached)) if cached else ((later, 0),)
    _expect(f"{cached} cached tokens", (cached, told), (cached, kv))
    _expect("cached tokens that are too old", await asking.once(age_max=0), (0, ((later, 0),)))


async def _prove_crossing(asking: _Asking, rename: Rename) -> None:
    """Raises NotTold, CallFailed, ServerRefused."""
    for _ in range(TRIES):
        before = asking.version
        stream = await asking.begin()
        try:
            await stream.until_told(1)
            await rename()
            await stream.until_told(2)
        finally:
            stream.close()
        now = asking.version
        _expect("a stream's first token", stream.told[:1], [(0, ((before, 0),))])
        if len(stream.told) > 1:
            count = stream.told[1][0]
            # The pass that gave this token computed the position before it.
            start = asking.of_stream + count - 1
            _expect("a stream that crossed", stream.told[1:2], [(count, ((before, 0), (now, start)))])
            return
    raise NotTold("no stream ran for long enough to cross a pause")


async def _name(control: Control, version: str, begun: Callable[[], None]) -> None:
    await control.pause()
    await adopt(control, version, begun)


def _expect(what: str, found: object, expected: object) -> None:
    """Raises NotTold."""
    if found != expected:
        raise NotTold(f"of {what} it said {found}, not {expected}")


class _Asking:
    """Requests whose tokens nobody sees. model: its name at the server. version: the one that its weights began with."""

    def __init__(self, server: VllmServer, model: str, version: int, sizes: tuple[int, int]) -> None:
        vocab_size, context = sizes
        self._server, self._model = server, model
        self.version = version
        self.begin_anew()
        self._prompt = spread_ids(max(2, min(PROMPT, context - 1)), vocab_size, first=17)
        #: Tokens before the first one of a stream.
        self.of_stream = 2
        self._stream_tokens = max(1, min(STREAM, context - self.of_stream))

    def begin_anew(self) -> None:
        """Nothing is cached."""
        self._salt = secrets.token_hex(16)

    async def once(self, age_max: int = ANY_AGE) -> tuple[int, KvSpans]:
        """How much of the prompt was cached, and what computed it. Raises NotTold, CallFailed."""
        data = self._body(self._prompt, 1, self._salt, age_max, stream=False)
        answer = await self._server.ask(protocol.PATH, data, ANSWER_S_MAX, NotTold)
        try:
            chunk = protocol.read_answer(answer, kv=True)
        except InvalidAnswer as error:
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
        return protocol.body(request, 0, model=self._model, salt=salt, stream=stream, kv=(1, age_max))


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
