"""An update of weights that a trainer asks for by a directory, and is answered once every replica serves it.

Owns: what the calls of trainers (trainer_calls.py) and those for adapters (adapter_calls.py) share.
Always holds:
- An update is taken as a signal is, and answered once every replica serves the snapshot, or with the reason why not.
- With several deployments a call that names none changes nothing: no default is guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol
from urllib.parse import quote

from starlette.requests import Request

from midstream.api.answers import HotLoadRow
from midstream.api.signals import Metadata, NamedDirectory, SignalBody
from midstream.api.status import SERVED_STAGES, SHOWN_STAGE, replica_rows
from midstream.core.errors import (
    Conflict,
    InvalidRequest,
    MidstreamError,
    ReplicaUnavailable,
    SnapshotError,
    SnapshotRefused,
)
from midstream.core.headers import HEADER_DEPLOYMENT, HEADER_MODEL
from midstream.core.scopes import OBSERVE, PUBLISH
from midstream.core.types import Content, Desired, PolicyFate, SnapshotFiles, Stage
from midstream.fleet.access import grant_of, shown_only
from midstream.fleet.registry import Deployment, Deployments
from midstream.ledger import Committing, Ledger, SignalResult
from midstream.snapshots.identity import check_identity

#: How long an update, or a pause, may take to reach every replica.
ANSWER_S_MAX = 600.0
#: What replicas do not report changes: the ledger's view of them is asked for again after so long.
LOOK_AGAIN_S = 1.0
#: How trainers give weights to this server.
INSTEAD = (
    "this server takes weights from files, and by vLLM's calls from /init_weight_transfer_engine on. Write each checkpoint"
    " as a Hugging Face directory into the deployment's bucket, {bucket}, and name it: prime-rl with weight_broadcast.type ="
    " 'filesystem', slime with disk transport, others with POST /update_weights_from_disk, POST"
    " /hot_load/v1/models/hot_load or `midstream publish`"
)


class Take(Protocol):
    """What takes a signal."""

    async def __call__(
        self,
        request: Request,
        deployment: Deployment,
        body: SignalBody,
        place: NamedDirectory | None = None,
        *,
        overwrite: bool = False,
        parents: tuple[SnapshotFiles, ...] = (),
    ) -> SignalResult: ...


class TakePushed(Protocol):
    """What takes the signal of an update that a trainer sent to the replicas."""

    async def check_pushed(self, request: Request, deployment: Deployment, body: SignalBody) -> PolicyFate:
        """Raise what the signal would be refused with, before anything is done. Returns what is to become of policies."""

    async def take_pushed(
        self,
        deployment: Deployment,
        body: SignalBody,
        content: Content,
        committing: Committing,
        *,
        overwrite: bool = False,
    ) -> SignalResult:
        """Make the snapshot the desired one. An empty identity gets a name. Raises MidstreamError."""


class Update(NamedTuple):
    """weight_version: the snapshot's identity; None: it is given one. param: the field that names the directory. parent: what
    an incremental one stands on."""

    directory: str
    param: str
    reset: bool
    weight_version: str | None = None
    parent: Metadata | None = None


class Updates:
    def __init__(self, ledger: Ledger, take: Take) -> None:
        self._ledger = ledger
        self._take = take

    async def run(
        self,
        request: Request,
        deployment: Deployment,
        update: Update,
        instead: str = INSTEAD,
        *,
        waits: bool = True,
    ) -> Desired:
        """instead: what to do, said with the refusal of a place. waits: until it serves. Raises MidstreamError."""
        if update.weight_version is not None:
            check_identity(update.weight_version, "weight_version")
        url = directory_url(update.directory)
        body = SignalBody(
            update.weight_version or "",
            reset_prompt_cache="all" if update.reset else "none",
            incremental_snapshot_metadata=update.parent,
            policy=deployment.policy or None,
        )
        try:
            result = await self._take(request, deployment, body, NamedDirectory(url, update.param))
        except InvalidRequest as error:
            # A place without a snapshot is a good place: another one would not help.
            if error.param != update.param or isinstance(error.__cause__, SnapshotError):
                raise
            raise SnapshotRefused(
                f"{error.message}; {instead.format(bucket='that place')}", param=update.param
            ) from error
        if waits:
            await self.served(deployment, result.desired)
        return result.desired

    async def served(
        self,
        deployment: Deployment,
        desired: Desired,
        *,
        replicas: Collection[str] | None = None,
        within_s: float = ANSWER_S_MAX,
        again: str = "ask again",
    ) -> None:
        """Returns when every replica that is to serve it does. replicas: only these are waited for. again: what may help
        where a replica could not load weights that are not at fault.

        Raises SnapshotRefused for weights that no replica would load; Conflict and ReplicaUnavailable.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            state = await self._ledger.state(deployment.name)
            if state.desired is None or state.desired.generation > desired.generation:
                raise Conflict(
                    f"{desired.snapshot!r} was superseded by {state.snapshot!r} before it served everywhere"
                )
            rows = [
                row
                for row in replica_rows(state, deployment)
                if replicas is None or row.midstream.replica in replicas
            ]
            later = proved_later(deployment)
            stages = ["done" if later(row, desired) else row.loading_state.stage for row in rows]
            if rows and all(stage in SERVED_STAGES for stage in stages):
                return
            if "error" in stages:
                bad = rows[stages.index("error")].midstream
                raise _not_loaded(deployment, desired, f"{bad.replica} could not load", bad.error, again)
            left = deadline - asyncio.get_running_loop().time()
            if not rows or left <= 0:
                why = f"they are at {', '.join(stages)}" if rows else "there are none"
                raise ReplicaUnavailable(f"not every replica serves {desired.snapshot!r}: {why}")
            # A demand lapses that no replica could meet.
            deployment.replicas.ask()
            await deployment.replicas.change(min(left, LOOK_AGAIN_S), any_report=False)


def _not_loaded(
    deployment: Deployment, desired: Desired, what: str, why: str | None, again: str
) -> MidstreamError:
    message = f"{what} {desired.snapshot!r}: {why}"
    reports = [view.report for view in deployment.replicas.views]
    if any(report is not None and report.own.refused >= desired.generation for report in reports):
        return SnapshotRefused(message)
    # A full disk, a bucket that does not answer, an engine that died. The same weights may load the next time.
    return ReplicaUnavailable(f"{message}; {again}")


def directory_url(directory: str) -> str:
    """A trainer names a directory by its path, or by a URL."""
    return directory if "://" in directory else f"file://{quote(directory.rstrip('/'))}"


def proved_later(deployment: Deployment) -> Callable[[HotLoadRow, Desired], bool]:
    """Tells of a replica's row whether the replica serves the snapshot, and can prove it only after the pause that it is in."""
    host = deployment.host or deployment
    reports = [replica.heard for replica in host.replicas.facts.members if replica.heard is not None]
    frozen = {
        report.replica
        for report in reports
        if report.pause.mode == "keep" and report.card is not None and not report.card.has("frozen_check")
    }

    def later(row: HotLoadRow, desired: Desired) -> bool:
        state = row.loading_state
        at = (state.stage, state.target_snapshot_identity, row.midstream.generation)
        checking = (SHOWN_STAGE[Stage.CHECKING], desired.snapshot, desired.generation)
        return row.midstream.replica in frozen and at == checking

    return later


def only(deployments: Deployments, request: Request) -> Deployment:
    """The deployment that the headers name, else the only one there is. Raises InvalidRequest, NotFound."""
    headers = request.headers
    if deployments.several and not (headers.get(HEADER_DEPLOYMENT) or headers.get(HEADER_MODEL)):
        shown = shown_only(grant_of(request), (PUBLISH, OBSERVE), deployments)
        names = ", ".join(one.name for one in shown)
        raise InvalidRequest(
            f"{HEADER_DEPLOYMENT}: this server has several deployments; name one in this header: {names}",
            param=HEADER_DEPLOYMENT,
        )
    found = deployments.named(headers)
    if found.policy:
        raise InvalidRequest(
            f"{HEADER_DEPLOYMENT}: {found.policy!r} is a policy, and this call is for all of {found.host.name}",
            param=HEADER_DEPLOYMENT,
        )
    return found
