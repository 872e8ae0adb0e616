"""Promises about signals and switches, broken one at a time."""

from __future__ import annotations

from time import monotonic

from starlette.responses import JSONResponse, Response
from tampering import Fault, Json

TRAJECTORY, AFFINITY = "x-multi-turn-session-id", "x-session-affinity"


class LateLoad(Fault):
    """A signal that repeats the one before makes replicas load a moment later."""

    MOMENT_S = 0.2

    def __init__(self) -> None:
        self._identity, self._repeated_at = "", 0.0

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.endswith("/hot_load") and body:
            self._repeated_at = monotonic() if body["identity"] == self._identity else 0.0
            self._identity = body["identity"]
        return None

    def other(self, method: str, path: str, body: Json) -> None:
        if self._repeated_at and monotonic() > self._repeated_at + self.MOMENT_S:
            for replica in body.get("replicas", ())[:1]:
                replica["readiness"] = False


class Vague(Fault):
    """The status says that a snapshot failed, and not why."""

    def other(self, method: str, path: str, body: Json) -> None:
        for replica in body.get("replicas", ()) if path.endswith("/hot_load") else ():
            if replica["midstream"].get("error"):
                replica["midstream"]["error"] = "it did not load"


class NoFailures(Fault):
    """The ledger has no errors."""

    def other(self, method: str, path: str, body: Json) -> None:
        for snapshot in body.get("snapshots", ()) if path.endswith("/ledger") else ():
            for replica in snapshot["replicas"]:
                replica["error"] = None


class AllFull(Fault):
    """The ledger takes every snapshot for a full one."""

    def other(self, method: str, path: str, body: Json) -> None:
        for snapshot in body.get("snapshots", ()) if path.endswith("/ledger") else ():
            snapshot["kind"] = "full"


class OldLater(Fault):
    """After a switch, plain answers are labelled as streams were before it."""

    def __init__(self) -> None:
        self._model = ""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        self._model = self._model or chunk["model"]

    def answer(self, request: Json, body: Json) -> None:
        body["model"] = self._model or body["model"]


class Grudge(Fault):
    """Whoever streamed during a switch gets a 425 for ever."""

    def __init__(self) -> None:
        self._sessions: set[str | None] = set()

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if body.get("stream"):
            self._sessions.add(headers.get(TRAJECTORY))
        elif "completions" in path and headers.get(TRAJECTORY, "") in self._sessions:
            error = {"error": {"message": "not yet", "code": "snapshot_transition"}}
            return JSONResponse(error, 425, {"retry-after": "1"})
        return None


class AffinityIsOld(Fault):
    """A request with x-session-affinity alone counts as the session that first sent its prompt."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "completions" in path:
            prompt = str(body.get("prompt"))
            if TRAJECTORY in headers:
                self._first.setdefault(prompt, headers[TRAJECTORY])
            elif AFFINITY in headers and prompt in self._first:
                headers[TRAJECTORY] = self._first[prompt]
        return None


class RecomputedKv(Fault):
    """What a server gives that computes a stream's KV again at a switch: a score of its tokens is what the stream said."""

    # Tokens.
    PROMPT = 32

    def __init__(self) -> None:
        # Of a prompt: each token's label and logprob.
        self._streams: dict[str, list[tuple[str, float]]] = {}

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        told = self._streams.setdefault(str(request.get("prompt")), [])
        for choice in chunk["choices"]:
            content = (choice.get("logprobs") or {}).get("content") or ()
            told += [(chunk["model"], entry["logprob"]) for entry in content]

    def answer(self, request: Json, body: Json) -> None:
        told = self._streams.get(str(request.get("prompt", [])[: self.PROMPT]))
        if told and request.get("echo"):
            entries = body["choices"][0]["logprobs"]["content"][self.PROMPT :]
            for entry, (label, logprob) in zip(entries, told, strict=False):
                if label == body["model"]:
                    entry["logprob"] = logprob
