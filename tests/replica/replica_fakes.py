"""Fakes at the replica's ports (engine, snapshot source) and a real HTTP server around them."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
from openapi_answers import CheckedClient
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from midstream.core.errors import SnapshotCorrupt, SnapshotError
from midstream.core.served_names import ServedNames
from midstream.core.types import (
    BASE_SNAPSHOT,
    NEAR_ROUTER,
    Content,
    Desired,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerationEvent,
    Hint,
    ModelInfo,
    SnapshotFiles,
    SwapTiming,
    TokenRecord,
    TopLogprob,
)
from midstream.engine.base import AtOnce, Engine, EngineDied, StagingFailed, StreamLost
from midstream.replica.policy import Bounds
from midstream.replica.replica import Replica
from midstream.replica.server import ReplicaServer
from midstream.replica.service import Outside
from midstream.replica.swap.source import SnapshotSource
from midstream.replica.text.chat import TextModel
from midstream.snapshots.arc2.files import Making

MODEL = "accounts/local/models/tiny"
DEPLOYMENT = "accounts/local/deployments/default"
#: How long a test waits for a state, in seconds.
UNTIL_S = 120.0
# A merged token and two special ones; below 256, token i is byte i.
HE, IM_START, IM_END = 256, 257, 258
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ raise_exception('no tools here') }}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def byte_tokenizer() -> Tokenizer:
    from midstream.replica.text.vocabulary import BYTE_ALPHABET

    vocab = dict(BYTE_ALPHABET.items()) | {"he": HE}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def write_tokenizer(directory: Path) -> Path:
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def ids(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text).ids)


#: Of each prompt token.
RANK = 77


def mask_at(position: int, token: int) -> bytes:
    """Of the token and the next one at odd positions, and of the token alone at others."""
    return b"\2" + struct.pack("<HH", token, token + 1) if position % 2 else b"\0"


def router_weights_at(position: int) -> bytes:
    return struct.pack("<2f", position + 0.25, 0.5)


def ascending(entry: dict[str, Any]) -> bytes:
    """The route of a token's entry, of one layer, as a record file has it where no router weights follow its order."""
    dtype = np.dtype(entry.get("routing_matrix_dtype", "uint8"))
    route = base64.b64decode(entry.get("routing_matrix", ""))
    return np.sort(np.frombuffer(route, dtype)).tobytes()


def record(
    token: int, position: int, request: GenerateRequest, snapshot: str, *, prompt: bool
) -> TokenRecord:
    """Numbers that a test can recognise: logprob -position, sampling_logprob half of it, route [position, token], a near
    tie at each seventh position."""
    first = prompt and position == 0
    return TokenRecord(
        token_id=token,
        logprob=-float(position),
        sampling_logprob=None if prompt else -position / 2,
        snapshot=snapshot,
        route=bytes([position % 256, token % 256]) if request.want_routes and not first else None,
        top_logprobs=()
        if first
        else tuple(TopLogprob(65 + i, -0.5 - i) for i in range(request.top_logprobs)),
        near_tie=NEAR_ROUTER if position % 7 == 6 else 0,
        rank=RANK if prompt and not first else 0,
        mask=mask_at(position, token) if request.want_masks and not prompt else None,
        router_weights=router_weights_at(position) if request.want_router_weights and not first else None,
    )


class FakeEngine(Engine):
    """Says `reply` over and over. `allowed` bounds the tokens of each choice until `allow` raises it."""

    proves_staged = True

    def __init__(
        self, reply: str = "hello ", *, moe: bool = True, experts: int = 8, allowed: int = 10_000
    ) -> None:
        self.info = ModelInfo(
            max_model_len=128,
            vocab_size=259,
            moe_layers=1 if moe else 0,
            top_k=2,
            num_experts=experts if moe else 0,
            eos_token_ids=(IM_END,),
        )
        self.reply: tuple[int, ...] = ids(reply)
        self.serving = BASE_SNAPSHOT
        # When asked to.
        self.tells_kv = False
        # Told with a token, by its number.
        self.kv_with: dict[int, tuple[tuple[str, int, int], ...]] = {}
        #: Told beside it.
        self.renamed_with: dict[int, tuple[tuple[str, str], ...]] = {}
        self.staged: str | None = None
        #: As it was when all files were proved.
        self.ahead_at_stage: tuple[str, ...] | None = None
        #: The tensors that were named of what is staged ahead; None if nothing is.
        self.ahead: tuple[str, ...] | None = None
        self.calls: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.started_streams = asyncio.Event()
        self.any_aborted = asyncio.Event()
        self.cached_tokens = 3
        self.fail_after: int | None = None
        self.dead_end_after: int | None = None
        #: What the files of what serves are, and of each snapshot that was switched to.
        self.files = self._announced = ""
        self.files_of: dict[str, str] = {}
        self.die_after: int | None = None
        self.death: EngineDied | StreamLost = EngineDied("killed by the test")
        self.stop_short = False
        self.starts = 0
        # Of a choice that says something of its own.
        self.replies: dict[int, tuple[int, ...]] = {}
        # Choices that are over, by themselves or by end_choice.
        self.ended: set[tuple[str, int]] = set()
        self.told_to_abort: set[str] = set()
        self.choices_to_abort: set[tuple[str, int]] = set()
        self.end_choice_calls: list[tuple[str, int]] = []
        # Tokens generated of one choice.
        self.made_of: dict[tuple[str, int], int] = {}
        # Loop ticks that each takes.
        self.stage_ticks = self.commit_ticks = 0
        # What the engine has switched to.
        self.switches: list[str] = []
        # What it was told to keep besides what serves, each time; and what it holds, by what runs, too.
        self.retained: list[tuple[str, ...]] = []
        #: How often it was told that nobody finds what is cached.
        self.abandoned = 0
        self.holds = {BASE_SNAPSHOT}
        self.running: list[str] = []
        self.canaries: list[GenerateRequest] = []
        # A snapshot's log-probability at each check, the last one for good.
        self.canary: dict[str, list[float]] = {}
        # Of a snapshot; else a digest of its name.
        self.digests: dict[str, str | None] = {}
        self.digest_gate = asyncio.Event()
        self.digest_gate.set()
        self.check_gate = asyncio.Event()
        self.check_gate.set()
        self.closed = False
        self.commit_gate = asyncio.Event()
        self.commit_gate.set()
        self.committing = asyncio.Event()
        self.stage_gate = asyncio.Event()
        self.stage_gate.set()
        self.refuse_stage = False
        self.allowed = allowed
        # Request id to tokens generated of each choice.
        self.made: dict[str, int] = {}
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self._moved = asyncio.Event()
        self._death: Callable[[str], Awaitable[None]] | None = None

    def allow(self, tokens: int) -> None:
        self.allowed = tokens
        self._announce()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._moved.wait()

    def _announce(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def start(self) -> ModelInfo:
        self.starts += 1
        await self.start_gate.wait()
        self.closed = False
        self.serving = BASE_SNAPSHOT
        self.retained, self.holds = [], {BASE_SNAPSHOT}
        return self.info

    def retain(self, snapshots: Collection[str]) -> None:
        self.retained.append(tuple(snapshots))
        self._free()

    def abandon_kv(self) -> None:
        self.abandoned += 1

    def _free(self) -> None:
        self.holds &= {self.serving, *self.running, *(self.retained[-1] if self.retained else ())}

    async def close(self) -> None:
        """Ends a commit under way too."""
        self.calls.append("close")
        self.closed = True
        self.commit_gate.set()
        self.check_gate.set()

    def end_choice(self, request_id: str, index: int) -> None:
        self.end_choice_calls.append((request_id, index))
        self.ended.add((request_id, index))

    def abort(self, request_id: str, index: int | None = None) -> None:
        if index is None:
            self.told_to_abort.add(request_id)
        else:
            self.choices_to_abort.add((request_id, index))
        self._announce()

    async def generate(
        self, request: GenerateRequest, at_once: AtOnce | None = None
    ) -> AsyncIterator[GenerationEvent]:
        if request.urgent:
            yield await self._score(request)
            return
        self.requests.append(request)
        if request.snapshot is not None and request.snapshot not in self.holds:
            yield GenerationEvent(error=f"{request.snapshot} is not loaded")
            return
        finished, fixed = False, [] if request.snapshot is None else [request.snapshot]
        self.running += fixed
        try:
            async for event in self._events(request):
                yield event
            finished = True
        finally:
            for snapshot in fixed:
                self.running.remove(snapshot)
            self._free()
            if not finished:
                self.aborted.append(request.request_id)
                self.any_aborted.set()

    def _files_for(self, snapshot: str | None) -> str:
        """None: of what serves."""
        return self.files if snapshot in (None, self.serving) else self.files_of.get(snapshot or "", "")

    async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        size, limit = len(request.prompt), request.sampling.max_tokens
        tells_kv = request.want_kv_snapshots and self.tells_kv
        for index in request.choices:
            known = size + len(request.emitted_of(index))
            yield GenerationEvent(
                index=index,
                cached_tokens=self.cached_tokens,
                kv_snapshots=((request.snapshot or self.serving, 0, known),) if tells_kv else None,
                kv_files=self._files_for(request.snapshot) if tells_kv else "",
                queued_s=0.25,
                prompt=tuple(
                    record(request.prompt[p], p, request, request.snapshot or self.serving, prompt=True)
                    for p in range(size - request.prompt_records, size)
                )
                if request.prompt_records
                else None,
                finish="length" if limit == 0 else None,
            )
        self.started_streams.set()
        for done in range(limit):
            await asyncio.sleep(0)
            async for index in self._held_back(request, done):
                yield GenerationEvent(index=index, finish="abort")
            if self._told_to_end(request):
                return
            if done == self.fail_after:
                yield GenerationEvent(error="the step failed: out of pages")
                return
            if done == self.dead_end_after:
                for index in request.choices:
                    yield GenerationEvent(index=index, finish="dead_end")
                return
            if done == self.die_after:
                raise self.death
            if self.stop_short and done == 1:
                return
            for index in request.choices:
                if (request.request_id, index) in self.ended or done < len(request.emitted_of(index)):
                    continue
                reply = self.replies.get(index, self.reply)
                token = reply[done % len(reply)]
                stops = token in request.sampling.stop_token_ids
                finish: FinishReason | None = "stop" if stops else "length" if done == limit - 1 else None
                self.made_of[request.request_id, index] = done + 1
                if finish is not None:
                    self.ended.add((request.request_id, index))
                made = record(token, size + done, request, request.snapshot or self.serving, prompt=False)
                spans = self.kv_with.get(done) if request.want_kv_snapshots else None
                renamed = self.renamed_with.get(done, ())
                yield GenerationEvent(
                    index=index, tokens=(made,), finish=finish, kv_snapshots=spans, renamed=renamed
                )
            self.made[request.request_id] = done + 1
            self._announce()
            if all((request.request_id, index) in self.ended for index in request.choices):
                return

    async def _held_back(self, request: GenerateRequest, done: int) -> AsyncIterator[int]:
        """Until another token may come; each choice that is told to end meanwhile."""
        while done >= self.allowed and not self._told_to_end(request):
            for index in self._choices_told(request):
                yield index
            await self.until(
                lambda: (
                    done < self.allowed
                    or self._told_to_end(request)
                    or bool(self._choices_told(request, peek=True))
                )
            )
        for index in request.choices if self._told_to_end(request) else ():
            if (request.request_id, index) not in self.ended:
                yield index

    def _choices_told(self, request: GenerateRequest, *, peek: bool = False) -> list[int]:
        """Choices that were told to end and did not yet."""
        found = [i for i in request.choices if (request.request_id, i) in self.choices_to_abort - self.ended]
        if not peek:
            self.ended.update((request.request_id, index) for index in found)
        return found

    def _told_to_end(self, request: GenerateRequest) -> bool:
        return request.request_id in self.told_to_abort

    async def _score(self, request: GenerateRequest) -> GenerationEvent:
        self.canaries.append(request)
        await self.check_gate.wait()
        if self.closed:
            raise EngineDied("closed")
        values = self.canary.get(self.serving, [-1.0])
        logprob = values.pop(0) if len(values) > 1 else values[0]
        records = tuple(TokenRecord(token, logprob, None, self.serving) for token in request.prompt)
        return GenerationEvent(prompt=records, finish="length")

    async def weights_digest(self) -> str | None:
        await self.digest_gate.wait()
        return self.digests.get(self.serving, f"digest of {self.serving}")

    async def stage(self, snapshot: str, directory: Path) -> None:
        self.calls.append(f"stage {snapshot} {directory.name}")
        self.ahead_at_stage = self.ahead
        await self.stage_gate.wait()
        for _ in range(self.stage_ticks):
            await asyncio.sleep(0)
        if self.refuse_stage:
            raise StagingFailed(f"{snapshot}: tensor a.weight has shape [2], expected [3]")
        self.staged = snapshot

    def stage_ahead(self, snapshot: str, directory: Path) -> None:
        self.calls.append(f"stage {snapshot} ahead from {directory.name}")
        self.ahead = ()

    def tensors_made(self, tensors: Sequence[str]) -> None:
        assert self.ahead is not None
        self.ahead = (*self.ahead, *tensors)

    def drop_staged(self) -> None:
        self.staged = self.ahead = None

    def announce(self, files: str, overwritten: Sequence[tuple[str, str]]) -> None:
        self.calls += [f"overwritten {name} {label}" for name, label in overwritten]
        self._announced = files

    async def commit(self, snapshot: str) -> SwapTiming:
        self.calls.append(f"commit {snapshot}")
        self.committing.set()
        for _ in range(self.commit_ticks):
            await asyncio.sleep(0)
        await self.commit_gate.wait()
        if self.closed:
            raise EngineDied("closed")
        if self.staged != snapshot:
            raise StagingFailed(f"{snapshot} is not staged")
        self.serving, self.staged, self.files = snapshot, None, self._announced
        self.files_of[snapshot] = self.files
        self.holds.add(snapshot)
        self._free()
        self.switches.append(snapshot)
        return SwapTiming(snapshot=snapshot, pause_ms=1.5, streams_crossed=2)

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    def stats(self) -> EngineStats:
        return EngineStats(steps=len(self.requests))

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        self._death = callback

    async def die(self) -> None:
        assert self._death is not None
        await self._death("killed by the test")


class FakeSource(SnapshotSource):
    """Fetch waits while `blocked` names the snapshot; verify fails for a snapshot in `corrupt`. `ticks` of the loop pass
    in every method."""

    def __init__(self) -> None:
        #: Its own, and their whole files.
        self.chains = self.whole_files = cast(Any, self)
        self.calls: list[str] = []
        self.corrupt: set[str] = set()
        # Somebody wrote to the files after they were verified.
        self.written_to = False
        #: Raised by `verify`.
        self.fails: Exception | None = None
        #: Snapshots whose files are here, and damaged. To be fetched once more, they have to be found so.
        self.rotten: set[str] = set()
        self._found: str | None = None
        #: Tensors that a rebuild makes, and what it then raises.
        self.makes: tuple[str, ...] = ()
        self.spoilt: SnapshotError | None = None
        self.blocked: set[str] = set()
        self.met: tuple[str, ...] = ()
        self.keeping: SnapshotError | None = None
        self.ticks = 0
        self.fetching = asyncio.Event()
        self.released = asyncio.Event()

    def of_policy(self, policy: str) -> SnapshotSource:
        return self

    async def blames_itself(self, path: Path) -> bool:
        return self._found is not None

    async def fetch(
        self, desired: Desired, *, refetch: bool = False, making: Making | None = None
    ) -> Path | None:
        self.calls.append(f"fetch {desired.snapshot}{' anew' if refetch else ''}")
        self._found = desired.snapshot if desired.snapshot in self.rotten else None
        self.rotten.discard(desired.snapshot)
        self.fetching.set()
        if desired.snapshot in self.blocked:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.calls.append(f"cancelled {desired.snapshot}")
                raise
        await self._pass()
        here = self._found is not None or not desired.compression
        return Path("/cache") / desired.snapshot if here else None

    async def rebuild(self, desired: Desired, making: Making | None = None) -> Path:
        self.calls.append(f"rebuild {desired.snapshot}")
        if self.makes and making is not None:
            await asyncio.to_thread(self._make, making, desired.snapshot)
        await self._pass()
        if self.spoilt is not None:
            raise self.spoilt
        return Path("/cache") / desired.snapshot

    async def verify(self, path: Path, desired: Desired) -> None:
        assert path.name == desired.snapshot
        self.calls.append(f"verify {path.name}")
        await self._pass()
        if path.name in self.corrupt or path.name == self._found:
            raise SnapshotCorrupt(f"{path.name}: checksum of a.weight differs")
        if self.fails is not None:
            raise self.fails

    async def check_unchanged(self) -> None:
        if self.written_to:
            raise SnapshotCorrupt("model.safetensors was opened for writing while it was loaded")

    async def remove_policy(self, policy: str) -> None:
        self.calls.append(f"remove the files of {policy}")

    def meet(self, addresses: Sequence[str]) -> None:
        self.met = tuple(addresses)

    def received(self, content: Content, directory: Path) -> None:
        self.calls.append(f"received {directory}")

    def forget_received(self, directory: Path) -> None:
        self.calls.append(f"forget {directory}")

    def open_held(self, fingerprint: str, name: str) -> None:
        """Nothing is here."""

    async def keep(self, snapshot: str, bucket: str, content: Content) -> None:
        """Waits while `blocked` names the snapshot; fails with `keeping`."""
        if snapshot in self.blocked:
            await asyncio.Event().wait()
        if self.keeping is not None:
            raise self.keeping
        self.calls.append(f"keep {snapshot} in {bucket}")

    async def distrust_chain(self, chain: Sequence[SnapshotFiles]) -> None:
        self.calls.append(f"distrust {[link.snapshot for link in chain]}")

    async def release(self, keep: Sequence[Desired]) -> None:
        self.calls.append(f"release all but {[desired.snapshot for desired in keep]}")
        self.released.set()
        await self._pass()

    async def prefetch(self, hint: Hint) -> None:
        self.calls.append(f"prefetch {hint.snapshot} {' '.join(hint.files)}")
        await self._pass()

    def _make(self, making: Making, snapshot: str) -> None:
        making.begun(Path("/cache") / f"{snapshot}-made")
        for tensor in self.makes:
            making.made(tensor)

    async def _pass(self) -> None:
        for _ in range(self.ticks):
            await asyncio.sleep(0)


@dataclass
class Running:
    replica: Replica
    server: ReplicaServer
    engine: FakeEngine
    source: FakeSource
    url: str
    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI
    extra: dict[str, Any] = field(default_factory=dict)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a state of the replica or its engine, woken by the replica's changes. An engine's have no event.

        Raises TimeoutError, so that a state that never comes does not hold up the whole run.
        """
        async with asyncio.timeout(UNTIL_S):
            while not holds():
                await self.replica.changed(0.02)

    async def swap(self, snapshot: str, **more: Any) -> None:
        generation = self.replica.report().own.generation + 1
        body = {"snapshot": snapshot, "generation": generation, "url": f"file:///b/{snapshot}", **more}
        assert (await self.http.post("/replica/desired", json=body)).status_code == 202

    async def swapped(self, snapshot: str, **more: Any) -> None:
        await self.swap(snapshot, **more)
        await self.until(lambda: self.replica.own.driver.machine.serving == snapshot)


def make_replica(
    directory: Path,
    engine: FakeEngine,
    source: FakeSource,
    write: Callable[[Path], Path] = write_tokenizer,
    **more: Any,
) -> Replica:
    bounds = {name: more.pop(name) for name in Bounds.__dataclass_fields__ if name in more}
    journal, files, audits = (more.pop(name, None) for name in ("journal", "files", "audits"))
    replica = Replica(
        name="replica-0",
        engine=engine,
        text=TextModel.load(write(directory)),
        source=source,
        names=ServedNames(MODEL, DEPLOYMENT),
        base_directory=directory,
        bounds=Bounds(**bounds),
        outside=Outside(**{"random_seed": lambda: 77, **more}),
    )
    if journal is not None:
        replica.keep_records(journal)
    if files is not None:
        replica.keep_record_files(files)
    if audits is not None:
        replica.audit_turns(audits)
    return replica


@asynccontextmanager
async def running(
    directory: Path, engine: FakeEngine, token: str = "", **more: Any
) -> AsyncIterator[Running]:
    source = FakeSource()
    replica = make_replica(directory, engine, source, **more)
    await replica.start()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = ReplicaServer(replica, listener, token)
    await server.start()
    http = CheckedClient(base_url=url, timeout=120)
    sdk = openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0, timeout=120)
    try:
        yield Running(replica, server, engine, source, url, http, sdk)
    finally:
        await http.aclose()
        await sdk.close()
        await replica.close()
        await server.close()


def sse(text: str) -> list[Any]:
    """The events of a stream; [DONE] as that string."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]
