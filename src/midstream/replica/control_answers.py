"""What a replica's port answers at once: control calls, health, models.

Always holds: an answer is made of the replica's state in one turn of the loop.
"""

from __future__ import annotations

import msgspec

from midstream.core.errors import InvalidRequest, ReplicaUnavailable
from midstream.core.responses import ResponseAsked
from midstream.core.sessions import SessionsAsked, SessionsHeld
from midstream.core.traces import RewardAsked
from midstream.core.types import Desired, PolicyEnd
from midstream.replica.exchange import Answer
from midstream.replica.replica import Replica


def health(replica: Replica) -> Answer:
    if not replica.ready:
        raise ReplicaUnavailable("the engine is not ready")
    return 200, {"status": "ok"}


def models(replica: Replica) -> Answer:
    model = {
        "id": replica.names.model,
        "object": "model",
        "created": 0,
        "owned_by": "midstream",
        "snapshot": replica.report().own.snapshot,
    }
    return 200, {"object": "list", "data": [model]}


def desire(replica: Replica, desired: Desired) -> Answer:
    replica.desire(desired)
    return 202, replica.report()


def end_policy(replica: Replica, end: PolicyEnd) -> Answer:
    return 200, {"ended": replica.policies.end(end.policy, end.made)}


def sessions(replica: Replica, asked: SessionsAsked) -> Answer:
    if asked.key is None:
        return 200, SessionsHeld(tuple(replica.sessions.of(asked.tenant, asked.after, asked.limit)))
    found = replica.session((asked.tenant, asked.key))
    return 200, SessionsHeld(() if found is None else (found,))


def close_session(replica: Replica, asked: SessionsAsked) -> Answer:
    if asked.key is None:
        raise InvalidRequest("key: name the session that is to be closed", param="key")
    return 200, {"closed": replica.close_session((asked.tenant, asked.key))}


def response(replica: Replica, asked: ResponseAsked) -> Answer:
    found = replica.responses.find(asked.tenant, asked.id)
    if found is None:
        return 200, {"found": None}
    if asked.what == "delete":
        return 200, {"found": replica.responses.delete(asked.tenant, asked.id)}
    return 200, {"found": found.input if asked.what == "items" else msgspec.Raw(found.body)}


def reward(replica: Replica, asked: RewardAsked) -> Answer:
    return 200, replica.reward(asked)


def abort(replica: Replica, ids: tuple[str, ...] | None) -> Answer:
    return 200, {"aborted": replica.policies.abort(ids)}


def reset_cache(replica: Replica, event: bytes) -> Answer:
    replica.reset_cache(event.decode("latin-1"))
    return 200, {}
