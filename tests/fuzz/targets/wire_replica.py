"""A replica for targets: the production one, before an engine that says the same few tokens each time.

Always holds: nothing of an input is left for the next one. An exception that nobody expected is raised where the input is run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from midstream.core.served_names import ServedNames
from midstream.core.types import (
    BASE_SNAPSHOT,
    EngineStats,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    SwapTiming,
    TokenRecord,
    TopLogprob,
)
from midstream.engine.base import AtOnce, Engine
from midstream.http.http1 import ClientConnection
from midstream.http.message import Request
from midstream.replica.app import ReplicaApp
from midstream.replica.policy import Bounds
from midstream.replica.replica import Replica
from midstream.replica.service import Outside
from midstream.replica.swap.source import SnapshotSource
from midstream.replica.text.chat import TextModel
from midstream.replica.text.vocabulary import BYTE_ALPHABET
from targets.target import check

NAMES = ServedNames("accounts/a/models/m", "accounts/a/deployments/d")
TEMPLATE = Path(__file__).parents[2] / "replica" / "templates" / "qwen2.5.jinja"
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
#: The chat template's own system message is about half of it.
INFO = ModelInfo(
    max_model_len=1024,
    vocab_size=256 + len(MARKERS),
    moe_layers=1,
    top_k=2,
    num_experts=4,
    eos_token_ids=(257,),
    grammars=True,
)
#: Of each choice, unless its limit or an end token comes first.
TOKENS_MAX = 3
SESSION_IDLE_S = 60.0


def text_model() -> TextModel:
    tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_ALPHABET.items()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return TextModel(tokenizer, TEMPLATE.read_text(), {})


class SaysLittle(Engine):
    """Checks what it is asked for as it goes."""

    def __init__(self) -> None:
        #: Of the input that runs.
        self.asked: list[GenerateRequest] = []

    async def start(self) -> ModelInfo:
        return INFO

    async def close(self) -> None: ...

    async def generate(
        self, request: GenerateRequest, at_once: AtOnce | None = None
    ) -> AsyncIterator[GenerationEvent]:
        if not request.urgent:
            self.asked.append(request)
        size, limit = len(request.prompt), request.sampling.max_tokens
        check(size > 0 and size + limit <= INFO.max_model_len, "more than the context", size, limit)
        check(all(0 <= t < INFO.vocab_size for t in request.prompt), "no token", request.prompt)
        check(0 <= request.prompt_records <= size, "records of no token", request.prompt_records)
        for index in request.choices:
            records = range(size - request.prompt_records, size)
            told = tuple(self._record(request, request.prompt[at], first=at == 0) for at in records)
            yield GenerationEvent(
                index=index,
                cached_tokens=0,
                queued_s=0.0,
                prompt=told if request.prompt_records else None,
                kv_snapshots=((BASE_SNAPSHOT, 0, size),) if request.want_kv_snapshots else None,
                finish="length" if limit == 0 else None,
            )
            for done in range(min(limit, TOKENS_MAX)):
                token = 65 + done
                ends = token in request.sampling.stop_token_ids
                last = done + 1 == min(limit, TOKENS_MAX)
                yield GenerationEvent(
                    index=index,
                    tokens=(self._record(request, token),),
                    finish="stop" if ends else "length" if last else None,
                )
                if ends:
                    break

    @staticmethod
    def _record(request: GenerateRequest, token: int, *, first: bool = False) -> TokenRecord:
        return TokenRecord(
            token_id=token,
            logprob=-1.0,
            sampling_logprob=-0.5,
            snapshot=BASE_SNAPSHOT,
            route=bytes([1, 2]) if request.want_routes and not first else None,
            top_logprobs=() if first else (TopLogprob(66, -0.5),) * request.top_logprobs,
        )

    async def stage(self, snapshot: str, directory: Path) -> None: ...

    async def commit(self, snapshot: str) -> SwapTiming:
        raise NotImplementedError

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()


class AnyGrammar:
    """Stands for the child that compiles grammars, which has a target of its own."""

    def of_request(self, leave: Any) -> Any:
        return lambda grammar, begun: None

    def close(self) -> None: ...


class Client:
    """Keeps what is written."""

    closes_after_response = False
    writable = True

    def __init__(self) -> None:
        self.written = b""
        self.done = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written += data

    def finish(self) -> None:
        self.done.set()

    def reset(self) -> None:
        raise AssertionError("a response is broken off")


class Answer(NamedTuple):
    """body: of a stream, all events."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def streamed(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")


class Failures(logging.Handler):
    """The exceptions behind answers that say no more than 500."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.raised: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.raised.append(record.exc_info[1])


class WireReplica:
    """From its first use on, until `close`."""

    def __init__(self, name: str = "r0", loop: asyncio.AbstractEventLoop | None = None) -> None:
        """loop: one that its caller closes."""
        self._loop = loop or asyncio.new_event_loop()
        self._own_loop = loop is None
        self._now = 0.0
        self.engine = SaysLittle()
        with tempfile.TemporaryDirectory() as base:
            self.replica = Replica(
                name=name,
                engine=self.engine,
                text=text_model(),
                source=cast(SnapshotSource, _NoFiles()),
                names=NAMES,
                base_directory=Path(base),
                bounds=Bounds(session_idle_s=SESSION_IDLE_S, turns_bytes_max=2**20),
                outside=Outside(monotonic=lambda: self._now, random_seed=lambda: 7),
            )
        # The child would be slow, and is the target `grammars`.
        self.replica._kept = dataclasses.replace(self.replica._kept, grammars=cast(Any, AnyGrammar()))
        self._app = ReplicaApp(self.replica)
        self._failures = Failures()
        self._log = logging.getLogger("midstream.replica.exchange")
        self._log.addHandler(self._failures)
        self._loop.run_until_complete(self.replica.start())

    def ask(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """The answer of a replica that knows of no other request."""
        return self._loop.run_until_complete(self.answer(path, body, headers))

    async def answer(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """As `ask`, within its loop."""
        self.engine.asked.clear()
        self._failures.raised.clear()
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        request = Request(b"POST", path.encode(), given, dict(given), body, False, True)
        client = Client()
        self._app.exchange(request, cast(ClientConnection, client)).start()
        await client.done.wait()
        # What was written for the loop's next turn.
        await asyncio.sleep(0)
        for failure in self._failures.raised:
            raise failure
        return answer_of(client.written)

    def forget(self) -> None:
        """Sessions, turns and stored responses of the last input."""
        self._now += 2 * SESSION_IDLE_S
        self.replica.sessions.sweep()
        stored = self.replica.responses
        for tenant, response in [*stored._held]:
            stored.delete(tenant, response)

    def close(self) -> None:
        self._log.removeHandler(self._failures)
        self._loop.run_until_complete(self.replica.close())
        if self._own_loop:
            self._loop.close()


class _NoFiles:
    chains = None

    async def prefetch(self, hint: Any) -> None: ...


def answer_of(written: bytes) -> Answer:
    head, _, body = written.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if "content-length" in headers:
        check(len(body) == int(headers["content-length"]), "a body of another length", headers)
        return Answer(int(line.split()[1]), headers, body)
    whole = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        if int(size, 16) == 0:
            check(rest == b"\r\n", "bytes behind a response", rest)
            return Answer(int(line.split()[1]), headers, whole)
        whole, body = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
