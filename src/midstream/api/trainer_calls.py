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
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from midstream import __version__
from midstream.api.adapter_calls import AdapterCalls, Adapters
from midstream.api.policies import PolicyApi
from midstream.api.status import context_of
from midstream.api.updates import ANSWER_S_MAX, INSTEAD, Take, Update, Updates, body_of, only
from midstream.core.errors import (
    Conflict,
    InvalidRequest,
    MidstreamError,
    ReplicaUnavailable,
)
from midstream.core.text import refusal
from midstream.core.types import Pause, PauseMode, ReplicaReport
from midstream.core.wires import TRAINER_CHANGES, TRAINER_REFUSED, TRAINER_UNSERVED
from midstream.fleet.registry import Deployment, Deployments
from midstream.http.bodies import fields_of, json_object, read_body
from midstream.ledger import Ledger

VLLM_MODES: Mapping[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
SGLANG_MODES: Mapping[str, PauseMode] = {"abort": "abort", "in_place": "keep"}


class UpdateWeights(msgspec.Struct, frozen=True):
    """prime-rl's. version_uid names weights of a transfer, and is null beside a directory."""

    weight_dir: str | None = None
    skip_prefix_cache_reset: bool = False
    version_uid: None = None


class AbortRequests(msgspec.Struct, frozen=True):
    request_ids: tuple[str, ...] | str | None = None


class PauseGeneration(msgspec.Struct, frozen=True):
    mode: str = "abort"


class ContinueGeneration(msgspec.Struct, frozen=True):
    torch_empty_cache: bool = True


class AbortRequest(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class UpdateFromDisk(msgspec.Struct, frozen=True):
    """Of SGLang. torch_empty_cache, recapture_cuda_graph and token_step mean nothing here."""

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


def trainer_routes(
    ledger: Ledger, deployments: Deployments, take: Take, policies: PolicyApi, loads: Adapters
) -> list[BaseRoute]:
    """Routes for the control app."""
    calls = _Calls(ledger, deployments, take)
    adapters = AdapterCalls(deployments, policies, loads)
    changes: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/pause": calls.pause,
        "/resume": calls.resume,
        "/reset_prefix_cache": calls.reset_prefix_cache,
        "/reset_prefix_cache/": calls.reset_prefix_cache,
        "/abort_requests": calls.abort_requests,
        "/update_weights": calls.update_weights,
        "/pause_generation": calls.pause_generation,
        "/continue_generation": calls.continue_generation,
        "/update_weights_from_disk": calls.update_weights_from_disk,
        "/flush_cache": calls.flush_cache,
        "/abort_request": calls.abort_request,
        "/v1/load_lora_adapter": adapters.load,
        "/v1/unload_lora_adapter": adapters.unload,
        "/load_lora_adapter": adapters.load_in_place,
    }
    reads: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/is_paused": calls.is_paused,
        "/weight_info": calls.weight_version,
        "/get_weight_version": calls.weight_version,
        "/model_info": calls.model_info,
        "/get_model_info": calls.model_info,
        "/server_info": calls.server_info,
        "/get_server_info": calls.server_info,
        "/get_world_size": calls.world_size,
        "/get_world_size/": calls.world_size,
        "/flush_cache": calls.flush_cache,
    }
    return [
        *(Route(path, changes[path], methods=["POST"]) for path in TRAINER_CHANGES),
        *(Route(path, calls.refuse, methods=["POST"]) for path in TRAINER_REFUSED),
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in reads.items()),
    ]


class _Calls:
    def __init__(self, ledger: Ledger, deployments: Deployments, take: Take) -> None:
        self._ledger = ledger
        self._deployments = deployments
        self._updates = Updates(ledger, take)

    # -- vLLM and prime-rl

    async def pause(self, request: Request) -> Response:
        deployment = self._meant(request)
        waits = _flag(request, "wait_for_inflight_requests", default=False)
        mode = _mode(request.query_params.get("mode", "wait" if waits else "abort"), VLLM_MODES)
        clear = _flag(request, "clear_cache", default=True) and mode != "keep"
        if clear:
            # Before anything is paused, so that a refusal leaves nothing behind.
            _check_resets(deployment)
        await self._pause(deployment, mode)
        if clear:
            await self._reset_caches(deployment)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._pause(self._meant(request), None)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        mode = (await self._ledger.state(self._meant(request).name)).pause.mode
        return JSONResponse({"is_paused": mode is not None, "mode": mode})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self._reset_caches(self._meant(request))
        return JSONResponse({"status": "ok"})

    async def abort_requests(self, request: Request) -> Response:
        deployment, body = self._meant(request), await body_of(request, AbortRequests)
        ids = (body.request_ids,) if isinstance(body.request_ids, str) else body.request_ids
        return JSONResponse({"status": "aborted", "aborted": await self._abort(deployment, ids or None)})

    async def update_weights(self, request: Request) -> Response:
        deployment = self._meant(request)
        raw = json_object(await read_body(request) or b"{}")
        if "update_info" in raw or raw.get("weight_dir") is None:
            field = "update_info" if "update_info" in raw else "weight_dir"
            raise await self._refusal(
                deployment, f"{field}: /update_weights without a directory asks for a transfer", field
            )
        body = fields_of(raw, UpdateWeights)
        assert body.weight_dir is not None
        reset = not body.skip_prefix_cache_reset
        desired = await self._updates.run(request, deployment, Update(body.weight_dir, "weight_dir", reset))
        return JSONResponse({"status": "ok", "weight_version": desired.snapshot})

    # -- SGLang

    async def pause_generation(self, request: Request) -> Response:
        deployment, body = self._meant(request), await body_of(request, PauseGeneration)
        await self._pause(deployment, _mode(body.mode, SGLANG_MODES))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        deployment = self._meant(request)
        await body_of(request, ContinueGeneration)
        await self._pause(deployment, None)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, request: Request) -> Response:
        try:
            deployment, body = self._meant(request), await body_of(request, UpdateFromDisk)
            for field, plain in (("load_format", (None, "auto", "safetensors")), ("is_async", (False,))):
                if (given := getattr(body, field)) not in plain:
                    raise InvalidRequest(f"{field}: {given!r} is not supported; leave it out", param=field)
            if body.abort_all_requests:
                await self._abort(deployment, None)
            held = _in_flight(deployment)
            update = Update(body.model_path, "model_path", body.flush_cache, body.weight_version)
            desired = await self._updates.run(request, deployment, update)
        except MidstreamError as error:
            told = {"success": False, "message": error.message, "num_paused_requests": 0}
            return JSONResponse({**told, **error.body()}, status_code=error.status, headers=error.headers())
        paused = (await self._ledger.state(deployment.name)).pause.mode is not None
        return JSONResponse(
            {
                "success": True,
                "message": f"every replica serves {desired.snapshot}",
                "num_paused_requests": held if paused else 0,
                "weight_version": desired.snapshot,
            }
        )

    async def flush_cache(self, request: Request) -> Response:
        await self._reset_caches(self._meant(request))
        return PlainTextResponse("Cache flushed.\n")

    async def abort_request(self, request: Request) -> Response:
        deployment, body = self._meant(request), await body_of(request, AbortRequest)
        if not body.rid and not body.abort_all:
            raise InvalidRequest("rid: name a request, or set abort_all", param="rid")
        aborted = await self._abort(deployment, None if body.abort_all else (body.rid or "",))
        return JSONResponse({"aborted": aborted})

    async def weight_version(self, request: Request) -> Response:
        return JSONResponse({"weight_version": await self._version(self._meant(request))})

    async def model_info(self, request: Request) -> Response:
        deployment = self._meant(request)
        version = await self._version(deployment)
        path = {"model_path": deployment.model, "tokenizer_path": deployment.model, "is_generation": True}
        return JSONResponse({**path, "weight_version": version})

    async def server_info(self, request: Request) -> Response:
        """Each replica is one worker, without parallelism inside that a trainer could see."""
        deployment = self._meant(request)
        state = await self._ledger.state(deployment.name)
        sizes = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "dp_size": deployment.wanted_in_all}
        return JSONResponse(
            {
                "version": f"midstream {__version__}",
                "model_path": deployment.model,
                "served_model_name": deployment.model,
                "weight_version": state.snapshot,
                "is_paused": state.pause.mode is not None,
                **sizes,
                **context_of(_reports(deployment)),
            }
        )

    async def world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": self._meant(request).wanted_in_all})

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
            does = "resumed" if now.mode is None else f"paused with {now.mode}"
            raise Conflict(
                f"mode: another call {does} {deployment.name} before this pause was carried out", param="mode"
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
        told = await self._tell(deployment, "/replica/abort", msgspec.json.encode(ids))
        return sum(msgspec.json.decode(answer)["aborted"] for answer in told)

    async def _reset_caches(self, deployment: Deployment) -> None:
        _check_resets(deployment)
        await self._tell(deployment, "/replica/reset_cache", b"")

    async def _tell(self, deployment: Deployment, path: str, body: bytes) -> list[bytes]:
        """What every replica that is heard answers. Raises ReplicaUnavailable when one does not."""
        replicas = deployment.replicas
        views = [view for view in (*replicas.views, *replicas.leaving) if view.report is not None]
        return await asyncio.gather(*(replicas.post(view, path, body, 200) for view in views))

    async def _version(self, deployment: Deployment) -> str:
        """The snapshot that every replica serves. Raises Conflict while they serve several."""
        serving = {report.snapshot for report in _reports(deployment)}
        if len(serving) > 1:
            raise Conflict(f"the replicas serve {' and '.join(sorted(serving))}; ask again")
        return serving.pop() if serving else (await self._ledger.state(deployment.name)).snapshot


def _reports(deployment: Deployment) -> list[ReplicaReport]:
    return [view.report for view in deployment.replicas.views if view.report is not None]


def _check_resets(deployment: Deployment) -> None:
    """Raises InvalidRequest where an engine cannot."""
    for report in _reports(deployment):
        if report.card is not None and not report.card.has("cache_policies"):
            words = "keep cached KV from being reused"
            raise InvalidRequest(refusal("the cache", report.card, "cache_policies", words))


def _in_flight(deployment: Deployment) -> int:
    return sum(report.in_flight for report in _reports(deployment))


def _carried_out(report: ReplicaReport, pause: Pause) -> bool:
    """Also by a newer one."""
    if report.pause.serial != pause.serial:
        return report.pause.serial > pause.serial
    return pause.mode in (None, "keep") or report.in_flight == 0


def _mode(given: str, modes: Mapping[str, PauseMode]) -> PauseMode:
    if given not in modes:
        raise InvalidRequest(f"mode: must be one of {', '.join(modes)}, got {given[:40]!r}", param="mode")
    return modes[given]


def _flag(request: Request, name: str, *, default: bool) -> bool:
    given = request.query_params.get(name, str(default)).lower()
    if given not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: must be true or false", param=name)
    return given in ("true", "1")
