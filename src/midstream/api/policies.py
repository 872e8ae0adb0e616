"""The policies of a deployment: made, forked, frozen, listed, ended. hotload.py takes the signals for them.

Always holds:
- A policy's name means nothing else on this server, so that a client can ask for it by name alone.
- A policy that is being ended takes no signal. One of its name can be made again once no replica has it any more.
- A fork that fails leaves no policy that was not there before, unless another call has given it a snapshot meanwhile.
- A frozen policy serves what it serves: a signal for it is refused until it is thawed.
- A deployment has a bound of policies, and each tenant may have one: a policy beyond it is not made.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from midstream.api.capabilities import check_signal
from midstream.api.resource_answers import Policies, Policy, PolicyEnding
from midstream.api.signals import Metadata, NamedDirectory, SignalBody
from midstream.api.status import replica_rows, unloaded
from midstream.api.updates import ANSWER_S_MAX, LOOK_AGAIN_S, Take
from midstream.core.endpoints import ONE_DEPLOYMENT, PAGE_AFTER, Endpoint, number
from midstream.core.errors import Conflict, InvalidRequest, MidstreamError, NotFound, ReplicaUnavailable
from midstream.core.headers import HEADER_MADE, HEADER_TENANT
from midstream.core.scopes import PUBLISH_ONE, READ_ONE
from midstream.core.served_names import names_of
from midstream.core.types import BASE_SNAPSHOT, Desired
from midstream.fleet.registry import Deployment, Deployments
from midstream.http.bodies import answered, asked_page
from midstream.ledger import DeploymentRow, DeploymentState, Ledger, NewDeployment
from midstream.ledger.deployments import FROZEN, NO_LIMITS, TENANT, NameTaken, PolicyLimits, check_takes

#: Of a list, unless less is asked for.
PAGE_ROWS = 200
_POLICIES = ONE_DEPLOYMENT + "/policies"
_ONE_POLICY = _POLICIES + "/{policy}"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class PolicyBody(msgspec.Struct):
    """policy: its name. from_: the policy that it takes its first snapshot from. frozen: it takes no signal."""

    policy: str
    from_: str | None = msgspec.field(default=None, name="from")
    frozen: bool | None = None


class PoliciesApi:
    """changed: takes up a change of the ledger that was made here. look: any, and raises LedgerUnavailable if it cannot.

    limits: how many policies there may be.
    """

    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        changed: Callable[[], Awaitable[None]],
        take: Take,
        limits: PolicyLimits = NO_LIMITS,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.look = look or changed
        self._ledger = ledger
        self._deployments = deployments
        self._changed = changed
        self._take = take
        self._limits = limits

    async def ready(self, request: Request, deployment: Deployment, name: str) -> Deployment:
        """The policy a signal is for; it is made if there is none of this name. Raises InvalidRequest, Conflict."""
        if deployment.policy:
            raise InvalidRequest(f"policy: {deployment.name} is a policy itself", param="policy")
        names = names_of(deployment.names, name)
        found = await self._there(names.deployment) if NAME.fullmatch(name) else None
        if found is None:
            found = await self._made(request, deployment, name)
        row = await self._row(found.name)
        if row is None:
            raise ending(name)
        # The ledger looks again as it takes the signal. Nothing is read for one that it would refuse.
        check_takes(row)
        return found

    async def named(self, deployment: Deployment, name: str) -> Deployment:
        """Raises NotFound."""
        found = await self.found(deployment, name)
        if found is None:
            raise NotFound(f"{deployment.name} has no policy {name!r}", param="policy")
        return found

    async def found(self, deployment: Deployment, name: str) -> Deployment | None:
        """The policy of that name, also if another gateway made it; None: there is none."""
        full = names_of(deployment.names, name).deployment
        if (
            self._deployments.known(full) is None
            and NAME.fullmatch(name)
            and await self._row(full) is not None
        ):
            await self.look()
        found = self._deployments.known(full)
        return found if found is not None and found.policy else None

    async def end(self, policy: Deployment) -> None:
        """It takes no more requests from now on."""
        await self._ledger.update_deployment(policy.name, deleting=True)
        await self._changed()

    async def is_as_left(self, policy: Deployment, desired: Desired | None) -> bool:
        """Whether no other call has given the policy a snapshot since. desired: what the caller gave it; None: nothing."""
        with contextlib.suppress(NotFound):
            now = (await self._ledger.state(policy.name)).desired
            return (now and now.generation) == (desired and desired.generation)
        return False

    async def unload(self, policy: Deployment) -> None:
        """Ends it, and returns when it is gone and its name is free. Raises ReplicaUnavailable."""
        await self.end(policy)
        deadline = asyncio.get_running_loop().time() + ANSWER_S_MAX
        while True:
            await self._changed()
            if self._deployments.known(policy.name) is not policy:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise ReplicaUnavailable(f"not every replica has ended the policy {policy.policy!r}")
            await policy.host.replicas.change(LOOK_AGAIN_S)

    @Endpoint(
        "POST",
        _POLICIES,
        PUBLISH_ONE,
        "Makes a policy, forks it from another one, or freezes or thaws it.",
        answer=Policy,
    )
    async def make(self, request: Request, body: PolicyBody) -> Response:
        deployment = self._of(request)
        source = None if body.from_ is None else await self._source(await self.named(deployment, body.from_))
        known = await self._there(names_of(deployment.names, body.policy).deployment)
        policy = known or await self._made(request, deployment, body.policy)
        if source is not None:
            await self._fork(request, source, policy, new=known is None)
        try:
            if body.frozen is not None:
                await self._ledger.update_deployment(policy.name, fields={FROZEN: body.frozen or None})
            row = await self._ledger.deployment(policy.name)
            shown = await self._shown(policy, row)
        except NotFound as error:
            raise ending(body.policy) from error
        if row.deleting:
            raise ending(body.policy)
        return answered(shown, headers={HEADER_MADE: policy.name})

    @Endpoint(
        "GET",
        _POLICIES,
        READ_ONE,
        "Lists the policies of a deployment by name.",
        (
            number("pageSize", f"How many are on a page; 0, and at most: {PAGE_ROWS}.", 0, 2**31 - 1, 0),
            PAGE_AFTER,
        ),
    )
    async def list(self, request: Request) -> Policies:
        """The policies in the order of their names. A page's token is the last name on it."""
        deployment = self._of(request)
        after, size = asked_page(request, PAGE_ROWS, PAGE_ROWS)
        # Another gateway may have made some.
        await self.look()
        page = self._deployments.policies_after(deployment, after, size + 1)
        token = page[size - 1].policy if len(page) > size else ""
        found = {policy.name: policy for policy in page[:size]}
        # One that goes meanwhile is left out.
        rows = await self._ledger.listed([*found])
        shown = [_shown(found[row.name], row, state) for row, state in rows]
        return Policies(shown, token, self._deployments.policy_count(deployment))

    @Endpoint("GET", _ONE_POLICY, READ_ONE, "Shows a policy.")
    async def get(self, request: Request) -> Policy:
        policy = await self.named(self._of(request), request.path_params["policy"])
        return await self._shown(policy, await self._ledger.deployment(policy.name))

    @Endpoint("DELETE", _ONE_POLICY, PUBLISH_ONE, "Ends a policy.")
    async def delete(self, request: Request) -> PolicyEnding:
        policy = await self.named(self._of(request), request.path_params["policy"])
        await self.end(policy)
        return PolicyEnding(policy.name)

    async def _source(self, policy: Deployment) -> Desired:
        """What a fork of the policy begins with. Raises Conflict."""
        desired = (await self._ledger.state(policy.name)).desired
        if desired is None or desired.url is None:
            raise Conflict(f"from: {policy.policy!r} has no snapshot yet", param="from")
        return desired

    async def _fork(self, request: Request, source: Desired, policy: Deployment, *, new: bool) -> None:
        """new: the policy was made for this, and is gone again when it fails."""
        assert source.url is not None
        try:
            target = await self.ready(request, policy.host, policy.policy)
            body = SignalBody(source.snapshot, incremental_snapshot_metadata=_metadata_of(source))
            parents = tuple(msgspec.structs.replace(link, content=None) for link in source.parents)
            await self._take(request, target, body, NamedDirectory(source.url, "from"), parents=parents)
        except MidstreamError:
            if new and await self.is_as_left(policy, None):
                await self.end(policy)
            raise

    async def _made(self, request: Request, deployment: Deployment, name: str) -> Deployment:
        if NAME.fullmatch(name) is None:
            raise InvalidRequest(
                "policy: a name has at most 128 letters, digits and any of . _ -, and begins with no . or -",
                param="policy",
            )
        check_signal(SignalBody("", policy=name), (view.report for view in deployment.replicas.views))
        names = names_of(deployment.names, name)
        if any(other.name != names.deployment for other in self._deployments.called(name)):
            raise Conflict(f"policy: {name!r} is the name of something else here", param="policy")
        row = await self._ledger.deployment(deployment.name)
        fields = {TENANT: request.headers.get(HEADER_TENANT) or None}
        new = NewDeployment(names.deployment, names.model, row.bucket_url, row.transition, fields=fields)
        # Another signal may make it meanwhile.
        with contextlib.suppress(NameTaken):
            await self._ledger.create_deployment(new, self._limits)
        await self._changed()
        if self._deployments.known(names.deployment) is None:
            # The ledger may not have been read.
            await self.look()
        found = self._deployments.known(names.deployment)
        if found is None:
            raise ending(name)
        return found

    async def _there(self, name: str) -> Deployment | None:
        """The policy of this name that the ledger has; what this gateway knows may be gone."""
        found = self._deployments.known(name)
        if found is not None and await self._row(name) is not None:
            return found
        await self.look()
        return None

    async def _row(self, name: str) -> DeploymentRow | None:
        with contextlib.suppress(NotFound):
            return await self._ledger.deployment(name)
        return None

    def _of(self, request: Request) -> Deployment:
        name = f"accounts/{request.path_params['account']}/deployments/{request.path_params['name']}"
        return self._deployments.get(name)

    async def _shown(self, policy: Deployment, row: DeploymentRow) -> Policy:
        return _shown(policy, row, await self._ledger.state(row.name))


def _shown(policy: Deployment, row: DeploymentRow, state: DeploymentState) -> Policy:
    return Policy(
        name=row.name,
        policy=policy.policy,
        model=row.model,
        state="DELETING" if row.deleting else "READY",
        frozen=bool(row.fields.get(FROZEN)),
        snapshot=None if state.snapshot == BASE_SNAPSHOT else state.snapshot,
        generation=row.generation,
        bytes=_size(state.desired),
        replicas=replica_rows(state, policy),
        unloaded=unloaded(policy.replicas),
        waits_for=policy.replicas.facts.unheard(policy.host.wanted) if row.deleting else [],
    )


def _size(desired: Desired | None) -> int | None:
    """The size of the snapshot's own files; None if there is no snapshot, or its files are not known."""
    if desired is None or desired.content is None:
        return None
    return sum(file.size for file in desired.content)


def ending(name: str) -> Conflict:
    """What a call for a policy gets that another call ends meanwhile."""
    return Conflict(f"policy {name!r} is being ended; make it again once it is gone", param="policy")


def _metadata_of(desired: Desired) -> Metadata | None:
    """The metadata as the signal of an incremental snapshot had them."""
    if desired.compression is None:
        return None
    return Metadata(desired.parents[-1].snapshot, desired.compression)
