"""The deployment's policies as the front uses them: an adapter made a policy's snapshot, waited for, ended.

Always holds: every call may be repeated. What a retry may cure is retried for `patience_s`; what goes wrong then is
`WorkFailed`, with the server's own words.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from midstream.client.status import Status, read_status
from midstream.core.call_attempts import CallAttempts, Heard, Verdict
from midstream.core.http_answer import HttpAnswer, NotThatAnswer
from midstream.core.retry import Backoff, Deadline
from midstream.core.wires import HOT_LOAD_PATH
from midstream.http.call import call, until_answered
from midstream_tinker.trainer.types import WorkFailed

REQUEST_TIMEOUT_S = 30.0
# The time that the replicas have to load an adapter.
READY_S = 600.0
# Once one replica serves an adapter, the others have so long to do so, too, before samples begin.
SPREAD_S = 5.0
POLL_S = 0.05
# How often a signal may be refused for a policy that is not there: it has just been ended, or its name is something else's.
ABSENT_MAX = 20
BACKOFF = Backoff(first_s=0.25, last_s=4.0)


class PolicyPort(Protocol):
    """Every call raises WorkFailed."""

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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gateway_url = gateway_url
        self._deployment = deployment
        self._key = key
        self._policies = f"/v1/{deployment}/policies"
        self._patience_s = patience_s
        self._sleep = sleep
        self._now = now
        self._tls = tls

    async def several(self) -> bool:
        until, what = self._deadline(), f"asking for the engines of {self._deployment}"
        while True:
            shown = await self._ask("GET", f"/v1/models/{self._deployment}", what, until)
            engines = _json(shown, what).get("midstream")
            if isinstance(engines, dict):
                return "policies" in engines["engine"]["features"]
            # No replica has been heard of yet.
            await self._pause(POLL_S, until, what, "no replica answers")

    async def known(self) -> list[str]:
        until, what = self._deadline(), f"listing the policies of {self._deployment}"
        found, page = list[str](), ""
        while True:
            answer = await self._ask("GET", f"{self._policies}?pageToken={quote(page, safe='')}", what, until)
            listed = _json(answer, what)
            found += [str(one["policy"]) for one in listed["policies"]]
            page = str(listed.get("nextPageToken") or "")
            if not page:
                return found

    async def load(self, policy: str, snapshot: str) -> None:
        until, what = self._deadline(), f"serving {snapshot!r}"
        path = f"{HOT_LOAD_PATH}?policy={quote(policy, safe='')}"
        await self._signal(policy, snapshot, what, until)
        first: float | None = None
        while True:
            answer = await self._ask("GET", path, what, until, final=(404,))
            if answer.status == 404:
                # Another gateway does not know it yet, or somebody has ended it.
                await self._signal(policy, snapshot, what, until)
            else:
                status = _status(_json(answer, what), what)
                if failed := status.failed(snapshot):
                    raise WorkFailed(
                        f"{what} failed: {failed.name} could not load it: {failed.error}", "unknown"
                    )
                if status.serves(snapshot):
                    return
                if _somewhere(status, snapshot):
                    first = self._now() if first is None else first
                    if self._now() - first >= SPREAD_S:
                        return
                else:
                    first = None
            await self._pause(POLL_S, until, what, "no replica serves it in time")

    async def end(self, policy: str) -> None:
        until, what = self._deadline(), f"ending the policy {policy!r}"
        path = f"{self._policies}/{policy}"
        answer = await self._ask("DELETE", path, what, until, final=(404,))
        while answer.status != 404:
            await self._pause(POLL_S, until, what, "replicas still have it")
            answer = await self._ask("GET", path, what, until, final=(404,))

    async def _signal(self, policy: str, snapshot: str, what: str, until: Deadline) -> None:
        body = {"identity": snapshot, "policy": policy}
        absent = 0
        while True:
            answer = await self._ask("POST", HOT_LOAD_PATH, what, until, body=body, final=(409,))
            if answer.status != 409:
                return
            # One of its name may be on its way out.
            path = f"{self._policies}/{policy}"
            there = await self._ask("GET", path, what, until, final=(404,))
            absent += there.status == 404
            leaving = there.status != 404 and _json(there, what).get("state") == "DELETING"
            if not leaving and (there.status != 404 or absent > ABSENT_MAX):
                raise WorkFailed(f"{what} failed: {answer.problem}", "server")
            await self._pause(POLL_S, until, what, answer.problem)

    def _deadline(self) -> Deadline:
        return Deadline(self._patience_s, self._now)

    async def _ask(
        self,
        method: str,
        path: str,
        what: str,
        until: Deadline,
        final: tuple[int, ...] = (),
        body: Mapping[str, Any] | None = None,
    ) -> HttpAnswer:
        """A 2xx, or one of `final`. Raises WorkFailed for other answers, and when there is none until then."""
        headers = f"fireworks-deployment: {self._deployment}\r\n"
        if self._key:
            headers += f"authorization: Bearer {self._key}\r\n"
        data = None if body is None else msgspec.json.encode(body)
        return await until_answered(
            _PolicyAttempts(what, until, final),
            lambda: call(self.gateway_url, method, path, data, REQUEST_TIMEOUT_S, headers, tls=self._tls),
            self._sleep,
        )

    async def _pause(self, seconds: float, until: Deadline, what: str, problem: str) -> None:
        """Raises WorkFailed when it is too late to try again."""
        if not until.allows(seconds):
            raise _too_late(what, problem)
        await self._sleep(seconds)


class _PolicyAttempts(CallAttempts):
    """Attempts until a deadline. what: the work that fails when they do. final: statuses that are answers here."""

    def __init__(self, what: str, until: Deadline, final: tuple[int, ...]) -> None:
        super().__init__(BACKOFF)
        self._what = what
        self._until = until
        self._final = final

    def verdict(self, answer: HttpAnswer) -> Verdict:
        return "take" if answer.status in self._final else super().verdict(answer)

    def allows(self, heard: Heard, pause_s: float) -> bool:
        return self._until.allows(pause_s)

    def refused(self, answer: HttpAnswer) -> WorkFailed:
        return WorkFailed(f"{self._what} failed: {answer.problem}", "user")

    def gave_up(self, heard: Heard) -> WorkFailed:
        return _too_late(self._what, heard.problem)


def _too_late(what: str, problem: str) -> WorkFailed:
    return WorkFailed(f"{what} failed: {problem}", "server")


def _somewhere(status: Status, snapshot: str) -> bool:
    return any(replica.ready and replica.snapshot == snapshot for replica in status.replicas)


def _json(answer: HttpAnswer, what: str) -> dict[str, Any]:
    try:
        return answer.read(dict[str, Any])
    except NotThatAnswer as error:
        raise WorkFailed(
            f"{what} failed: the server's answer is no JSON object: {error}", "server"
        ) from error


def _status(answer: Mapping[str, Any], what: str) -> Status:
    try:
        return read_status(answer)
    except ValueError as error:
        raise WorkFailed(f"{what} failed: {error}", "server") from error
