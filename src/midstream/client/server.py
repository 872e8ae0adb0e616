"""The server's hot-load API as a trainer uses it: signal, hint, status, ledger, and waiting.

Always holds: every call may be repeated. Errors that a retry can cure are retried until the deadline, others are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import httpx

from midstream.client.errors import NotReadyInTime, PublishError, SnapshotFailed, Unanswered
from midstream.client.retry import Answer, Caller
from midstream.client.status import Status, read_status
from midstream.core.types import HEADER_OVERWRITE

HOT_LOAD_PATH = "/hot_load/v1/models/hot_load"
SIGNAL_RETRY_S = 300.0
HINT_TIMEOUT_S = 5.0

ResetPromptCache = Literal["all", "new_session", "none"] | bool | Mapping[str, int]
Compression = Literal["arc_v1", "arc_v2"]


class SignalOptions(TypedDict, total=False):
    """Options of a signal.

    previous: the snapshot that a delta stands on. compression: of a delta ("arc_v2").
    extra_fields_ignore: top-level fields of config.json that may differ from the served model's.
    retry_s: how long the signal is retried, in seconds (300).
    overwrite: these files replace others that were served under this identity.
    """

    previous: str | None
    compression: Compression
    extra_fields_ignore: Sequence[str]
    retry_s: float
    overwrite: bool


class HotLoadServer:
    """A server's hot-load API. Safe to use from several threads.

    base_url: with or without /v1. Raises ValueError when it has credentials.
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
        url = httpx.URL(base_url)
        # They would be shown in messages, and kept on disk.
        if url.userinfo or url.query or url.fragment:
            raise ValueError("base_url must not hold a user, password or query; give a key as api_key")
        self.root = base_url.rstrip("/").removesuffix("/v1").removesuffix("/inference")
        self.url = self.root + HOT_LOAD_PATH
        self.deployment = deployment
        headers = {"fireworks-model": model, "fireworks-deployment": deployment}
        headers["authorization"] = f"Bearer {api_key}" if api_key else None
        self._http = http or httpx.Client(timeout=request_timeout_s)
        self._http.headers.update({name: value for name, value in headers.items() if value})
        self._sleep = sleep
        self._monotonic = monotonic
        self._caller = Caller(self._http, sleep=sleep, monotonic=monotonic)

    def __repr__(self) -> str:
        return f"<HotLoadServer {self.url}>"

    def close(self) -> None:
        self._http.close()

    def signal(
        self, identity: str, reset_prompt_cache: ResetPromptCache = "all", **options: Unpack[SignalOptions]
    ) -> Answer:
        """Ask replicas to serve `identity`, which is in the bucket. Safe to repeat. Raises SignalRefused."""
        previous, fields = options.get("previous"), options.get("extra_fields_ignore")
        policy = dict(reset_prompt_cache) if isinstance(reset_prompt_cache, Mapping) else reset_prompt_cache
        body: dict[str, Any] = {"identity": identity, "reset_prompt_cache": policy}
        if previous is not None:
            body["incremental_snapshot_metadata"] = delta_metadata(
                previous, options.get("compression", "arc_v2")
            )
        if fields:
            body["validation"] = {"extra_fields_ignore": list(fields)}
        retry_s = options.get("retry_s", SIGNAL_RETRY_S)
        headers = {HEADER_OVERWRITE: "1"} if options.get("overwrite") else None
        return self._caller.call("POST", self.url, deadline_s=retry_s, json=body, headers=headers)

    def hint(
        self, identity: str, files: Sequence[str], previous: str | None, compression: Compression
    ) -> bool:
        """Say that `files` are in the bucket; whether the server took it. Never raises: a hint only saves time."""
        body: dict[str, Any] = {"identity": identity, "files": list(files)}
        if previous is not None:
            body["incremental_snapshot_metadata"] = delta_metadata(previous, compression)
        try:
            answer = self._http.post(f"{self.url}/hint", json=body, timeout=HINT_TIMEOUT_S)
        except httpx.TransportError:
            return False
        return answer.is_success

    def status(self, *, retry_s: float = SIGNAL_RETRY_S) -> Status:
        """The snapshots that every replica serves and loads. Raises SignalRefused."""
        answer = self._caller.call("GET", self.url, deadline_s=retry_s).body
        try:
            return read_status(answer)
        except (KeyError, TypeError, AttributeError) as error:
            raise PublishError(f"{self.url}: answered something else than replicas: {answer!r}") from error

    def wait_until_ready(
        self,
        identity: str,
        timeout_s: float = 300.0,
        *,
        on_status: Callable[[Status], None] | None = None,
        poll_s: float = 0.1,
    ) -> Status:
        """Poll until every replica serves `identity`.

        Raises SnapshotFailed with the replica's message as soon as one could not load it. Raises NotReadyInTime.
        """
        until = self._monotonic() + timeout_s
        late = f"snapshot {identity!r} is not known to be served everywhere after {timeout_s:g} s"
        status: Status | None = None
        while True:
            try:
                status = self.status(retry_s=max(0.0, until - self._monotonic()))
            except Unanswered as error:
                heard = status or "nothing was heard of the replicas"
                raise NotReadyInTime(f"{late}: {heard}; {error}") from error
            if on_status is not None:
                on_status(status)
            if failed := status.failed(identity):
                raise SnapshotFailed(identity, failed.name, failed.error or "it gave no reason")
            if status.serves(identity):
                return status
            if self._monotonic() + poll_s > until:
                raise NotReadyInTime(f"{late}: {status}")
            self._sleep(poll_s)

    def deployments(self, *, retry_s: float = SIGNAL_RETRY_S) -> list[dict[str, Any]]:
        """The deployment resources of the server's one account. Raises SignalRefused."""
        account = self._get("/v1/accounts?pageSize=2", "accounts", retry_s)[0]["name"]
        found: list[dict[str, Any]] = self._get(f"/v1/{account}/deployments", "deployments", retry_s)
        return found

    def ledger(self, deployment: str, *, retry_s: float = SIGNAL_RETRY_S) -> dict[str, Any]:
        """Every snapshot that was signalled to `deployment` (its full name). Raises SignalRefused."""
        url = f"{self.root}/v1/{deployment}/ledger"
        answer = self._caller.call("GET", url, deadline_s=retry_s).body
        if not isinstance(answer, dict) or not isinstance(answer.get("snapshots"), list):
            raise PublishError(f"{url}: answered something else than a ledger: {answer!r}")
        return answer

    def metrics(self, *, retry_s: float = SIGNAL_RETRY_S) -> str:
        """The text of /metrics, in Prometheus' format. Raises SignalRefused."""
        return self._caller.text("GET", f"{self.root}/metrics", deadline_s=retry_s)

    def _get(self, path: str, key: str, retry_s: float) -> Any:
        url = self.root + path
        answer = self._caller.call("GET", url, deadline_s=retry_s).body
        if not isinstance(answer, dict) or not isinstance(answer.get(key), list) or not answer[key]:
            raise PublishError(f"{url}: answered something else than {key}: {answer!r}")
        return answer[key]


def delta_metadata(previous: str, compression: Compression) -> dict[str, str]:
    """The metadata of a delta's signal. The protocol spells Adler-32 `alder32`."""
    return {
        "previous_snapshot_identity": previous,
        "compression_format": compression,
        "checksum_format": "alder32",
    }
