"""What each operation of the gateway's port does, in one sentence, and what it reads beside its path. Pure.

Owns: the summaries, the query parameters and the request headers of all operations, in the groups in which they are shown.
Always holds: an operation stands here under the path as core/scopes.py spells it, without Fireworks' prefix. A test fails for a
route without an entry, for an entry without a route, and for a query parameter that only one of entry and code knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from midstream.api import adapter_calls, addons, answers, hotload, policies, resource, responses, signals
from midstream.api import resource_answers as resources
from midstream.api import trainer_calls as trainer
from midstream.api import trajectories as sessions
from midstream.api.pages import TYPES
from midstream.core import scopes
from midstream.core.headers import HEADER_OVERWRITE
from midstream.core.traces import RewardGiven
from midstream.core.wires import TRAINER_REFUSED
from midstream.fleet.membership import ReplicaBody


class Parameter(NamedTuple):
    """schema: JSON Schema of its value."""

    name: str
    schema: Mapping[str, Any]
    words: str


class Operation(NamedTuple):
    """body: what a JSON body is read into, of what the control app reads itself. kinds: the media types of the answer; none:
    it has no body. headers: beside those that its place in the table of scopes implies. status: of success, or of what always
    refuses. answer: the type of a JSON answer; Any: it is not told, or replicas tell it. answer_of: the path of the POST whose
    answer it gives again."""

    summary: str
    query: tuple[Parameter, ...] = ()
    body: type[msgspec.Struct] | None = None
    kinds: tuple[str, ...] = ("application/json",)
    headers: tuple[Parameter, ...] = ()
    status: int = 200
    answer: Any = Any
    answer_of: str = ""


class Group(NamedTuple):
    """page: of docs/, with more on it."""

    name: str
    words: str
    page: str
    operations: Mapping[tuple[str, str], Operation]


def _kinds_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The media types of these files."""
    return tuple(sorted({TYPES[name.rpartition(".")[2]] for name in names}))


def _text(name: str, words: str) -> Parameter:
    return Parameter(name, {"type": "string"}, words)


def _number(name: str, words: str, lowest: int, highest: int, default: int) -> Parameter:
    bounds = {"type": "integer", "minimum": lowest, "maximum": highest, "default": default}
    return Parameter(name, bounds, words)


def _flag(name: str, words: str, default: bool = False) -> Parameter:
    return Parameter(name, {"type": "boolean", "default": default}, words)


def _choice(name: str, words: str, values: tuple[str, ...], default: str | None = None) -> Parameter:
    given = {} if default is None else {"default": default}
    return Parameter(name, {"type": "string", "enum": list(values), **given}, words)


_STREAMED = ("application/json", "text/event-stream")
_PLAIN = ("text/plain",)
_HTML = ("text/html",)
_PAGE_AFTER = _text("pageToken", "The `nextPageToken` of the page before.")
_PAGE_SIZE = _number("pageSize", "How many are on a page; 0: 50, and never more than 200.", 0, 2**31 - 1, 0)
_OFFSET = _number("offset", "How many are passed over.", 0, 999_999_999, 0)
_TINKER_LIMIT = _number("limit", "How many are on a page, never more than 1000.", 0, 999_999_999, 100)

_INFERENCE: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation("Answers a chat, whole or as a stream.", kinds=_STREAMED),
    ("POST", "/v1/completions"): Operation("Completes a prompt, whole or as a stream.", kinds=_STREAMED),
    ("POST", "/v1/messages"): Operation("Answers a chat as Anthropic's Messages API does.", kinds=_STREAMED),
    ("POST", "/v1/messages/count_tokens"): Operation("Counts the tokens that a Messages request would have."),
    ("POST", "/v1/responses"): Operation("Answers as OpenAI's Responses API does.", kinds=_STREAMED),
    ("GET", "/v1/responses/{id}"): Operation(
        "Shows a stored response.",
        (_choice("stream", "A stored one is not streamed again.", ("false",)),),
        answer_of="/v1/responses",
    ),
    ("DELETE", "/v1/responses/{id}"): Operation("Deletes a stored response.", answer=answers.ResponseDeleted),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "Lists the input items of a stored response.",
        (
            _number("limit", "How many items.", 1, responses.PAGE_SIZE_MAX, responses.PAGE_SIZE),
            _choice("order", "The order of the items.", ("asc", "desc"), "desc"),
            _text("after", "The id of the last item of the page before."),
        ),
        answer=answers.ResponseItems,
    ),
    ("POST", "/inference/v1/generate"): Operation(
        "Generates token ids after token ids, as vLLM does.", kinds=_STREAMED
    ),
    ("POST", "/generate"): Operation("Generates after a text or token ids, as SGLang does.", kinds=_STREAMED),
    ("POST", "/tokenize"): Operation("Gives the token ids of a prompt or a chat."),
    ("POST", "/detokenize"): Operation("Gives the text of token ids."),
    ("POST", "/v1/chat/completions/render"): Operation(
        "Renders a chat into a request of token ids, as vLLM does."
    ),
    ("POST", "/v1/completions/render"): Operation(
        "Renders a completion into requests of token ids, as vLLM does."
    ),
    ("GET", "/v1/models"): Operation(
        "Lists the served models and policies, with each replica's snapshot.", answer=answers.ModelList
    ),
    ("GET", "/v1/models/{model:path}"): Operation("Shows one served model or policy.", answer=answers.Model),
}

_SESSIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v1/sessions"): Operation(
        "Lists the tenant's sessions in the order of their keys.",
        (
            _number("limit", "How many sessions.", 1, sessions.PAGE_SIZE_MAX, sessions.PAGE_SIZE),
            _text("after", "The key of the last session of the page before."),
        ),
        answer=answers.SessionList,
    ),
    ("GET", "/v1/sessions/{key:path}"): Operation(
        "Shows what the turns of one session were like.", answer=answers.SessionShown
    ),
    ("DELETE", "/v1/sessions/{key:path}"): Operation(
        "Closes a session and drops its part of the cache.", answer=answers.SessionDeleted
    ),
    ("GET", "/v1/sessions/{key:path}/trace"): Operation(
        "Gives a session's turns as token ids with their records and rewards.", answer=answers.SessionTrace
    ),
    ("POST", "/v1/sessions/{key:path}/reward"): Operation(
        "Rewards a session or one turn of it.", body=RewardGiven, answer=answers.SessionReward
    ),
    ("GET", "/sessions/{key:path}/trace"): Operation(
        "Gives the trace of the session that a client's base URL names.", answer=answers.SessionTrace
    ),
    ("POST", "/sessions/{key:path}/reward"): Operation(
        "Rewards the session that a client's base URL names.", body=RewardGiven, answer=answers.SessionReward
    ),
}

_OVERWRITE = Parameter(
    HEADER_OVERWRITE,
    {"type": "string", "enum": ["1"]},
    "The files replace those that the identity meant before.",
)
_SOURCE = _text(
    signals.SOURCE_URL_HEADER, "The snapshot's directory, where it is not the identity's place in the bucket."
)
_HOT_LOAD: Mapping[tuple[str, str], Operation] = {
    ("POST", hotload.HOT_LOAD_PATH): Operation(
        "Signals a snapshot, which all replicas then load while they serve.",
        body=signals.SignalBody,
        headers=(_OVERWRITE, _SOURCE),
        answer=answers.SignalTaken,
    ),
    ("GET", hotload.HOT_LOAD_PATH): Operation(
        "Shows what each replica serves and loads, the least ready one first.",
        (_text("policy", "The policy whose loads are shown."),),
        answer=answers.HotLoadStatus,
    ),
    ("POST", hotload.HOT_LOAD_PATH + "/hint"): Operation(
        "Says that files of a snapshot have landed, so that replicas fetch them early.",
        body=signals.HintBody,
        headers=(_SOURCE,),
        status=202,
        answer=answers.HintTaken,
    ),
    ("GET", policies.OF_ONE + "/ledger"): Operation(
        "Shows a deployment's signals, snapshots and stage changes.",
        (
            _number(
                "limit",
                "How many of the newest stage changes.",
                1,
                hotload.TRANSITIONS_SHOWN_MAX,
                hotload.TRANSITIONS_SHOWN,
            ),
        ),
        answer=answers.DeploymentLedger,
    ),
    ("DELETE", policies.OF_ONE + "/ledger"): Operation(
        "Forgets all snapshots, so that replicas go back to the base weights.", answer=answers.LedgerReset
    ),
}

_COLLECTION = "/v1/accounts/{account}/deployments"
_ONE = policies.OF_ONE
_DEPLOYMENTS: Mapping[tuple[str, str], Operation] = {
    ("GET", _COLLECTION): Operation(
        "Lists the deployments by name.", (_PAGE_SIZE, _PAGE_AFTER), answer=resources.Deployments
    ),
    ("POST", _COLLECTION): Operation(
        "Creates a deployment.",
        (
            _text("deploymentId", "The last part of its name; one is made up without it."),
            _flag("validateOnly", "Nothing is created; the answer shows what would be."),
        ),
        resource.DeploymentBody,
        answer=resources.Deployment,
    ),
    ("GET", _ONE): Operation("Shows a deployment.", answer=resources.Deployment),
    ("PATCH", _ONE): Operation(
        "Changes fields of a deployment.",
        (
            _text("updateMask", "The fields to change, separated by commas; without it, those of the body."),
            _text("update_mask", "The same under its other name."),
        ),
        resource.DeploymentBody,
        answer=resources.Deployment,
    ),
    ("DELETE", _ONE): Operation(
        "Deletes a deployment; its replicas end when their requests have.",
        (_flag("hard", "Its replicas end at once."),),
        answer=resources.Nothing,
    ),
    ("PATCH", _ONE + ":scale"): Operation(
        "Sets the number of replicas.", body=resource.ScaleBody, answer=resources.Nothing
    ),
    ("POST", _ONE + ":scale"): Operation(
        "Sets the number of replicas.", body=resource.ScaleBody, answer=resources.Nothing
    ),
    ("POST", _ONE + ":undelete"): Operation("Refuses: a deleted deployment is gone.", kinds=(), status=400),
    ("GET", _ONE + "/replicas"): Operation("Lists the replicas of a deployment.", answer=resources.Replicas),
    ("POST", _ONE + "/replicas"): Operation(
        "Lets a replica join that others run.", body=ReplicaBody, answer=resources.Replica
    ),
    ("PATCH", _ONE + "/replicas/{replica}"): Operation(
        "Changes a replica's weight, drains it, or takes it back.", body=ReplicaBody, answer=resources.Replica
    ),
    ("DELETE", _ONE + "/replicas/{replica}"): Operation(
        "Removes a replica that joined by this API.", answer=resources.Nothing
    ),
    ("GET", "/v1/accounts"): Operation("Lists the server's one account.", answer=resources.Accounts),
    ("GET", "/v1/accounts/{account}"): Operation("Shows the account.", answer=resources.Account),
    ("GET", "/v1/accounts/{account}/models"): Operation(
        "Lists the models that are deployed or can be deployed.", answer=resources.AccountModels
    ),
    ("GET", "/v1/accounts/{account}/models/{model}"): Operation(
        "Shows one of these models.", answer=resources.AccountModel
    ),
}

_ADDON = addons.COLLECTION + "/{model}"
_POLICIES: Mapping[tuple[str, str], Operation] = {
    ("GET", _ONE + "/policies"): Operation(
        "Lists the policies of a deployment by name.",
        (
            _number(
                "pageSize", f"How many are on a page; 0, and at most: {policies.PAGE_SIZE}.", 0, 2**31 - 1, 0
            ),
            _PAGE_AFTER,
        ),
        answer=resources.Policies,
    ),
    ("POST", _ONE + "/policies"): Operation(
        "Makes a policy, forks it from another one, or freezes or thaws it.",
        body=policies.PolicyBody,
        answer=resources.Policy,
    ),
    ("GET", _ONE + "/policies/{policy}"): Operation("Shows a policy.", answer=resources.Policy),
    ("DELETE", _ONE + "/policies/{policy}"): Operation("Ends a policy.", answer=resources.PolicyEnding),
    ("GET", addons.COLLECTION): Operation(
        "Lists the add-ons that are loaded.",
        (
            _PAGE_SIZE,
            _PAGE_AFTER,
            _text("filter", "Refused: all are listed."),
            _text("orderBy", "Refused: they are listed by name."),
        ),
        answer=resources.DeployedModels,
    ),
    ("POST", addons.COLLECTION): Operation(
        "Loads a LoRA add-on onto a deployment, as a policy of its name.",
        (_flag(addons.REPLACE, "It takes the place of the add-ons that were loaded before."),),
        addons.DeployedModelBody,
        answer=resources.DeployedModel,
    ),
    ("GET", _ADDON): Operation("Shows an add-on.", answer=resources.DeployedModel),
    ("PATCH", _ADDON): Operation(
        "Changes the texts that describe an add-on.",
        body=addons.DeployedModelBody,
        answer=resources.DeployedModel,
    ),
    ("DELETE", _ADDON): Operation("Unloads an add-on.", answer=resources.Nothing),
}

_IS_FLUSHED = Operation("Resets the prompt cache of every replica, as SGLang does.", kinds=_PLAIN)
_IS_RESET = Operation("Resets the prompt cache of every replica, as vLLM does.", answer=answers.Done)
_VERSION = Operation("Names the snapshot that every replica serves.", answer=answers.WeightInfo)
_MODEL_INFO = Operation(
    "Shows the model and the snapshot that every replica serves.", answer=answers.ModelInfo
)
_SERVER_INFO = Operation("Shows version, model, snapshot, pause and sizes.", answer=answers.ServerInfo)
_WORLD = Operation("Says how many replicas the deployment is to have.", answer=answers.WorldSize)
_TRAINERS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/pause"): Operation(
        "Pauses generation, as vLLM does.",
        (
            _choice("mode", "What becomes of running requests.", tuple(trainer.VLLM_MODES)),
            _flag("wait_for_inflight_requests", "Without `mode`: wait, and do not abort."),
            _flag("clear_cache", "The prompt cache is reset, unless requests are kept.", True),
        ),
        answer=answers.Done,
    ),
    ("POST", "/resume"): Operation("Lets generation go on, as vLLM does.", answer=answers.Done),
    ("GET", "/is_paused"): Operation(
        "Says whether generation is paused, and how.", answer=answers.PauseState
    ),
    ("POST", "/reset_prefix_cache"): _IS_RESET,
    ("POST", "/reset_prefix_cache/"): _IS_RESET,
    ("POST", "/abort_requests"): Operation(
        "Ends requests by id, or all of them.", body=trainer.AbortRequests, answer=answers.RequestsAborted
    ),
    ("POST", "/update_weights"): Operation(
        "Loads the snapshot in a directory, as prime-rl asks for it.",
        body=trainer.UpdateWeights,
        answer=answers.WeightsUpdated,
    ),
    ("POST", "/pause_generation"): Operation(
        "Pauses generation, as SGLang does.", body=trainer.PauseGeneration, answer=answers.DoneInWords
    ),
    ("POST", "/continue_generation"): Operation(
        "Lets generation go on, as SGLang does.", body=trainer.ContinueGeneration, answer=answers.DoneInWords
    ),
    ("POST", "/update_weights_from_disk"): Operation(
        "Loads the snapshot in a directory, as SGLang does.",
        body=trainer.UpdateFromDisk,
        answer=answers.WeightsUpdatedFromDisk,
    ),
    ("POST", "/flush_cache"): _IS_FLUSHED,
    ("GET", "/flush_cache"): _IS_FLUSHED,
    ("POST", "/abort_request"): Operation(
        "Ends one request, or all of them, as SGLang does.",
        body=trainer.AbortRequest,
        answer=answers.RequestAborted,
    ),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "Loads a LoRA adapter as a policy, as vLLM does.", body=adapter_calls.LoadAdapter, kinds=_PLAIN
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "Unloads a LoRA adapter, as vLLM does.", body=adapter_calls.UnloadAdapter, kinds=_PLAIN
    ),
    ("POST", "/load_lora_adapter"): Operation(
        "Loads a LoRA adapter in place, as prime-rl asks for it.",
        body=adapter_calls.LoadAdapter,
        answer=answers.Done,
    ),
    ("GET", "/weight_info"): _VERSION,
    ("GET", "/get_weight_version"): _VERSION,
    ("GET", "/model_info"): _MODEL_INFO,
    ("GET", "/get_model_info"): _MODEL_INFO,
    ("GET", "/server_info"): _SERVER_INFO,
    ("GET", "/get_server_info"): _SERVER_INFO,
    ("GET", "/get_world_size"): _WORLD,
    ("GET", "/get_world_size/"): _WORLD,
    **{
        ("POST", path): Operation(
            "Refuses a call that this server does not have, and says what to do instead.",
            kinds=(),
            status=400,
        )
        for path in TRAINER_REFUSED
    },
}

_TINKER = {
    ("GET", "healthz"): Operation("Says that the front is up."),
    ("GET", "get_server_capabilities"): Operation("Lists the models that can be sampled and trained."),
    ("POST", "client/config"): Operation("Gives the SDK its configuration."),
    ("POST", "client/dynamic_config"): Operation(
        "Gives the SDK the part of its configuration that may change."
    ),
    ("POST", "telemetry"): Operation("Takes the SDK's telemetry and drops it."),
    ("POST", "create_session"): Operation("Begins a session of a client."),
    ("POST", "session_heartbeat"): Operation("Keeps a session alive."),
    ("POST", "sessions/{session_id}/finish"): Operation("Ends a session."),
    ("GET", "sessions"): Operation("Lists the sessions."),
    ("GET", "sessions/{session_id}"): Operation("Shows the training runs and samplers of a session."),
    ("POST", "create_sampling_session"): Operation("Begins sampling from the base model or a checkpoint."),
    ("GET", "samplers/{sampling_session_id}"): Operation("Shows a sampling session."),
    ("POST", "asample"): Operation("Submits a prompt to be sampled."),
    ("POST", "create_model"): Operation("Submits the making of a model to be trained."),
    ("POST", "load_weights"): Operation("Submits the loading of a checkpoint."),
    ("POST", "forward_backward"): Operation("Submits a forward and a backward pass."),
    ("POST", "forward"): Operation("Submits a forward pass alone, as SDKs up to 0.18 ask for it."),
    ("POST", "optim_step"): Operation("Submits an optimizer's step."),
    ("POST", "save_weights"): Operation("Submits the saving of a training state."),
    ("POST", "save_weights_for_sampler"): Operation("Submits the publishing of weights to be sampled."),
    ("POST", "retrieve_future"): Operation(
        "Gives the result of a submission, or answers 408 while there is none.",
        kinds=("application/json", "application/x-protobuf"),
    ),
    ("POST", "cancel_future"): Operation("Cancels a submission."),
    ("POST", "get_info"): Operation("Shows a model that is trained."),
    ("POST", "weights_info"): Operation("Shows what a checkpoint was trained with."),
    ("GET", "midstream/requests/{request_id}"): Operation(
        "Says which snapshot and replica served a submission."
    ),
    ("GET", "training_runs"): Operation("Lists the training runs.", (_OFFSET, _TINKER_LIMIT)),
    ("GET", "training_runs/{model_id}"): Operation("Shows a training run."),
    ("GET", "training_runs/{model_id}/checkpoints"): Operation("Lists the checkpoints of a training run."),
    ("DELETE", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}"): Operation(
        "Deletes a checkpoint.", kinds=(), status=204
    ),
    ("GET", "checkpoints"): Operation("Lists all checkpoints.", (_OFFSET, _TINKER_LIMIT)),
}

_HEALTH = Operation("Answers 200 while a replica can be used, else 503.", answer=answers.Health)
_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/health"): _HEALTH,
    ("GET", "/liveness"): _HEALTH,
    ("GET", "/health_generate"): _HEALTH,
    ("GET", "/metrics"): Operation("Gives all metrics in Prometheus' text format.", kinds=_PLAIN),
    ("GET", scopes.DASHBOARD): Operation("Shows the dashboard.", kinds=_HTML),
    ("GET", scopes.DASHBOARD + "/{file}"): Operation(
        "Gives a file of the dashboard.", kinds=_kinds_of(scopes.DASHBOARD_FILES)
    ),
    ("GET", scopes.DASHBOARD_EVENTS): Operation(
        "Streams what the dashboard shows.", kinds=("text/event-stream",)
    ),
    ("GET", scopes.OPENAPI): Operation("Gives this document."),
    ("GET", scopes.DOCS): Operation("Shows this document.", kinds=_HTML),
    ("GET", scopes.DOCS + "/{file}"): Operation(
        "Gives a file of the page that shows it.", kinds=_kinds_of(scopes.DOCS_FILES)
    ),
}

GROUPS = (
    Group("Inference", "Generation, tokens and text, in the API that a client speaks.", "api", _INFERENCE),
    Group("Rollouts and sessions", "Sessions, their traces and their rewards.", "exact-sessions", _SESSIONS),
    Group("Hot load", "New weights under running requests.", "publishing", _HOT_LOAD),
    Group("Deployments", "Deployments, their replicas, the account and its models.", "api", _DEPLOYMENTS),
    Group("Policies", "Adapters beside the deployment's own weights.", "policies", _POLICIES),
    Group("Trainer calls", "Control calls of vLLM, prime-rl and SGLang.", "trainer-calls", _TRAINERS),
    Group(
        "Tinker",
        "The Tinker API. Each path answers 404 with `--no-tinker`.",
        "tinker",
        {(method, f"/api/v1/{path}"): operation for (method, path), operation in _TINKER.items()},
    ),
    Group("Operations", "Health, metrics and pages.", "runbook", _OPERATIONS),
)
#: The paths that stand for several files each, and these.
FILES = {
    scopes.DASHBOARD + "/{file}": scopes.DASHBOARD_FILES,
    scopes.DOCS + "/{file}": scopes.DOCS_FILES,
}
