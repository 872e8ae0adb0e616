"""The calls by which trainers ask for the disk deltas that they wrote: Miles' `/pull_weights` and SkyRL's `/fetch_weights`.

Owns: where each trainer's versions lie, and which snapshots they are. What an update does is a hot-load signal's (hotload.py).
Always holds:
- Version N is the snapshot of the identity N, an incremental one on N - 1, or a whole checkpoint, on which later ones stand.
  Version 0 is what the trainer began with, which a person published in full.
- A call is answered once every replica serves the version, or with the reason why not. It may be repeated, and a later call for
  the same version changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from midstream.api.answers import WeightsPulled, WeightsUpdated
from midstream.api.signals import Metadata, NamedDirectory
from midstream.api.updates import Update, Updates, directory_url, only
from midstream.core.endpoints import Endpoint, serves
from midstream.core.errors import (
    InvalidRequest,
    MidstreamError,
    RebasePending,
    ReplicaUnavailable,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    SnapshotRefused,
    UnknownField,
)
from midstream.core.scopes import SIGNAL
from midstream.core.types import Desired, TrainerFormat
from midstream.core.versions import version_number
from midstream.fleet.registry import Deployment, Deployments
from midstream.http.bodies import answered, body_of, fields_of
from midstream.ledger import CHAIN_MAX, Ledger
from midstream.snapshots.identity import directory_name
from midstream.snapshots.trainer_deltas.records import version_of
from midstream.snapshots.trainer_deltas.versions import holds_checkpoint

VERSION_MAX = 2**53
#: The URL of a snapshot, and of its bucket: of a directory that a client names. Raises MidstreamError.
UrlOf = Callable[[Request, Deployment, str, NamedDirectory | None], Awaitable[tuple[str, str]]]


class PullWeights(msgspec.Struct, frozen=True):
    """SGLang's, as Miles sends it. local_checkpoint_dir: of an engine of its own; replicas have their own cache."""

    source_dir: str
    target_version: int
    local_checkpoint_dir: str = ""


class FetchWeights(msgspec.Struct, frozen=True):
    """SkyRL's, also as `update_info` of /update_weights. uri: of the version's own directory."""

    target_version: int
    sync_dir: str | None = None
    uri: str | None = None
    version: int | None = None
    update_kind: str | None = None


class _Series(NamedTuple):
    """The versions of one trainer. name: of a version's directory, for a number. param: the field that says where they lie."""

    directory: str
    name: str
    compression: TrainerFormat
    param: str

    def place(self, version: int) -> str:
        return f"{self.directory.rstrip('/')}/{self.name.format(version)}"


class DeltaCallsApi:
    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        updates: Updates,
        url_of: UrlOf,
        chain_max: int = CHAIN_MAX,
        rebase_after: int = 0,
    ) -> None:
        self._ledger = ledger
        self._deployments = deployments
        self._updates = updates
        self._url_of = url_of
        self._chain_max, self._rebase_after = chain_max, rebase_after

    @serves(
        Endpoint(
            "POST",
            "/pull_weights",
            SIGNAL,
            "Brings every replica to a version that Miles published, as SGLang does.",
            body=PullWeights,
            answer=WeightsPulled,
        )
    )
    async def pull_weights(self, request: Request) -> Response:
        try:
            deployment, body = only(self._deployments, request), await body_of(request, PullWeights)
            series = _Series(body.source_dir, "weight_v{:06d}", "miles_delta", "source_dir")
            served = await self._bring(request, deployment, series, body.target_version)
        except MidstreamError as error:
            answer = {"success": False, "message": error.message}
            return JSONResponse({**answer, **error.body()}, status_code=error.status, headers=error.headers())
        return answered(
            WeightsPulled(success=True, message=f"every replica serves {served}", weight_version=served)
        )

    @serves(
        Endpoint(
            "POST",
            "/fetch_weights",
            SIGNAL,
            "Brings every replica to a version that SkyRL published, as its servers do.",
        )
    )
    async def fetch_weights(self, request: Request, body: FetchWeights) -> WeightsUpdated:
        deployment = only(self._deployments, request)
        return await self._fetched(request, deployment, body)

    async def update(
        self, request: Request, deployment: Deployment, info: dict[str, object]
    ) -> WeightsUpdated:
        """/update_weights with the `update_info` of a SkyRL delta. Raises MidstreamError, naming fields within it."""
        try:
            return await self._fetched(request, deployment, fields_of(info, FetchWeights))
        except UnknownField as error:
            raise UnknownField(f"update_info.{error.param}") from error
        except (InvalidRequest, RebasePending) as error:
            if error.param not in FetchWeights.__struct_fields__:
                # Of the snapshot, not of a field.
                raise
            raise type(error)(f"update_info.{error.message}", param=f"update_info.{error.param}") from error

    async def _fetched(self, request: Request, deployment: Deployment, body: FetchWeights) -> WeightsUpdated:
        if body.version not in (None, body.target_version):
            raise InvalidRequest(f"version: {body.version} is not the target_version", param="version")
        name = "delta-{:08d}"
        if body.uri is not None:
            directory, _, own = body.uri.rstrip("/").rpartition("/")
            if unquote(own) != name.format(body.target_version):
                raise InvalidRequest(
                    f"uri: version {body.target_version} lies in {name.format(body.target_version)}",
                    param="uri",
                )
            series = _Series(directory, name, "skyrl_delta", "uri")
        elif body.sync_dir is not None:
            series = _Series(body.sync_dir, name, "skyrl_delta", "sync_dir")
        else:
            raise InvalidRequest("sync_dir: say where the version lies, by sync_dir or uri", param="sync_dir")
        return WeightsUpdated("ok", await self._bring(request, deployment, series, body.target_version))

    async def _bring(self, request: Request, deployment: Deployment, series: _Series, target: int) -> str:
        """Signal what is missing up to version `target`, one after the other. Returns the identity, which serves then."""
        if not 0 <= target <= VERSION_MAX:
            raise InvalidRequest(f"target_version: must be from 0 to {VERSION_MAX}", param="target_version")
        state = await self._ledger.state(deployment.name)
        at = version_number(state.snapshot)
        if at is not None and at > target:
            raise _cannot_reach(target, state.snapshot)
        lowest = max(1, target - self._chain_max, 1 if at is None else min(at + 1, target))
        full = await self._newest_full(request, deployment, series, lowest, target)
        if at is None and full is None:
            raise _cannot_reach(target, state.snapshot)
        base = full if full is not None else at or 0
        standing = len(state.desired.parents) if state.desired is not None and full is None else 0
        if standing + target - base > self._chain_max:
            # Refused before the first of them is signalled.
            raise await self._ledger.chain_full(
                deployment.name,
                # Whole files of what is desired are of no use where these alone are too many.
                self._rebase_after if target - base <= self._chain_max else 0,
                f"target_version: {standing + target - base} versions would stand on one full snapshot, and at most"
                f" {self._chain_max} may (gateway.chain_max)",
                "target_version",
            )
        if target == 0:
            assert state.desired is not None
            await self._updates.served(deployment, state.desired)
            return state.desired.snapshot
        for version in range(min(base + 1, target) if full is None else full, target + 1):
            parent = None if version == full else Metadata(str(version - 1), series.compression)
            update = Update(series.place(version), series.param, True, str(version), parent)
            await self._updates.run(request, deployment, update, waits=version == target)
        return str(target)

    async def _newest_full(
        self, request: Request, deployment: Deployment, series: _Series, lowest: int, target: int
    ) -> int | None:
        """The newest version from `lowest` up to `target` that is a whole checkpoint. What is wrong with a version is said
        when it is signalled."""
        for version in range(target, lowest - 1, -1):
            try:
                place = NamedDirectory(directory_url(series.place(version)), series.param)
                url, bucket = await self._url_of(request, deployment, "", place)
                if await holds_checkpoint(url, bucket, series.compression):
                    return version
            except InvalidRequest:
                return None
            except (SnapshotMissing, SnapshotCorrupt):
                continue
            except SnapshotError as error:
                raise ReplicaUnavailable(f"the bucket cannot be read now: {error}") from error
        return None


def _cannot_reach(target: int, now: str) -> SnapshotRefused:
    return SnapshotRefused(
        f"target_version: version {target} cannot be reached from {now!r}, which is desired now. Versions stand on what"
        " the trainer began with: reset the ledger, and publish that checkpoint as '0' (midstream publish DIR --identity 0)",
        param="target_version",
    )


def is_version(desired: Desired | None, weight_version: str | None) -> bool:
    """Whether what is desired is this version, brought here by `/pull_weights`."""
    if desired is None or desired.url is None or desired.snapshot != weight_version:
        return False
    number = version_number(desired.snapshot)
    # A whole checkpoint, too: one that the trainer wrote, or what became of its delta (ledger/rebases.py).
    of_miles = desired.compression in (None, "miles_delta")
    return of_miles and number is not None and version_of(directory_name(desired.url)) == number
