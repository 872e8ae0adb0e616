"""Trainers' control calls: the paths of vLLM, prime-rl and SGLang by which unmodified trainers pause and update a server.

Owns: those paths' requests and responses (docs/trainer-calls.md). What an update does is a hot-load signal's (hotload.py).
Always holds:
- An update is taken as a signal is, and answered once every replica serves the snapshot, or with the reason why not.
- A pause is in the ledger before it is answered. It is answered once every replica that is heard has carried it out.
- A call of a transfer that this server does not have is refused by its name, with what to use instead.
- With several deployments a call that names none changes nothing: no default is guessed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from midstream import __version__
from midstream.api.answers import (
    Done,
    DoneInWords,
    PauseState,
    RequestAborted,
    RequestsAborted,
    ServedModel,
    ServerInfo,
    WeightInfo,
    WeightsUpdated,
    WeightsUpdatedFromDisk,
    WorldSize,
)
from midstream.api.capabilities import max_model_len
from midstream.api.delta_calls import DeltaCallsApi, is_version
from midstream.api.updates import ANSWER_S_MAX, INSTEAD, Update, Updates, only
from midstream.api.weight_transfer import UPDATE_BODY_BYTES, WeightTransferApi
from midstream.core.endpoints import PLAIN_TEXT, Endpoint, choice, flag, serves
from midstream.core.engine_words import refusal
from midstream.core.errors import (
    Conflict,
    InvalidRequest,
    MidstreamError,
    PayloadTooLarge,
    ReplicaUnavailable,
)
from midstream.core.reports import ReplicaReport
from midstream.core.scopes import READ_SIGNALS, SIGNAL
from midstream.core.transfer import SentTensors
from midstream.core.types import Desired, Pause, PauseMode
from midstream.core.wires import CHANGES_BY_GET, TRAINER_REFUSED, TRAINER_UNSERVED
from midstream.fleet.push_members import ranks_of
from midstream.fleet.registry import Deployment, Deployments
from midstream.http.bodies import answered, body_of, fields_of, json_object, read_body
from midstream.ledger import Ledger

VLLM_MODES: Mapping[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
SGLANG_MODES: Mapping[str, PauseMode] = {"abort": "abort", "in_place": "keep"}
_RESETS = "Resets the prompt cache of every replica, as {of} does."


class UpdateWeights(msgspec.Struct, frozen=True):
    """prime-rl's, or vLLM's with `update_info` alone. version_uid is null beside a directory."""

    weight_dir: str | None = None
    update_info: SentTensors | tuple[SentTensors, ...] | None = None
    skip_prefix_cache_reset: bool = False
    version_uid: None = None


class AbortRequests(msgspec.Struct, frozen=True):
    request_ids: tuple[str, ...] | str | None = None


class PauseFields(msgspec.Struct, frozen=True):
    """vLLM has them in the query. Trainers that send them in a body mean the same."""

    mode: str | None = None
    wait_for_inflight_requests: bool | None = None
    clear_cache: bool | None = None


class PauseGeneration(msgspec.Struct, frozen=True):
    mode: str = "abort"


class ContinueGeneration(msgspec.Struct, frozen=True):
    torch_empty_cache: bool = True


class AbortRequest(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class UpdateFromDisk(msgspec.Struct, frozen=True):
    """The body of SGLang's call. torch_empty_cache, recapture_cuda_graph and token_step mean nothing here."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    load_format: str | None = None
    is_async: bool = False
    keep_pause: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: None = None


class TrainerApi:
    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        updates: Updates,
        transfer: WeightTransferApi,
        deltas: DeltaCallsApi,
    ) -> None:
        self._ledger = ledger
        self._deployments = deployments
        self._updates = updates
        self._transfer = transfer
        self._deltas = deltas

    # -- vLLM and prime-rl

    @serves(
        Endpoint(
            "POST",
            "/pause",
            SIGNAL,
            "Pauses generation, as vLLM does.",
            (
                choice("mode", "What becomes of running requests.", tuple(VLLM_MODES)),
                flag("wait_for_inflight_requests", "Without `mode`: wait, and do not abort."),
                flag("clear_cache", "The prompt cache is reset, unless requests are kept.", True),
            ),
        )
    )
    async def pause(self, request: Request, body: PauseFields) -> Done:
        deployment = self._meant(request)
        waits = _flag(request, "wait_for_inflight_requests", body, default=False)
        mode = _mode(_said(request, "mode", body, "wait" if waits else "abort"), VLLM_MODES)
        clear = _flag(request, "clear_cache", body, default=True) and mode != "keep"
        if clear:
            # Before anything is paused, so that a refusal leaves nothing behind.
            _check_resets(deployment)
        await self._pause(deployment, mode)
        if clear:
            await self._reset_caches(deployment)
        return Done("paused")

    @serves(Endpoint("POST", "/resume", SIGNAL, "Resumes generation, as vLLM does."))
    async def resume(self, request: Request) -> Done:
        await self._pause(self._meant(request), None)
        return Done("resumed")

    @serves(Endpoint("GET", "/is_paused", READ_SIGNALS, "Says whether generation is paused, and how."))
    async def is_paused(self, request: Request) -> PauseState:
        mode = (await self._ledger.state(self._meant(request).name)).pause.mode
        return PauseState(mode is not None, mode)

    @serves(
        Endpoint("POST", "/reset_prefix_cache", SIGNAL, _RESETS.format(of="vLLM")),
        Endpoint("POST", "/reset_prefix_cache/", SIGNAL, _RESETS.format(of="vLLM")),
    )
    async def reset_prefix_cache(self, request: Request) -> Done:
        await self._reset_caches(self._meant(request))
        return Done("ok")

    @serves(Endpoint("POST", "/abort_requests", SIGNAL, "Ends requests by id, or all of them."))
    async def abort_requests(self, request: Request, body: AbortRequests) -> RequestsAborted:
        deployment = self._meant(request)
        ids = (body.request_ids,) if isinstance(body.request_ids, str) else body.request_ids
        return RequestsAborted("aborted", await self._abort(deployment, ids or None))

    @serves(
        Endpoint(
            "POST",
            "/update_weights",
            SIGNAL,
            "Loads the snapshot in a directory, as prime-rl asks for it; or receives tensors, as vLLM does.",
            body=UpdateWeights,
        )
    )
    async def update_weights(self, request: Request) -> WeightsUpdated:
        deployment = self._meant(request)
        try:
            sent = await read_body(request, UPDATE_BODY_BYTES)
        except PayloadTooLarge as error:
            # Nothing but the names of tensors is that long.
            await self._transfer.refuse(deployment, error)
        raw = await asyncio.to_thread(json_object, sent or b"{}")
        info = raw.get("update_info")
        if isinstance(info, dict) and "target_version" in info:
            return await self._deltas.update(request, deployment, info)
        if "update_info" in raw:
            done = await self._transfer.receive(deployment, raw)
            return WeightsUpdated("ok", message=done.message)
        if raw.get("weight_dir") is None:
            what = (
                "weight_dir: /update_weights without a directory, and without update_info, names no weights"
            )
            raise await self._refusal(deployment, what, "weight_dir")
        body = fields_of(raw, UpdateWeights)
        assert body.weight_dir is not None
        reset = not body.skip_prefix_cache_reset
        desired = await self._updates.run(request, deployment, Update(body.weight_dir, "weight_dir", reset))
        return WeightsUpdated("ok", desired.snapshot)

    # -- SGLang

    @serves(Endpoint("POST", "/pause_generation", SIGNAL, "Pauses generation, as SGLang does."))
    async def pause_generation(self, request: Request, body: PauseGeneration) -> DoneInWords:
        await self._pause(self._meant(request), _mode(body.mode, SGLANG_MODES))
        return DoneInWords("Generation paused successfully.", "ok")

    @serves(Endpoint("POST", "/continue_generation", SIGNAL, "Resumes generation, as SGLang does."))
    async def continue_generation(self, request: Request, body: ContinueGeneration) -> DoneInWords:
        await self._pause(self._meant(request), None)
        return DoneInWords("Generation continued successfully.", "ok")

    @serves(
        Endpoint(
            "POST",
            "/update_weights_from_disk",
            SIGNAL,
            "Loads the snapshot in a directory, as SGLang does.",
            body=UpdateFromDisk,
            answer=WeightsUpdatedFromDisk,
        )
    )
    async def update_weights_from_disk(self, request: Request) -> Response:
        try:
            deployment, body = self._meant(request), await body_of(request, UpdateFromDisk)
            for field, plain in (("load_format", (None, "auto", "safetensors")), ("is_async", (False,))):
                if (given := getattr(body, field)) not in plain:
                    raise InvalidRequest(f"{field}: {given!r} is not supported; leave it out", param=field)
            if body.abort_all_requests:
                await self._abort(deployment, None)
            held = _in_flight(deployment)
            desired = await self._updated(request, deployment, body)
        except MidstreamError as error:
            answer = {"success": False, "message": error.message, "num_paused_requests": 0}
            return JSONResponse({**answer, **error.body()}, status_code=error.status, headers=error.headers())
        paused = (await self._ledger.state(deployment.name)).pause.mode is not None
        return answered(
            WeightsUpdatedFromDisk(
                success=True,
                message=f"every replica serves {desired.snapshot}",
                num_paused_requests=held if paused else 0,
                weight_version=desired.snapshot,
            )
        )

    async def _updated(self, request: Request, deployment: Deployment, body: UpdateFromDisk) -> Desired:
        """The snapshot that every replica serves then. Raises MidstreamError.

        Miles names its engine's own copy of the version that it had pulled before. That is what is served already.
        """
        desired = (await self._ledger.state(deployment.name)).desired
        if desired is not None and is_version(desired, body.weight_version):
            await self._updates.served(deployment, desired)
            return desired
        update = Update(body.model_path, "model_path", body.flush_cache, body.weight_version)
        return await self._updates.run(request, deployment, update)

    @serves(
        Endpoint("POST", "/flush_cache", SIGNAL, _RESETS.format(of="SGLang"), kinds=PLAIN_TEXT),
        *(
            Endpoint("GET", path, SIGNAL, _RESETS.format(of="SGLang"), kinds=PLAIN_TEXT)
            for path in CHANGES_BY_GET
        ),
    )
    async def flush_cache(self, request: Request) -> Response:
        await self._reset_caches(self._meant(request))
        return PlainTextResponse("Cache flushed.\n")

    @serves(Endpoint("POST", "/abort_request", SIGNAL, "Ends one request, or all of them, as SGLang does."))
    async def abort_request(self, request: Request, body: AbortRequest) -> RequestAborted:
        deployment = self._meant(request)
        if not body.rid and not body.abort_all:
            raise InvalidRequest("rid: name a request, or set abort_all", param="rid")
        aborted = await self._abort(deployment, None if body.abort_all else (body.rid or "",))
        return RequestAborted(aborted)

    @serves(
        *(
            Endpoint("GET", path, READ_SIGNALS, "Names the snapshot that every replica serves.")
            for path in ("/weight_info", "/get_weight_version")
        )
    )
    async def weight_version(self, request: Request) -> WeightInfo:
        return WeightInfo(await self._version(self._meant(request)))

    @serves(
        *(
            Endpoint("GET", path, READ_SIGNALS, "Shows the model and the snapshot that every replica serves.")
            for path in ("/model_info", "/get_model_info")
        )
    )
    async def model_info(self, request: Request) -> ServedModel:
        deployment = self._meant(request)
        version = await self._version(deployment)
        return ServedModel(deployment.model, deployment.model, is_generation=True, weight_version=version)

    @serves(
        *(
            Endpoint("GET", path, READ_SIGNALS, "Shows version, model, snapshot, pause and sizes.")
            for path in ("/server_info", "/get_server_info")
        )
    )
    async def server_info(self, request: Request) -> ServerInfo:
        """Each replica is one worker, without parallelism inside that a trainer could see."""
        deployment = self._meant(request)
        state = await self._ledger.state(deployment.name)
        return ServerInfo(
            version=f"midstream {__version__}",
            model_path=deployment.model,
            served_model_name=deployment.model,
            weight_version=state.snapshot,
            is_paused=state.pause.mode is not None,
            tp_size=1,
            pp_size=1,
            ep_size=1,
            dp_size=deployment.wanted_in_all,
            max_model_len=max_model_len(_reports(deployment)),
        )

    @serves(
        *(
            Endpoint("GET", path, READ_SIGNALS, "Says how many ranks of a trainer's group the replicas are.")
            for path in ("/get_world_size", "/get_world_size/")
        )
    )
    async def world_size(self, request: Request) -> WorldSize:
        return WorldSize(ranks_of(self._meant(request)))

    @serves(
        *(
            Endpoint(
                "POST",
                path,
                SIGNAL,
                "Refuses a call that this server does not have, and says what to do instead.",
                kinds=(),
                status=400,
            )
            for path in TRAINER_REFUSED
        )
    )
    async def refuse(self, request: Request) -> Response:
        deployment, path = self._meant(request), request.scope["path"]
        instead = TRAINER_UNSERVED.get(path)
        if instead is not None:
            raise InvalidRequest(f"{path} {instead}")
        raise await self._refusal(deployment, f"{path} belongs to a transfer between processes")

    # -- what they do

    def _meant(self, request: Request) -> Deployment:
        return only(self._deployments, request)

    async def _refusal(self, deployment: Deployment, what: str, param: str | None = None) -> InvalidRequest:
        bucket = (await self._ledger.deployment(deployment.name)).bucket_url
        return InvalidRequest(f"{what}; {INSTEAD.format(bucket=bucket)}", param=param)

    async def _pause(self, deployment: Deployment, mode: PauseMode | None) -> None:
        if mode == "keep":
            await self._check_keep(deployment)
        floor = max((report.pause.serial for report in _reports(deployment)), default=0)
        pause = await self._ledger.pause(deployment.name, mode, floor=floor)
        deployment.signalled()
        deadline = asyncio.get_running_loop().time() + ANSWER_S_MAX
        while not all(_carried_out(report, pause) for report in _reports(deployment)):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise ReplicaUnavailable(
                    f"not every replica carried out {mode or 'the resumption'} in {ANSWER_S_MAX:g} s"
                )
            # Nothing is waited for between the look at the reports and this, so no change is missed.
            await deployment.replicas.change(left)
            pause = await self._still(deployment, pause)
        await self._still(deployment, pause)

    async def _still(self, deployment: Deployment, pause: Pause) -> Pause:
        """The pause that the ledger has now, of the same mode. Raises Conflict when another call ended this one's."""
        if pause.mode is None:
            return pause
        now = (await self._ledger.state(deployment.name)).pause
        if now.mode != pause.mode:
            act = "resumed" if now.mode is None else f"paused with {now.mode}"
            raise Conflict(
                f"mode: another call {act} {deployment.name} before this pause was carried out", param="mode"
            )
        return now

    async def _check_keep(self, deployment: Deployment) -> None:
        for report in _reports(deployment):
            if report.card is not None and not report.card.has("freeze"):
                words = "keep requests through a pause; pause with wait or abort"
                raise InvalidRequest(refusal("mode", report.card, "freeze", words), param="mode")
        if (await self._ledger.deployment(deployment.name)).transition == "SYNC":
            raise InvalidRequest(
                "mode: keep: under hotLoadTransitionType SYNC a swap waits for the end of all requests, and these do not end;"
                " pause with wait or abort",
                param="mode",
            )

    async def _abort(self, deployment: Deployment, ids: tuple[str, ...] | None) -> int:
        answers = await self._tell(deployment, "/replica/abort", msgspec.json.encode(ids))
        return sum(msgspec.json.decode(answer)["aborted"] for answer in answers)

    async def _reset_caches(self, deployment: Deployment) -> None:
        _check_resets(deployment)
        # Replicas whose caches the same call reset may give KV to each other.
        await self._tell(deployment, "/replica/reset_cache", uuid.uuid4().hex.encode())

    async def _tell(self, deployment: Deployment, path: str, body: bytes) -> list[bytes]:
        """What every replica that is heard answers. Raises ReplicaUnavailable when one does not."""
        replicas = deployment.replicas
        views = [view for view in (*replicas.views, *replicas.leaving) if view.report is not None]
        return await asyncio.gather(*(replicas.post(view, path, body, 200) for view in views))

    async def _version(self, deployment: Deployment) -> str:
        """The snapshot that every replica serves. Raises Conflict while they serve several."""
        heard = (view.report for view in deployment.replicas.views if view.report is not None)
        serving = {report.own.snapshot for report in heard}
        if len(serving) > 1:
            raise Conflict(f"the replicas serve {' and '.join(sorted(serving))}; ask again")
        return serving.pop() if serving else (await self._ledger.state(deployment.name)).snapshot


def _reports(deployment: Deployment) -> list[ReplicaReport]:
    """Also of replicas that leave: their requests are the deployment's, too."""
    return [replica.heard for replica in deployment.replicas.facts.known if replica.heard is not None]


def _check_resets(deployment: Deployment) -> None:
    """Raises InvalidRequest where an engine cannot."""
    for report in _reports(deployment):
        if report.card is not None and not report.card.has("cache_policies"):
            words = "keep cached KV from being reused"
            raise InvalidRequest(refusal("the cache", report.card, "cache_policies", words))


def _in_flight(deployment: Deployment) -> int:
    return sum(report.in_flight for report in _reports(deployment))


def _carried_out(report: ReplicaReport, pause: Pause) -> bool:
    """True if this pause, or a newer one, was carried out."""
    if report.pause.serial != pause.serial:
        return report.pause.serial > pause.serial
    return pause.mode in (None, "keep") or report.in_flight == 0


def _mode(given: str, modes: Mapping[str, PauseMode]) -> PauseMode:
    if given not in modes:
        raise InvalidRequest(f"mode: must be one of {', '.join(modes)}, got {given[:40]!r}", param="mode")
    return modes[given]


def _said(request: Request, name: str, body: PauseFields, default: str) -> str:
    """What the query says, or the body. Raises InvalidRequest where they say different things."""
    sent = getattr(body, name)
    told = {str(value).lower() for value in (request.query_params.get(name), sent) if value is not None}
    if len(told) > 1:
        raise InvalidRequest(f"{name}: the query and the body must say the same", param=name)
    return told.pop() if told else default


def _flag(request: Request, name: str, body: PauseFields, *, default: bool) -> bool:
    given = _said(request, name, body, str(default).lower())
    if given not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: must be true or false", param=name)
    return given in ("true", "1")
