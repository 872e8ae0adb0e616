"""What the Tinker API answers, as types: of handlers, of futures, and in the OpenAPI document. Pure.

Always holds: a field is in every answer unless its type has UnsetType. Null is only where the type has None: the SDK reads some
fields that are null otherwise than those that are left out. Times are ISO 8601, in UTC.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.traces import Span
from midstream_tinker.trainer.types import Category

_T = TypeVar("_T")


def given(value: _T | None) -> _T | UnsetType:
    """A field that is left out when there is nothing to say."""
    return UNSET if value is None else value


# -- the client's start


class FrontUp(msgspec.Struct, kw_only=True):
    status: Literal["ok"] = "ok"


class SdkConfig(msgspec.Struct, kw_only=True):
    """Training requests one after another, and in the form that all SDKs from 0.24 on share."""

    parallel_fwdbwd_chunks: bool = False
    proto_write_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    create_model_via_load_weights: bool = True


class SdkDynamicConfig(msgspec.Struct, kw_only=True):
    sample_cancel_enabled: bool = True


class OfferedModel(msgspec.Struct, kw_only=True):
    """max_context_length: in tokens; null where the checkpoint does not say."""

    model_name: str
    max_context_length: int | None
    trainable: bool
    sampleable: bool = True


class OfferedModels(msgspec.Struct, kw_only=True):
    supported_models: list[OfferedModel]


class TelemetryDropped(msgspec.Struct, kw_only=True):
    status: Literal["accepted"] = "accepted"


# -- sessions and samplers


class ClientSessionMade(msgspec.Struct, kw_only=True):
    session_id: str
    type: Literal["create_session"] = "create_session"


class HeartbeatTaken(msgspec.Struct, kw_only=True):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class ClientSessions(msgspec.Struct, kw_only=True):
    sessions: list[str]


class ClientSession(msgspec.Struct, kw_only=True):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | UnsetType = UNSET
    display_name: str | UnsetType = UNSET


class SamplerMade(msgspec.Struct, kw_only=True):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class ClientSampler(msgspec.Struct, kw_only=True):
    """model_path: of the checkpoint that it samples; left out for the base model."""

    sampler_id: str
    base_model: str
    model_path: str | UnsetType = UNSET


# -- models and checkpoints


class ModelData(msgspec.Struct, kw_only=True):
    """tokenizer_id: the directory of the base model."""

    model_name: str
    tokenizer_id: str


class TrainedModelInfo(msgspec.Struct, kw_only=True):
    """lora_rank: left out for a model that is trained whole."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool
    lora_rank: int | UnsetType = UNSET


class WeightsInfo(msgspec.Struct, kw_only=True):
    """lora_rank: 0 for a model that is trained whole. is_lora is true for that one, too: SDK 0.24 makes no model from anything
    else, and sends the rank back."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class SavedCheckpoint(msgspec.Struct, kw_only=True):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: str
    tinker_path: str
    size_bytes: int | UnsetType = UNSET
    public: bool = False
    user_metadata: dict[str, str] | UnsetType = UNSET


class ClientRun(msgspec.Struct, kw_only=True):
    """lora_rank: left out for a model that is trained whole."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int | UnsetType = UNSET
    corrupted: bool = False
    last_request_time: str
    user_metadata: dict[str, str] | UnsetType = UNSET
    last_checkpoint: SavedCheckpoint | UnsetType = UNSET
    last_sampler_checkpoint: SavedCheckpoint | UnsetType = UNSET


class Cursor(msgspec.Struct, kw_only=True):
    offset: int
    limit: int
    total_count: int


class ClientRuns(msgspec.Struct, kw_only=True):
    training_runs: list[ClientRun]
    cursor: Cursor


class RunCheckpoints(msgspec.Struct, kw_only=True):
    checkpoints: list[SavedCheckpoint]


class CheckpointPage(RunCheckpoints, kw_only=True):
    cursor: Cursor


# -- submissions and their futures


class Submitted(msgspec.Struct, kw_only=True):
    """request_id: of the future. model_id: left out for a model that is still to be made."""

    request_id: str
    model_id: str | UnsetType = UNSET


class SampleSubmitted(msgspec.Struct, kw_only=True):
    request_id: str
    sample_sequence_ids: list[str]


class TryAgain(msgspec.Struct, kw_only=True):
    """With status 408: there is no result yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active"] = "active"


class ResultAnnounced(msgspec.Struct, kw_only=True):
    """The result is large. It is asked for again without allow_metadata_only."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class FutureFailed(msgspec.Struct, kw_only=True):
    error: str
    category: Category


class FutureCancelled(msgspec.Struct, kw_only=True):
    request_id: str


class SpansOfSequence(msgspec.Struct, kw_only=True):
    snapshots: tuple[Span, ...]


class SampleFacts(msgspec.Struct, kw_only=True):
    """What is known of a sample beside its result. Null: the gateway did not say it."""

    session_id: str | UnsetType | None = UNSET
    replica: str | UnsetType | None = UNSET
    route_reason: str | UnsetType | None = UNSET
    cached_prompt_tokens: int | UnsetType = UNSET
    sequences: list[SpansOfSequence] | UnsetType = UNSET
    prompt_snapshots: tuple[Span, ...] | UnsetType = UNSET
    error: str | UnsetType = UNSET


class RequestFacts(SampleFacts, kw_only=True):
    request_id: str
    status: Literal["pending", "done", "failed", "gone"]


# -- results


class ModelMade(msgspec.Struct, kw_only=True):
    type: Literal["create_model"] = "create_model"
    model_id: str


class WeightsLoaded(msgspec.Struct, kw_only=True):
    type: Literal["load_weights"] = "load_weights"
    model_id: str
    path: str


class StepDone(msgspec.Struct, kw_only=True):
    type: Literal["optim_step"] = "optim_step"
    metrics: dict[str, float]


class WeightsSaved(msgspec.Struct, kw_only=True):
    type: Literal["save_weights"] = "save_weights"
    path: str


class SamplerWeightsSaved(msgspec.Struct, kw_only=True):
    """path: of a checkpoint with a name; without a name, sampling_session_id is the sampler."""

    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"
    path: str | UnsetType = UNSET
    sampling_session_id: str | UnsetType = UNSET


class LossTensor(msgspec.Struct, kw_only=True):
    """data: flat."""

    data: list[float]
    dtype: str
    shape: list[int]


class LossResults(msgspec.Struct, kw_only=True):
    """loss_fn_outputs: for each datum its fields."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, LossTensor]]
    metrics: dict[str, float]


class SampledSequence(msgspec.Struct, kw_only=True):
    stop_reason: Literal["stop", "length"]
    tokens: list[int]
    logprobs: list[float]


class Samples(msgspec.Struct, kw_only=True):
    """prompt_logprobs, topk_prompt_logprobs: by position of the prompt; null where it has none."""

    type: Literal["sample"] = "sample"
    sequences: list[SampledSequence]
    prompt_cache_hit_tokens: int
    prompt_logprobs: list[float | None] | UnsetType = UNSET
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | UnsetType = UNSET


#: The JSON forms of a future's end.
Result: Any = (
    ModelMade
    | WeightsLoaded
    | StepDone
    | WeightsSaved
    | SamplerWeightsSaved
    | LossResults
    | Samples
    | FutureFailed
    | ResultAnnounced
)
