"""The sessions API: what the turns of each session were like, as the replicas that hold it say, and closing one.

    GET /v1/sessions?limit=100&after=KEY    GET /v1/sessions/KEY    DELETE /v1/sessions/KEY
    GET /v1/sessions/KEY/trace, or GET /sessions/KEY/trace
    POST /v1/sessions/KEY/reward, or POST /sessions/KEY/reward

Always holds:
- A tenant sees and closes its own sessions only. Sessions are those of the deployment that the headers name, else of the
  default one.
- Replicas are asked each time; one that does not answer is named, and what others say is shown.
- A session that lived on several replicas is shown as one, all its turns together.
- In a path, a slash of the key may be written %2F. So a key that ends in "/trace" can be read, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from midstream.core.errors import InvalidRequest, NotFound, ReplicaUnavailable
from midstream.core.headers import HEADER_TENANT
from midstream.core.sessions import SessionsAsked, SessionsHeld, SessionStats, check_key
from midstream.core.traces import RewardAsked, RewardGiven, RewardTaken, check_reward
from midstream.core.types import Session
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.view import ReplicaView
from midstream.http.bodies import fields_of, json_object, read_body, whole_number

PAGE_SIZE = 100
PAGE_SIZE_MAX = 1000
# Replicas that are asked at once.
_ASKED_AT_ONCE = 64

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


def session_routes(deployments: Deployments) -> list[BaseRoute]:
    api = _Api(deployments)
    routes: list[BaseRoute] = []
    for prefix in ("", "/inference"):
        one = prefix + "/v1/sessions/{key:path}"
        routes += [
            Route(prefix + "/v1/sessions", api.list, methods=["GET"]),
            Route(one + "/trace", api.trace, methods=["GET"]),
            Route(one + "/reward", api.reward, methods=["POST"]),
            Route(one, api.get, methods=["GET"]),
            Route(one, api.delete, methods=["DELETE"]),
        ]
    routes.append(Route("/sessions/{key:path}/trace", api.trace, methods=["GET"]))
    routes.append(Route("/sessions/{key:path}/reward", api.reward, methods=["POST"]))
    return routes


class _Api:
    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    async def list(self, request: Request) -> Response:
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
        body = {
            "object": "list",
            "data": [_shown(deployment, by_key[key]) for key in keys[:limit]],
            "has_more": len(keys) > limit or limit in per_replica,
            "unreachable": silent,
        }
        return JSONResponse(body)

    async def get(self, request: Request) -> Response:
        deployment, session = self._deployments.named(request.headers), _session(request)
        found, silent = await _ask(deployment, SessionsAsked(tenant=session[0], key=session[1]))
        if not found:
            _not_there(session, silent)
        held = [{"replica": replica, **_measured([stats])} for replica, stats in found]
        return JSONResponse(_shown(deployment, found) | {"replicas": held, "unreachable": silent})

    async def trace(self, request: Request) -> Response:
        """Of each replica that has turns of the session, those turns: a turn's parent is one of the same replica."""
        if not request.scope.get("raw_path", b"/trace").endswith(b"/trace"):
            # Its slash was written %2F: it is the end of the key.
            request.path_params["key"] += "/trace"
            return await self.get(request)
        deployment, session = self._deployments.named(request.headers), _session(request)
        asked = msgspec.json.encode(SessionsAsked(tenant=session[0], key=session[1]))
        answers, silent = await ask_replicas(deployment, "/replica/trace", asked)
        traces = [(replica, _traced.decode(answer).trace) for replica, answer in answers]
        found = [
            {"replica": replica, "turns": trace.turns, "rewards": trace.rewards, "forgotten": trace.forgotten}
            for replica, trace in traces
            if trace is not None
        ]
        if not found:
            _not_there(session, silent)
        about = {"id": session[1], "object": "session.trace", "deployment": deployment.name}
        told = msgspec.json.encode(about | {"traces": found, "unreachable": silent})
        return Response(told, media_type="application/json")

    async def reward(self, request: Request) -> Response:
        """Rewards the session where its turns are, or one turn. The last one of a turn and name counts."""
        deployment, session = self._deployments.named(request.headers), _session(request)
        given = fields_of(json_object(await read_body(request)), RewardGiven)
        check_reward(given)
        asked = RewardAsked(tenant=session[0], key=session[1], given=given, look=True)
        told, silent = await _rewarded(deployment, asked, given.replica)
        has = [replica for replica, answer in told if answer.has]
        if not has:
            _not_there(session, silent)
        if given.turn is not None and len(has) > 1:
            names = ", ".join(has)
            raise InvalidRequest(
                f"replica: several have turns of the session; name one of {names}", param="replica"
            )
        if given.turn is not None and not any(answer.taken for _, answer in told):
            raise NotFound(f"{has[0]} has no turn {given.turn} of the session", param="turn")
        told, more = await _rewarded(deployment, replace(asked, look=False), given.replica)
        taken = [replica for replica, answer in told if answer.taken]
        if not taken:
            _not_there(session, more)
        about = {"id": session[1], "object": "session.reward", "deployment": deployment.name}
        shown = about | {"replicas": taken, "unreachable": more} | msgspec.to_builtins(given)
        del shown["replica"]
        return JSONResponse(shown)

    async def delete(self, request: Request) -> Response:
        deployment, session = self._deployments.named(request.headers), _session(request)
        body = msgspec.json.encode(SessionsAsked(tenant=session[0], key=session[1]))
        answers, silent = await ask_replicas(deployment, "/replica/sessions/close", body)
        closed = [replica for replica, answer in answers if msgspec.json.decode(answer)["closed"]]
        known = deployment.sessions.forget(session)
        if not closed and not known:
            _not_there(session, silent)
        shown = {"id": session[1], "object": "session", "deleted": True}
        return JSONResponse(shown | {"replicas": closed, "unreachable": silent})


def _tenant(request: Request) -> str:
    return request.headers.get(HEADER_TENANT, "")


def _session(request: Request) -> Session:
    return _tenant(request), check_key(request.path_params["key"], "key")


def _not_there(session: Session, silent: Sequence[str]) -> None:
    if silent:
        raise ReplicaUnavailable(
            f"not known whether there is such a session: no answer of {', '.join(silent)}"
        )
    raise NotFound(f"no replica holds a session {session[1]!r}", param="key")


def views_of(deployment: Deployment) -> Sequence[ReplicaView]:
    return (*deployment.replicas.views, *deployment.replicas.leaving)


async def _ask(
    deployment: Deployment, asked: SessionsAsked
) -> tuple[list[tuple[str, SessionStats]], list[str]]:
    """(replica, what it knows) of each session on each replica, and who did not answer."""
    answers, silent = await ask_replicas(deployment, "/replica/sessions", msgspec.json.encode(asked))
    return [
        (replica, stats) for replica, answer in answers for stats in _held.decode(answer).sessions
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
    answers = await asyncio.gather(*map(one, views))
    both = list(zip(views, answers, strict=True))
    told = [(view.name, answer) for view, answer in both if answer is not None]
    return told, [view.name for view, answer in both if answer is None]


async def _rewarded(
    deployment: Deployment, asked: RewardAsked, only: str | None
) -> tuple[list[tuple[str, RewardTaken]], list[str]]:
    views = [view for view in views_of(deployment) if only in (None, view.name)]
    answers, silent = await ask_replicas(deployment, "/replica/reward", msgspec.json.encode(asked), views)
    return [(replica, _taken.decode(answer)) for replica, answer in answers], silent


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
