"""Checks and admits one inference request; response/generation.py runs it on the engine.

Always holds: an invalid request is refused before it waits at the gate, and one that the gate would refuse is refused before
it is tokenized (prompting.py). A request takes its salt in the step in which it passes the gate, and the snapshot it asks for
serves in that step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from midstream.core.errors import InvalidRequest
from midstream.core.headers import (
    HEADER_BOOT,
    HEADER_HISTORY,
    HEADER_MODEL,
    HEADER_PLACED,
    HEADER_POLICY,
    HEADER_RECORDS,
    HEADER_SESSION,
    HEADER_TENANT,
    HEADER_UNKNOWN_FIELDS,
)
from midstream.core.resumption import HEADER_RESUMABLE, Resume
from midstream.core.session_keys import SESSION_BODY_FIELDS, SESSION_HEADERS
from midstream.core.traces import WITH_ROUTES, RecordsKept, records_kept
from midstream.core.types import GenerateRequest, Session
from midstream.core.versions import (
    HEADER_ADMITTED,
    Admitted,
    VersionConstraint,
    constraint_of_body,
    constraint_of_version,
    from_header,
)
from midstream.engine.base import Engine
from midstream.replica import gate
from midstream.replica.aborts import Called, called_as
from midstream.replica.kv_budget import KvBudget, KvTurn, expected_tokens, may_move, moved_here
from midstream.replica.kv_travel import KvHere, KvTravel
from midstream.replica.namespaces import Namespaces, cache_salt
from midstream.replica.pins import Asked, Pins
from midstream.replica.prompting import PromptReader
from midstream.replica.record_files import RecordFiles
from midstream.replica.request.checked import (
    MAX_PROMPTS,
    Checked,
    Prompt,
    check,
    check_choices,
    check_room,
    sampling_for,
)
from midstream.replica.request.fields import bad_tokens, ending_at
from midstream.replica.request.needs import ages_are_kept, check_needs, check_resume, lacks_any
from midstream.replica.request.schema import LONG_BODY, ChatBody, CompletionBody
from midstream.replica.request.unknown import read_known
from midstream.replica.response.generation import Generation, Surroundings
from midstream.replica.response.measured import Timings
from midstream.replica.response.prompt_echo import scored_tokens
from midstream.replica.response.referenced import check_rows
from midstream.replica.response.resume import Continued, can_be_resumed
from midstream.replica.response.stages import behind_thinking
from midstream.replica.response.work import Work
from midstream.replica.sessions import Sessions, session_of, stamp_of
from midstream.replica.shared_store import check_files
from midstream.replica.stored import Shelf, StoredResponses
from midstream.replica.text import grammar
from midstream.replica.text.grammarcheck import GrammarChecks
from midstream.replica.text.text_jobs import TextJobs
from midstream.replica.text.toolformat import ToolFormat
from midstream.replica.text.tools import check_template
from midstream.replica.turns.history import History, policy_of
from midstream.replica.turns.tree import Trees
from midstream.replica.wire.base import Read, Wire

_Made = TypeVar("_Made")

HEADER_ISOLATION = "x-prompt-cache-isolation-key"
#: What may name a session: headers, and these values of a request.
_SESSION_HEADERS = frozenset((HEADER_SESSION, *SESSION_HEADERS))
_NAMES_SESSION = attrgetter(*SESSION_BODY_FIELDS)
_HISTORY_HEADERS = frozenset((HEADER_HISTORY, HEADER_RECORDS))


@dataclass(frozen=True)
class Outside:
    """Time and randomness, which tests replace."""

    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random_seed: Callable[[], int] = lambda: random.getrandbits(62)
    new_boot: Callable[[], str] = lambda: uuid.uuid4().hex


REAL = Outside()


@dataclass(frozen=True)
class KeptAcrossBoots:
    """What all policies of a replica share, and keep while its engine ends and starts again."""

    sessions: Sessions
    budget: KvBudget
    jobs: TextJobs
    grammars: GrammarChecks
    trees: Trees
    responses: StoredResponses
    #: The default for turns, if the request does not say.
    records: RecordsKept = "none"
    travel: KvTravel = field(default_factory=KvTravel)
    #: Where records go that a request wants by reference. None: this server has no bucket for them.
    files: RecordFiles | None = None


class _Ready(NamedTuple):
    """A request before the gate. histories: one for each prompt of a session's request, else none. counted: choices that count
    against the bound, none for a resumed stream."""

    work: Work
    session: Session | None
    histories: Sequence[History]
    continued: Continued | None
    choices: int
    counted: int


@dataclass(kw_only=True, eq=False, repr=False)
class Service(Surroundings):
    """Serves the requests of one policy in one boot."""

    kept: KeptAcrossBoots
    pins: Pins
    namespaces: Namespaces
    random_seed: Callable[[], int]
    #: Whether what serves has passed its check.
    proved: Callable[[], bool] = lambda: True
    #: The requests that wait at the gate or are inside, as clients may call them.
    called: dict[Called, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reader = PromptReader(self.text, self.info, self.kept.jobs)
        self.gate.on_move = self._wake
        #: The names of the model that ask for no snapshot.
        self._plain_names = {name for name in self.names.accepted() if "@" not in name and "#" not in name}
        #: There are requests that the engine cannot serve, by its card.
        self._lacks_any = lacks_any(self.info)
        #: The engine refuses more than its card says.
        self._engine_judges = type(self.engine).refuses is not Engine.refuses

    def abort(self, ids: Collection[str] | None = None, *, held: bool = True) -> int:
        """Ends requests and choices with what they have; None: all of them. held: also those that wait at the gate.

        Returns of how many requests."""
        ended = [one.end(ids) for one in tuple(self.called) if held or not one.held]
        if held:
            self._wake()
            self.gate.wake()
        return sum(ended)

    def _wake(self) -> None:
        """What waits before the gate asks again whether it still does."""
        self.kept.budget.wake()
        self.kept.travel.wake()

    @asynccontextmanager
    async def admitted(
        self, wire: Wire, body: bytes, headers: Mapping[str, str], resume: Resume | None = None
    ) -> AsyncIterator[Generation]:
        """A request inside the gate, ready to be streamed or answered. Raises MidstreamError.

        resume: of a stream to continue; it was let in before, so its choices are not counted against the bound.
        """
        shelf = Shelf(self.kept.responses, headers.get(HEADER_TENANT, ""), resume is not None)
        # A stream that was let in continues, whatever the setting says by now.
        passes_over = resume is not None or headers.get(HEADER_UNKNOWN_FIELDS) == "ignore"
        if passes_over or len(body) > LONG_BODY:
            read = await self._reader.beside(body, partial(_read, wire, shelf, passes_over), headers)
        else:
            read = wire.read(body, shelf)
        try:
            timings = Timings(self.monotonic())
            asked = self._asked(read.body, headers, judged=resume is not None)
            timeout_s = headers.get(gate.HEADER_DRAIN_TIMEOUT)
            limit_s = None if timeout_s is None else gate.wait_timeout_s(timeout_s)
            ready = await self._ready(wire, read, len(body), headers, resume, asked)
            called = called_as(ready.work, headers.get("x-request-id", ""))
            turn = self._kv_turn(ready, read, headers, called)
            # KV of an older snapshot has a salt of its own.
            turn.takes_kv = ready.work.checked.prompt_cache and (asked is None or not asked.pinned)
            self.called[called] = None
            try:
                await self.kept.budget.enter(turn)
                with self.kept.budget.turn(turn, timings):
                    if turn.moved is not None and turn.takes_kv:
                        owner = self._owner(ready.work.checked, headers)
                        look = partial(self.kv_here, turn.session, owner)
                        await self.kept.travel.bring(turn, self.kept.budget, owner[1], look)
                    await self.gate.enter(limit_s, ready.counted, lambda: called.over)
                    async with self._inside(ready, read, headers, asked, timings, called) as generation:
                        turn.measured = generation
                        yield generation
            finally:
                del self.called[called]
        except InvalidRequest as error:
            wire.rename(error, read.details)
            raise

    @asynccontextmanager
    async def _inside(
        self,
        ready: _Ready,
        given: Read,
        headers: Mapping[str, str],
        asked: Asked | None,
        timings: Timings,
        called: Called,
    ) -> AsyncIterator[Generation]:
        """Begins in the step of the loop that found the gate open."""
        work, session = ready.work, ready.session
        self.check_boot(headers.get(HEADER_BOOT))
        timings.admitted = self.monotonic()
        # No await from here until the request counts as inside: gate, snapshot and salt belong to the same moment.
        serving = self.serving()
        begins = serving if asked is None else asked.check(serving, self.pins)
        older = None if begins == serving else begins
        # KV under the salt of an older snapshot is its own, so of age 0.
        age_max = None if older else self.namespaces.kv_age_max
        salt = self._salt(work.checked, session, headers, older)
        pinned = nullcontext() if asked is None or not asked.pinned else self.pins.hold(asked, begins)
        fixed = begins if self.pins.several and asked is not None and asked.pinned else None
        returns = self.kept.budget.returns(session if salt else None)
        salt = salt or os.urandom(16)
        requests = [
            replace(r, salt=salt, kv_age_max=age_max, snapshot=fixed, **returns) for r in work.requests
        ]
        stamp = stamp_of(headers) if HEADER_PLACED in headers else None
        inside = self.gate.admitted(ready.choices)
        async with pinned:
            with inside, self.kept.sessions.turn(session, stamp) as turn:
                resumable = HEADER_RESUMABLE in headers and given.resumable and self.info.card.has("resume")
                generation = Generation(
                    self,
                    dataclasses.replace(work, requests=requests),
                    timings,
                    resumable=resumable and can_be_resumed(work.checked, self.info.card),
                    continued=ready.continued,
                    histories=ready.histories,
                    files=self.kept.files,
                )
                called.let_in(work, generation, generation.ids)
                try:
                    yield generation
                finally:
                    generation.measure(turn)

    def _kv_turn(self, ready: _Ready, given: Read, headers: Mapping[str, str], called: Called) -> KvTurn:
        """Raises InvalidRequest."""
        checked = ready.work.checked
        return KvTurn.of(
            ready.session,
            ready.work.requests,
            apart="\0".join((*self._owner(checked, headers), self.policy)),
            said=expected_tokens(headers, self.info.max_model_len),
            priority=checked.priority,
            resumed=ready.continued is not None,
            over=lambda: called.over or self.gate.door in (gate.Door.DOWN, gate.Door.UNSOUND),
            shut=lambda: self.gate.door is gate.Door.CLOSED,
            # What it may name lies here.
            movable=given.thread is None and may_move(headers),
            moved=moved_here(headers),
            policy=headers.get(HEADER_POLICY, ""),
        )

    async def _ready(
        self,
        wire: Wire,
        given: Read,
        body_size: int,
        headers: Mapping[str, str],
        resume: Resume | None,
        asked: Asked | None,
    ) -> _Ready:
        """The request, checked and tokenized, as it waits at the gate. Raises MidstreamError."""
        parsed = given.body
        checked = check(parsed, self.info, given.prompt_from, cumulative=given.cumulative)
        if checked.text.special:
            self.text.check_spaces(checked.text.special, parsed.spaces_between_special_tokens)
        if self._lacks_any:
            check_needs(checked, parsed, self.info)
        stay_s = check_files(checked, self.kept.files, headers) if checked.by_file else 0.0
        if resume is not None:
            check_resume(self.info)
        session = None
        if _NAMES_SESSION(checked) != (None, None, None) or not _SESSION_HEADERS.isdisjoint(headers):
            session = session_of(_NAMES_SESSION(checked), headers)
        tool_format = None if checked.tools is None else check_template(self.text.tools)
        count = check_room(checked, parsed, self.info, self.text)
        histories: Sequence[History] = ()
        if session is not None or given.thread is not None or not _HISTORY_HEADERS.isdisjoint(headers):
            histories = self._histories(session, given, headers, count, resumed=resume is not None)
        unread = self._reader.unread(parsed, checked, body_size, histories)
        choices = check_choices(count, checked.n)
        continued = None if resume is None else Continued(resume, checked, choices, self.info.card)
        self.gate.check(counted := choices if continued is None else 0)
        if asked is not None and self.gate.door is gate.Door.OPEN:
            asked.check(self.serving(), self.pins)
        answer = None
        if checked.constrained or checked.tools is not None:
            answer = await self._grammar(checked, tool_format, headers.get(HEADER_TENANT, ""))
        known = continued is not None and not given.whole
        prompts = [] if known else await self._reader.prompts(unread, headers)
        seed = self.random_seed() if checked.seed is None else checked.seed
        if continued is not None:
            prompts, seed = continued.prompts(prompts), continued.opening.seed
        for history, prompt in zip(histories, prompts, strict=bool(histories)):
            history.settled(prompt)
        records = histories[0].records if histories else "none"
        answers: Sequence[str | None] = [None] * len(prompts)
        if answer is not None:
            eos = self.info.eos_token_ids
            answers = [behind_thinking(checked, answer, prompt, self.text, eos) for prompt in prompts]
        requests = self._requests(checked, prompts, seed, answers, records)
        if checked.by_file:
            check_rows(requests, self.info, checked)
        own = (tool_format, given.ignored, given.whole, stay_s)
        work = Work(wire, given.details, checked, prompts, requests, seed, *own)
        return _Ready(work, session, histories, continued, choices, counted)

    async def prompts(
        self, parsed: CompletionBody | ChatBody, size: int, headers: Mapping[str, str]
    ) -> list[Prompt]:
        """The prompts of a body as a request with it would have them. size: of the body, in bytes. Raises MidstreamError."""
        checked = check(parsed, self.info)
        if checked.tools is not None:
            check_template(self.text.tools)
        check_room(checked, parsed, self.info, self.text)
        return await self._reader.prompts(self._reader.unread(parsed, checked, size), headers)

    async def beside(self, body: bytes, read: Callable[[bytes], _Made], headers: Mapping[str, str]) -> _Made:
        """As PromptReader.beside."""
        return await self._reader.beside(body, read, headers)

    def _histories(
        self,
        session: Session | None,
        given: Read,
        headers: Mapping[str, str],
        count: int,
        *,
        resumed: bool,
    ) -> Sequence[History]:
        """One for each of `count` prompts; none of a request without a session. A wire's thread stands for the session of a
        request that names none."""
        policy = policy_of(headers.get(HEADER_HISTORY))
        records = records_kept(headers.get(HEADER_RECORDS), self.kept.records)
        if resumed or count > 1:
            # Its prompt is what its first replica made of it: rendered, unless the resume log has its ids. The log has those of
            # one prompt only.
            policy = "template"
        held = None if session is None else partial(self.kept.sessions.holds, session)
        begins = session is None and given.whole
        if session is None and given.thread is not None:
            session = (headers.get(HEADER_TENANT, ""), given.thread)
        if session is None or count > MAX_PROMPTS:
            return ()
        own = (self.kept.trees, session, self.info.eos_token_ids)
        return [
            History(*own, policy, records, held, begins=begins, model=self.names.model) for _ in range(count)
        ]

    def _asked(
        self, body: CompletionBody | ChatBody, headers: Mapping[str, str], *, judged: bool
    ) -> Asked | None:
        """The snapshot that the request asks for; None: any. A resumed stream was judged when it began."""
        model, header = self.names.model if body.model is None else body.model, headers.get(HEADER_MODEL, "")
        demands = (
            body.midstream is not None
            or body.weight_version is not None
            or HEADER_ADMITTED in headers
            or "@" in header
        )
        if not demands and model in self._plain_names:
            return None
        named = self.names.wanted(model, header)
        of_version = constraint_of_version(body.weight_version).with_(VersionConstraint(named))
        constraint = constraint_of_body(body.midstream).with_(of_version)
        given = headers.get(HEADER_ADMITTED)
        admitted = None if given is None else from_header(given, Admitted)
        return Asked(self.names.model, constraint, admitted, judged=judged)

    async def _grammar(self, checked: Checked, tool_format: ToolFormat | None, tenant: str) -> str | None:
        """What the answer must match, compiled once so that the client sees a mistake in it."""
        if not checked.constrained and (checked.tools is None or not checked.tools.constrained):
            return None
        eos = self.info.eos_token_ids
        wanted = checked.answer
        given = (wanted.schema, checked.tools, tool_format, self.text, eos)
        problem_of, own = self.kept.grammars.of_request, (wanted.rule, wanted.param)
        return await self.kept.jobs.read(
            tenant, lambda leave: grammar.build(*given, problem_of(leave.check), *own)
        )

    def _requests(
        self,
        checked: Checked,
        prompts: list[Prompt],
        seed: int,
        answers: Sequence[str | None],
        records: RecordsKept = "none",
    ) -> list[GenerateRequest]:
        """answers: what must match, by prompt. records: what a trace keeps, though the response does not have it.

        Raises InvalidRequest for what the engine refuses although its card does not say so.
        """
        card = self.info.card
        routes = records in WITH_ROUTES and self.info.moe_layers > 0 and card.has("routes")
        masks = records == "masks" and card.has("sampling_masks")
        # A retry carries the same x-request-id again.
        engine_id = uuid.uuid4().hex
        # A stop string that is the name of a special token, which has no text, is that token.
        stops, words = checked.stops, checked.sampling.bad_words
        named = self.text.marker_ids(stops) if stops and not any(answers) else ()
        bad = bad_tokens(words, self.text.encode_rendered) if words else ()
        scores = checked.prompt_from is not None or (checked.scored and checked.echo != 0)
        requests = [
            GenerateRequest(
                request_id=f"{engine_id}-{index}",
                prompt=prompt.token_ids,
                sampling=sampling_for(checked, prompt, index, seed, self.info),
                n=checked.n,
                want_routes=checked.routes or routes,
                want_masks=checked.masks or masks,
                want_router_weights=checked.router_weights,
                top_logprobs=max(checked.top_logprobs, checked.prompt_logprobs or 0),
                prompt_records=scored_tokens(checked, prompt) if scores else 0,
                want_kv_snapshots=checked.perf_metrics or checked.by_file or records != "none",
                want_logprobs=checked.scored or checked.prompt_from is not None or records != "none",
                reproducible=checked.seed is not None,
                grammar=answers[index],
                priority=checked.priority,
                policy=self.policy,
            )
            for index, prompt in enumerate(prompts)
        ]
        if named or bad:
            requests = [replace(r, sampling=ending_at(r.sampling, named, bad)) for r in requests]
        for request in requests if self._engine_judges else ():
            problem = self.engine.refuses(request)
            if problem is not None:
                raise InvalidRequest(problem, param=problem.partition(":")[0])
        return requests

    def _salt(
        self, checked: Checked, session: Session | None, headers: Mapping[str, str], older: str | None
    ) -> bytes | None:
        """None: no other request may use its KV. That of an engine which does not keep ages may be too old."""
        too_old = self.namespaces.kv_age_max is not None and not ages_are_kept(self.info)
        if not checked.prompt_cache or too_old:
            return None
        namespace = self.namespaces.admit(session) if older is None else self.namespaces.resets
        own = "" if older is None else self.pins.salt_of(older)
        return cache_salt(namespace, *self._owner(checked, headers), (self.policy or self.names.model) + own)

    def kv_here(self, session: Session | None, owner: tuple[str, str]) -> KvHere | None:
        """Where the session's next turn looks for cached KV. None: there is none that another engine may have or give."""
        spaces, copies = self.namespaces, self.engine.kv
        if session is None or copies is None or (namespace := spaces.newest(session)) is None:
            return None
        if not self.proved():
            # The label of what these weights compute may turn out to be wrong.
            return None
        salt = cache_salt(namespace, *owner, self.policy or self.names.model)
        return KvHere(copies, self.policy, salt, spaces.era, spaces.began, spaces.kv_age_max)

    def _owner(self, checked: Checked, headers: Mapping[str, str]) -> tuple[str, str]:
        """Whose KV it may use: a tenant's, and under which key."""
        return headers.get(HEADER_TENANT, ""), checked.isolation_key or headers.get(HEADER_ISOLATION, "")


def _read(wire: Wire, shelf: Shelf, passes_over: bool, body: bytes) -> Read:
    """passes_over: unknown fields."""
    if not passes_over:
        return wire.read(body, shelf)
    read, ignored = read_known(lambda known: wire.read(known, shelf), body)
    return read._replace(ignored=ignored)
