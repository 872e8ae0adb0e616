"""Promises, broken one at a time."""

from __future__ import annotations

import base64
import threading
from typing import Any

from starlette.responses import JSONResponse, Response
from tampering import Fault, Json


class NoDone(Fault):
    done = False


class OneChoice(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("n", None)
        return None


class NoStop(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "temperature" in body:
            body.pop("stop", None)
        return None


class WrongCount(Fault):
    def answer(self, request: Json, body: Json) -> None:
        body["usage"]["prompt_tokens"] += 1


class OtherStream(Fault):
    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        for choice in chunk["choices"]:
            if choice.get("text"):
                choice["text"] += " "


class NoLabel(Fault):
    def answer(self, request: Json, body: Json) -> None:
        body["model"] = body["model"].partition("@")[0]

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        chunk["model"] = chunk["model"].partition("@")[0]


class SameLogprobs(Fault):
    """sampling_logprob is the raw one."""

    def answer(self, request: Json, body: Json) -> None:
        for entry in _entries(body):
            entry["sampling_logprob"] = entry["logprob"] if entry["sampling_logprob"] is not None else None


class TemperedLogprobs(Fault):
    """logprob is after temperature and filters."""

    def answer(self, request: Json, body: Json) -> None:
        for entry in _entries(body):
            if entry["sampling_logprob"] is not None:
                entry["logprob"] = entry["sampling_logprob"]


class NullFirst(Fault):
    def answer(self, request: Json, body: Json) -> None:
        entries = _entries(body)
        if request.get("echo") and entries:
            entries[0]["logprob"] = None


class WholeEcho(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("echo_last", None)
        return None


class ColdEcho(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if body.get("echo"):
            body["prompt_cache_max_len"] = 0
        return None


class LateRoutes(Fault):
    """Each token has the matrix of the one before it, while it is generated."""

    def answer(self, request: Json, body: Json) -> None:
        entries = [] if request.get("echo") else _entries(body)
        routes = [entry.get("routing_matrix") for entry in entries]
        for entry, route in zip(entries[1:], routes, strict=False):
            entry["routing_matrix"] = route


class OneRoute(Fault):
    def answer(self, request: Json, body: Json) -> None:
        for entry in _entries(body)[1:]:
            entry.pop("routing_matrix", None)


class NoSessions(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        for name in ("x-multi-turn-session-id", "x-session-affinity", "x-session-id"):
            headers.pop(name, None)
        for name in ("prompt_cache_key", "user"):
            body.pop(name, None)
        return None


class OneSession(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        headers["x-multi-turn-session-id"] = "everybody"
        return None


class AffinityWins(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "x-session-affinity" in headers:
            headers["x-multi-turn-session-id"] = headers["x-session-affinity"]
        return None


class NoIsolation(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        headers.pop("x-prompt-cache-isolation-key", None)
        body.pop("prompt_cache_isolation_key", None)
        return None


class AlwaysCached(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("prompt_cache_max_len", None)
        return None


class AnyModel(Fault):
    """Serves whatever name is asked for."""

    def __init__(self) -> None:
        self._model = ""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if headers.get("fireworks-deployment", "").startswith("accounts/nobody"):
            del headers["fireworks-deployment"]
        if "completions" in path and "nobody" in body.get("model", ""):
            body["model"] = self._model
        self._model = body.get("model") or self._model
        return None


class Lenient(Fault):
    """Drops what it does not know."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        for name in ("no_such_field", "midstream", "context_length_exceeded_behavior"):
            body.pop(name, None)
        if body.get("max_tokens", 0) < 0 or body.get("max_tokens", 0) > 10**6:
            body["max_tokens"] = 1
        return None


class AnyKey(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if headers.get("x-api-key"):
            headers["authorization"] = "Bearer conformance-key"
        return None


class Policy(Fault):
    """Every signal has this policy."""

    def __init__(self, policy: str) -> None:
        self._policy = policy

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.endswith("/hot_load") and body:
            body["reset_prompt_cache"] = self._policy
        return None


class OldLabel(Fault):
    """A stream keeps the label it began with."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        chunk["model"] = memory.setdefault("model", chunk["model"])


class LateLabel(Fault):
    """The first token of a new snapshot has the label of the old one."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        own = chunk["model"]
        chunk["model"] = memory.get("model", own)
        memory["model"] = own


class BackAndForth(Fault):
    """The fifth chunk of every other stream has a label of its own."""

    def __init__(self) -> None:
        self._streams = 0

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        memory["chunks"] = memory.get("chunks", 0) + 1
        self._streams += memory["chunks"] == 1
        memory.setdefault("odd", self._streams % 2)
        if memory["odd"] and memory["chunks"] == 5:
            chunk["model"] = chunk["model"].partition("@")[0] + "@another"


class Unavailable(Fault):
    """Every fifth request is a 503."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if body.get("max_tokens", 1) > 1 and body.get("stream") and len(body["prompt"]) == 32:
            with self._lock:
                self._count += 1
            if self._count % 5 == 0:
                return JSONResponse({"error": {"message": "busy", "code": "busy"}}, 503)
        return None


class NoRetryAfter(Fault):
    def response(self, status: int, headers: dict[str, str]) -> int:
        headers.pop("retry-after", None)
        return status


class StuckWeights(Fault):
    """Prompts are scored as they were the first time: what a server does that loads nothing."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}

    def answer(self, request: Json, body: Json) -> None:
        if request.get("echo") and not request.get("max_tokens"):
            for choice in body["choices"]:
                key = str(request["prompt"])
                choice["logprobs"] = self._first.setdefault(key, choice["logprobs"])


class Trusting(Fault):
    """Signals are taken whatever they are."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.endswith("/hot_load") and body:
            names = [part for part in body["identity"].split("/") if part.strip(".")]
            if names != body["identity"].split("/") or "no_such_field" in body or len(body["identity"]) > 512:
                return JSONResponse({"identity": body["identity"]})
        return None


def _entries(body: Json) -> list[Json]:
    logprobs = body["choices"][0].get("logprobs") or {}
    content: list[Json] = logprobs.get("content") or []
    return content


class OtherName(Fault):
    """Lists another model, under a name that is served too."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path.endswith("/models"):
            for entry in body["data"]:
                entry["id"] = entry["id"].rpartition("/")[2]

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        self.models = getattr(self, "models", 0) + path.endswith("/models")
        if path.endswith("/models") and self.models > 1:
            return JSONResponse({"object": "list", "data": [{"id": "another"}]})
        return None


class OnePrefix(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.startswith("/inference") or body.get("model", "").count("/") == 0 < len(
            body.get("model", "")
        ):
            return JSONResponse({"error": {"message": "there is nothing", "code": "not_found_error"}}, 404)
        return None


class OneName(Fault):
    """No name but the model's, and none in fireworks-model."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "completions" in path:
            headers.pop("fireworks-model", None)
            if "/deployments/" in body.get("model", ""):
                return JSONResponse({"error": {"message": "no such model", "code": "not_found_error"}}, 404)
        return None


class BareStreams(Fault):
    """Chunks have no perf_metrics, and those of chats no ids."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        chunk.pop("perf_metrics", None)
        if "messages" in request:
            for place in (chunk, *chunk["choices"]):
                place.pop("prompt_token_ids", None)


class Nothing(Fault):
    """No log-probability and no id: nothing that could differ from anything."""

    def answer(self, request: Json, body: Json) -> None:
        for choice in body["choices"]:
            if (choice.get("logprobs") or {}).get("content"):
                choice["logprobs"]["content"] = []
            if choice.get("raw_output"):
                choice["raw_output"]["completion_token_ids"] = []

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        self.answer(request, chunk)


class OneLayer(Fault):
    """Routes of the first layer only: its two experts."""

    def answer(self, request: Json, body: Json) -> None:
        for entry in _entries(body):
            if entry.get("routing_matrix"):
                first = base64.b64decode(entry["routing_matrix"])[:2]
                entry["routing_matrix"] = base64.b64encode(first).decode()


class ForgetsAnswers(Fault):
    """Only the 64 tokens of a first turn's prompt are cached, and not what was generated."""

    def answer(self, request: Json, body: Json) -> None:
        details = body["usage"]["prompt_tokens_details"]
        if len(request.get("prompt", "")) >= 64:
            details["cached_tokens"] = min(details["cached_tokens"], 64)


class OtherChat(Fault):
    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        for choice in chunk["choices"]:
            if (choice.get("delta") or {}).get("content"):
                choice["delta"]["content"] += " "


class Backwards(Fault):
    """Several prompts are answered in the other order."""

    def answer(self, request: Json, body: Json) -> None:
        for choice in body["choices"]:
            choice["index"] = len(body["choices"]) - 1 - choice["index"]


class NoIds(Fault):
    def answer(self, request: Json, body: Json) -> None:
        for choice in body["choices"]:
            choice.pop("token_ids", None)
            choice.pop("raw_output", None)


class OwnRequestId(Fault):
    def response(self, status: int, headers: dict[str, str]) -> int:
        headers["x-request-id"] = "ours"
        headers["fireworks-cached-prompt-tokens"] = "0"
        return status


class NoSeed(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("seed", None)
        return None


class BareEntries(Fault):
    def answer(self, request: Json, body: Json) -> None:
        for entry in _entries(body):
            entry.pop("token", None)


class OffLogprobs(Fault):
    """Streams, alternatives and legacy lists have other numbers than plain answers."""

    def answer(self, request: Json, body: Json) -> None:
        for entry in _entries(body):
            entry["top_logprobs"] = list(reversed(entry.get("top_logprobs") or []))
        lists = body["choices"][0].get("logprobs") or {}
        if "token_logprobs" in lists:
            lists["token_logprobs"] = [value - 0.5 for value in lists["token_logprobs"]]

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        for entry in _entries(chunk):
            entry["logprob"] -= 0.5


class NoEchoText(Fault):
    def answer(self, request: Json, body: Json) -> None:
        for choice in body["choices"]:
            choice["text"] = ""


class OffWhenWarm(Fault):
    """Numbers and routes of cached prompts are others."""

    def answer(self, request: Json, body: Json) -> None:
        if body["usage"]["prompt_tokens_details"]["cached_tokens"]:
            entries = _entries(body)
            for entry in entries:
                entry["logprob"] -= 0.5
            routes = [entry.get("routing_matrix") for entry in entries]
            for entry, route in zip(entries[1:], [*routes[2:], routes[-1]], strict=False):
                entry["routing_matrix"] = route


class LateStreamRoutes(Fault):
    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        for entry in _entries(chunk):
            own = entry.get("routing_matrix")
            entry["routing_matrix"] = memory.get("route", own)
            memory["route"] = own


class NeverCached(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "completions" in path:
            body["prompt_cache_max_len"] = 0
        return None


class SaysCached(Fault):
    def answer(self, request: Json, body: Json) -> None:
        body["usage"]["prompt_tokens_details"]["cached_tokens"] = len(request.get("prompt", ""))


class Restless(Fault):
    """No request finds what those before it left, as if each went to another replica."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        self._turn = getattr(self, "_turn", 0) + 1
        if "completions" in path:
            # Sessions of one prompt share a replica, so another session's key would not do.
            body["prompt_cache_isolation_key"] = f"restless-{self._turn}"
        return None


class NullState(Fault):
    def other(self, method: str, path: str, body: Json) -> None:
        for replica in body.get("replicas", ()) if path.endswith("/hot_load") else ():
            replica["loading_state"] = None


class Quiet(Fault):
    """Failures have no message."""

    def other(self, method: str, path: str, body: Json) -> None:
        for replica in body.get("replicas", ()) if path.endswith("/hot_load") else ():
            replica["midstream"]["error"] = ""


class Careless(Fault):
    """Config differences are ignored, source URLs too, and signals that cannot be taken are a 500."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.endswith("/hot_load") and body:
            body["validation"] = {"extra_fields_ignore": ["conformance_extra"]}
            headers.pop("x-fireworks-hot-load-source-url", None)
        return None

    def response(self, status: int, headers: dict[str, str]) -> int:
        return 500 if status == 400 else status


class FullOnly(Fault):
    """Deltas are refused, all of them, without saying why."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.endswith("/hot_load") and "incremental_snapshot_metadata" in body:
            return JSONResponse({"error": {"message": "", "code": "no"}}, 409)
        return None


class NewLoad(Fault):
    """A signal that repeats the one before is another load, which resets the cache."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "completions" in path:
            body["prompt_cache_isolation_key"] = str(getattr(self, "loads", 0))
        elif path.endswith("/hot_load") and body:
            self.loads = getattr(self, "loads", 0) + 1
        return None


class NoHeaders(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "x-fireworks-hot-load-drain-timeout" in headers:
            return JSONResponse({"error": {"message": "unknown header", "code": "no"}}, 400)
        return None
