"""A server as a trainer asks it: one connection, and the calls of each job on it.

Always holds: every call may be repeated. Errors that a retry can cure are retried until the deadline, others are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from midstream.client.calls import RETRY_S, RetryingCaller, decoded, expected
from midstream.client.deployment_calls import DeploymentCalls
from midstream.client.session_calls import SessionCalls
from midstream.client.snapshot_calls import SnapshotCalls


def check_url(name: str, value: str) -> None:
    """Raises ValueError when the URL has what would be shown in messages, and kept on disk. name: of the parameter."""
    url = httpx.URL(value)
    if url.userinfo or url.query or url.fragment:
        raise ValueError(f"{name} must not hold a user, password or query; give a key as api_key")


class ServerClient:
    """A server. Safe to use from several threads.

    base_url: with or without /v1. model, deployment: which deployment, where the server has several. api_key: a key with the
    scope of the calls that are made. request_timeout_s: of one request, in seconds. http, sleep, monotonic: for tests.
    Raises ValueError when base_url has credentials or a query.

    `snapshots` signals the deployment's weights and waits for them, `policy` those of one of its policies. `sessions` has
    traces and rewards, `deployments` the deployments with their policies and ledgers.

    Each method that takes `retry_s` repeats what a retry can cure, and has its answer, or raises Unanswered, after so many
    seconds. 0 asks once, for `request_timeout_s` at most.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        deployment: str | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 30.0,
        http: httpx.Client | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        check_url("base_url", base_url)
        self.root = base_url.rstrip("/").removesuffix("/v1").removesuffix("/inference")
        headers = {"fireworks-model": model, "fireworks-deployment": deployment}
        headers["authorization"] = f"Bearer {api_key}" if api_key else None
        http = http or httpx.Client(timeout=request_timeout_s)
        http.headers.update({name: value for name, value in headers.items() if value})
        #: Sends the requests of all calls.
        self.caller = RetryingCaller(http, sleep=sleep, monotonic=monotonic)
        self.snapshots = SnapshotCalls(self.caller, self.root)
        self.sessions = SessionCalls(self.caller, self.root)
        self.deployments = DeploymentCalls(self.caller, self.root, deployment)

    def __repr__(self) -> str:
        return f"<ServerClient {self.root}>"

    def close(self) -> None:
        """Closes the connections. No call may follow."""
        self.caller.close()

    def policy(self, name: str) -> SnapshotCalls:
        """Signals of this policy of the deployment, on the same connections."""
        return SnapshotCalls(self.caller, self.root, policy=name)

    def health(self) -> dict[str, Any]:
        """What /health says, also of a server that is not well. Raises Unanswered; never asks twice."""
        url = f"{self.root}/health"
        return expected(decoded(self.caller.once("GET", url), url), dict[str, Any], url, "its health")

    def get(self, path: str, *, retry_s: float = RETRY_S) -> Any:
        """The JSON that the server answers at `path`, such as /health. Raises SignalRefused."""
        return self.caller.call("GET", self.root + path, deadline_s=retry_s).body

    def metrics(self, *, retry_s: float = RETRY_S) -> str:
        """The text of /metrics, in Prometheus' format. Raises SignalRefused."""
        return self.caller.text("GET", f"{self.root}/metrics", deadline_s=retry_s)
