"""What a client asks about models and checkpoints: get_info, weights_info, and the REST paths of training runs.

Always holds: a model that was not created under this API key, and a checkpoint of another key, are unknown (404).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Literal, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from midstream.core.endpoints import Endpoint, number
from midstream_tinker import answers, serving
from midstream_tinker.answers import given
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.serving import EITHER, PREFIX, TRAINS, caller, get, post
from midstream_tinker.store import CheckpointRow, ModelRow, Store
from midstream_tinker.types import CheckpointKind, ModelBody, Served, WeightsInfoBody

PAGE = 100
MAX_PAGE = 1000
_OFFSET = number("offset", "How many are passed over.", 0, 999_999_999, 0)
_LIMIT = number("limit", f"How many are on a page, never more than {MAX_PAGE}.", 0, 999_999_999, PAGE)
_TYPES: dict[CheckpointKind, Literal["training", "sampler"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
}
_T = TypeVar("_T")


class Runs:
    def __init__(
        self,
        store: Store,
        delete: Callable[[str, str], Awaitable[None]],
        served: Served,
    ) -> None:
        self._store = store
        # Deletes a tenant's checkpoint with this uri.
        self._delete = delete
        self._served = served

    def _model(self, tenant: str, model_id: str) -> ModelRow:
        model = self._store.model(tenant, model_id)
        if model is None:
            raise TinkerRefusal(404, f"there is no model {model_id!r} of this API key", "model_id")
        return model

    @post("get_info", EITHER, "Shows a model that is trained.")
    async def _get_info(self, request: Request, body: ModelBody) -> answers.TrainedModelInfo:
        tenant = caller(request).tenant
        model = self._model(tenant, body.model_id)
        name = model.base_model
        return answers.TrainedModelInfo(
            model_id=model.id,
            model_data=answers.ModelData(model_name=name, tokenizer_id=self._served.directory),
            model_name=name,
            is_lora=model.lora.rank > 0,
            lora_rank=model.lora.rank or UNSET,
        )

    @post("weights_info", EITHER, "Shows what a checkpoint was trained with.")
    async def _weights_info(self, request: Request, body: WeightsInfoBody) -> answers.WeightsInfo:
        tenant = caller(request).tenant
        row = self._store.checkpoint(tenant, body.tinker_path)
        if row is None:
            raise TinkerRefusal(
                404, f"there is no checkpoint {body.tinker_path!r} of this API key", "tinker_path"
            )
        lora = self._model(tenant, row.model_id).lora
        return answers.WeightsInfo(
            base_model=row.base_model,
            lora_rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
        )

    @get("training_runs", "Lists the training runs.", _OFFSET, _LIMIT)
    async def _training_runs(self, request: Request) -> answers.ClientRuns:
        tenant = caller(request).tenant
        page, cursor = _page(request, self._store.models(tenant))
        return answers.ClientRuns(training_runs=[self._run(tenant, model) for model in page], cursor=cursor)

    @get("training_runs/{model_id}", "Shows a training run.")
    async def _training_run(self, request: Request) -> answers.ClientRun:
        tenant = caller(request).tenant
        return self._run(tenant, self._model(tenant, request.path_params["model_id"]))

    def _run(self, tenant: str, model: ModelRow) -> answers.ClientRun:
        rows = self._store.checkpoints(tenant, model.id)
        session = self._store.session(tenant, model.session_id)
        seen = max(model.created, *(row.created for row in rows), session.seen if session else 0.0)
        return answers.ClientRun(
            training_run_id=model.id,
            base_model=model.base_model,
            model_owner=tenant,
            is_lora=model.lora.rank > 0,
            lora_rank=model.lora.rank or UNSET,
            last_request_time=_time(seen),
            user_metadata=given(serving.texts(model.user_metadata)),
            last_checkpoint=_newest(rows, "weights"),
            last_sampler_checkpoint=_newest(rows, "sampler_weights"),
        )

    @get("training_runs/{model_id}/checkpoints", "Lists the checkpoints of a training run.")
    async def _checkpoints_of(self, request: Request) -> answers.RunCheckpoints:
        tenant = caller(request).tenant
        model = self._model(tenant, request.path_params["model_id"])
        rows = self._store.checkpoints(tenant, model.id)
        return answers.RunCheckpoints(checkpoints=[_checkpoint(row) for row in rows])

    @get("checkpoints", "Lists all checkpoints.", _OFFSET, _LIMIT)
    async def _checkpoints(self, request: Request) -> answers.CheckpointPage:
        page, cursor = _page(request, self._store.checkpoints(caller(request).tenant))
        return answers.CheckpointPage(checkpoints=[_checkpoint(row) for row in page], cursor=cursor)

    @Endpoint(
        "DELETE",
        f"{PREFIX}/training_runs/{{model_id}}/checkpoints/{{checkpoint_id:path}}",
        TRAINS,
        "Deletes a checkpoint.",
        kinds=(),
        status=204,
        errors="tinker",
    )
    async def _delete_checkpoint(self, request: Request) -> Response:
        model_id, checkpoint_id = request.path_params["model_id"], request.path_params["checkpoint_id"]
        await self._delete(caller(request).tenant, f"tinker://{model_id}/{checkpoint_id}")
        return Response(status_code=204)


def _newest(rows: Sequence[CheckpointRow], kind: CheckpointKind) -> answers.SavedCheckpoint | UnsetType:
    return next((_checkpoint(row) for row in rows if row.kind == kind), UNSET)


def _checkpoint(row: CheckpointRow) -> answers.SavedCheckpoint:
    return answers.SavedCheckpoint(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=_TYPES[row.kind],
        time=_time(row.created),
        tinker_path=row.uri,
        size_bytes=given(row.size),
        user_metadata=given(serving.texts(row.user_metadata)),
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(request: Request, rows: Sequence[_T]) -> tuple[Sequence[_T], answers.Cursor]:
    offset, limit = _count(request, "offset", 0), _count(request, "limit", PAGE)
    limit = min(limit, MAX_PAGE)
    return rows[offset : offset + limit], answers.Cursor(offset=offset, limit=limit, total_count=len(rows))


def _count(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name, str(default))
    if not given.isascii() or not given.isdigit() or len(given) > 9:
        raise TinkerRefusal(400, f"{name} is {given!r}; a count is expected", name)
    return int(given)
