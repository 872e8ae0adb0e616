"""A server's deployments: their resources, buckets, policies and ledgers.

Always holds: every call may be repeated, and only reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from midstream.client.calls import RETRY_S, RetryingCaller, expected
from midstream.client.errors import PublishError

_AtLeastOne = msgspec.Meta(min_length=1)


class _Named(msgspec.Struct):
    name: str


class _Accounts(msgspec.Struct):
    accounts: Annotated[list[_Named], _AtLeastOne]


class _Deployments(msgspec.Struct):
    deployments: Annotated[list[dict[str, Any]], _AtLeastOne]


class _Policies(msgspec.Struct):
    """A server that is older than pages sends all of them, without a token."""

    policies: list[dict[str, Any]]
    next_page: str | None = msgspec.field(name="nextPageToken", default=None)


class _Ledger(msgspec.Struct):
    snapshots: list[Any]


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


class DeploymentCalls:
    """The calls of `ServerClient.deployments`. Safe to use from several threads. deployment: the one that is meant, if any."""

    def __init__(self, caller: RetryingCaller, root: str, deployment: str | None) -> None:
        self._caller = caller
        self._root = f"{root}/v1"
        self._deployment = deployment

    def __repr__(self) -> str:
        return f"<DeploymentCalls {self._root}>"

    def all(self, *, retry_s: float = RETRY_S) -> list[dict[str, Any]]:
        """The deployment resources of the server's one account. Raises SignalRefused."""
        url = f"{self._root}/accounts?pageSize=2"
        account = self._caller.read(url, _Accounts, "accounts", deadline_s=retry_s).accounts[0].name
        url = f"{self._root}/{account}/deployments"
        return self._caller.read(url, _Deployments, "deployments", deadline_s=retry_s).deployments

    def own_bucket(self, *, retry_s: float = RETRY_S) -> str:
        """The URL of the bucket that the deployment reads. Raises SignalRefused; PublishError when it is not known which."""
        try:
            row = which_deployment(self.all(retry_s=retry_s), self._deployment)
        except ValueError as error:
            raise PublishError(str(error)) from error
        if not row.get("hotLoadBucketUrl"):
            raise PublishError(f"bucket: {row['name']} does not say which is its own; name it")
        return str(row["hotLoadBucketUrl"])

    def policies(self, deployment: str, *, retry_s: float = RETRY_S) -> list[dict[str, Any]]:
        """The policies of `deployment` (its full name), as docs/policies.md shows them. Raises SignalRefused."""
        url, found, page = f"{self._root}/{deployment}/policies", list[dict[str, Any]](), ""
        while True:
            place = f"{url}?pageToken={quote(page, safe='')}" if page else url
            answer = self._caller.read(place, _Policies, "policies", deadline_s=retry_s)
            found += answer.policies
            page = answer.next_page or ""
            if not page:
                return found

    def ledger(self, deployment: str, *, retry_s: float = RETRY_S) -> dict[str, Any]:
        """Every snapshot that was signalled to `deployment` (its full name). Raises SignalRefused."""
        url = f"{self._root}/{deployment}/ledger"
        answer: dict[str, Any] = self._caller.call("GET", url, deadline_s=retry_s).body
        expected(answer, _Ledger, url, "a ledger")
        return answer
