"""Signals to a deployment or to one of its policies: signal, hint, status, and waiting until replicas serve.

Always holds: every call may be repeated. A snapshot counts as served only when the server says so of every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack
from urllib.parse import quote

from midstream.client.calls import RETRY_S, CallAnswer, RetryingCaller
from midstream.client.errors import NotReadyInTime, PublishError, SnapshotFailed, Unanswered
from midstream.client.status import Status, read_status
from midstream.core.errors import RebasePending
from midstream.core.headers import HEADER_OVERWRITE
from midstream.core.types import PolicyFate
from midstream.core.wires import HOT_LOAD_PATH

HINT_TIMEOUT_S = 5.0

ResetPromptCache = Literal["all", "new_session", "none"] | bool | Mapping[str, int]
Compression = Literal["arc_v1", "arc_v2"]


class SignalOptions(TypedDict, total=False):
    """Options of a signal.

    previous: the snapshot that a delta stands on. compression: of a delta ("arc_v2").
    extra_fields_ignore: top-level fields of config.json that may differ from the served model's.
    retry_s: how long the signal is retried, in seconds (300).
    overwrite: these files replace others that were served under this identity.
    wait_for_rebase: a delta on a full chain is retried until a replica has written whole files to stand on (True). False: it
    is refused at once.
    policies: with full weights, what becomes of the deployment's policies: "keep", "rebase", "end" or "refuse".
    """

    previous: str | None
    compression: Compression
    extra_fields_ignore: Sequence[str]
    retry_s: float
    overwrite: bool
    wait_for_rebase: bool
    policies: PolicyFate | None


class SnapshotCalls:
    """The calls of `ServerClient.snapshots`, `ServerClient.policy` and `SnapshotPublisher.snapshots`. Safe to use from several
    threads.

    policy: of the deployment; None signals the deployment itself.
    """

    def __init__(self, caller: RetryingCaller, root: str, *, policy: str | None = None) -> None:
        self._caller = caller
        self._policy = policy
        self.url = root + HOT_LOAD_PATH

    def __repr__(self) -> str:
        return f"<SnapshotCalls {self.url}{'' if self._policy is None else f' {self._policy}'}>"

    def signal(
        self, identity: str, reset_prompt_cache: ResetPromptCache = "all", **options: Unpack[SignalOptions]
    ) -> CallAnswer:
        """Ask replicas to serve `identity`, which is in the bucket. Safe to repeat. Raises SignalRefused.

        reset_prompt_cache: "all", "new_session", "none", True (all), False (none), or {"max_age": k}: KV that is older than k
        swaps is computed again. options: see `SignalOptions`.
        """
        previous, fields = options.get("previous"), options.get("extra_fields_ignore")
        policy = dict(reset_prompt_cache) if isinstance(reset_prompt_cache, Mapping) else reset_prompt_cache
        body: dict[str, Any] = {"identity": identity, "reset_prompt_cache": policy}
        if self._policy is not None:
            body["policy"] = self._policy
        if previous is not None:
            body["incremental_snapshot_metadata"] = delta_metadata(
                previous, options.get("compression", "arc_v2")
            )
        if (fate := options.get("policies")) is not None:
            body["policies"] = fate
        if fields:
            body["validation"] = {"extra_fields_ignore": list(fields)}
        retry_s = options.get("retry_s", RETRY_S)
        headers = {HEADER_OVERWRITE: "1"} if options.get("overwrite") else None
        final = () if options.get("wait_for_rebase", True) else (RebasePending.code,)
        return self._caller.call(
            "POST", self.url, deadline_s=retry_s, json=body, headers=headers, final=final
        )

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

    def status(self, *, retry_s: float = RETRY_S) -> Status:
        """The snapshots that every replica serves and loads. Raises SignalRefused."""
        url = self.url if self._policy is None else f"{self.url}?policy={quote(self._policy, safe='')}"
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
        deadline = self._caller.deadline(timeout_s)
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
            self._caller.sleep(poll_s)


def delta_metadata(previous: str, compression: Compression) -> dict[str, str]:
    """The metadata of a delta's signal. The protocol spells Adler-32 `alder32`."""
    return {
        "previous_snapshot_identity": previous,
        "compression_format": compression,
        "checksum_format": "alder32",
    }
