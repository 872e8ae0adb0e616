"""The hot-load API: signals, hints, status and the ledger, over the ledger and the replicas' reports.

Always holds:
- A signal is answered 200 only after it is committed in the ledger; it is refused whole when any part of it is not
  understood. Errors are raised as MidstreamError; the app that mounts the routes turns them into responses.
- What GET says is read off the ledger and the reports at that moment; nothing is cached here.
- A key that may publish to some deployments only publishes nothing out of the bucket of another one.
- A hint changes nothing that is desired, and no failure of a replica to follow it is the client's. One for a policy has it
  loaded where it makes sense.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from midstream.api import ledger_view
from midstream.api.adapter_calls import AdapterCallsApi, AdapterLoader
from midstream.api.addons import AddonsApi
from midstream.api.answers import DeploymentLedger, HintTaken, HotLoadStatus, LedgerReset, SignalTaken
from midstream.api.capabilities import check_signal, fate_of_policies
from midstream.api.delta_calls import DeltaCallsApi
from midstream.api.deployments import lies_in
from midstream.api.policies import PoliciesApi, ending
from midstream.api.pushed_names import check_name
from midstream.api.signals import (
    OVERWRITE,
    SOURCE_URL_HEADER,
    HintBody,
    NamedDirectory,
    SignalBody,
    overwrites,
    source_url,
)
from midstream.api.status import replica_rows, unloaded
from midstream.api.trainer_calls import TrainerApi
from midstream.api.updates import Take, Updates
from midstream.api.weight_transfer import WeightTransferApi
from midstream.core.config import PushSettings
from midstream.core.endpoints import ONE_DEPLOYMENT, Endpoint, number, text
from midstream.core.errors import (
    NotFound,
    ReplicaUnavailable,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    SnapshotRefused,
)
from midstream.core.reports import Reported
from midstream.core.scopes import CHANGE_ONE, PUBLISH, READ_ONE, READ_SIGNALS, SIGNAL, forbidden
from midstream.core.types import BASE_SNAPSHOT, Content, Hint, PolicyFate, SnapshotFiles
from midstream.core.wires import HOT_LOAD_PATH
from midstream.fleet.access import grant_of
from midstream.fleet.push import PushDoor
from midstream.fleet.reconcile import failure, serving_generation
from midstream.fleet.registry import Deployment, Deployments
from midstream.http.bodies import answered, whole_number
from midstream.ledger import (
    CHAIN_MAX,
    Committing,
    DeploymentState,
    FleetReports,
    Ledger,
    Signal,
    SignalResult,
)
from midstream.ledger.deployments import NO_LIMITS, PolicyLimits
from midstream.ledger.signals import PUSHED
from midstream.snapshots.adapter import check_found, is_adapter_listing
from midstream.snapshots.content import content_fingerprint
from midstream.snapshots.identity import check_bucket, parse_bucket, public_url, snapshot_url
from midstream.snapshots.store.listing import DirectoryContents, check_inside, find_file, find_snapshot

logger = logging.getLogger(__name__)

# Transitions of the ledger, unless the client asks for more or fewer.
TRANSITIONS_SHOWN = 1000
TRANSITIONS_SHOWN_MAX = 100_000
# Groups of trainers, and updates of each.
TRANSFERS_SHOWN = 20
# Files of a hint that are looked for in the bucket at once.
LOOKED_FOR_AT_ONCE = 16
_SOURCE = text(
    SOURCE_URL_HEADER, "The snapshot's directory, where it is not the identity's place in the bucket."
)


async def _nothing() -> None:
    pass


def hotload_apis(
    ledger: Ledger,
    deployments: Deployments,
    *,
    allowed_buckets: Sequence[str] = (),
    chain_max: int = CHAIN_MAX,
    rebase_after: int = 0,
    changed: Callable[[], Awaitable[None]] = _nothing,
    limits: PolicyLimits = NO_LIMITS,
    look: Callable[[], Awaitable[None]] | None = None,
    door: PushDoor | None = None,
) -> list[object]:
    """The APIs by which snapshots and policies are published; the ledger has every deployment.

    allowed_buckets: beside the deployment's own, where snapshots may lie that name their URL themselves. chain_max: how
    many incremental snapshots may stand on one full one. rebase_after: as of `Ledger.signal`. changed: takes up a change of
    the ledger: a policy was made or ended. limits: how many policies there may be. look: takes up what other gateways changed;
    None: `changed` does. door: of weights that trainers send.
    Raises ConfigError on an allowed bucket that is none.
    """
    for bucket in allowed_buckets:
        check_bucket(bucket)
    policies = partial(PoliciesApi, ledger, deployments, changed, limits=limits, look=look)
    api = HotLoadApi(ledger, deployments, tuple(allowed_buckets), (chain_max, rebase_after), policies)
    updates = Updates(ledger, api.take)
    adapters = AdapterLoader(deployments, api.policies, updates)
    deltas = DeltaCallsApi(ledger, deployments, updates, api.url_of, chain_max, rebase_after)
    transfer = WeightTransferApi(ledger, deployments, api, updates, door or PushDoor(ledger, PushSettings()))
    return [
        api,
        api.policies,
        AddonsApi(ledger, deployments, api.policies, adapters),
        TrainerApi(ledger, deployments, updates, transfer, deltas),
        transfer,
        deltas,
        AdapterCallsApi(deployments, api.policies, adapters),
    ]


class HotLoadApi:
    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        allowed_buckets: tuple[str, ...],
        chains: tuple[int, int],
        policies: Callable[[Take], PoliciesApi],
    ) -> None:
        """chains: chain_max and rebase_after."""
        self._ledger = ledger
        self._deployments = deployments
        self._allowed_buckets = allowed_buckets
        self._chain_max, self._rebase_after = chains
        self.policies = policies(self.take)

    @Endpoint(
        "POST",
        HOT_LOAD_PATH,
        SIGNAL,
        "Signals a snapshot, which all replicas then load while they serve.",
        headers=(OVERWRITE, _SOURCE),
    )
    async def signal(self, request: Request, body: SignalBody) -> SignalTaken:
        deployment = self._deployments.named(request.headers)
        place = self._place(request)
        # A policy may be named by the header alone.
        policy = body.policy if body.policy is not None else deployment.policy or None
        if policy is not None:
            if deployment.policy not in ("", policy):
                raise SnapshotRefused(f"policy: {deployment.name} is another one", param="policy")
            # Nothing is made for files that are not there.
            await _found(*await self.url_of(request, deployment.host, body.identity, place))
            deployment = await self.policies.ready(request, deployment.host, policy)
        result = await self.take(request, deployment, body, place, overwrite=overwrites(request.headers))
        desired = result.desired
        return SignalTaken(
            identity=desired.snapshot,
            generation=desired.generation,
            changed=result.changed,
            reset_prompt_cache=desired.reset_prompt_cache,
            max_cache_age=desired.max_cache_age,
            kind="delta" if desired.parents else "full",
        )

    async def take(
        self,
        request: Request,
        deployment: Deployment,
        body: SignalBody,
        place: NamedDirectory | None = None,
        *,
        overwrite: bool = False,
        parents: tuple[SnapshotFiles, ...] = (),
    ) -> SignalResult:
        """Make the snapshot the desired one. request: its key must have the scope. place: where it lies, if not under its
        identity; with one, the identity may be empty. parents: as in Signal. Raises MidstreamError."""
        check_signal(body, (view.report for view in deployment.replicas.views))
        if deployment.policy and body.policies is not None:
            raise SnapshotRefused(f"policies: {deployment.name} is one of them", param="policies")
        url, bucket = await self.url_of(request, deployment, body.identity, place)
        # A signal names the snapshot beside its place, other calls name the place alone.
        named = "identity" if place is None or place.param == SOURCE_URL_HEADER else place.param
        found = await _found(url, bucket, named)
        try:
            return await self._take_found(deployment, body, url, found, overwrite, parents)
        except NotFound as error:
            if not deployment.policy:
                raise
            # It was there when the call began.
            raise ending(deployment.policy) from error

    async def check_pushed(self, request: Request, deployment: Deployment, body: SignalBody) -> PolicyFate:
        """Raise what `take_pushed` would refuse the signal with. request: its key must have the scope. Returns what is to
        become of policies."""
        check_signal(body, (view.report for view in deployment.replicas.views))
        await self.url_of(request, deployment, body.identity or PUSHED, None)
        return self._fate(deployment, body)

    async def take_pushed(
        self,
        deployment: Deployment,
        body: SignalBody,
        content: Content,
        committing: Committing,
        *,
        overwrite: bool = False,
    ) -> SignalResult:
        """Make the snapshot desired whose files are on the replicas, and commit its update. Raises MidstreamError.

        overwrite: the identity may have meant other weights. Files that the bucket has under it are not replaced all the same.
        """
        if body.identity:
            await check_name(self._ledger, deployment, body.identity, content)
        sizes = {file.name: file.size for file in content}
        found = DirectoryContents(content_fingerprint(content), sizes, content)
        return await self._take_found(deployment, body, "", found, overwrite, (), committing)

    async def _take_found(
        self,
        deployment: Deployment,
        body: SignalBody,
        url: str,
        found: DirectoryContents,
        overwrite: bool,
        parents: tuple[SnapshotFiles, ...],
        committing: Committing | None = None,
    ) -> SignalResult:
        state = await self._ledger.state(deployment.name)
        _check_policy(deployment, found, state)
        signal = Signal(
            identity=body.identity,
            url=url,
            reset_prompt_cache=body.reset,
            fingerprint=found.fingerprint,
            sizes=found.sizes,
            content=found.content,
            overwrite=overwrite,
            previous=body.previous,
            compression=body.compression,
            checksum_format=body.checksum_format,
            max_cache_age=body.max_cache_age,
            ignore_config=body.ignore_config,
            parents=parents,
            policies=self._fate(deployment, body),
        )
        if state.snapshot == BASE_SNAPSHOT:
            # It writes down which boots serve the base weights. A gateway that has just begun has not heard them yet.
            await deployment.replicas.learned()
        fleet = fleet_of(state, [view.report for view in deployment.replicas.views if view.report])
        result = await self._ledger.signal(
            deployment.name,
            signal,
            fleet,
            chain_max=self._chain_max,
            # A replica keeps the files of policies apart, and they are small.
            rebase_after=0 if deployment.policy else self._rebase_after,
            committing=committing,
        )
        deployment.signalled(result.desired)
        return result

    def _fate(self, deployment: Deployment, body: SignalBody) -> PolicyFate:
        """What becomes of its policies. Raises ReplicaUnavailable."""
        fate = fate_of_policies(body, (view.report for view in deployment.replicas.views))
        if fate is None and not deployment.policy and self._deployments.policy_count(deployment):
            raise ReplicaUnavailable("no replica has said yet whether its engine keeps a base for policies")
        return fate or "keep"

    @Endpoint(
        "POST",
        HOT_LOAD_PATH + "/hint",
        SIGNAL,
        "Says that files of a snapshot have landed, so that replicas fetch them early.",
        headers=(_SOURCE,),
        status=202,
    )
    async def hint(self, request: Request, body: HintBody) -> HintTaken:
        deployment = self._deployments.named(request.headers)
        if body.policy is not None and deployment.policy != body.policy:
            deployment = await self.policies.named(deployment, body.policy)
        deployment.replicas.ask()
        if body.identity is None:
            to_hold = [view.name for view in deployment.replicas.holders]
            return HintTaken(to_hold, policy=UNSET if body.policy is None else body.policy)
        url, bucket = await self.url_of(request, deployment, body.identity, self._place(request))
        await _look_for(url, bucket, body.names)
        hint = Hint(snapshot=body.identity, url=url, files=body.names)
        views = deployment.replicas.views
        answers = await asyncio.gather(*(deployment.replicas.send_hint(view, hint) for view in views))
        accepted = [view.name for view, took in zip(views, answers, strict=True) if took]
        return HintTaken(accepted, identity=body.identity, files=list(body.names))

    @Endpoint(
        "GET",
        HOT_LOAD_PATH,
        READ_SIGNALS,
        "Shows what each replica serves and loads, the least ready one first.",
        (text("policy", "Shows the loads of this policy instead."),),
    )
    async def status(self, request: Request) -> HotLoadStatus:
        deployment = self._deployments.named(request.headers)
        policy = request.query_params.get("policy")
        if policy is not None:
            deployment = await self.policies.named(deployment, policy)
        state = await self._ledger.state(deployment.name)
        if not state.proven:
            # A publisher waits for it. What made the demand known may be gone.
            deployment.replicas.ask()
        return HotLoadStatus(
            replica_rows(state, deployment),
            unloaded(deployment.replicas) if deployment.policy else UNSET,
            state.rebase_problem or UNSET,
        )

    @Endpoint(
        "GET",
        ONE_DEPLOYMENT + "/ledger",
        READ_ONE,
        "Shows a deployment's signals, snapshots and stage changes.",
        (
            number(
                "limit",
                "How many of the newest stage changes.",
                1,
                TRANSITIONS_SHOWN_MAX,
                TRANSITIONS_SHOWN,
            ),
        ),
        answer=DeploymentLedger,
    )
    async def get_ledger(self, request: Request) -> Response:
        name = self._named(request)
        limit = whole_number(request, "limit", TRANSITIONS_SHOWN, 1, TRANSITIONS_SHOWN_MAX)
        newest = await self._ledger.transitions(name, newest=limit + 1)
        snapshots = await self._ledger.snapshots(name)
        state = await self._ledger.state(name)
        transfers = await self._ledger.newest_transfers(name, TRANSFERS_SHOWN)

        # A long run's answer has many megabytes. It is made in a thread: the loop's streams would wait for it.
        def shown() -> Response:
            return answered(
                ledger_view.shown(
                    state, snapshots, newest[-limit:], transfers, older_left_out=len(newest) > limit
                )
            )

        return await asyncio.to_thread(shown)

    @Endpoint(
        "DELETE",
        ONE_DEPLOYMENT + "/ledger",
        CHANGE_ONE,
        "Forgets all snapshots, so that replicas go back to the base weights.",
    )
    async def reset_ledger(self, request: Request) -> LedgerReset:
        deployment = self._deployments.get(self._named(request))
        reports = [view.report for view in deployment.replicas.views if view.report]
        floor = max((report.own.generation for report in reports), default=0)
        generation = await self._ledger.reset_ledger(deployment.name, floor)
        deployment.order.learn((), reset=generation)
        deployment.signalled()
        state = await self._ledger.state(deployment.name)
        return LedgerReset(state.snapshot, generation)

    async def url_of(
        self, request: Request, deployment: Deployment, identity: str, place: NamedDirectory | None
    ) -> tuple[str, str]:
        """The URL of the snapshot, and of its bucket. It lies in the deployment's bucket under its identity, or where `place`
        says."""
        row = await self._ledger.deployment(deployment.name)
        if row.fields.get("enableHotLoad") is False:
            raise SnapshotRefused(f"{row.name} has enableHotLoad false", param="enableHotLoad")
        bucket = row.bucket_url
        if place is None:
            url = snapshot_url(bucket, identity)
        else:
            url, bucket = source_url(place.url, (bucket, *self._allowed_buckets), place.param)
        grant = grant_of(request)
        if not grant.everywhere((PUBLISH,)):
            buckets = {row.name: row.bucket_url for row in await self._ledger.deployments()}
            if not any(
                grant.allows((PUBLISH,), name) for name in owners(url, buckets) or (deployment.host.name,)
            ):
                raise forbidden((PUBLISH,), "the place of this snapshot")
        return url, bucket

    @staticmethod
    def _place(request: Request) -> NamedDirectory | None:
        source = request.headers.get(SOURCE_URL_HEADER)
        return NamedDirectory(source) if source else None

    def _named(self, request: Request) -> str:
        name = f"accounts/{request.path_params['account']}/deployments/{request.path_params['name']}"
        return self._deployments.get(name).name


def owners(url: str, buckets: Mapping[str, str]) -> list[str]:
    """The deployments that a directory belongs to: those with the innermost bucket around it. buckets: by deployment."""
    around = {name: bucket for name, bucket in buckets.items() if lies_in(url, bucket)}
    depth = {name: len(parse_bucket(bucket).path.strip("/")) for name, bucket in around.items()}
    return [name for name in around if depth[name] == max(depth.values())]


async def _found(url: str, bucket: str, param: str = "identity") -> DirectoryContents:
    """The files at `url`, which are there before they are signalled. param: the field that names them.

    Raises SnapshotRefused, also for an adapter that no replica would take; and ReplicaUnavailable.
    """
    try:
        found = await find_snapshot(url, bucket)
    except SnapshotMissing as error:
        raise SnapshotRefused(
            f"{error}; write the snapshot, then signal it (the server reads {public_url(bucket)})",
            param=param,
        ) from error
    except SnapshotCorrupt as error:
        # No retry makes the file another one.
        raise SnapshotRefused(str(error), param=param) from error
    except SnapshotError as error:
        raise ReplicaUnavailable(f"the bucket cannot be read now: {error}") from error
    try:
        # In a thread: a configuration of 1 MiB takes a while to be read.
        await asyncio.to_thread(check_found, found.sizes, found.adapter_config)
    except SnapshotError as error:
        raise SnapshotRefused(f"{param}: {error}", param=param) from error
    return found


def _check_policy(deployment: Deployment, found: DirectoryContents, state: DeploymentState) -> None:
    """Raises SnapshotRefused for an adapter that was meant for a policy."""
    if not is_adapter_listing(found.sizes):
        return
    content = None if state.desired is None else state.desired.content
    # What is not known is not refused.
    is_one = content is None or is_adapter_listing({file.name for file in content})
    if not deployment.policy and not (state.snapshot != BASE_SNAPSHOT and is_one):
        raise SnapshotRefused(
            f"policy: the directory is a LoRA adapter; name the policy that it is for, or publish full weights"
            f" for {deployment.name} itself",
            param="policy",
        )


def fleet_of(state: DeploymentState, reports: Sequence[Reported]) -> FleetReports:
    """What the ledger has to know of the replicas to take a signal."""
    desired = state.desired
    failed = desired is not None and any(failure(state, report, desired) for report in reports)
    return FleetReports(
        failed_generation=desired.generation if desired is not None and failed else None,
        generation_floor=max((report.own.generation for report in reports), default=0),
        serving=tuple((one.own.snapshot, serving_generation(one)) for one in reports if one.ready),
        boots=tuple(one.boot for one in reports if one.ready and one.own.snapshot == BASE_SNAPSHOT),
    )


async def _look_for(url: str, bucket: str, names: Sequence[str]) -> None:
    """Raise SnapshotRefused, naming it, when one of the files is not in the bucket."""
    try:
        await asyncio.to_thread(check_inside, url, bucket, names)
    except SnapshotCorrupt as out:
        raise SnapshotRefused(f"files: {out}", param="files") from out
    at_once = asyncio.Semaphore(LOOKED_FOR_AT_ONCE)

    async def look(name: str) -> SnapshotError | None:
        async with at_once:
            try:
                await find_file(url, name)
            except SnapshotError as error:
                return error
            return None

    looked = zip(names, await asyncio.gather(*map(look, names)), strict=True)
    errors = [(name, error) for name, error in looked if error is not None]
    for name, error in errors:
        if isinstance(error, SnapshotCorrupt):
            raise SnapshotRefused(f"files: {error}", param="files") from error
        if isinstance(error, SnapshotMissing):
            raise SnapshotRefused(
                f"files: {name} is not in the bucket ({error}); write a file, then hint at it", param="files"
            ) from error
    if errors:
        raise ReplicaUnavailable(f"the bucket cannot be read now: {errors[0][1]}") from errors[0][1]
