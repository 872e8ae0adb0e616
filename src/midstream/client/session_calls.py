"""A deployment's sessions: their keys, traces and rewards.

Always holds: every call may be repeated. A replica that does not answer is an error unless the caller can do without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from midstream.client.calls import RETRY_S, RetryingCaller, expected
from midstream.client.errors import ReplicasSilent
from midstream.core.http_answer import MESSAGE_CHARS_MAX


class _Session(msgspec.Struct):
    id: str


class _Sessions(msgspec.Struct):
    data: list[_Session]
    has_more: bool
    unreachable: list[str]


class _Traced(msgspec.Struct):
    unreachable: list[str]


class SessionCalls:
    """The calls of `ServerClient.sessions`. Safe to use from several threads."""

    def __init__(self, caller: RetryingCaller, root: str) -> None:
        self._caller = caller
        self._url = f"{root}/v1/sessions"

    def __repr__(self) -> str:
        return f"<SessionCalls {self._url}>"

    def keys(
        self, *, page: int = 1000, retry_s: float = RETRY_S, without: Collection[str] = ()
    ) -> Iterator[str]:
        """The keys of all sessions of the deployment, in order; one request for each `page` of them.

        without: replicas that need not answer. Raises SignalRefused, and ReplicasSilent for others that do not.
        """
        after = ""
        while True:
            url = f"{self._url}?limit={page}&after={quote(after, safe='')}"
            answer = self._caller.call("GET", url, deadline_s=retry_s).body
            found = expected(answer, _Sessions, url, "sessions")
            _check_heard(url, found.unreachable, without)
            keys = [one.id for one in found.data]
            yield from keys
            if not found.has_more or not keys:
                return
            after = keys[-1]

    def get(self, session: str, *, retry_s: float = RETRY_S) -> dict[str, Any]:
        """What the turns of a session were like, and `wait`: why its next one has not begun. Raises SignalRefused."""
        url = f"{self._url}/{quote(session, safe='')}"
        answer = self._caller.call("GET", url, deadline_s=retry_s).body
        return expected(answer, dict[str, Any], url, "a session")

    def trace(
        self, session: str, *, retry_s: float = RETRY_S, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """The turns of a session (docs/exact-sessions.md).

        without: replicas that need not answer. Raises SignalRefused, and ReplicasSilent for others that do not.
        """
        url = f"{self._url}/{quote(session, safe='')}/trace"
        answer: dict[str, Any] = self._caller.call("GET", url, deadline_s=retry_s).body
        _check_heard(url, expected(answer, _Traced, url, "a trace").unreachable, without)
        return answer

    def reward(
        self,
        session: str,
        reward: float,
        *,
        turn: int | None = None,
        name: str = "reward",
        metadata: Mapping[str, Any] | None = None,
        retry_s: float = RETRY_S,
    ) -> dict[str, Any]:
        """Reward a session, or one turn of it. The last reward of a turn and name counts.

        turn: its number; None rewards the session. name: training uses "reward". metadata: is kept with it.
        Raises SignalRefused.
        """
        url = f"{self._url}/{quote(session, safe='')}/reward"
        body = {"reward": reward, "turn": turn, "name": name, "metadata": metadata}
        answer = self._caller.call("POST", url, deadline_s=retry_s, json=body).body
        return expected(answer, dict[str, Any], url, "a reward")


def _check_heard(url: str, silent: Sequence[str], without: Collection[str]) -> None:
    if missed := [name for name in silent if name not in without]:
        named = ", ".join(missed)[:MESSAGE_CHARS_MAX]
        raise ReplicasSilent(f"{url}: no answer of {named}; try again", missed)
