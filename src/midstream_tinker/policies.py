"""The deployment's policies as the front uses them: an adapter made a policy's snapshot, waited for, ended.

Always holds: every call may be repeated. What a retry may cure is retried for `patience_s`; what goes wrong then is `Failed`,
with the server's own words.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import httpx

from midstream.client.server import HOT_LOAD_PATH
from midstream.client.status import Status, read_status
from midstream.core.retry import Backoff, outcome_of
from midstream_tinker.trainer.types import Failed

REQUEST_TIMEOUT_S = 30.0
# The time that the replicas have to load an adapter.
READY_S = 600.0
# Once one replica serves an adapter, the others have so long to do so, too, before samples begin.
SPREAD_S = 5.0
POLL_S = 0.05
# How often a signal may be refused for a policy that is not there: it has just been ended, or its name is something else's.
ABSENT_MAX = 20
BACKOFF = Backoff(first_s=0.25, last_s=4.0)


class Policies(Protocol):
    """Every call raises Failed."""

    async def several(self) -> bool:
        """Whether every replica's engine serves many policies side by side."""

    async def known(self) -> list[str]:
        """The names of the policies that there are."""

    async def load(self, policy: str, snapshot: str) -> None:
        """Replicas serve `snapshot`, which is in the bucket, as the policy when this returns."""

    async def end(self, policy: str) -> None:
        """There is no policy of this name when this returns."""


class DeploymentPolicies:
    """The port over the gateway's public API. For use in one event loop.

    gateway_url: may be changed when the gateway moved. deployment: its full name. key: this server's own, which may publish
    to the deployment; None where keys are not in use. tls: for an https gateway.
    """

    def __init__(
        self,
        *,
        gateway_url: str,
        deployment: str,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        patience_s: float = READY_S,
        spread_s: float = SPREAD_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gateway_url = gateway_url
        self._deployment = deployment
        self._key = key
        self._policies = f"/v1/{deployment}/policies"
        self._patience_s = patience_s
        self._spread_s = spread_s
        self._sleep = sleep
        self._now = now
        # Without HTTPS no TLS context is set up, which takes a while.
        self._http = httpx.AsyncClient(verify=tls or False, timeout=REQUEST_TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def several(self) -> bool:
        until, what = self._now() + self._patience_s, f"asking for the engines of {self._deployment}"
        while True:
            shown = await self._ask("GET", f"/v1/models/{self._deployment}", what, until)
            engines = _json(shown, what).get("midstream")
            if isinstance(engines, dict):
                return "policies" in engines["engine"]["features"]
            # No replica has been heard of yet.
            await self._pause(POLL_S, until, what, "no replica answers")

    async def known(self) -> list[str]:
        what, until = f"listing the policies of {self._deployment}", self._now() + self._patience_s
        found, page = list[str](), ""
        while True:
            answer = await self._ask("GET", self._policies, what, until, params={"pageToken": page})
            told = _json(answer, what)
            found += [str(one["policy"]) for one in told["policies"]]
            page = str(told.get("nextPageToken") or "")
            if not page:
                return found

    async def load(self, policy: str, snapshot: str) -> None:
        until, what = self._now() + self._patience_s, f"serving {snapshot!r}"
        await self._signal(policy, snapshot, what, until)
        first: float | None = None
        while True:
            answer = await self._ask(
                "GET", HOT_LOAD_PATH, what, until, params={"policy": policy}, final=(404,)
            )
            if answer.status_code == 404:
                # Another gateway does not know it yet, or somebody has ended it.
                await self._signal(policy, snapshot, what, until)
            else:
                status = _status(_json(answer, what), what)
                if failed := status.failed(snapshot):
                    raise Failed(f"{what} failed: {failed.name} could not load it: {failed.error}", "unknown")
                if status.serves(snapshot):
                    return
                if _somewhere(status, snapshot):
                    first = self._now() if first is None else first
                    if self._now() - first >= self._spread_s:
                        return
                else:
                    first = None
            await self._pause(POLL_S, until, what, "no replica serves it in time")

    async def end(self, policy: str) -> None:
        until, what = self._now() + self._patience_s, f"ending the policy {policy!r}"
        path = f"{self._policies}/{policy}"
        answer = await self._ask("DELETE", path, what, until, final=(404,))
        while answer.status_code != 404:
            await self._pause(POLL_S, until, what, "replicas still have it")
            answer = await self._ask("GET", path, what, until, final=(404,))

    async def _signal(self, policy: str, snapshot: str, what: str, until: float) -> None:
        body = {"identity": snapshot, "policy": policy}
        absent = 0
        while True:
            answer = await self._ask("POST", HOT_LOAD_PATH, what, until, json=body, final=(409,))
            if answer.status_code != 409:
                return
            # One of its name may be on its way out.
            path = f"{self._policies}/{policy}"
            there = await self._ask("GET", path, what, until, final=(404,))
            absent += there.status_code == 404
            leaving = there.status_code != 404 and _json(there, what).get("state") == "DELETING"
            if not leaving and (there.status_code != 404 or absent > ABSENT_MAX):
                raise Failed(f"{what} failed: {_message(answer)}", "server")
            await self._pause(POLL_S, until, what, _message(answer))

    async def _ask(
        self,
        method: str,
        path: str,
        what: str,
        until: float,
        final: tuple[int, ...] = (),
        **request: Any,
    ) -> httpx.Response:
        """A 2xx, or one of `final`. Raises Failed for other answers, and when there is none until then."""
        headers = {"fireworks-deployment": self._deployment}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        failures = 0
        while True:
            try:
                answer = await self._http.request(
                    method, f"{self.gateway_url}{path}", headers=headers, **request
                )
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if answer.is_success or answer.status_code in final:
                    return answer
                problem = _message(answer)
                if outcome_of(answer.status_code) == "refused":
                    raise Failed(f"{what} failed: {problem}", "user")
            failures += 1
            await self._pause(BACKOFF.pause_s(failures), until, what, problem)

    async def _pause(self, seconds: float, until: float, what: str, problem: str) -> None:
        """Raises Failed when it is too late to go on."""
        if self._now() + seconds > until:
            raise Failed(f"{what} failed: {problem}", "server")
        await self._sleep(seconds)


def _somewhere(status: Status, snapshot: str) -> bool:
    return any(replica.ready and replica.snapshot == snapshot for replica in status.replicas)


def _json(answer: httpx.Response, what: str) -> Mapping[str, Any]:
    try:
        found = answer.json()
    except ValueError as error:
        raise Failed(f"{what} failed: the server's answer is not JSON", "server") from error
    if not isinstance(found, dict):
        raise Failed(f"{what} failed: the server's answer is no object", "server")
    return found


def _status(answer: Mapping[str, Any], what: str) -> Status:
    try:
        return read_status(answer)
    except ValueError as error:
        raise Failed(f"{what} failed: {error}", "server") from error


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status_code}"
