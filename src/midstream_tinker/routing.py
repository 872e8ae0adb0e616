"""Which key a sample is routed by, and which weights it may see. Pure.

Always holds: one sampling session and seq_id are one key, also for a repeated submission. A request that lacks either has no
key and is balanced. A client never gets a token of other weights than its sampling session's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from midstream.core.headers import HEADER_FOLLOW_PREFIX
from midstream.core.types import BASE_SNAPSHOT
from midstream.core.versions import HEADER_MIN_SNAPSHOT, HEADER_SNAPSHOT
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.types import Policy
from midstream_tinker.weights import same_run_not_older

HEADER_KEY = "x-session-id"
_SETTING = '[tinker] base_model_clients = "serving"'


class SessionWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampling session may be served by.

    exact: `snapshot` from the first token to the last. run: `snapshot` or what the same run saved later, not what it saved
    before and somebody serves again. serving: whatever serves. adapter: `snapshot`, which is an adapter, beside all others.
    """

    policy: Policy
    snapshot: str | None = None
    run: str | None = None

    def headers(self) -> dict[str, str]:
        if self.policy == "serving" or self.snapshot is None:
            return {}
        return {HEADER_MIN_SNAPSHOT if self.policy == "run" else HEADER_SNAPSHOT: self.snapshot}

    def allows(self, snapshot: str) -> bool:
        if self.policy == "serving" or snapshot == self.snapshot:
            return True
        return (
            self.policy == "run" and self.snapshot is not None and same_run_not_older(snapshot, self.snapshot)
        )

    def check(self, labels: Iterable[str]) -> None:
        """Raises WorkFailed when a token was made by other weights than the client asked for."""
        others = sorted({label for label in labels if not self.allows(label)})
        if others:
            raise WorkFailed(f"{self._asked()}; tokens came from {_listed(others)}, {self._advice()}")

    def superseded(self, serving: Iterable[str]) -> WorkFailed:
        """The error of a sample that no replica can serve any more. serving: the snapshots that replicas serve."""
        others = sorted(set(serving))
        now = f"replicas serve {_listed(others)} now" if others else "no replica serves it now"
        return WorkFailed(f"{self._asked()}; {now}, {self._advice()}")

    def _asked(self) -> str:
        if self.snapshot == BASE_SNAPSHOT:
            return f"this sampling client is of the base weights (snapshot {BASE_SNAPSHOT!r})"
        later = " or a later one of its run" if self.policy == "run" else ""
        return f"this sampling client is of snapshot {self.snapshot!r}{later}"

    def _advice(self) -> str:
        if self.snapshot == BASE_SNAPSHOT:
            return f"and the server's setting {_SETTING} would let such clients sample from whatever serves"
        return "which superseded it: make a new sampling client of the weights you want"


BASE = SessionWeights(policy="exact", snapshot=BASE_SNAPSHOT)
SERVING = SessionWeights(policy="serving")


def routing_key(sampling_session_id: str | None, seq_id: int | None) -> str | None:
    """`<sampling session>:<seq_id>`, None when either is missing. Raises TinkerRefusal (400): the session's id has a colon."""
    if sampling_session_id is not None and ":" in sampling_session_id:
        raise TinkerRefusal(400, "a sampling session's id holds no ':'", "sampling_session_id")
    if sampling_session_id is None or seq_id is None:
        return None
    return f"{sampling_session_id}:{seq_id}"


def key_headers(key: str | None) -> dict[str, str]:
    """A stock client has another key on every turn of a rollout: an unknown one follows its prompt to where that is cached."""
    return {} if key is None else {HEADER_KEY: key, HEADER_FOLLOW_PREFIX: "1"}


def may_come_back(weights: SessionWeights, refusal: Mapping[str, Any]) -> bool:
    """Whether weights that no replica serves at the moment are still those that replicas load when they can.

    refusal: the body of the gateway's 409; its `newest` is what was last ready anywhere.
    """
    newest = refusal.get("newest")
    return isinstance(newest, str) and weights.policy != "serving" and weights.allows(newest)


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:4]) + (" and others" if len(names) > 4 else "")
