"""What the KV cache of a vLLM server holds, and for whom, as midstream's scheduler says (midstream_vllm_kv.py).

Owns: the last answer, the sessions that are over and that the scheduler has to be told of, and the proof at each start: with
real requests, a session's blocks are held when its turn is over, found by its next turn, and given up at its end.
Always holds: the server is asked at most once in LOOK_S, and not at all while nothing begins or ends. A server that fails the
proof is used without the feature; then its capacity is known, if it says so, and what is used is computed from the requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence

import msgspec

from midstream.core.kv import KvStats
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.base import spread_ids
from midstream.engine.servers.chunks import InvalidAnswer
from midstream.engine.servers.control import CALL_S_MAX, ServerRefused
from midstream.engine.servers.engine import used_by
from midstream.engine.servers.scoring import ANSWER_S_MAX
from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import SCHEDULER, UNHELD
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.swap import Control
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import LOOK
from midstream.http.call import CallFailed

logger = logging.getLogger(__name__)

LOOK_S = 0.5
#: Tokens of the proof's prompt: more than a block of the usual sizes.
PROMPT = 300
#: While the proof runs. It ends before.
KEPT_S = 300.0


class NotHeld(Exception):
    """The server does not say what it holds, or does not hold it. The message says why."""


class _Unheld(msgspec.Struct, frozen=True):
    """why: the scheduler knows its cache, if it is empty."""

    why: str = ""


class SessionKv:
    """control: of the server that runs now. runs: whether it has requests. lacks: why it keeps no session's KV; "": it does."""

    def __init__(self, control: Callable[[], Control], runs: Callable[[], bool]) -> None:
        self._control = control
        self._runs = runs
        self._kv = KvStats()
        self._ended: list[str] = []
        self._moved = asyncio.Event()
        self.lacks = UNHELD

    async def begin(self, capacity: KvStats, server: VllmServer, sizes: tuple[int, int]) -> None:
        """A server has started. sizes: of the vocabulary and of the context. Raises CallFailed."""
        self._kv, self._ended, self.lacks = capacity, [], UNHELD
        if server.scheduler != SCHEDULER:
            return
        try:
            self._kv = await self._prove(server, sizes)
            self.lacks = ""
        except (NotHeld, ServerRefused) as error:
            logger.warning("this vLLM has no session_kv: %s", error)
            self.lacks = f"{UNHELD}: {error}"

    def stats(self, contexts: Iterable[int]) -> KvStats:
        """contexts: tokens of each request that is computed now."""
        return used_by(self._kv, contexts) if self.lacks else self._kv

    def asked(self, request: GenerateRequest) -> tuple[str, float, float] | None:
        """What a request says to the scheduler: its session, when the next turn is likely, and for how long to keep the KV."""
        if self.lacks or not request.session:
            return None
        return request.session, request.returns_s, request.kept_s

    def moved(self) -> None:
        """A request has begun, or is over."""
        self._moved.set()

    def end(self, session: str) -> None:
        if not self.lacks:
            self._ended.append(session)
            self._moved.set()

    async def keep_looking(self) -> None:
        """Until it is cancelled."""
        while not self.lacks:
            await self._moved.wait()
            # What is over is freed by then.
            await asyncio.sleep(LOOK_S)
            self._moved.clear()
            ended, self._ended = self._ended, []
            try:
                self._kv = await self._look(ended)
            except (CallFailed, ServerRefused, NotHeld) as error:
                logger.debug("vLLM's scheduler did not say what it holds: %s", error)
                self._ended = ended + self._ended
                self._moved.set()
            if self._runs():
                self._moved.set()

    async def _look(self, ended: Sequence[str] = ()) -> KvStats:
        """Raises NotHeld, CallFailed, ServerRefused."""
        said = await self._control().ask_workers(LOOK, {"ended": ended}, CALL_S_MAX, holds_up=False)
        try:
            if why := msgspec.convert(said[0], _Unheld).why:
                raise NotHeld(why)
            return msgspec.convert(said[0], KvStats)
        except (IndexError, msgspec.ValidationError) as error:
            raise NotHeld(f"it answered {str(said)[:120]}") from error

    async def _prove(self, server: VllmServer, sizes: tuple[int, int]) -> KvStats:
        """Raises NotHeld, CallFailed, ServerRefused."""
        before = await self._look()
        turn = _Turn(server, sizes)
        await turn.take()
        least = len(turn.prompt) // before.block_tokens if before.block_tokens else 0
        if not least:
            raise NotHeld(f"its blocks have {before.block_tokens} tokens, and the proof {len(turn.prompt)}")
        held = (await self._look()).held - before.held
        # The step behind the last token may have been computed.
        if held not in (least, (len(turn.prompt) + 1) // before.block_tokens):
            raise NotHeld(f"of {least} blocks of a session it holds {held}")
        if not await turn.take():
            raise NotHeld("it does not find what it holds")
        after = await self._look()
        if (after.held - before.held, after.again_tokens) != (held, before.again_tokens):
            raise NotHeld(f"behind a second turn it holds {after.held - before.held} blocks of {held}")
        over = await self._look([turn.session])
        if over.held != before.held:
            raise NotHeld("it holds what a session had that is over")
        return over


class _Turn:
    """Turns of one session with one prompt, which nobody sees."""

    def __init__(self, server: VllmServer, sizes: tuple[int, int]) -> None:
        vocab_size, context = sizes
        self._server = server
        self.session = secrets.token_hex(16)
        self.prompt = spread_ids(max(2, min(PROMPT, context - 1)), vocab_size, first=29)

    async def take(self) -> int:
        """How much of its prompt was cached. Raises NotHeld, CallFailed."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = GenerateRequest(
            request_id="held", prompt=self.prompt, sampling=sampling, reproducible=False
        )
        server, told = self._server, (self.session, 0.0, KEPT_S)
        name = server.served_name
        data = protocol.body(request, 0, model=name, salt=self.session, stream=False, session=told)
        answer = await server.ask(protocol.PATH, data, ANSWER_S_MAX, NotHeld)
        try:
            return protocol.read_answer(answer).cached or 0
        except InvalidAnswer as error:
            raise NotHeld(str(error)) from error
