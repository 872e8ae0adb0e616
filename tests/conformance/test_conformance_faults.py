"""Every row can fail: an endpoint that breaks one promise fails the rows about it, and the command exits with 1."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from serving import Server
from starlette.responses import JSONResponse, Response
from tampering import Fault, Json, tampering

from midstream import cli
from midstream.conformance import target


def run(url: str, options: list[str], rows: list[str], out: Path) -> tuple[int, dict[str, Json]]:
    """The exit code, and the results by id."""
    code = cli.main(["conformance", url, *options, "--json", str(out), "--only", *rows])
    results = {row["id"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(results) == set(rows)
    return code, results


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
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "completions" in path:
            body["model"] = "conformance-model"
        return None

    def __init__(self, model: str = "") -> None:
        self._model = model


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
    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        memory["chunks"] = memory.get("chunks", 0) + 1
        if memory["chunks"] == 5:
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


FAULTS: list[tuple[Fault, list[str]]] = [
    (NoDone(), ["openai.done"]),
    (OneChoice(), ["openai.n", "affinity.choices"]),
    (NoStop(), ["openai.stop"]),
    (WrongCount(), ["openai.usage"]),
    (OtherStream(), ["openai.stream"]),
    (NoLabel(), ["labels.stream", "labels.plain", "labels.served"]),
    (SameLogprobs(), ["logprobs.sampling"]),
    (TemperedLogprobs(), ["logprobs.raw"]),
    (NullFirst(), ["echo.prompt", "echo.score"]),
    (WholeEcho(), ["echo.last", "routes.echo_last"]),
    (ColdEcho(), ["echo.cached"]),
    (LateRoutes(), ["routes.alignment"]),
    (OneRoute(), ["routes.completions", "routes.chat", "routes.echo"]),
    (NoSessions(), ["affinity.trajectory", "affinity.fallback", "affinity.skyrl", "affinity.body"]),
    (OneSession(), ["affinity.spread", "affinity.no_key"]),
    (AffinityWins(), ["affinity.order"]),
    (NoIsolation(), ["cache.isolation", "policies.isolation"]),
    (AlwaysCached(), ["cache.off"]),
    (
        Lenient(),
        ["status.unknown_field", "status.param", "status.context", "status.stream", "status.version"],
    ),
    (AnyKey(), ["status.key"]),
    (Policy("none"), ["policies.default", "policies.all", "policies.new_session"]),
    (Policy("all"), ["policies.none", "policies.bool", "policies.max_age"]),
    (Trusting(), ["hotload.identity", "hotload.unknown_field"]),
    (StuckWeights(), ["hotload.weights", "incremental.delta"]),
    (OldLabel(), ["transitions.async_crosses", "labels.tokens"]),
    (LateLabel(), ["labels.tokens"]),
    (BackAndForth(), ["labels.once", "transitions.sync_one_policy"]),
    (Unavailable(), ["transitions.async_errors"]),
    (NoRetryAfter(), ["transitions.sync_425"]),
]


@pytest.fixture
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "STREAM_S", 0.4)


@pytest.mark.parametrize(
    ("fault", "rows"), FAULTS, ids=lambda value: type(value).__name__ if isinstance(value, Fault) else ""
)
def test_a_broken_promise_fails_its_rows(
    server: Server, options: list[str], fault: Fault, rows: list[str], tmp_path: Path, short_streams: None
) -> None:
    with tampering(server.url, fault) as url:
        code, results = run(url, options, rows, tmp_path / "results.json")
    assert {name: row["verdict"] for name, row in results.items()} == dict.fromkeys(rows, "fail")
    assert all(row["why"] for row in results.values())
    assert code == 1


def test_the_proxy_itself_breaks_nothing(
    server: Server, options: list[str], tmp_path: Path, short_streams: None
) -> None:
    rows = sorted({row for _, listed in FAULTS for row in listed})
    with tampering(server.url, Fault()) as url:
        code, results = run(url, options, rows, tmp_path / "results.json")
    assert [(name, row["why"]) for name, row in results.items() if row["verdict"] != "pass"] == []
    assert code == 0
