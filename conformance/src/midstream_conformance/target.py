"""What the endpoint under test is and has, found out before the first row runs.

Always holds: a feature that cannot be looked for counts as there, so that a row fails rather than hides. The one exception is a
feature that only a change could show (publishing, transitions).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from midstream.client.status import read_status
from midstream.core.errors import ConfigError
from midstream.core.types import ENGINE_FEATURES
from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.answers import Answer, Json, Odd
from midstream_conformance.endpoint import Endpoint, Flight, refusal
from midstream_conformance.outcome import Failed

#: What a row may need beside a feature of the engine (types.ENGINE_FEATURES).
NEEDS: dict[str, str] = {
    "publish": "snapshots can be published (--bucket and --checkpoint)",
    "moe": "a model with mixture-of-experts layers",
    "replicas>=2": "at least two replicas",
    "sync": "a transition that is SYNC, or can be set to it over the Deployments API",
    "keys": "an endpoint that asks for API keys",
    "midstream": "a midstream server: the behaviour is one of its own",
    "messages": "Anthropic's Messages API, POST /v1/messages",
    "responses": "OpenAI's Responses API, POST /v1/responses",
    "vllm_generate": "vLLM's POST /inference/v1/generate",
    "sglang_generate": "SGLang's POST /generate",
    "render": "vLLM's POST /v1/chat/completions/render",
    "tokenize": "vLLM's POST /tokenize, and /detokenize",
}
#: APIs that an endpoint may lack: a need to the path of its requests. {prefix}: that of the endpoint.
WIRES = {
    "messages": "{prefix}/messages",
    "responses": "{prefix}/responses",
    "vllm_generate": "/inference/v1/generate",
    "sglang_generate": "/generate",
    "render": "{prefix}/chat/completions/render",
    "tokenize": "/tokenize",
}
# What is said where a path is not there.
_NO_PATH = (404, 405, 501)

# Long enough for every engine's cache blocks, short enough for the smallest context.
PROMPT_TOKENS = 416
# The context where no answer has it.
CONTEXT_TOKENS = 448
WARM_UP_TOKENS = 48
# A stream that is to cross a swap shall take so long when it is alone.
STREAM_S = 1.0
#: Of config.json: how many experts a layer has.
EXPERTS_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts")
# Part of the error of an endpoint that lacks a field, rather than the model.
_UNKNOWN_FIELD = "Extra inputs are not permitted"
_CONTEXT_FIELDS = ("max_model_len", "context_length", "contextLength", "max_context", "context")


@dataclass
class Target:
    """features: of the engine; None: it does not say. replicas: ready ones; None: unknown. serving: the snapshots that they
    serve at the beginning. context, stream_tokens: tokens; stream_tokens is what a stream that shall cross a swap asks for,
    and stream_tokens_max the most that it may.
    """

    model: str
    midstream: bool
    engine: str = "unknown"
    features: tuple[str, ...] | None = None
    replicas: int | None = None
    serving: tuple[str, ...] = ()
    context: int = CONTEXT_TOKENS
    # The full name, if known.
    deployment: str | None = None
    # ASYNC or SYNC. None: unknown.
    transition: str | None = None
    stream_tokens: int = 0
    stream_tokens_max: int = 0
    # The config of the checkpoint, if one was given.
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # Need to the reason why it is not there.
    absent: dict[str, str] = field(default_factory=dict)

    def missing(self, need: str) -> str | None:
        """Why `need` is not there; None if it is, or if that is not known."""
        if need in self.absent:
            return self.absent[need]
        if need in ENGINE_FEATURES and self.features is not None and need not in self.features:
            return f"engine {self.engine} has no {need}: {ENGINE_FEATURES[need]}"
        return None


async def look(endpoint: Endpoint, checkpoint: Path | None, publish: bool) -> Target:
    """Asks the endpoint. Raises ConfigError when it cannot be tested at all."""
    try:
        entry = await _model(endpoint)
        target = _of_entry(entry, endpoint.deployment, checkpoint)
        _name(endpoint, target)
        if not publish:
            target.absent["publish"] = f"needs {NEEDS['publish']}"
        if not target.midstream:
            target.absent["midstream"] = f"needs {NEEDS['midstream']}"
        await _replicas(endpoint, target)
        if not endpoint.has_key:
            target.absent["keys"] = "it serves without a key: none are set"
        await _deployment(endpoint, target)
        await _warm_up(endpoint, target)
        await _moe(endpoint, target)
        await _wires(endpoint, target)
    except httpx.TransportError as error:
        raise ConfigError(f"{endpoint.root}: cannot be reached: {error or type(error).__name__}") from error
    except (Odd, Failed) as error:
        raise ConfigError(f"{endpoint.root}: serves no completion: {error}") from error
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{endpoint.root}: an answer is not of the API's form: {what}") from error
    return target


async def _model(endpoint: Endpoint) -> Json:
    """The entry of the model that is meant, of GET /models."""
    response = await endpoint.request("GET", f"{endpoint.prefix}/models")
    if response.status_code != 200:
        if endpoint.model:
            return {"id": endpoint.model}
        raise ConfigError(f"{endpoint.root}{endpoint.prefix}/models: {refusal(response)}")
    try:
        entries = [entry for entry in response.json()["data"] if isinstance(entry["id"], str)]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{endpoint.root}{endpoint.prefix}/models: is not a list of models") from error
    if endpoint.model:
        asked = endpoint.model.partition("@")[0]
        named = [e for e in entries if asked in (e["id"], e["id"].rpartition("/")[2])]
        return named[0] if named else {"id": endpoint.model}
    if endpoint.deployment:
        wanted = endpoint.deployment.rpartition("/")[2]
        entries = [
            e for e in entries if wanted == str(e.get("deployment", wanted)).rpartition("/")[2]
        ] or entries
    if not entries:
        raise ConfigError(f"{endpoint.root}: lists no model; name one with --model")
    return dict(entries[0])


def _of_entry(entry: Json, named: str | None, checkpoint: Path | None) -> Target:
    """named: the deployment that was asked for, if one was; the entry may be of another one of the same model."""
    listed = entry.get("deployment")
    deployment = _deployment_name(named, listed)
    own = _object(entry.get("midstream")) if deployment == listed else {}
    engine = _object(own.get("engine"))
    features = engine.get("features")
    target = Target(
        model=entry["id"],
        midstream="midstream" in entry or "snapshots" in entry,
        engine=f"{engine.get('kind', 'unknown')} {engine.get('version', '')}".strip(),
        features=tuple(features) if isinstance(features, list) else None,
        deployment=deployment,
    )
    if checkpoint is not None:
        target.config = _config(checkpoint)
    said = [place[name] for place in (own, entry) for name in _CONTEXT_FIELDS if name in place]
    said.append(target.config.get("max_position_embeddings"))
    target.context = next((n for n in said if isinstance(n, int) and n > 0), CONTEXT_TOKENS)
    return target


def _deployment_name(named: str | None, listed: Any) -> str | None:
    """In full, if that is known."""
    listed = listed if isinstance(listed, str) and "/" in listed else None
    if named is None or "/" in named:
        return named or listed
    return f"{listed.rpartition('/')[0]}/{named}" if listed else None


def _name(endpoint: Endpoint, target: Target) -> None:
    """Signals are for the model and the deployment that rows look at, however many the endpoint has."""
    endpoint.model = target.model
    endpoint.hot_load_headers = {"fireworks-model": target.model.partition("@")[0]}
    if deployment := target.deployment or endpoint.deployment:
        endpoint.hot_load_headers["fireworks-deployment"] = deployment


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _config(checkpoint: Path) -> Json:
    try:
        config = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--checkpoint {checkpoint}: config.json cannot be read: {error}") from error
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else dict(config)


async def _replicas(endpoint: Endpoint, target: Target) -> None:
    response = await endpoint.request("GET", HOT_LOAD_PATH)
    try:
        status = read_status(response.json()) if response.status_code == 200 else None
    except ValueError:
        # The rows of the hot-load API report that.
        status = None
    if status is not None:
        target.replicas = sum(replica.ready for replica in status.replicas)
        target.serving = tuple(sorted({replica.snapshot for replica in status.replicas if replica.snapshot}))
        if target.replicas < 2:
            target.absent["replicas>=2"] = f"needs {NEEDS['replicas>=2']}; {target.replicas} is ready"
    elif target.absent.get("publish") is None:
        raise ConfigError(f"{endpoint.root}{HOT_LOAD_PATH}: {refusal(response)}; leave --bucket out")


async def _deployment(endpoint: Endpoint, target: Target) -> None:
    if target.deployment is not None:
        response = await endpoint.request("GET", f"/v1/{target.deployment}")
        if response.status_code == 200:
            # A page for people: there is no Deployments API.
            with contextlib.suppress(ValueError):
                found = _object(response.json()).get("hotLoadTransitionType")
                target.transition = found if found in ("ASYNC", "SYNC") else None
    if "publish" in target.absent:
        target.absent["sync"] = target.absent["publish"]
    elif target.transition is None:
        target.absent["sync"] = "the deployment's transition cannot be read, so it is not changed"


async def _warm_up(endpoint: Endpoint, target: Target) -> None:
    """The first request of some engines takes seconds; the second one says how fast it generates."""
    body: Json = {"prompt": [20, 21, 22, 23], "max_tokens": WARM_UP_TOKENS, "ignore_eos": True}
    for _ in range(2):
        flight = await _flown(endpoint, body)
    if not flight.at:
        raise Failed("a stream without an event")
    span = max(flight.at[-1] - flight.at[0], 1e-3)
    target.stream_tokens_max = target.context - 96
    target.stream_tokens = max(96, min(int(STREAM_S * WARM_UP_TOKENS / span), target.stream_tokens_max))
    body |= {"prompt": [20] * 32, "max_tokens": target.stream_tokens, "logprobs": True}
    answer = (await _flown(endpoint, body)).whole()
    got = _generated(answer)
    # A context may be shorter than the endpoint claims.
    if got is not None and got < target.stream_tokens:
        target.stream_tokens = target.stream_tokens_max = got


def _generated(answer: Answer) -> int | None:
    """How many tokens it has; None when nothing says."""
    said = (answer.usage or {}).get("completion_tokens")
    return len(answer.choice.tokens) or (said if isinstance(said, int) and said > 0 else None)


async def _flown(endpoint: Endpoint, body: Json) -> Flight:
    flight = Flight(endpoint, body)
    await flight.run()
    flight.whole()
    return flight


async def _moe(endpoint: Endpoint, target: Target) -> None:
    """A checkpoint with experts settles it. Else routes are asked for, where the engine can give them: a dense model says so
    in a 400. What an endpoint says that does not know the field counts only where the checkpoint has no experts.
    """
    counts = [target.config.get(name) for name in EXPERTS_FIELDS]
    if target.missing("routes") or any(isinstance(count, int) and count > 0 for count in counts):
        return
    fields = {"prompt": [20, 21], "max_tokens": 1, "logprobs": True, "include_routing_matrix": True}
    response = await endpoint.post("/completions", fields)
    if response.status_code != 400 or "include_routing_matrix" not in response.text:
        return
    if target.config or _UNKNOWN_FIELD not in response.text:
        target.absent["moe"] = refusal(response)


async def _wires(endpoint: Endpoint, target: Target) -> None:
    """A body that asks for nothing is refused where the path is there, and generates no token.

    midstream's documents promise the paths: there one that is missing fails the rows.
    """
    for need, path in WIRES.items() if not target.midstream else ():
        asked = path.format(prefix=endpoint.prefix)
        response = await endpoint.request("POST", asked, {"model": endpoint.model})
        if response.status_code in _NO_PATH:
            target.absent[need] = f"needs {NEEDS[need]}; {refusal(response)}"
