"""The server's hot-load API as a trainer uses it: signal, hint, status, ledger, and waiting.

Always holds: every call may be repeated. Errors that a retry can cure are retried until the deadline, others are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx
import msgspec

from midstream.client.calls import Answer, Caller, decoded
from midstream.client.errors import NotReadyInTime, PublishError, ReplicasSilent, SnapshotFailed, Unanswered
from midstream.client.status import Status, read_status
from midstream.core.headers import HEADER_OVERWRITE
from midstream.core.http_answer import MESSAGE_CHARS_MAX, NotThatAnswer, read
from midstream.core.retry import Deadline


class _Named(msgspec.Struct):
    name: str


class _Session(msgspec.Struct):
    id: str


class _Sessions(msgspec.Struct):
    data: list[_Session]
    has_more: bool
    unreachable: list[str]


class _Traced(msgspec.Struct):
    unreachable: list[str]


_Kind = TypeVar("_Kind")


def _read(answer: Any, kind: type[_Kind], url: str, what: str) -> _Kind:
    """Raises PublishError when `answer` is something else."""
    try:
        return read(answer, kind)
    except NotThatAnswer as error:
        raise PublishError(f"{url}: answered something else than {what}: {error}") from error


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


def which_deployment(rows: Sequence[Mapping[str, Any]], asked: str | None) -> Mapping[str, Any]:
    """The one of the deployment resources that is meant. asked: its name, whole or its last part; None: the only one, or the
    one named default. Raises ValueError."""
    meant = [row for row in rows if asked is None or asked in (row["name"], row["name"].rpartition("/")[2])]
    if asked is None and len(meant) > 1:
        meant = [row for row in meant if row["name"].endswith("/default")] or meant
    if len(meant) != 1:
        known = ", ".join(row["name"].rpartition("/")[2] for row in rows)
        raise ValueError(
            f"deployment {asked}: there is none, only {known}"
            if asked
            else f"deployment: name one of {known}"
        )
    return meant[0]


def check_url(name: str, value: str) -> None:
    """Raises ValueError when the URL has what would be shown in messages, and kept on disk. name: of the parameter."""
    url = httpx.URL(value)
    if url.userinfo or url.query or url.fragment:
        raise ValueError(f"{name} must not hold a user, password or query; give a key as api_key")


class HotLoadServer:
    """A server's hot-load API, and its sessions' traces. Safe to use from several threads.

    base_url: with or without /v1. model, deployment: which deployment, where the server has several. api_key: a key with the
    scope of the calls that are made. request_timeout_s: of one request, in seconds. http, sleep, monotonic: for tests.
    Raises ValueError when base_url has credentials or a query.

    Each method that takes `retry_s` repeats what a retry can cure, and has its answer, or raises Unanswered, after so many
    seconds. 0 asks once, for `request_timeout_s` at most.
    """

    #: Signals and status are of this policy of the deployment; None: of the deployment itself.
    policy: str | None = None

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
        self.url = self.root + HOT_LOAD_PATH
        self.deployment = deployment
        headers = {"fireworks-model": model, "fireworks-deployment": deployment}
        headers["authorization"] = f"Bearer {api_key}" if api_key else None
        http = http or httpx.Client(timeout=request_timeout_s)
        http.headers.update({name: value for name, value in headers.items() if value})
        self._sleep = sleep
        self._monotonic = monotonic
        self._caller = Caller(http, sleep=sleep, monotonic=monotonic)

    def __repr__(self) -> str:
        return f"<HotLoadServer {self.url}>"

    def close(self) -> None:
        """Closes the connections. No call may follow."""
        self._caller.close()

    def signal(
        self, identity: str, reset_prompt_cache: ResetPromptCache = "all", **options: Unpack[SignalOptions]
    ) -> Answer:
        """Ask replicas to serve `identity`, which is in the bucket. Safe to repeat. Raises SignalRefused.

        reset_prompt_cache: "all", "new_session", "none", True (all), False (none), or {"max_age": k}: KV that is older than k
        swaps is computed again. options: see `SignalOptions`.
        """
        previous, fields = options.get("previous"), options.get("extra_fields_ignore")
        policy = dict(reset_prompt_cache) if isinstance(reset_prompt_cache, Mapping) else reset_prompt_cache
        body: dict[str, Any] = {"identity": identity, "reset_prompt_cache": policy}
        if self.policy is not None:
            body["policy"] = self.policy
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
            answer = self._caller.once("POST", f"{self.url}/hint", deadline_s=HINT_TIMEOUT_S, json=body)
        except Unanswered:
            return False
        return answer.outcome == "done"

    def status(self, *, retry_s: float = SIGNAL_RETRY_S) -> Status:
        """The snapshots that every replica serves and loads. Raises SignalRefused."""
        url = self.url if self.policy is None else f"{self.url}?policy={quote(self.policy, safe='')}"
        answer = self._caller.call("GET", url, deadline_s=retry_s).body
        try:
            return read_status(answer)
        except ValueError as error:
            raise PublishError(f"{url}: answered something else than replicas: {error}") from error

    def wait_until_ready(
        self,
        identity: str,
        timeout_s: float = 300.0,
        *,
        on_status: Callable[[Status], None] | None = None,
        poll_s: float = 0.1,
    ) -> Status:
        """Poll until every replica serves `identity`. Returns the last answer.

        timeout_s: in seconds; no request lasts past it. 0 asks once. poll_s: in seconds. on_status: called with each answer.
        Raises SnapshotFailed with the replica's message as soon as one could not load it. Raises NotReadyInTime.
        """
        deadline = Deadline(timeout_s, self._monotonic)
        late = f"snapshot {identity!r} is not known to be served everywhere after {timeout_s:g} s"
        status: Status | None = None
        while True:
            try:
                # A wait of 0 s asks once. One that slept too long has a moment left.
                status = self.status(retry_s=max(deadline.left_s, 0.001) if timeout_s else 0.0)
            except Unanswered as error:
                heard = status or "nothing was heard of the replicas"
                raise NotReadyInTime(f"{late}: {heard}; {error}") from error
            if on_status is not None:
                on_status(status)
            if failed := status.failed(identity):
                raise SnapshotFailed(identity, failed.name, failed.error or "it gave no reason")
            if status.serves(identity):
                return status
            if not deadline.allows(poll_s):
                raise NotReadyInTime(f"{late}: {status}")
            self._sleep(poll_s)

    def deployments(self, *, retry_s: float = SIGNAL_RETRY_S) -> list[dict[str, Any]]:
        """The deployment resources of the server's one account. Raises SignalRefused."""
        path = "/v1/accounts?pageSize=2"
        account = _read(self._get(path, "accounts", retry_s)[0], _Named, self.root + path, "accounts").name
        found: list[dict[str, Any]] = self._get(f"/v1/{account}/deployments", "deployments", retry_s)
        return found

    def own_bucket(self, *, retry_s: float = SIGNAL_RETRY_S) -> str:
        """The URL of the bucket that the deployment reads. Raises SignalRefused; PublishError when it is not known which."""
        try:
            row = which_deployment(self.deployments(retry_s=retry_s), self.deployment)
        except ValueError as error:
            raise PublishError(str(error)) from error
        if not row.get("hotLoadBucketUrl"):
            raise PublishError(f"bucket: {row['name']} does not say which is its own; name it")
        return str(row["hotLoadBucketUrl"])

    def policies(self, deployment: str, *, retry_s: float = SIGNAL_RETRY_S) -> list[dict[str, Any]]:
        """The policies of `deployment` (its full name), as docs/policies.md shows them. Raises SignalRefused."""
        url, found, page = f"{self.root}/v1/{deployment}/policies", list[dict[str, Any]](), ""
        while True:
            place = f"{url}?pageToken={quote(page, safe='')}" if page else url
            answer = self._caller.call("GET", place, deadline_s=retry_s).body
            if not isinstance(answer, dict) or not isinstance(answer.get("policies"), list):
                raise PublishError(f"{url}: answered something else than policies")
            found += answer["policies"]
            # A server that is older than pages has told all.
            page = str(answer.get("nextPageToken") or "")
            if not page:
                return found

    def ledger(self, deployment: str, *, retry_s: float = SIGNAL_RETRY_S) -> dict[str, Any]:
        """Every snapshot that was signalled to `deployment` (its full name). Raises SignalRefused."""
        url = f"{self.root}/v1/{deployment}/ledger"
        answer = self._caller.call("GET", url, deadline_s=retry_s).body
        if not isinstance(answer, dict) or not isinstance(answer.get("snapshots"), list):
            raise PublishError(f"{url}: answered something else than a ledger")
        return answer

    def sessions(
        self, *, page: int = 1000, retry_s: float = SIGNAL_RETRY_S, without: Collection[str] = ()
    ) -> Iterator[str]:
        """The keys of all sessions of the deployment, in order; one request for each `page` of them.

        without: replicas that need not answer. Raises SignalRefused, and ReplicasSilent for others that do not.
        """
        after = ""
        while True:
            url = f"{self.root}/v1/sessions?limit={page}&after={quote(after, safe='')}"
            answer = self._caller.call("GET", url, deadline_s=retry_s).body
            found = _read(answer, _Sessions, url, "sessions")
            _check_heard(url, found.unreachable, without)
            keys = [one.id for one in found.data]
            yield from keys
            if not found.has_more or not keys:
                return
            after = keys[-1]

    def trace(
        self, session: str, *, retry_s: float = SIGNAL_RETRY_S, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """The turns of a session (docs/exact-sessions.md).

        without: replicas that need not answer. Raises SignalRefused, and ReplicasSilent for others that do not.
        """
        url = f"{self.root}/v1/sessions/{quote(session, safe='')}/trace"
        answer: dict[str, Any] = self._caller.call("GET", url, deadline_s=retry_s).body
        _check_heard(url, _read(answer, _Traced, url, "a trace").unreachable, without)
        return answer

    def reward(
        self,
        session: str,
        reward: float,
        *,
        turn: int | None = None,
        name: str = "reward",
        metadata: Mapping[str, Any] | None = None,
        retry_s: float = SIGNAL_RETRY_S,
    ) -> dict[str, Any]:
        """Reward a session, or one turn of it. The last reward of a turn and name counts.

        turn: its number; None rewards the session. name: training uses "reward". metadata: is kept with it.
        Raises SignalRefused.
        """
        url = f"{self.root}/v1/sessions/{quote(session, safe='')}/reward"
        body = {"reward": reward, "turn": turn, "name": name, "metadata": metadata}
        answer = self._caller.call("POST", url, deadline_s=retry_s, json=body).body
        return _read(answer, dict[str, Any], url, "a reward")

    def health(self) -> dict[str, Any]:
        """What /health says, also of a server that is not well. Raises Unanswered; never asks twice."""
        url = f"{self.root}/health"
        return _read(decoded(self._caller.once("GET", url), url), dict[str, Any], url, "its health")

    def get(self, path: str, *, retry_s: float = SIGNAL_RETRY_S) -> Any:
        """The JSON that the server answers at `path`, such as /health. Raises SignalRefused."""
        return self._caller.call("GET", self.root + path, deadline_s=retry_s).body

    def metrics(self, *, retry_s: float = SIGNAL_RETRY_S) -> str:
        """The text of /metrics, in Prometheus' format. Raises SignalRefused."""
        return self._caller.text("GET", f"{self.root}/metrics", deadline_s=retry_s)

    def _get(self, path: str, key: str, retry_s: float) -> Any:
        url = self.root + path
        answer = self._caller.call("GET", url, deadline_s=retry_s).body
        if not isinstance(answer, dict) or not isinstance(answer.get(key), list) or not answer[key]:
            raise PublishError(f"{url}: answered something else than {key}")
        return answer[key]


def _check_heard(url: str, silent: Sequence[str], without: Collection[str]) -> None:
    if missed := [name for name in silent if name not in without]:
        named = ", ".join(missed)[:MESSAGE_CHARS_MAX]
        raise ReplicasSilent(f"{url}: no answer of {named}; try again", missed)


def delta_metadata(previous: str, compression: Compression) -> dict[str, str]:
    """The metadata of a delta's signal. The protocol spells Adler-32 `alder32`."""
    return {
        "previous_snapshot_identity": previous,
        "compression_format": compression,
        "checksum_format": "alder32",
    }
