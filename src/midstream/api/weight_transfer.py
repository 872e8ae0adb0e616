"""vLLM's weight-transfer calls: a trainer sends its weights straight to the replicas.

Owns: those paths' requests and responses (docs/trainer-calls.md). What they do is the door's (fleet/push.py).
Always holds:
- A field that is not understood is refused by its name, and so are transfers of other kinds, with what to use instead.
- Where the replicas declare a backend of vLLM, what is said to it is passed on as it is. What is pickled, or is memory of the
  trainer's device, is refused there, too.
- An update that cannot be read ends the group: its trainer may wait in a broadcast.
- A finished update is taken as a signal is, and answered once the replicas that received it serve it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, cast

import msgspec
from starlette.requests import Request

from midstream.api.pushed_names import check_new_name
from midstream.api.signals import OVERWRITE, SignalBody, overwrites
from midstream.api.transfer_answers import TransferDone, TransferFinished, TransferOpened, TransferStarted
from midstream.api.updates import TakePushed, Updates, only
from midstream.core.endpoints import Endpoint, choice, serves
from midstream.core.errors import (
    Conflict,
    InvalidRequest,
    MidstreamError,
    SnapshotRefused,
    UnknownField,
)
from midstream.core.scopes import SIGNAL
from midstream.core.transfer import InitInfo, Rendezvous, SentTensors, UpdateInfo
from midstream.core.types import Content, Desired, PolicyFate
from midstream.fleet.push import PushDoor
from midstream.fleet.push_members import backend_of
from midstream.fleet.registry import Deployment, Deployments
from midstream.http.bodies import fields_of, json_object, read_body
from midstream.ledger import NOTHING_SAID, Begun, Committing, Ledger, Phase, SignalResult
from midstream.snapshots.identity import check_identity

#: The names of a large model's tensors take several MiB.
UPDATE_BODY_BYTES = 64 * 2**20
WORLD_SIZE_MAX = 4096
PIECE_BYTES_MAX = 2**31 - 1
#: A name, or an address of either kind with its zone.
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
RESETS = ("all", "new_session", "none")
_GLOO = (
    "here the bytes come over torch.distributed with gloo, unless vllm.weight_transfer names a backend of vLLM: use"
    " midstream.client.SnapshotPublisher(to='push'), or midstream.integrations.vllm_push for vLLM's own trainer classes"
)
#: Fields of vLLM's other engines, with what each is.
_OF_INIT = {
    "nccl_unique_id_b64": "belongs to an NCCL group between GPUs",
    "nccl_unique_id": "belongs to an NCCL group between GPUs",
}
_OF_UPDATE = {
    "ipc_handles": "is memory of the trainer's own device, which no replica shares",
    "ipc_handles_pickled": "is pickled, which could run any code",
}

Inner = TypeVar("Inner", bound=msgspec.Struct)


class InitTransfer(msgspec.Struct, frozen=True):
    """init_info: where `vllm.weight_transfer` names a backend of vLLM, what that backend takes."""

    init_info: Rendezvous


class StartUpdate(msgspec.Struct, frozen=True):
    """is_checkpoint_format: of older clients of vLLM. Tensors are always those of a checkpoint, so false is refused.

    weight_version: the snapshot's identity, where it is known already. One that is taken is refused before a tensor moves.
    policies: as in a signal. What cannot be done is refused before a tensor moves, too."""

    is_checkpoint_format: bool | None = None
    weight_version: str | None = None
    policies: PolicyFate | None = None


class DeltaInit(msgspec.Struct, frozen=True):
    """`init_info` of SkyRL's disk deltas: how its own servers keep them."""

    base_model_path: str
    local_checkpoint_dir: str = ""
    cloud_download_workers: int = 0
    checkpoint_load_format: str = ""
    multi_thread_safetensors_max_workers: int = 0


class FinishUpdate(msgspec.Struct, frozen=True):
    """weight_version: the snapshot's identity. Without one it is that of the start, or a name that the ledger gives. policies:
    as in a signal. Without a word it is that of the start."""

    weight_version: str | None = None
    policies: PolicyFate | None = None


class WeightTransferApi:
    def __init__(
        self, ledger: Ledger, deployments: Deployments, take: TakePushed, updates: Updates, door: PushDoor
    ) -> None:
        self._ledger = ledger
        self._deployments = deployments
        self._take = take
        self._updates = updates
        self._door = door

    @serves(
        Endpoint(
            "POST",
            "/init_weight_transfer_engine",
            SIGNAL,
            "Forms the group of a trainer and all replicas, as vLLM does.",
            body=InitTransfer,
        )
    )
    async def init(self, request: Request) -> TransferOpened:
        deployment = only(self._deployments, request)
        raw = json_object(await read_body(request) or b"{}")
        if isinstance(given := raw.get("init_info"), dict) and "base_model_path" in given:
            _inner(given, "init_info", DeltaInit, {})
            return TransferOpened(
                "Deltas need no group of trainer and replicas", "", deployment.wanted_in_all, {}
            )
        backend = backend_of(deployment)
        await self._check_transition(deployment, backend)
        asked = _init_info(raw, backend) if backend else _rendezvous(raw)
        group = await self._door.run(self._door.init(deployment, asked), Phase.JOINING)
        last = group.members[-1]
        return TransferOpened(
            message="Weight transfer initialized",
            group=group.group,
            world_size=last.rank + last.ranks,
            ranks={member.replica: member.rank for member in group.members},
        )

    @serves(
        Endpoint(
            "POST",
            "/start_weight_update",
            SIGNAL,
            "Begins an update: every replica makes room for it.",
            body=StartUpdate,
        )
    )
    async def start(self, request: Request) -> TransferStarted:
        deployment = only(self._deployments, request)
        body = fields_of(_maybe(await read_body(request)), StartUpdate)
        if body.is_checkpoint_format is False:
            raise _wrong(
                "is_checkpoint_format",
                "false means tensors as an engine's kernels keep them; send those of the checkpoint, with its names",
            )
        if (found := await self._fetched(deployment)) is not None:
            _check_fetched(found, body.policies)
            return TransferStarted(f"{found.snapshot} was fetched already", "", 0)
        # It may have been set since the group was formed.
        await self._check_transition(deployment, backend_of(deployment))
        if body.weight_version is not None:
            check_identity(body.weight_version, "weight_version")
        # The last call says what becomes of cached KV.
        signal = SignalBody(body.weight_version or "", reset_prompt_cache="none", policies=body.policies)
        fate = await self._take.check_pushed(request, deployment, signal)
        await self._ledger.check_policies(deployment.name, fate)
        if body.weight_version is not None:
            await check_new_name(self._ledger, deployment, body.weight_version)
        begun = Begun(body.weight_version, body.policies)
        group = await self._door.run(self._door.start(deployment, begun), Phase.STARTING)
        return TransferStarted("Weight update started", group.group, group.number)

    async def refuse(self, deployment: Deployment, error: MidstreamError) -> NoReturn:
        """End the group: its trainer may wait in a broadcast of tensors that cannot be taken. Raises MidstreamError."""
        await self._door.run(self._door.refuse(deployment, error))

    async def receive(self, deployment: Deployment, raw: dict[str, Any]) -> TransferDone:
        """/update_weights with `update_info`. Answered when the tensors are on the replicas."""
        try:
            read = update_info if backend_of(deployment) else sent_tensors
            sent: Sequence[SentTensors | UpdateInfo] = await asyncio.to_thread(read, raw)
        except MidstreamError as error:
            await self.refuse(deployment, error)
        await self._door.run(self._door.update(deployment, sent), Phase.RECEIVING)
        return TransferDone("Weights updated")

    @serves(
        Endpoint(
            "POST",
            "/finish_weight_update",
            SIGNAL,
            "Ends an update: the weights become a snapshot, which is answered for once it serves.",
            (choice("reset_prompt_cache", "What becomes of cached KV.", RESETS, "all"),),
            headers=(OVERWRITE,),
            body=FinishUpdate,
        )
    )
    async def finish(self, request: Request) -> TransferFinished:
        deployment = only(self._deployments, request)
        body = fields_of(_maybe(await read_body(request)), FinishUpdate)
        if body.weight_version is not None:
            check_identity(body.weight_version, "weight_version")
        if (found := await self._fetched(deployment)) is not None:
            _check_fetched(found, body.policies)
            if body.weight_version not in (None, found.snapshot):
                raise Conflict(
                    f"weight_version: no trainer's group is open, and {found.snapshot!r} was fetched, not"
                    f" {body.weight_version!r}",
                    param="weight_version",
                )
            await self._updates.served(deployment, found)
            replicas = [view.name for view in deployment.replicas.views]
            return TransferFinished(
                f"{found.snapshot} serves", found.snapshot, found.generation, replicas, {}
            )
        begun = await self._said_at_start(deployment)
        version = body.weight_version or begun.identity
        policies = body.policies or begun.policies
        signal = SignalBody(version or "", reset_prompt_cache=_reset(request), policies=policies)
        await self._take.check_pushed(request, deployment, signal)
        overwrite = overwrites(request.headers)
        publishing = _SignalOf(deployment, signal, overwrite, self._take, self._updates)
        said = Begun(version, body.policies)
        done = await self._door.run(self._door.finish(deployment, publishing, said), Phase.FINISHING)
        return TransferFinished(
            message="Weight update finished",
            weight_version=done.desired.snapshot,
            generation=done.desired.generation,
            replicas=list(done.replicas),
            fenced=done.fenced,
        )

    @serves(
        Endpoint(
            "POST",
            "/shutdown_weight_transfer_engine",
            SIGNAL,
            "Ends the group of the trainer and the replicas.",
        )
    )
    async def shutdown(self, request: Request) -> TransferDone:
        deployment = only(self._deployments, request)
        _nothing_in(_maybe(await read_body(request)))
        await self._door.run(self._door.shutdown(deployment))
        return TransferDone("Weight transfer shut down")

    async def _said_at_start(self, deployment: Deployment) -> Begun:
        """Of the update that is open, or was the last one."""
        group = await self._ledger.transfer(deployment.name)
        update = None if group is None else await self._ledger.last_update(group)
        return NOTHING_SAID if update is None else Begun(update.identity, update.policies)

    async def _check_transition(self, deployment: Deployment, backend: str) -> None:
        """Raises Conflict where a swap would wait for requests that wait for the swap."""
        if backend and (await self._ledger.deployment(deployment.name)).transition == "SYNC":
            raise Conflict(
                "under hotLoadTransitionType SYNC a swap waits for the end of all requests, and these stand still while a"
                " trainer writes into vLLM: set it to ASYNC, or serve without vllm.weight_transfer"
            )

    async def _fetched(self, deployment: Deployment) -> Desired | None:
        """The version that a trainer had fetched, and now takes to be loaded by these calls; None if they are a push's."""
        desired = (await self._ledger.state(deployment.name)).desired
        if desired is None or desired.compression != "skyrl_delta":
            return None
        return desired if await self._ledger.transfer(deployment.name) is None else None


class _SignalOf:
    """Makes a snapshot of one update."""

    def __init__(
        self,
        deployment: Deployment,
        signal: SignalBody,
        overwrite: bool,
        take: TakePushed,
        updates: Updates,
    ) -> None:
        self._deployment = deployment
        self._signal = signal
        self._overwrite = overwrite
        self._take = take
        self._updates = updates

    async def sign(self, content: Content, committing: Committing) -> SignalResult:
        try:
            return await self._take.take_pushed(
                self._deployment, self._signal, content, committing, overwrite=self._overwrite
            )
        except SnapshotRefused as error:
            if error.param != "identity":
                raise
            raise SnapshotRefused(f"weight_version: {error.message}", param="weight_version") from error

    async def served(self, desired: Desired, replicas: Collection[str], within_s: float) -> None:
        await self._updates.served(
            self._deployment, desired, replicas=replicas, within_s=within_s, again="push it again"
        )


def _check_fetched(found: Desired, policies: PolicyFate | None) -> None:
    """Raises Conflict."""
    if policies is not None:
        raise Conflict(f"policies: {found.snapshot!r} was fetched, and signalled then", param="policies")


def sent_tensors(raw: dict[str, Any]) -> list[SentTensors]:
    """The tensors of an /update_weights. Raises InvalidRequest."""
    given = _only_field(raw, "update_info")
    parts = given if isinstance(given, list) else [given]
    sent = [_inner(part, "update_info", SentTensors, _OF_UPDATE) for part in parts]
    if not sent or not all(one.names for one in sent):
        raise _wrong("update_info.names", "must name at least one tensor")
    for one in sent:
        _check_tensors(one)
    return sent


def update_info(raw: dict[str, Any]) -> list[UpdateInfo]:
    """What an /update_weights says to a backend of vLLM. Raises InvalidRequest."""
    given = _only_field(raw, "update_info")
    for one in given if isinstance(given, list) else [given]:
        _pass_on(one, "update_info", _OF_UPDATE)
    return [UpdateInfo(fields=given)]


def _init_info(raw: dict[str, Any], backend: str) -> InitInfo:
    given = _only_field(raw, "init_info")
    _pass_on(given, "init_info", {})
    return InitInfo(backend=backend, fields=given)


def _pass_on(given: Any, name: str, refused: Mapping[str, str]) -> None:
    """Raises InvalidRequest for what is not passed on."""
    if not isinstance(given, dict):
        raise _wrong(name, "must be an object")
    for field, what in refused.items():
        if field in given:
            raise _wrong(f"{name}.{field}", f"{what}; use a backend that sends the tensors, such as nccl")


def _only_field(raw: dict[str, Any], name: str) -> Any:
    for field in raw:
        if field != name:
            raise UnknownField(field)
    if name not in raw:
        raise _wrong(name, "this field is required")
    return raw[name]


def _check_tensors(sent: SentTensors) -> None:
    for field in ("dtype_names", "shapes"):
        if (found := len(getattr(sent, field))) != (count := len(sent.names)):
            raise _wrong(f"update_info.{field}", f"must be as many as the names, {count}, got {found}")
    seen: set[str] = set()
    for name in sent.names:
        if name in seen:
            raise _wrong("update_info.names", f"has {name[:200]!r} twice")
        seen.add(name)
    if any(size < 0 for shape in sent.shapes for size in shape):
        raise _wrong("update_info.shapes", "no size may be below 0")


def _rendezvous(raw: dict[str, Any]) -> Rendezvous:
    found = _inner(_only_field(raw, "init_info"), "init_info", Rendezvous, _OF_INIT)
    if not _HOST.fullmatch(found.master_address):
        raise _wrong("init_info.master_address", "must be the name or the address of a host")
    bounds = {
        "master_port": (1, 65535),
        "world_size": (2, WORLD_SIZE_MAX),
        "rank_offset": (1, WORLD_SIZE_MAX),
        "packed_buffer_size_bytes": (1, PIECE_BYTES_MAX),
        "packed_num_buffers": (1, WORLD_SIZE_MAX),
    }
    for field, (lowest, highest) in bounds.items():
        if not lowest <= (given := getattr(found, field)) <= highest:
            raise _wrong(f"init_info.{field}", f"must be from {lowest} to {highest}, got {given}")
    return found


def _inner(given: Any, name: str, kind: type[Inner], refused: Mapping[str, str]) -> Inner:
    """An object inside a body, whose fields are named with the object. Raises InvalidRequest."""
    if not isinstance(given, dict):
        raise _wrong(name, "must be an object")
    for field, what in refused.items():
        if field in given:
            raise _wrong(f"{name}.{field}", f"{what}; {_GLOO}")
    try:
        return fields_of(given, kind)
    except UnknownField as error:
        raise UnknownField(f"{name}.{error.param}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}.{error.message}", param=f"{name}.{error.param}") from error


def _wrong(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", param=field)


def _maybe(body: bytes) -> dict[str, Any]:
    """vLLM's client sends no body, or null, where it has nothing to say."""
    return {} if body.strip() in (b"", b"null") else json_object(body)


def _nothing_in(raw: Mapping[str, Any]) -> None:
    for field in raw:
        raise UnknownField(field)


def _reset(request: Request) -> Literal["all", "new_session", "none"]:
    given = request.query_params.get("reset_prompt_cache", "all")
    if given not in RESETS:
        raise _wrong("reset_prompt_cache", f"must be one of {', '.join(RESETS)}, got {given[:40]!r}")
    return cast("Literal['all', 'new_session', 'none']", given)
