"""The Deployments API: create, get, list, patch, scale and delete, over the ledger.

Always holds:
- A change is answered after it is committed in the ledger, and is carried out afterwards (fleet/desired_state.py).
- The default deployment, the one of the command line, cannot be deleted.
- A bucket outside the server's own and the allowed ones is refused.
- A key that is not for every deployment sees and changes its own, and moves none to another bucket.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from midstream.api import resource
from midstream.api.status import loading_state
from midstream.core.endpoints import ONE_DEPLOYMENT as ONE
from midstream.core.endpoints import PAGE_AFTER, PAGE_SIZE, Endpoint, Nothing, flag, serves, text
from midstream.core.errors import ConfigError, Conflict, InvalidRequest, NotFound
from midstream.core.headers import HEADER_MADE
from midstream.core.scopes import CHANGE_ONE, OBSERVE, OPERATE, PUBLISH, READ_ONE, ScopeNeed, forbidden
from midstream.fleet.access import grant_of
from midstream.fleet.desired_state import HARD
from midstream.fleet.registry import Deployments
from midstream.http.bodies import answered, asked_page, page_of, read_body
from midstream.ledger import DeploymentRow, DeploymentState, Ledger, NewDeployment
from midstream.ledger.deployments import NameTaken
from midstream.ledger.records import DeploymentChange
from midstream.snapshots.identity import file_url_path, parse_bucket

#: Rows of a page, unless the client asks for more or fewer.
PAGE_ROWS = 50
PAGE_ROWS_MAX = 200
_COLLECTION = "/v1/accounts/{account}/deployments"


class DeploymentsApi:
    """bucket: the URL of the server's own; a deployment that names none gets a place of its name in it.

    allowed_buckets: others that may be named. changed: takes up a change of the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        *,
        bucket: str,
        allowed_buckets: Collection[str] = (),
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._ledger = ledger
        self._deployments = deployments
        self._account = deployments.default.names.account
        self._bucket = bucket
        self._allowed_buckets = tuple(allowed_buckets)
        self._changed = changed

    @Endpoint(
        "POST",
        _COLLECTION,
        ScopeNeed((OPERATE,), "every"),
        "Creates a deployment.",
        (
            text("deploymentId", "The last part of its name; one is made up without it."),
            flag("validateOnly", "Nothing is created; the answer shows what would be."),
        ),
        body=resource.DeploymentBody,
        answer=resource.DeploymentShown,
    )
    async def create(self, request: Request) -> Response:
        self._check_account(request)
        deployment_id = request.query_params.get("deploymentId") or f"d-{secrets.token_hex(4)}"
        resource.check_id(deployment_id)
        given = resource.parse_body(await read_body(request))
        model = self._base_model(given.get("baseModel"))
        least, most = resource.counts(given, given, None)
        new = NewDeployment(
            name=f"{self._account}/deployments/{deployment_id}",
            model=model,
            bucket_url=self._bucket_of(given, deployment_id),
            transition=resource.transition_of(given),
            replicas_min=least,
            replicas_max=most,
            fields=resource.stored(given, given),
        )
        if request.query_params.get("validateOnly") == "true":
            return answered(resource.shown(DeploymentRow(**vars(new)), None, (), None))
        row = await self._made(new)
        await self._changed()
        return answered(await self._shown(row), headers={HEADER_MADE: row.name})

    @Endpoint("GET", ONE, READ_ONE, "Shows a deployment.", answer=resource.DeploymentShown)
    async def get(self, request: Request) -> msgspec.Struct:
        return await self._shown(await self._row(request))

    @Endpoint(
        "GET",
        _COLLECTION,
        ScopeNeed((PUBLISH, OBSERVE), "some"),
        "Lists the deployments by name.",
        (PAGE_SIZE, PAGE_AFTER),
        answer=resource.DeploymentsShown,
    )
    async def list(self, request: Request) -> msgspec.Struct:
        """The deployments in the order of their names. A page's token is the last name on it."""
        self._check_account(request)
        rows = {
            row.name: row
            for row in await self._ledger.deployments()
            if row.name.startswith(f"{self._account}/")
            and grant_of(request).allows((PUBLISH, OBSERVE), row.name)
        }
        page, token = page_of(rows, *asked_page(request, PAGE_ROWS, PAGE_ROWS_MAX))
        shown = [await self._shown(rows[name]) for name in page]
        return resource.DeploymentsShown(shown, token, len(rows))

    @Endpoint(
        "PATCH",
        ONE,
        CHANGE_ONE,
        "Changes fields of a deployment.",
        (
            text("updateMask", "The fields to change, separated by commas; without it, those of the body."),
            text("update_mask", "The same under its other name."),
        ),
        body=resource.DeploymentBody,
        answer=resource.DeploymentShown,
    )
    async def patch(self, request: Request) -> msgspec.Struct:
        row = await self._row(request)
        given = resource.parse_body(await read_body(request))
        masks = request.query_params.getlist("updateMask") or request.query_params.getlist("update_mask")
        fields = resource.mask_of(",".join(masks) or None, given)
        if "hotLoadBucketUrl" in fields and not grant_of(request).everywhere((OPERATE,)):
            raise forbidden((OPERATE,), "every deployment, to change hotLoadBucketUrl")
        return await self._shown(await self._change(row, given, fields))

    @serves(
        Endpoint("PATCH", ONE + ":scale", CHANGE_ONE, "Sets the number of replicas."),
        Endpoint("POST", ONE + ":scale", CHANGE_ONE, "Sets the number of replicas."),
    )
    async def scale(self, request: Request, body: resource.ScaleBody) -> Nothing:
        row, count = await self._row(request), body.replica_count
        # A greatest number below it is taken along.
        given = {"minReplicaCount": count} if count else {"minReplicaCount": 0, "maxReplicaCount": 0}
        await self._change(row, given, given)
        return Nothing()

    @Endpoint(
        "DELETE",
        ONE,
        CHANGE_ONE,
        "Deletes a deployment; its replicas end when their requests have.",
        (flag("hard", "Its replicas end at once."),),
    )
    async def delete(self, request: Request) -> Nothing:
        row = await self._row(request)
        deployment = self._deployments.known(row.name)
        if deployment is self._deployments.default:
            raise InvalidRequest(
                f"{row.name} is the deployment the server was started with: scale it to 0, or stop the server",
                param="deployment",
            )
        change: DeploymentChange = {"deleting": True}
        if request.query_params.get("hard") == "true":
            change["fields"] = {HARD: True}
        await self._ledger.update_deployment(row.name, **change)
        await self._changed()
        return Nothing()

    @Endpoint(
        "POST", ONE + ":undelete", CHANGE_ONE, "Refuses: a deleted deployment is gone.", kinds=(), status=400
    )
    async def undelete(self, request: Request) -> Response:
        raise InvalidRequest("a deployment that was deleted is gone: create it again")

    # -- inside

    async def _made(self, new: NewDeployment) -> DeploymentRow:
        """Raises InvalidRequest, and Conflict for a name that is taken: for it, no directory is made."""
        taken = Conflict(f"deploymentId: there is a deployment {new.name} already", param="deploymentId")
        if any(known.name == new.name for known in await self._ledger.deployments()):
            raise taken
        await _make_bucket(new.bucket_url)
        try:
            return await self._ledger.create_deployment(new)
        except NameTaken as error:
            # Another call was faster.
            raise taken from error

    async def _change(
        self, row: DeploymentRow, given: dict[str, Any], fields: Collection[str]
    ) -> DeploymentRow:
        """The row after the `fields` are as `given` says; one that it does not give goes back to its default."""
        prefix = f"{self._account}/models/"
        if "baseModel" in fields and prefix + given.get("baseModel", "").removeprefix(prefix) != row.model:
            raise InvalidRequest(f"baseModel: cannot be changed, it is {row.model}", param="baseModel")
        always: DeploymentChange = {}
        if "hotLoadTransitionType" in fields:
            always["transition"] = resource.transition_of(given)
        if "hotLoadBucketUrl" in fields:
            always["bucket_url"] = self._bucket_of(given, row.name.rpartition("/")[2])
            await _make_bucket(always["bucket_url"])
        if more := resource.stored(given, fields):
            always["fields"] = more

        def change(now: DeploymentRow) -> DeploymentChange:
            if now.deleting:
                raise InvalidRequest(f"{now.name} is being deleted", param="name")
            if "minReplicaCount" not in fields and "maxReplicaCount" not in fields:
                return always
            least, most = resource.counts(given, fields, (now.replicas_min, now.replicas_max))
            return {**always, "replicas_min": least, "replicas_max": most}

        row = await self._ledger.revise_deployment(row.name, change)
        await self._changed()
        if (deployment := self._deployments.known(row.name)) is not None:
            deployment.signalled()
        return row

    async def _shown(self, row: DeploymentRow) -> msgspec.Struct:
        deployment = self._deployments.known(row.name)
        if deployment is None:
            return resource.shown(row, None, (), None)
        state = await self._state(row)
        stages = [loading_state(state, view.report)[0] for view in deployment.replicas.views]
        failed = f"a replica could not load {state.snapshot}" if "error" in stages else None
        return resource.shown(row, deployment, stages, failed)

    async def _state(self, row: DeploymentRow) -> DeploymentState:
        try:
            return await self._ledger.state(row.name)
        except NotFound:
            # Another call removed it since it was read.
            return DeploymentState(None)

    async def _row(self, request: Request) -> DeploymentRow:
        account, name = request.path_params["account"], request.path_params["name"]
        # No name has such characters, and not every database takes them.
        if not f"{account}{name}".isprintable():
            raise NotFound("there is no such deployment")
        return await self._ledger.deployment(f"accounts/{account}/deployments/{name}")

    def _check_account(self, request: Request) -> None:
        if f"accounts/{request.path_params['account']}" != self._account:
            raise NotFound(f"there is no account {request.path_params['account']!r}", param="account")

    def _base_model(self, asked: str | None) -> str:
        """The resource name of the model asked for. Raises InvalidRequest."""
        prefix = f"{self._account}/models/"
        model = prefix + (asked or "").removeprefix(prefix)
        if model not in self._deployments.models:
            known = ", ".join(self._deployments.models)
            raise InvalidRequest(
                f"baseModel: {asked!r} is not known here; known are {known}", param="baseModel"
            )
        return model

    def _bucket_of(self, given: Mapping[str, Any], deployment_id: str) -> str:
        """The bucket's URL. Raises InvalidRequest."""
        asked = given.get("hotLoadBucketUrl")
        if not asked:
            if given.get("hotLoadBucketType") in ("S3", "MINIO", "NEBIUS"):
                raise InvalidRequest(
                    f"hotLoadBucketUrl: is needed with {given['hotLoadBucketType']}", param="hotLoadBucketUrl"
                )
            default = self._deployments.default.name.rpartition("/")[2]
            own = self._bucket.rstrip("/")
            return own if deployment_id == default else f"{own}/{deployment_id}"
        try:
            inside = any(lies_in(asked, bucket) for bucket in (self._bucket, *self._allowed_buckets))
        except ConfigError as error:
            raise InvalidRequest(f"hotLoadBucketUrl: {error}", param="hotLoadBucketUrl") from error
        if not inside:
            raise InvalidRequest(
                "hotLoadBucketUrl: is neither in the server's bucket nor in one of gateway.allowed_buckets",
                param="hotLoadBucketUrl",
            )
        return str(asked).rstrip("/")


def lies_in(url: str, bucket: str) -> bool:
    """True if the directory at `url` is `bucket` or lies in it. Raises ConfigError if one is no URL of a bucket."""
    inner, outer = parse_bucket(url), parse_bucket(bucket)
    if (inner.kind, inner.container, inner.account) != (outer.kind, outer.container, outer.account):
        return False
    above = outer.path.strip("/")
    return not above or f"{inner.path.strip('/')}/".startswith(f"{above}/")


async def _make_bucket(url: str) -> None:
    """A local bucket's directory. Raises InvalidRequest when it cannot be made."""
    if parse_bucket(url).kind != "file":
        return
    path = file_url_path(url)
    try:
        await asyncio.to_thread(path.mkdir, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(
            f"hotLoadBucketUrl: cannot be made: {error.strerror or error}", param="hotLoadBucketUrl"
        ) from error
