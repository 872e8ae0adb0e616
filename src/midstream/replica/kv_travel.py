"""KV of a session that moved: its new home takes it from the one before, where that costs less than to compute it.

Owns: the messages between the two, and when a home asks. What a piece is, is in engine/kv_copies.py.
Always holds:
- The new home names tokens, salt and policy by itself. The old one makes salt and policy of the same session. A piece travels
  only while both look for that session's KV in the newest namespace, serve the same signal's snapshot, and had the same resets.
- A message is taken only if its digest is right, which is over question and answer. So it is whole, and answers this question.
- All asking takes at most `SHARE` of the time that computing takes. What has come by then is used, and the rest is computed.
- Each side has a bounded number of pieces in memory, each of them of bounded size.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from midstream.core.errors import InvalidRequest
from midstream.core.headers import HEADER_TOKEN
from midstream.engine.base import EngineDied
from midstream.engine.kv_copies import KvCopies, KvForm, KvPiece, KvPlace, KvRefused
from midstream.http.call import CallFailed, open_stream
from midstream.http.tls import tls_for
from midstream.replica.kv_budget import KvBudget, KvTurn, session_name

log = logging.getLogger(__name__)

PATH_KV = "/replica/kv"
#: Of the time that computing takes, what asking may take.
SHARE = 0.5
#: What takes less is not asked for, and nothing takes more. The old home has `FIRST_S` to say what computing takes.
LEAST_S, FIRST_S, MOST_S = 0.02, 0.25, 60.0
#: Of a connection; all asking has its own bound.
CONNECT_S = 1.0
#: Of a message. The engine copies one between two steps.
PIECE_BYTES, HEAD_BYTES_MAX = 2**23, 2**16
TAKING_MAX, GIVING_MAX = 2, 4
#: Of the occasions on which copying seems too slow, one in so many is taken to measure again.
RETRY = 32
_DIGEST, _SIZE = 32, 4
_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class KvHere(NamedTuple):
    """Where the next turn of a session finds cached KV in this engine. era, began: as Namespaces has them."""

    copies: KvCopies
    policy: str
    salt: bytes
    era: str
    began: str
    kv_age_max: int | None


class KvAsked(msgspec.Struct, frozen=True, kw_only=True):
    """isolation: the session's key of that name. policy: as in the header. most: blocks; 0: how many are there? tokens: as in
    KvPlace. once: never the same twice."""

    tenant: str
    key: str
    isolation: str
    policy: str
    era: str
    began: str
    form: KvForm
    tokens: bytes
    first: _Whole = 0
    most: _Whole = 0
    once: bytes = b""


class KvAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """prefill_tokens_s: what computing is like there; 0: not known."""

    part: KvPiece
    prefill_tokens_s: float


_asked = msgspec.msgpack.Decoder(KvAsked)
_answer = msgspec.msgpack.Decoder(KvAnswer)


class KvTravel:
    def __init__(self) -> None:
        self._token = ""
        self._key = b""
        self._taking = asyncio.Semaphore(TAKING_MAX)
        self._giving = asyncio.Semaphore(GIVING_MAX)
        # What each turn that asks has as its bound.
        self._asking: dict[asyncio.Timeout, KvTurn] = {}
        #: Tokens per second of what was asked for, later ones weighing more; 0: not known.
        self.tokens_s = 0.0
        self._refused = 0

    def __repr__(self) -> str:
        return f"KvTravel({self.tokens_s:.0f} tokens/s)"

    def speak(self, token: str) -> None:
        """token: what replicas ask for; "": nothing."""
        self._token = f"{HEADER_TOKEN}: {token}\r\n" if token else ""
        self._key = hashlib.sha256(token.encode()).digest()

    # -- the new home

    async def bring(
        self, turn: KvTurn, budget: KvBudget, isolation: str, look: Callable[[], KvHere | None]
    ) -> None:
        """Returns once the KV of a turn's session is here, or is not worth more time. The old home makes it raise nothing.

        isolation: the key of that name. look: says where the turn will look for its KV."""
        here, moved, session = look(), turn.moved, turn.session
        if here is None or session is None or moved is None or not moved.url:
            return
        size = here.copies.form.block_tokens
        tokens = array("i", turn.prompt[: len(turn.prompt) // size * size])
        rate = budget.moves.pace.prefill_tokens_s
        limit_s = min(MOST_S, SHARE * len(tokens) / rate) if rate else FIRST_S
        if not tokens or limit_s < LEAST_S or self._too_slow(len(tokens), limit_s):
            return
        whose = KvAsked(
            tenant=session[0],
            key=session[1],
            isolation=isolation,
            policy=turn.policy,
            era=here.era,
            began=here.began,
            form=here.copies.form,
            tokens=tokens.tobytes(),
        )
        own = (session_name(session), budget.account.silent_s(), rate)
        pull = _Pull(whose, moved.url, here, look, *own, began=asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(limit_s) as timer:
                self._asking[timer] = turn
                try:
                    async with self._taking:
                        await self._pull(pull, timer, turn.over)
                finally:
                    del self._asking[timer]
        except (TimeoutError, CallFailed, KvRefused, EngineDied, ValueError) as error:
            log.info("KV of a session that moved here stayed at %s: %s", moved.url, error or repr(error))
        took_s = asyncio.get_running_loop().time() - pull.asking
        if pull.missing and took_s > 0:
            measured = pull.came * size / took_s
            self.tokens_s = (self.tokens_s + measured) / 2 if self.tokens_s else measured

    def wake(self) -> None:
        """A turn that is over asks for nothing more."""
        for timer, turn in self._asking.items():
            if turn.over() and not timer.expired():
                timer.reschedule(0.0)

    def _too_slow(self, tokens: int, limit_s: float) -> bool:
        if not self.tokens_s or tokens / self.tokens_s <= limit_s:
            return False
        self._refused += 1
        return self._refused % RETRY != 0

    async def _pull(self, pull: _Pull, timer: asyncio.Timeout, over: Callable[[], bool]) -> None:
        """Raises CallFailed, KvRefused, EngineDied, ValueError."""
        form = pull.asked.form
        # Others came before.
        pull.asking = asyncio.get_running_loop().time()
        answer, _ = await self._ask(pull, 0, 0)
        there = answer.part.total
        if not there:
            return
        here = await self._take(pull, answer.part, b"")
        rate = pull.prefill_tokens_s or answer.prefill_tokens_s
        limit_s = min(MOST_S, SHARE * (there - here) * form.block_tokens / rate) if rate > 0 else 0.0
        if limit_s < LEAST_S or over():
            return
        timer.reschedule(pull.began + limit_s)
        pull.missing = there - here
        while here < there:
            answer, content = await self._ask(pull, here, max(1, PIECE_BYTES // form.block_bytes))
            before, here = here, await self._take(pull, answer.part, content)
            if here <= before:
                return
            pull.came += here - before

    async def _take(self, pull: _Pull, part: KvPiece, content: bytes) -> int:
        here = pull.here
        if pull.look() != here:
            raise KvRefused("the cache was reset, or other weights serve")
        place = KvPlace(here.salt, here.policy, pull.asked.tokens)
        return await here.copies.take(place, part, content, pull.session, pull.kept_s)

    async def _ask(self, pull: _Pull, first: int, most: int) -> tuple[KvAnswer, bytes]:
        """Raises CallFailed, ValueError."""
        form = pull.asked.form
        question = msgspec.msgpack.encode(
            msgspec.structs.replace(pull.asked, first=first, most=most, once=os.urandom(16))
        )
        data = await self._call(pull.url, question, HEAD_BYTES_MAX + most * form.block_bytes)
        answer, content = await asyncio.to_thread(opened, self._key, question, data)
        part = answer.part
        if (
            len(content) != part.count * form.block_bytes
            or part.count > most
            or (most and part.first != first)
        ):
            raise ValueError("this is no answer to that question")
        return answer, content

    async def _call(self, url: str, question: bytes, most: int) -> bytes:
        """most: bytes of the answer. Raises CallFailed."""
        came = bytearray()

        def take(data: bytes) -> None:
            if len(came) + len(data) > most:
                raise ValueError("an answer is too long")
            came.extend(data)

        tls = tls_for(url, None)
        stream = await open_stream(url, "POST", PATH_KV, question, take, CONNECT_S, self._token, tls=tls)
        try:
            reason = await stream.ended
        finally:
            stream.abort()
        if reason is not None or stream.status != 200:
            raise CallFailed(reason or f"status {stream.status}")
        return bytes(came)

    # -- the home before

    async def answer(
        self,
        body: bytes,
        find: Callable[[KvAsked], KvHere | None],
        prefill_tokens_s: float,
    ) -> bytes:
        """find: where the session's next turn would look here. Raises InvalidRequest, and what `find` raises."""
        try:
            asked = _asked.decode(body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"not a question about KV: {error}") from error
        part, content = KvPiece(), b""
        async with self._giving:
            here = find(asked)
            if here is not None and (here.era, here.copies.form) == (asked.era, asked.form):
                # Behind another beginning, older KV may be what a reset was to end.
                age_max = here.kv_age_max if here.began == asked.began else 0
                most = min(asked.most, max(1, PIECE_BYTES // asked.form.block_bytes))
                place = KvPlace(here.salt, here.policy, asked.tokens)
                try:
                    given = await here.copies.give(place, asked.first, most, age_max)
                    if find(asked) != here:
                        raise KvRefused("the cache was reset, or other weights serve")
                    part, content = given
                except (KvRefused, EngineDied) as error:
                    log.info("no KV was given: %s", error)
            head = msgspec.msgpack.encode(KvAnswer(part=part, prefill_tokens_s=prefill_tokens_s))
            return await asyncio.to_thread(sealed, self._key, body, head, content)


@dataclass(eq=False)
class _Pull:
    """One turn's. session: its name. prefill_tokens_s: what computing is like here; 0: not known. began: when it began to wait.
    asking: since when it asks. missing: blocks that were asked for. came: of these."""

    asked: KvAsked
    url: str
    here: KvHere
    look: Callable[[], KvHere | None]
    session: str
    kept_s: float
    prefill_tokens_s: float
    began: float
    asking: float = 0.0
    missing: int = 0
    came: int = 0


def sealed(key: bytes, question: bytes, head: bytes, content: bytes) -> bytes:
    """A digest of the question and of all that follows, the size of the head, the head, the content."""
    size = len(head).to_bytes(_SIZE, "little")
    return b"".join((_digest(key, question, size, head, content), size, head, content))


def opened(key: bytes, question: bytes, data: bytes) -> tuple[KvAnswer, bytes]:
    """Raises ValueError for all but what `sealed` made of an answer to this question."""
    whole = memoryview(data)
    if not hmac.compare_digest(_digest(key, question, whole[_DIGEST:]), data[:_DIGEST]):
        raise ValueError("the digest of an answer is wrong")
    begin = _DIGEST + _SIZE
    end = begin + int.from_bytes(whole[_DIGEST:begin], "little")
    try:
        return _answer.decode(whole[begin:end]), bytes(whole[end:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the head of an answer: {error}") from error


def _digest(key: bytes, question: bytes, *rest: bytes | memoryview) -> bytes:
    whole = hashlib.blake2b(key=key, digest_size=_DIGEST)
    for part in (len(question).to_bytes(8, "little"), question, *rest):
        whole.update(part)
    return whole.digest()
