"""Which replicas a deployment has beside those that the supervisor runs, each one's part of the work, and who is drained.

    GET, POST   /v1/accounts/{A}/deployments/{D}/replicas             POST: {"url", "weight"?}
    PATCH, DELETE  /v1/accounts/{A}/deployments/{D}/replicas/{name}   PATCH: {"weight"?, "drain"?, "within_s"?}

Owns: the entries of single replicas: from the settings, from a DNS name, and from this API, which keeps them in the ledger.
Always holds:
- A replica that others run goes by the host and port of its URL, unique in the gateway.
- The API takes a URL only of a host that `gateway.allowed_replicas` names: it will be sent users' prompts and the token.
- Whoever is drained or removed takes no new request from then on and is let go when its requests have ended.
- A DNS name that cannot be resolved changes nothing.
- What two calls say of one replica at once counts both, also at two gateways. But only one deployment has it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request

from midstream.core.endpoints import ONE_DEPLOYMENT, Endpoint, Nothing
from midstream.core.errors import ConfigError, Conflict, InvalidRequest, NotFound
from midstream.core.scopes import CHANGE_ONE, OBSERVE, ScopeNeed
from midstream.fleet.access import grant_of
from midstream.fleet.known_replica import Standing
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.view import ReplicaEntry, ReplicaView
from midstream.ledger import DeploymentChange, DeploymentRow, Ledger

logger = logging.getLogger(__name__)

RESOLVED_EVERY_S = 5.0
# Field of a deployment's row, before the name of a replica.
_FIELD = "_replica:"
#: A name or an address. In one of IPv6, "%" comes before the interface.
_HOST = re.compile(r"[\w.-]+|[0-9a-f:.]+(%[\w.-]+)?")
_PATH = ONE_DEPLOYMENT + "/replicas"


class ReplicaBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    drain: bool | None = None
    #: Its machine goes after so long.
    within_s: Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)] | None = None


def replica_name(url: str) -> str:
    """What a replica at this base URL is called here. Raises ConfigError.

    The URL is nothing but scheme, host and port: readers of URLs pass over line ends, and over a "@" or "?" without a text.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        # A UnicodeError is one, too.
        host, port = "", None
    netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if (
        not _HOST.fullmatch(host)
        or not port
        or url.lower().removesuffix("/")
        not in (
            f"http://{netloc}",
            f"https://{netloc}",
        )
    ):
        raise ConfigError(f"{url!r}: expected http://HOST:PORT or https://HOST:PORT")
    return f"{host}:{port}"


def entries_of_settings(urls: Collection[str], weights: Mapping[str, float]) -> dict[str, ReplicaEntry]:
    """By name. Raises ConfigError."""
    entries = {name: ReplicaEntry(weight=weight) for name, weight in weights.items()}
    for url in urls:
        name = replica_name(url)
        entries[name] = ReplicaEntry(url=url.rstrip("/"), weight=weights.get(name))
    return entries


def entries_of_row(row: DeploymentRow) -> dict[str, ReplicaEntry]:
    """The replicas that the API added, by name."""
    return {
        field.removeprefix(_FIELD): msgspec.convert(value, ReplicaEntry)
        for field, value in row.fields.items()
        if field.startswith(_FIELD)
    }


def merged(*sources: Mapping[str, ReplicaEntry]) -> dict[str, ReplicaEntry]:
    """What each source says of a replica; a later one's word counts."""
    entries: dict[str, ReplicaEntry] = {}
    for source in sources:
        for name, entry in source.items():
            before = entries.get(name, ReplicaEntry())
            entries[name] = ReplicaEntry(
                url=entry.url or before.url,
                weight=before.weight if entry.weight is None else entry.weight,
                drain=entry.drain,
                leaves_at=entry.leaves_at,
            )
    return entries


class Resolver:
    """The replicas behind a DNS name, one for each of its addresses."""

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        """name: HOST:PORT. changed: called when `entries` are others. Raises ConfigError."""
        host, _, port = name.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"{name!r}: expected HOST:PORT")
        replica_name(f"http://{name}")
        self._host, self._port = host, int(port)
        self._changed = changed
        self.entries: dict[str, ReplicaEntry] = {}

    def __repr__(self) -> str:
        return f"Resolver({self._host}:{self._port}, {len(self.entries)} replicas)"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(RESOLVED_EVERY_S)

    async def look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            logger.warning("%s is not resolved: %s", self._host, error)
            return
        hosts = sorted({str(address[4][0]) for address in found})
        netlocs = [f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts]
        urls = [f"http://{netloc}" for netloc in netlocs]
        entries = {replica_name(url): ReplicaEntry(url=url) for url in urls}
        if entries != self.entries:
            self.entries = entries
            self._changed()


class ReplicaShown(msgspec.Struct):
    """weight: its part of new work; null: 1. drain: it takes no new requests. in_flight: requests. snapshot: the one that
    serves; null while it cannot be reached. leaves_at: when its machine goes, in seconds since the epoch; null: not known."""

    name: str
    url: str
    weight: float | None
    drain: bool
    standing: Standing
    usable: bool
    in_flight: int
    snapshot: str | None
    leaves_at: float | None = None


class Replicas(msgspec.Struct):
    replicas: list[ReplicaShown]


class MembershipApi:
    """allowed: hosts, or HOST:PORT, of replicas that may join. changed: takes up a change of the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        *,
        allowed: Collection[str],
        changed: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._deployments = deployments
        self._allowed = frozenset(allowed)
        self._changed = changed
        self._clock = clock

    @Endpoint("GET", _PATH, ScopeNeed((OBSERVE,), "named"), "Lists the replicas of a deployment.")
    async def list(self, request: Request) -> Replicas:
        deployment = self._deployment(request)
        views = (*deployment.replicas.views, *deployment.replicas.leaving)
        return Replicas([_shown(deployment, view) for view in views])

    @Endpoint("POST", _PATH, CHANGE_ONE, "Lets a replica join that others run.")
    async def add(self, request: Request, body: ReplicaBody) -> ReplicaShown:
        deployment = self._deployment(request)
        if body.within_s is not None:
            raise InvalidRequest("within_s: is for a replica that is a member", param="within_s")
        if body.url is None:
            raise InvalidRequest("url: is needed, http://HOST:PORT or https://HOST:PORT", param="url")
        try:
            name = replica_name(body.url)
        except ConfigError as error:
            raise InvalidRequest(f"url: {error}", param="url") from error
        if not {name, name.rpartition(":")[0]} & self._allowed:
            raise InvalidRequest(f"url: {name} is none of gateway.allowed_replicas", param="url")
        joining = ReplicaEntry(body.url.rstrip("/"), body.weight, body.drain or False)

        def check(owner: str, entries: Mapping[str, ReplicaEntry]) -> None:
            if name in entries and (owner != deployment.name or entries[name].url):
                known = grant_of(request).allows((OBSERVE,), owner)
                whose = owner if known else "another deployment"
                raise Conflict(f"url: {name} belongs to {whose} already", param="url")

        def change(row: DeploymentRow, others: Sequence[DeploymentRow]) -> DeploymentChange:
            # Another gateway may have written since this one looked.
            for one in (row, *others):
                check(one.name, {} if one.deleting else entries_of_row(one))
            return _kept(name, joining)

        for other in self._deployments:
            check(other.name, other.entries)
        await self._ledger.revise_beside(deployment.name, change)
        await self._changed()
        return self._answer(deployment, name)

    @Endpoint(
        "PATCH",
        _PATH + "/{replica}",
        CHANGE_ONE,
        "Changes a replica's weight, drains it, or takes it back.",
    )
    async def patch(self, request: Request, body: ReplicaBody) -> ReplicaShown:
        deployment, name = self._deployment(request), self._replica(request)
        if body.url is not None:
            raise InvalidRequest("url: cannot be changed", param="url")
        if body.weight is None and body.drain is None:
            raise InvalidRequest("weight: give a weight, or drain", param="weight")
        if body.within_s is not None and not body.drain:
            raise InvalidRequest("within_s: goes with drain: true", param="within_s")
        row = await self._ledger.deployment(deployment.name)
        joined = name in entries_of_row(row)

        def changed(kept: ReplicaEntry | None) -> ReplicaEntry:
            if kept is None and joined:
                raise NotFound(f"{name} has left meanwhile", param="name")
            return self._changed_entry(kept or ReplicaEntry(), body)

        await self._keep(deployment, name, changed)
        return self._answer(deployment, name)

    @Endpoint("DELETE", _PATH + "/{replica}", CHANGE_ONE, "Removes a replica that joined by this API.")
    async def delete(self, request: Request) -> Nothing:
        deployment, name = self._deployment(request), self._replica(request)

        def removed(kept: ReplicaEntry | None) -> None:
            if kept is None or kept.url is None:
                raise InvalidRequest(
                    f"{name} did not join by this API: scale the deployment, or change the settings",
                    param="name",
                )

        await self._keep(deployment, name, removed)
        return Nothing()

    # -- inside

    def _changed_entry(self, kept: ReplicaEntry, body: ReplicaBody) -> ReplicaEntry:
        weight = kept.weight if body.weight is None else body.weight
        drain = kept.drain if body.drain is None else body.drain
        ends = [] if kept.leaves_at is None else [kept.leaves_at]
        if body.within_s is not None:
            ends.append(self._clock() + body.within_s)
        # Of several notices, the earliest end counts.
        leaves_at = min(ends) if drain and ends else None
        return ReplicaEntry(kept.url, weight, drain, leaves_at)

    async def _keep(
        self,
        deployment: Deployment,
        name: str,
        changed: Callable[[ReplicaEntry | None], ReplicaEntry | None],
    ) -> None:
        """changed: what becomes of the stored entry, with no other call in between."""

        def change(row: DeploymentRow) -> DeploymentChange:
            return _kept(name, changed(entries_of_row(row).get(name)))

        await self._ledger.revise_deployment(deployment.name, change)
        await self._changed()

    def _deployment(self, request: Request) -> Deployment:
        account, name = request.path_params["account"], request.path_params["name"]
        return self._deployments.get(f"accounts/{account}/deployments/{name}")

    def _replica(self, request: Request) -> str:
        deployment, name = self._deployment(request), str(request.path_params["replica"])
        views = (*deployment.replicas.views, *deployment.replicas.leaving)
        if name not in deployment.entries and all(view.name != name for view in views):
            raise self._deployments.missing(f"{deployment.name} has no replica {name!r}", "name")
        return name

    def _answer(self, deployment: Deployment, name: str) -> ReplicaShown:
        for view in (*deployment.replicas.views, *deployment.replicas.leaving):
            if view.name == name:
                return _shown(deployment, view)
        raise NotFound(f"{name} has left meanwhile", param="name")


def _kept(name: str, entry: ReplicaEntry | None) -> DeploymentChange:
    return {"fields": {_FIELD + name: None if entry is None else msgspec.to_builtins(entry)}}


def _shown(deployment: Deployment, view: ReplicaView) -> ReplicaShown:
    return ReplicaShown(
        name=view.name,
        url=view.url,
        weight=view.replica.weight,
        drain=deployment.entries.get(view.name, ReplicaEntry()).drain,
        standing=view.replica.standing,
        usable=view.usable,
        in_flight=view.replica.in_flight,
        snapshot=view.report.own.snapshot if view.report else None,
        leaves_at=view.replica.leaves_at,
    )
