"""The bodies of the Tinker API and what they become inside. Pure.

Always holds: a field that the SDK may send is named here. An unknown field with a value is refused where leaving it out would
change the result (`Exact`), and ignored elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from midstream.core.decoding import NOT_JSON, fault
from midstream.core.traces import Span
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.serving import MAX_JSON_BYTES, MAX_SAMPLE_BYTES
from midstream_tinker.trainer.types import MAX_INT64, AdamParams, ForwardBackward, LoraConfig

Policy = Literal["exact", "run", "serving", "adapter"]
CheckpointKind = Literal["weights", "sampler_weights"]
MAX_TEXT = 1024
# Objects and arrays in a body. Each takes far more memory than its two bytes.
MAX_PARTS = 100_000
# Numbers, texts and names in a body: more than a prompt of any context has tokens, or a batch of SDK 0.18 numbers. One call
# decodes them all, and holds the interpreter's lock for as long: 20 to 60 ms.
MAX_VALUES = 1 << 20
# Nesting of a client's own notes, which the server does not read.
MAX_NESTED = 32
# Size of these notes as JSON.
MAX_NOTES_BYTES = 1 << 16

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SeqId = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]


class DrawnSequence(msgspec.Struct, frozen=True, kw_only=True):
    """logprobs: one per token, of the distribution it was drawn from. stopped: at a stop sequence, not at a length."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    snapshots: tuple[Span, ...] = ()


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    """prompt_logprobs: one per prompt token, None where there is none; topk: per prompt token (token, logprob) pairs."""

    sequences: tuple[DrawnSequence, ...]
    prompt_logprobs: tuple[float | None, ...] | None = None
    topk_prompt_logprobs: tuple[tuple[tuple[int, float], ...] | None, ...] | None = None
    cached_tokens: int = 0
    replica: str | None = None
    route_reason: str | None = None
    key: str | None = None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What the front offers. names: what a client may call the base model, the model's own name first."""

    names: tuple[str, ...]
    # Of the model, with its tokenizer. Absolute.
    directory: str
    # accounts/A/deployments/D
    deployment: str = ""
    max_context: int | None = None
    trainable: bool = True
    base_policy: Literal["exact", "serving"] = "exact"


# -- bodies


class TinkerBody(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON body with ignored unknown fields. bytes_max: of the body."""

    bytes_max: ClassVar[int] = MAX_JSON_BYTES


class Exact(TinkerBody, frozen=True, kw_only=True):
    """A JSON body with unknown fields that must be empty, as those of the objects within a body."""


class PromptChunk(Exact, frozen=True, kw_only=True):
    """A part of a prompt; only `encoded_text` has tokens."""

    type: str = "encoded_text"
    tokens: tuple[TokenId, ...] = ()
    data: Any = None
    format: Any = None
    location: Any = None
    dmel: Any = None
    expected_tokens: Any = None
    override_dimensions: Any = None


class TinkerPrompt(Exact, frozen=True, kw_only=True):
    chunks: tuple[PromptChunk, ...]

    def token_ids(self, param: str = "prompt") -> tuple[int, ...]:
        """All chunks' tokens. Raises TinkerRefusal (400) for a chunk that is no text, or when there are none."""
        for index, chunk in enumerate(self.chunks):
            if chunk.type != "encoded_text":
                message = f"chunks of type {chunk.type!r} are not supported here, only encoded_text"
                raise TinkerRefusal(400, message, f"{param}.chunks[{index}]")
        tokens = tuple(token for chunk in self.chunks for token in chunk.tokens)
        if not tokens:
            raise TinkerRefusal(400, "the prompt has no tokens", param)
        return tokens


class TinkerSamplingParams(Exact, frozen=True, kw_only=True):
    """stop: None: at the model's end token; a string, strings or token ids: at these; []: at nothing."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | tuple[str | int, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Exact, frozen=True, kw_only=True):
    bytes_max: ClassVar[int] = MAX_SAMPLE_BYTES

    prompt: TinkerPrompt
    sampling_params: TinkerSamplingParams
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: SeqId | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: Any = None
    record_stability_info: bool | None = None
    type: str = "sample"


class CreateSessionBody(TinkerBody, frozen=True, kw_only=True):
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: Annotated[str, Meta(max_length=MAX_TEXT)] | None = None


class SessionBody(TinkerBody, frozen=True, kw_only=True):
    session_id: Text


class CreateSamplingSessionBody(Exact, frozen=True, kw_only=True):
    session_id: Text
    sampling_session_seq_id: SeqId
    base_model: Text | None = None
    model_path: Text | None = None
    type: str = "create_sampling_session"


class RetrieveBody(TinkerBody, frozen=True, kw_only=True):
    request_id: Text
    allow_metadata_only: bool = False


class CancelBody(TinkerBody, frozen=True, kw_only=True):
    request_id: Text


class ModelBody(TinkerBody, frozen=True, kw_only=True):
    model_id: Text


class OptimizerConfig(Exact, frozen=True, kw_only=True):
    type: str = "adamw"
    version: Any = None


class CreateModelBody(Exact, frozen=True, kw_only=True):
    session_id: Text
    model_seq_id: SeqId
    base_model: Text
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig | None = None
    type: str = "create_model"


class OptimStepBody(Exact, frozen=True, kw_only=True):
    model_id: Text
    seq_id: SeqId | None = None
    adam_params: AdamParams | None = None
    # Of another optimizer.
    optimizer_params: dict[str, Any] | None = None
    type: str = "optim_step"


class SaveWeightsBody(Exact, frozen=True, kw_only=True):
    """path: the checkpoint's bare name."""

    model_id: Text
    path: Text | None = None
    seq_id: SeqId | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    type: str = "save_weights"


class SaveWeightsForSamplerBody(Exact, frozen=True, kw_only=True):
    """Either path, the bare name of a checkpoint, or sampling_session_seq_id, for an ephemeral sampling session."""

    model_id: Text
    path: Text | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: str = "snapshot"
    seq_id: SeqId | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    type: str = "save_weights_for_sampler"


class LoadWeightsBody(Exact, frozen=True, kw_only=True):
    """Either model_id and seq_id, for a model there is, or session_id and model_seq_id, which make one."""

    path: Text
    optimizer: bool = False
    model_id: Text | None = None
    seq_id: SeqId | None = None
    session_id: Text | None = None
    model_seq_id: SeqId | None = None
    base_model: Text | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: str = "load_weights"


class WeightsInfoBody(TinkerBody, frozen=True, kw_only=True):
    tinker_path: Text


_T = TypeVar("_T", bound=TinkerBody)


def decode(body: bytes, into: type[_T]) -> _T:
    """Read a JSON body. Raises TinkerRefusal (400) that names the field at fault."""
    if body.count(b"{") + body.count(b"[") > MAX_PARTS:
        raise TinkerRefusal(400, f"the body has more than {MAX_PARTS} objects and arrays")
    if body.count(b",") > MAX_VALUES:
        raise TinkerRefusal(400, f"the body has more than {MAX_VALUES} values")
    try:
        refuse_unknown(body, into)
        made = msgspec.json.decode(body, type=into)
    except msgspec.ValidationError as error:
        raise TinkerRefusal(400, str(error), fault(error).field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TinkerRefusal(400, f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise TinkerRefusal(400, "the body is nested too deeply") from error
    for name in ("user_metadata", "optimizer_params"):
        notes = getattr(made, name, None)
        if notes is None:
            continue
        _check_notes(notes, name)
        if len(msgspec.json.encode(notes)) > MAX_NOTES_BYTES:
            raise TinkerRefusal(400, f"{name} is longer than {MAX_NOTES_BYTES} bytes", name)
    return made


def _check_notes(value: Any, where: str, left: int = MAX_NESTED) -> None:
    """Raises TinkerRefusal (400) for what cannot be written down."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TinkerRefusal(400, f"{where}: a whole number beyond 64 bits is not kept", where)
    if not isinstance(value, dict | list):
        return
    if not left:
        raise TinkerRefusal(400, f"{where} is nested too deeply", where)
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        within = f"{where}[{name}]" if isinstance(value, list) else f"{where}.{name}"
        _check_notes(item, within, left - 1)


#: What is submitted for training.
TrainingBody = (
    CreateModelBody
    | LoadWeightsBody
    | ForwardBackward
    | OptimStepBody
    | SaveWeightsBody
    | SaveWeightsForSamplerBody
)


class _Addressed(TinkerBody, frozen=True, kw_only=True):
    model_id: Text
    seq_id: SeqId


def addressee(body: bytes) -> tuple[str, int] | None:
    """The model_id and seq_id of a body that is refused, if they can be read."""
    try:
        found = msgspec.json.decode(body, type=_Addressed)
    except NOT_JSON:
        return None
    return found.model_id, found.seq_id


def refuse_unknown(value: msgspec.Raw | bytes, struct: type[msgspec.Struct], path: str = "") -> None:
    """Raises TinkerRefusal (400) when `value`, an object in JSON, has a field that `struct` does not know and must not leave
    out.

    Makes nothing of the fields' values. Raises msgspec.DecodeError, also when it is no object.
    """
    fields = _fields(struct)
    ignores_unknown = issubclass(struct, TinkerBody) and not issubclass(struct, Exact)
    for name, item in msgspec.json.decode(value, type=dict[str, msgspec.Raw]).items():
        where = f"{path}.{name}" if path else name
        within = fields.get(name)
        if name not in fields:
            if not ignores_unknown and _says_something(item):
                raise TinkerRefusal(400, f"the field {where} is not supported here", where)
        elif within is not None and _begins(item, b"["):
            for index, one in enumerate(msgspec.json.decode(item, type=list[msgspec.Raw])):
                if _begins(one, b"{"):
                    refuse_unknown(one, within, f"{where}[{index}]")
        elif within is not None and _begins(item, b"{"):
            refuse_unknown(item, within, where)


def _begins(value: msgspec.Raw, with_: bytes) -> bool:
    return memoryview(value)[:1] == with_


def _says_something(value: msgspec.Raw) -> bool:
    """Whether a value is none of those that a field may have which is left out."""
    return memoryview(value).nbytes > MAX_TEXT or msgspec.json.decode(value) not in (
        None,
        False,
        0,
        "",
        [],
        {},
    )


_KNOWN: dict[type[msgspec.Struct], dict[str, type[msgspec.Struct] | None]] = {}


def _fields(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """The fields' names, and of those that hold structs (or a tuple of them), which."""
    if struct not in _KNOWN:
        hints = get_type_hints(struct)
        _KNOWN[struct] = {name: _struct_in(hints[name]) for name in struct.__struct_fields__}
    return _KNOWN[struct]


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((found for found in map(_struct_in, get_args(annotation)) if found is not None), None)
