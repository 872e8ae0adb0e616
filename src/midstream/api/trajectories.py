"""The sessions API: what the turns of each session were like, as the replicas that hold it say, and closing one.

    GET /v1/sessions?limit=100&after=KEY    GET /v1/sessions/KEY    DELETE /v1/sessions/KEY
    GET /v1/sessions/KEY/trace, or GET /sessions/KEY/trace
    POST /v1/sessions/KEY/reward, or POST /sessions/KEY/reward

Always holds:
- A tenant sees and closes its own sessions only. Sessions are those of the deployment that the headers name, else of the
  default one.
- Replicas are asked each time; one that does not answer is named, and what others say is shown. To close a session, those are
  asked that may hold turns of it.
- A session that lived on several replicas is shown as one, all its turns together.
- In a path, a slash of the key may be written %2F. So a key that ends in "/trace" can be read, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from midstream.api import answers
from midstream.core.endpoints import Endpoint, number, serves, text
from midstream.core.errors import InvalidRequest, MidstreamError, NotFound, ReplicaUnavailable
from midstream.core.headers import HEADER_TENANT
from midstream.core.scopes import SAMPLE_MEANT
from midstream.core.session_keys import check_key
from midstream.core.sessions import SessionsAsked, SessionsHeld, SessionStats
from midstream.core.traces import RewardAsked, RewardGiven, RewardTaken, check_reward
from midstream.core.types import Session
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.view import ReplicaView
from midstream.http.bodies import answered, whole_number

PAGE_SIZE = 100
PAGE_SIZE_MAX = 1000
# Replicas that are asked at once.
_ASKED_AT_ONCE = 64
#: For so long a replica that reports another boot may have turns that it does not report. Later, others are likely to have
#: their place.
RENEWED_S = 3600.0

_ONE = "/v1/sessions/{key:path}"

_held = msgspec.json.Decoder(SessionsHeld)


class _Trace(msgspec.Struct):
    """A traces.Trace. turns: passed on as they came, as they may be many megabytes."""

    turns: msgspec.Raw
    forgotten: bool = False
    rewards: msgspec.Raw = msgspec.Raw(b"[]")


class _Traced(msgspec.Struct):
    trace: _Trace | None = None


_taken = msgspec.json.Decoder(RewardTaken)
_traced = msgspec.json.Decoder(_Traced)


class SessionsApi:
    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    @Endpoint(
        "GET",
        "/v1/sessions",
        SAMPLE_MEANT,
        "Lists the tenant's sessions in the order of their keys.",
        (
            number("limit", "How many sessions.", 1, PAGE_SIZE_MAX, PAGE_SIZE),
            text("after", "The key of the last session of the page before."),
        ),
        prefixed=True,
    )
    async def list(self, request: Request) -> answers.SessionList:
        deployment = self._deployments.named(request.headers)
        limit = whole_number(request, "limit", PAGE_SIZE, 1, PAGE_SIZE_MAX)
        asked = SessionsAsked(
            tenant=_tenant(request), after=request.query_params.get("after") or None, limit=limit
        )
        found, silent = await _ask(deployment, asked)
        by_key: dict[str, list[tuple[str, SessionStats]]] = {}
        for replica, stats in found:
            by_key.setdefault(stats.key, []).append((replica, stats))
        keys = sorted(by_key)
        per_replica = [sum(replica == view.name for replica, _ in found) for view in views_of(deployment)]
        return answers.SessionList(
            object="list",
            data=[answers.Session(**_shown(deployment, by_key[key])) for key in keys[:limit]],
            has_more=len(keys) > limit or limit in per_replica,
            unreachable=silent,
        )

    @Endpoint("GET", _ONE, SAMPLE_MEANT, "Shows what the turns of one session were like.", prefixed=True)
    async def get(self, request: Request) -> answers.SessionShown:
        deployment, session = self._deployments.named(request.headers), _session(request)
        found, silent = await _ask(deployment, SessionsAsked(tenant=session[0], key=session[1]))
        if not found:
            raise self._not_there(session, silent)
        held = [answers.SessionOnReplica(replica=replica, **_measured([stats])) for replica, stats in found]
        wait = next((stats.wait for _, stats in found if stats.wait is not None), None)
        return answers.SessionShown(**_shown(deployment, found), wait=wait, replicas=held, unreachable=silent)

    @serves(
        Endpoint(
            "GET",
            _ONE + "/trace",
            SAMPLE_MEANT,
            "Gives a session's turns as token ids with their records and rewards.",
            answer=answers.SessionTrace,
            prefixed=True,
        ),
        Endpoint(
            "GET",
            "/sessions/{key:path}/trace",
            SAMPLE_MEANT,
            "Gives the trace of the session that a client's base URL names.",
            answer=answers.SessionTrace,
        ),
    )
    async def trace(self, request: Request) -> Response:
        """The turns of the session, per replica that has some. The parent of a turn is on the same replica."""
        if not request.scope.get("raw_path", b"/trace").endswith(b"/trace"):
            # Its slash was written %2F: it is the end of the key.
            request.path_params["key"] += "/trace"
            return answered(await self.get(request))
        deployment, session = self._deployments.named(request.headers), _session(request)
        asked = msgspec.json.encode(SessionsAsked(tenant=session[0], key=session[1]))
        replies, silent = await ask_replicas(deployment, "/replica/trace", asked)
        traces = [(replica, _traced.decode(answer).trace) for replica, answer in replies]
        found = [
            {"replica": replica, "turns": trace.turns, "rewards": trace.rewards, "forgotten": trace.forgotten}
            for replica, trace in traces
            if trace is not None
        ]
        if not found:
            raise self._not_there(session, silent)
        about = {"id": session[1], "object": "session.trace", "deployment": deployment.name}
        return answered(about | {"traces": found, "unreachable": silent})

    @serves(
        Endpoint(
            "POST", _ONE + "/reward", SAMPLE_MEANT, "Rewards a session or one turn of it.", prefixed=True
        ),
        Endpoint(
            "POST",
            "/sessions/{key:path}/reward",
            SAMPLE_MEANT,
            "Rewards the session that a client's base URL names.",
        ),
    )
    async def reward(self, request: Request, body: RewardGiven) -> answers.SessionReward:
        """Rewards the session where its turns are, or one turn. The last one of a turn and name counts."""
        deployment, session = self._deployments.named(request.headers), _session(request)
        check_reward(body)
        asked = RewardAsked(tenant=session[0], key=session[1], given=body, look=True)
        replies, silent = await _rewarded(deployment, asked, body.replica)
        has = [replica for replica, answer in replies if answer.has]
        if not has:
            raise self._not_there(session, silent)
        if body.turn is not None and len(has) > 1:
            names = ", ".join(has)
            raise InvalidRequest(
                f"replica: several have turns of the session; name one of {names}", param="replica"
            )
        if body.turn is not None and not any(answer.taken for _, answer in replies):
            raise NotFound(f"{has[0]} has no turn {body.turn} of the session", param="turn")
        replies, more = await _rewarded(deployment, replace(asked, look=False), body.replica)
        taken = [replica for replica, answer in replies if answer.taken]
        if not taken:
            raise self._not_there(session, more)
        return answers.SessionReward(
            id=session[1],
            object="session.reward",
            deployment=deployment.name,
            replicas=taken,
            unreachable=more,
            reward=body.reward,
            turn=body.turn,
            name=body.name,
            metadata=body.metadata,
        )

    @Endpoint(
        "DELETE", _ONE, SAMPLE_MEANT, "Closes a session and drops its part of the cache.", prefixed=True
    )
    async def delete(self, request: Request) -> answers.SessionDeleted:
        deployment, session = self._deployments.named(request.headers), _session(request)
        some, others = _holding(deployment, session)
        closed, silent = await _close(deployment, session, some)
        if not closed and others:
            more, still = await _close(deployment, session, others)
            closed, silent = closed + more, silent + still
        known = deployment.sessions.over(session, silent)
        if not closed and not known:
            raise self._not_there(session, silent)
        return answers.SessionDeleted(session[1], "session", True, closed, silent)

    def _not_there(self, session: Session, silent: Sequence[str]) -> MidstreamError:
        if silent:
            return ReplicaUnavailable(
                f"not known whether there is such a session: no answer of {', '.join(silent)}"
            )
        return self._deployments.missing(f"no replica holds a session {session[1]!r}", "key")


def _tenant(request: Request) -> str:
    return request.headers.get(HEADER_TENANT, "")


def _session(request: Request) -> Session:
    return _tenant(request), check_key(request.path_params["key"], "key")


def views_of(deployment: Deployment) -> Sequence[ReplicaView]:
    return (*deployment.replicas.views, *deployment.replicas.leaving)


def _holding(deployment: Deployment, session: Session) -> tuple[list[ReplicaView], list[ReplicaView]]:
    """The replicas that may hold turns of the session, and all others."""
    views, holders, now = views_of(deployment), deployment.sessions.holders(session), time.monotonic()
    if holders is None:
        return list(views), []
    some: list[ReplicaView] = []
    others: list[ReplicaView] = []
    for view in views:
        replica = view.replica
        # What an unheard one holds is not known.
        renewed = now - replica.renewed_at < RENEWED_S
        may = view.name in holders or not deployment.replicas.facts.hears(replica) or renewed
        (some if may else others).append(view)
    return some, others


async def _close(
    deployment: Deployment, session: Session, views: Sequence[ReplicaView]
) -> tuple[list[str], list[str]]:
    """The replicas of these that closed the session, and those that did not answer."""
    asked = msgspec.json.encode(SessionsAsked(tenant=session[0], key=session[1]))
    replies, silent = await ask_replicas(deployment, "/replica/sessions/close", asked, views)
    return [replica for replica, answer in replies if msgspec.json.decode(answer)["closed"]], silent


async def _ask(
    deployment: Deployment, asked: SessionsAsked
) -> tuple[list[tuple[str, SessionStats]], list[str]]:
    """(replica, what it knows) of each session on each replica, and who did not answer."""
    replies, silent = await ask_replicas(deployment, "/replica/sessions", msgspec.json.encode(asked))
    return [
        (replica, stats) for replica, answer in replies for stats in _held.decode(answer).sessions
    ], silent


async def ask_replicas(
    deployment: Deployment, path: str, body: bytes, views: Sequence[ReplicaView] | None = None
) -> tuple[list[tuple[str, bytes]], list[str]]:
    """What each replica answered, and who did not. views: those that are asked; None: all."""
    places = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def one(view: ReplicaView) -> bytes | None:
        async with places:
            try:
                return await deployment.replicas.post(view, path, body, 200)
            except ReplicaUnavailable:
                return None

    views = views_of(deployment) if views is None else views
    both = list(zip(views, await asyncio.gather(*map(one, views)), strict=True))
    replies = [(view.name, answer) for view, answer in both if answer is not None]
    return replies, [view.name for view, answer in both if answer is None]


async def _rewarded(
    deployment: Deployment, asked: RewardAsked, only: str | None
) -> tuple[list[tuple[str, RewardTaken]], list[str]]:
    views = [view for view in views_of(deployment) if only in (None, view.name)]
    replies, silent = await ask_replicas(deployment, "/replica/reward", msgspec.json.encode(asked), views)
    return [(replica, _taken.decode(answer)) for replica, answer in replies], silent


def _shown(deployment: Deployment, found: Sequence[tuple[str, SessionStats]]) -> dict[str, Any]:
    """replica: where the next request goes."""
    stats = [one for _, one in found]
    home = deployment.sessions.home((stats[0].tenant, stats[0].key))
    latest = max(found, key=lambda one: one[1].stamp)[0]
    about = {
        "id": stats[0].key,
        "object": "session",
        "deployment": deployment.name,
        "replica": home or latest,
    }
    return about | _measured(stats)


def _measured(stats: Iterable[SessionStats]) -> dict[str, Any]:
    """Times in seconds, `_at` since the epoch; None where nothing was measured."""
    all_of = list(stats)

    def total(name: str) -> Any:
        return sum(getattr(one, name) for one in all_of)

    newest = max(all_of, key=lambda one: one.used_at)
    first_tokens, gaps, prompt = total("first_tokens"), total("token_gaps"), total("prompt_tokens")
    return {
        "opened_at": min(one.opened_at for one in all_of),
        "used_at": newest.used_at,
        "turns": total("turns"),
        "open_turns": total("open_turns"),
        "prompt_tokens": prompt,
        "cached_prompt_tokens": total("cached_prompt_tokens"),
        "cached_share": total("cached_prompt_tokens") / prompt if prompt else None,
        "generated_tokens": total("generated_tokens"),
        "generation_s": total("generation_s"),
        "mean_time_to_first_token_s": total("time_to_first_token_s") / first_tokens if first_tokens else None,
        "last_time_to_first_token_s": newest.last_time_to_first_token_s,
        "mean_inter_token_s": total("generation_s") / gaps if gaps else None,
        "last_reward": max(all_of, key=lambda one: one.rewarded_at).last_reward,
    }
