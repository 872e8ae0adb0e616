"""The inference APIs that clients speak: their paths, the shape of their errors, and sessions that a path names. Pure.

Also the path of signals, and those by which trainers control servers of other kinds (api/trainer_calls.py,
docs/trainer-calls.md).

A wire is one such API: OpenAI's chat completions, Anthropic's messages, and so on. Its requests and responses are in
replica/wire/; a gateway passes their bytes on.
Always holds: every path of WIRES is inference for gateways, replicas and scopes, and no other path is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import unquote_to_bytes

import msgspec

from midstream.core.errors import ErrorShape

UserField = Literal["user", "metadata.user_id", "routing_key"]


class WirePath(msgspec.Struct, frozen=True):
    """name: of the wire, and of its metrics. summary: what a request to it does. streams: an answer may be a stream.

    errors: the shape in which its clients read errors. user: the field of a body that names the session where no other one
    does. prefixed: it is served below Fireworks' prefix, too.
    """

    name: str
    summary: str
    streams: bool = False
    errors: ErrorShape = "openai"
    user: UserField = "user"
    prefixed: bool = True


#: By path, without Fireworks' prefix.
INFERENCE: Mapping[str, WirePath] = {
    "/v1/chat/completions": WirePath("chat_completions", "Answers a chat, whole or as a stream.", True),
    "/v1/completions": WirePath("completions", "Completes a prompt, whole or as a stream.", True),
    "/v1/messages": WirePath(
        "messages",
        "Answers a chat as Anthropic's Messages API does.",
        True,
        errors="anthropic",
        user="metadata.user_id",
    ),
    "/v1/messages/count_tokens": WirePath(
        "count_tokens",
        "Counts the tokens that a Messages request would have.",
        errors="anthropic",
        user="metadata.user_id",
    ),
    "/v1/responses": WirePath(
        "responses", "Answers as OpenAI's Responses API does.", True, errors="responses"
    ),
    # Token ids in, token ids out: vLLM's and SGLang's.
    "/inference/v1/generate": WirePath(
        "vllm_generate", "Generates token ids after token ids, as vLLM does.", True, prefixed=False
    ),
    "/generate": WirePath(
        "sglang_generate",
        "Generates after a text or token ids, as SGLang does.",
        True,
        user="routing_key",
        prefixed=False,
    ),
    # vLLM's, at the root.
    "/tokenize": WirePath("tokenize", "Gives the token ids of a prompt or a chat.", prefixed=False),
    "/detokenize": WirePath("detokenize", "Gives the text of token ids.", prefixed=False),
    "/v1/chat/completions/render": WirePath(
        "render_chat", "Renders a chat into a request of token ids, as vLLM does."
    ),
    "/v1/completions/render": WirePath(
        "render_completions", "Renders a completion into requests of token ids, as vLLM does."
    ),
}
#: Fireworks' clients write this before the paths of OpenAI's API.
PREFIX = "/inference"
#: By path, with and without the prefix.
WIRES: Mapping[str, WirePath] = {
    **INFERENCE,
    **{PREFIX + path: wire for path, wire in INFERENCE.items() if wire.prefixed},
}
#: The same by the target of a request that names neither a session nor a query, as nearly all do.
WIRES_OF_TARGETS: Mapping[bytes, WirePath] = {path.encode(): wire for path, wire in WIRES.items()}

#: Path classes in the gateway's metrics that are no inference: control calls, pages, and what was refused before its path
#: was looked at.
NO_ROLLOUTS = frozenset(("control", "dashboard", "refused"))

#: Signals, and what replicas serve, as Fireworks names it. The path of hints lies below it.
HOT_LOAD_PATH = "/hot_load/v1/models/hot_load"
#: Trainers' calls that change something although they are GETs.
CHANGES_BY_GET = ("/flush_cache",)
#: As /health.
TRAINER_HEALTH = ("/liveness", "/health_generate")
#: Calls of transfers that this server does not have.
TRAINER_TRANSFERS = (
    *("/update_weight_version", "/init_broadcaster", "/collective_rpc"),
    *(
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/end_weight_update",
    ),
    *("/update_weights_from_distributed", "/update_weights_from_tensor", "/update_weights_from_ipc"),
    *("/init_communicator/", "/update_named_param/", "/close_communicator/"),
)
_MEMORY = (
    "would lend the engine's memory to a trainer on the same device, and replicas keep theirs: give trainer and replicas"
    " devices of their own, or scale the deployment down while it trains; to hold requests call /pause and then /resume"
)
_PROFILE = "would profile the engine, which is not done over HTTP: read /metrics, or attach a profiler to the engine process"
_SESSIONS = (
    "is not needed: a session begins with the first request that names it, by prompt_cache_key or a header"
)
_EXPERTS = "would record expert loads: ask for routes with each request instead, by include_routing_matrix"
#: More calls to vLLM and SGLang that this server does not have, with what to do.
TRAINER_UNSERVED: Mapping[str, str] = {
    **dict.fromkeys(
        ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"), _MEMORY
    ),
    **dict.fromkeys(("/start_profile", "/stop_profile"), _PROFILE),
    **dict.fromkeys(("/open_session", "/close_session"), _SESSIONS),
    **dict.fromkeys(
        tuple(f"/{what}_expert_distribution_record" for what in ("start", "stop", "dump")), _EXPERTS
    ),
    "/start_draft_weight_update": "would update a draft model, and replicas have none: call /start_weight_update",
    "/scale_elastic_ep": "would change the engine's parallelism: change the deployment's replicas instead",
    "/get_weights_by_name": "would read weights of the engine: read them from the snapshot's files in the bucket",
    "/reset_mm_cache": "is not needed: no images are cached; /reset_prefix_cache resets the prompt cache",
    "/reset_encoder_cache": "is not needed: no images are cached; /reset_prefix_cache resets the prompt cache",
}
TRAINER_REFUSED = (*TRAINER_TRANSFERS, *TRAINER_UNSERVED)

#: Harnesses that can set nothing but a base URL name the session in it: the bases as OpenAPI writes them, and a pattern that
#: ends before the wire's own path.
SESSION_BASES = (
    "/sessions/{session}",
    "/trajectories/{session}",
    "/ng-rollout/{session}/training-token-capture",
    "/proxy/rollout/{run}/attempt/{attempt}/mode/{mode}/openai",
)
_IN_PATH = re.compile(
    rb"/(?:"
    rb"sessions/(?P<session>[^/?]*)"
    rb"|trajectories/(?P<trajectory>[^/?]*)"
    rb"|ng-rollout/(?P<rollout>[^/?]*)/training-token-capture"
    rb"|proxy/rollout/(?P<run>[^/?]*)/attempt/(?P<attempt>[^/?]*)/mode/[^/?]*/openai"
    rb")(?=/)"
)
#: What SDKs read beside inference.
_MODELS = re.compile(rb"(?:/inference)?/v1/models(?:/|\Z)")
#: A stored response. Its client has no other base URL to name it by.
_STORED = re.compile(rb"(?:/inference)?/v1/responses/[^/]+(?P<items>/input_items)?")


def wire_of(path: bytes) -> WirePath | None:
    """path: without a query and without a session."""
    return WIRES.get(path.decode("latin-1"))


def split_session(target: bytes) -> tuple[bytes | None, bytes]:
    """The session that a target's path names, percent-decoded, and the target without it. None: it is no such path.

    `/sessions/S/v1/...`, `/trajectories/S/v1/...`, `/ng-rollout/S/training-token-capture/v1/...` and
    `/proxy/rollout/R/attempt/A/mode/M/openai/v1/...`, with the session `R/A`.
    The session may hold any byte. It is empty when one of its parts is.
    """
    found = _IN_PATH.match(target)
    if found is None:
        return None, target
    parts = [part for part in found.groups() if part is not None]
    session = b"/".join(unquote_to_bytes(part) for part in parts) if all(parts) else b""
    return session, target[found.end() :]


def is_read_in_session(method: bytes, path: bytes) -> bool:
    """True if a client with a session in its base URL may ask this path of the control app. path: without the session.

    Nothing that changes a thing is among them, so that each such call has one path in the audit log; but a stored response is
    deleted where it was made.
    """
    stored = _STORED.fullmatch(path)
    if stored is not None:
        return method in (b"GET", b"HEAD") or (method == b"DELETE" and stored["items"] is None)
    return method in (b"GET", b"HEAD") and (wire_of(path) is not None or _MODELS.match(path) is not None)
