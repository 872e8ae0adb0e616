"""What the control app's successful answers are, as types: handlers return them, and the OpenAPI document shows them. Pure.

Owns: the fields of those answers. Those of deployments are in resource.py, of replicas in fleet/membership.py, of the account,
policies and add-ons in resource_answers.py.
Always holds:
- A field is in every answer unless its type has UnsetType. Null is only where the type has None.
- Tests hold each answer that they get against these types, and fail on a field that is missing here.
- `_at` and `created` are seconds since the epoch; `_s` is seconds, `_ms` milliseconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from midstream.api.transfer_answers import LedgerTransfer
from midstream.core.kv import KvWait
from midstream.core.traces import Reward, TracedTurn
from midstream.core.types import CompressionFormat, PauseMode, ResetPromptCache, Stage, SwapTiming

# -- Rollouts and sessions


class _Measured(msgspec.Struct):
    opened_at: float
    used_at: float
    turns: int
    open_turns: int
    prompt_tokens: int
    cached_prompt_tokens: int
    cached_share: float | None
    generated_tokens: int
    generation_s: float
    mean_time_to_first_token_s: float | None
    last_time_to_first_token_s: float | None
    mean_inter_token_s: float | None
    last_reward: float | None


class SessionOnReplica(_Measured):
    """What one replica measured of the session. Null: nothing was measured."""

    replica: str


class Session(_Measured):
    """All turns of a session together. replica: where the next request goes. open_turns: those that have not ended.
    generation_s: from first to last token, all turns together. cached_share: of the prompt tokens.
    last_reward: the one given last, to the session or one of its turns. Null: not measured."""

    id: str
    object: Literal["session"]
    deployment: str
    replica: str


class SessionShown(Session):
    """A session, and what each replica measured of it. unreachable: replicas that did not answer. wait: why its next turn has
    not begun; null: it does not wait for room in a KV cache."""

    wait: KvWait | None
    replicas: list[SessionOnReplica]
    unreachable: list[str]


class SessionList(msgspec.Struct):
    """unreachable: replicas that did not answer, so sessions may be missing."""

    object: Literal["list"]
    data: list[Session]
    has_more: bool
    unreachable: list[str]


class SessionDeleted(msgspec.Struct):
    """replicas: those that held it."""

    id: str
    object: Literal["session"]
    deleted: bool
    replicas: list[str]
    unreachable: list[str]


class ReplicaTrace(msgspec.Struct):
    """The turns that one replica has; a turn's parent is one of these. forgotten: turns were dropped for want of memory."""

    replica: str
    turns: list[TracedTurn]
    rewards: list[Reward]
    forgotten: bool


class SessionTrace(msgspec.Struct):
    """unreachable: replicas that did not answer, so turns may be missing."""

    id: str
    object: Literal["session.trace"]
    deployment: str
    traces: list[ReplicaTrace]
    unreachable: list[str]


class SessionReward(msgspec.Struct):
    """replicas: those that keep it. turn: null for a reward of the whole session."""

    id: str
    object: Literal["session.reward"]
    deployment: str
    replicas: list[str]
    unreachable: list[str]
    reward: float
    turn: int | None
    name: str
    metadata: dict[str, Any] | None


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItems(msgspec.Struct):
    """A page of a stored response's input items. first_id, last_id: null on an empty page."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


# -- Models


class EngineShown(msgspec.Struct):
    """The engines that serve a model. features: what all of them can do. lacks: what one or more cannot.
    why: reasons for some of these. kind, version: several are separated by commas."""

    kind: str
    version: str
    features: list[str]
    lacks: list[str]
    why: dict[str, str] | UnsetType = UNSET


class ModelEngines(msgspec.Struct):
    engine: EngineShown
    max_model_len: int | UnsetType = UNSET


class Model(msgspec.Struct):
    """A model or policy. snapshots: by replica, which one serves; null: the replica cannot be reached.
    root, parent: of a policy. max_model_len: tokens of prompt and answer together, the shortest of all replicas; absent while
    no engine is known."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    deployment: str
    snapshots: dict[str, str | None]
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    midstream: ModelEngines | UnsetType = UNSET


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


# -- Hot load


class SignalTaken(msgspec.Struct):
    """changed: it was an effective signal, which began generation `generation`. max_cache_age: in commits; null: no limit."""

    identity: str
    generation: int
    changed: bool
    reset_prompt_cache: ResetPromptCache
    max_cache_age: int | None
    kind: Literal["full", "delta"]


ShownStage = Literal[
    "error",
    "pending",
    "downloading",
    "rebuilding",
    "verifying",
    "staging",
    "staged",
    "committing",
    "checking",
    "unloaded",
    "idle",
    "done",
]


class LoadingState(msgspec.Struct):
    """target_snapshot_identity: null while nothing is to be loaded."""

    stage: ShownStage
    target_snapshot_identity: str | None


class ReplicaLoad(msgspec.Struct):
    """Null while the replica is not reachable. error: of the desired snapshot; null: none. last_swap: null before the first."""

    replica: str
    boot: str | None
    reachable: bool
    error: str | None
    generation: int | None
    last_swap: SwapTiming | None


class HotLoadRow(msgspec.Struct):
    """How far one replica is. readiness: it takes requests with its current snapshot. loading_state: of the desired snapshot,
    so `pending` beside readiness is a replica that serves an older one. current_snapshot_identity: null while it cannot be
    reached."""

    current_snapshot_identity: str | None
    readiness: bool
    loading_state: LoadingState
    midstream: ReplicaLoad


class HotLoadStatus(msgspec.Struct):
    """replicas: the least ready one first. unloaded: of a policy, the replicas that are not to hold it. rebase_problem: why a
    long chain of incremental snapshots is not shortened, if something prevents it."""

    replicas: list[HotLoadRow]
    unloaded: list[str] | UnsetType = UNSET
    rebase_problem: str | UnsetType = UNSET


class HintTaken(msgspec.Struct):
    """replicas: those that took the hint. identity, files: what has landed; without them the hint was for a policy."""

    replicas: list[str]
    identity: str | UnsetType = UNSET
    files: list[str] | UnsetType = UNSET
    policy: str | UnsetType = UNSET


class LedgerFile(msgspec.Struct):
    """size: in bytes."""

    name: str
    size: int
    digest: str


class _OfBoot(msgspec.Struct):
    replica: str
    boot: str
    generation: int
    error: str | None


class LedgerTransition(_OfBoot):
    """One stage change of a replica. seq: counts from 0 within a boot. error: null unless the stage is error."""

    seq: int
    stage: Stage
    at: float


class LedgerDisagreement(_OfBoot):
    """A replica's check that differed from the others'. out: it differed again, and is not used."""

    identity: str
    verdict: Literal["reload", "out", "agreed"]


class LedgerReplica(msgspec.Struct):
    """The last stage change of a replica. ready_at: null while it was not ready in this generation."""

    replica: str
    generation: int
    ready_at: float | None
    stage: Stage
    at: float
    error: str | None


class LedgerSnapshot(msgspec.Struct):
    """A signalled snapshot. chain: what an incremental one stands on, the full one first. max_cache_age: in commits; null: no
    limit. fingerprint, files: null while they are not known. ready_at: null before it was ready anywhere. full_url: where the
    whole files of an incremental one lie, too; null: nowhere. full_needed: replicas may load a chain that begins there."""

    identity: str
    kind: Literal["full", "delta"]
    previous_snapshot_identity: str | None
    compression_format: CompressionFormat | None
    checksum_format: str | None
    chain: list[str]
    url: str
    full_url: str | None
    full_needed: bool
    reset_prompt_cache: ResetPromptCache
    max_cache_age: int | None
    extra_fields_ignore: list[str]
    first_signalled_at: float
    signalled_at: float
    generation: int
    fingerprint: str | None
    files: list[LedgerFile] | None
    ready_at: float | None
    replicas: list[LedgerReplica]
    transitions: list[LedgerTransition]


class DeploymentLedger(msgspec.Struct):
    """generation: 0 before the first signal. older_transitions_left_out: ask with a greater limit for them. transfers: the
    newest groups of trainers, the last one first, each with its newest updates."""

    desired_snapshot_identity: str
    generation: int
    snapshots: list[LedgerSnapshot]
    disagreements: list[LedgerDisagreement]
    transfers: list[LedgerTransfer]
    older_transitions_left_out: bool


class LedgerReset(msgspec.Struct):
    desired_snapshot_identity: str
    generation: int


# -- Trainer calls


class Done(msgspec.Struct):
    status: Literal["ok", "paused", "resumed"]


class DoneInWords(msgspec.Struct):
    message: str
    status: Literal["ok"]


class PauseState(msgspec.Struct):
    """mode: what becomes of running requests; null: it generates."""

    is_paused: bool
    mode: PauseMode | None


class RequestsAborted(msgspec.Struct):
    """aborted: how many."""

    status: Literal["aborted"]
    aborted: int


class RequestAborted(msgspec.Struct):
    """aborted: how many."""

    aborted: int


class WeightsUpdated(msgspec.Struct):
    """weight_version: the snapshot that every replica serves now; of a directory. message: tensors were received."""

    status: Literal["ok"]
    weight_version: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class WeightsUpdatedFromDisk(msgspec.Struct):
    """weight_version: the snapshot that every replica serves now. num_paused_requests: those that stood still meanwhile."""

    success: bool
    message: str
    num_paused_requests: int
    weight_version: str


class WeightsPulled(msgspec.Struct):
    """weight_version: the snapshot that every replica serves now."""

    success: bool
    message: str
    weight_version: str


class WeightInfo(msgspec.Struct):
    """weight_version: the snapshot that every replica serves."""

    weight_version: str


class ServedModel(msgspec.Struct):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    weight_version: str


class ServerInfo(msgspec.Struct):
    """dp_size: the replicas that the deployment is to have. max_model_len: absent while no engine is known."""

    version: str
    model_path: str
    served_model_name: str
    weight_version: str
    is_paused: bool
    tp_size: int
    pp_size: int
    ep_size: int
    dp_size: int
    max_model_len: int | UnsetType = UNSET


class WorldSize(msgspec.Struct):
    world_size: int


# -- Health


class DeploymentHealth(msgspec.Struct):
    """usable: replicas that take requests. elsewhere: those of them that others run. failed: those that cannot be started."""

    name: str
    model: str
    wanted: int
    usable: int
    elsewhere: int
    failed: list[str]


class ReplicaHealth(msgspec.Struct):
    """snapshot, stage: null while it cannot be reached. in_flight: requests."""

    name: str
    reachable: bool
    ready: bool
    usable: bool
    snapshot: str | None
    stage: Stage | None
    in_flight: int
    engine: str | UnsetType = UNSET


class Health(msgspec.Struct):
    """A request without a key sees the status alone."""

    status: Literal["ok", "unavailable"]
    deployments: list[DeploymentHealth] | UnsetType = UNSET
    usable_replicas: int | UnsetType = UNSET
    gateway_workers_ready: int | UnsetType = UNSET
    replicas: list[ReplicaHealth] | UnsetType = UNSET
