"""Promises about sessions and trainers' control calls, broken one at a time."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from tampering import Fault, Json

SESSION_HEADERS = ("x-multi-turn-session-id", "x-session-affinity", "x-session-id", "x-smg-routing-key")


class HeaderIsNone(Fault):
    """Headers name no session."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        for name in SESSION_HEADERS:
            headers.pop(name, None)
        return None


class AnyVersion(Fault):
    """Versions that requests demand are not looked at."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("weight_version", None)
        return None


class AnyParent(Fault):
    """Deltas of trainers are refused, all of them, without saying why."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        metadata = body.get("incremental_snapshot_metadata") or {}
        if path.endswith("/hot_load") and metadata.get("compression_format") == "miles_delta":
            return JSONResponse({"error": {"message": "", "code": "no"}}, 409)
        return None


class TellsNoBranch(Fault):
    def answer(self, request: Json, body: Json) -> None:
        body.pop("midstream", None)


class RepeatsBranch(Fault):
    """Every chunk says it."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        own = chunk.setdefault("midstream", memory.get("own", {}))
        memory["own"] = own


class AlwaysBranch(Fault):
    """A turn that goes on is told to be a branch, too."""

    def answer(self, request: Json, body: Json) -> None:
        body.setdefault("midstream", {"branch": {"why": "unknown", "messages": 0}})


class OtherTrace(Fault):
    """A field of each turn in a trace is changed."""

    def __init__(self, field: str) -> None:
        self._field = field

    def other(self, method: str, path: str, body: Json) -> None:
        for trace in body.get("traces", ()) if path.endswith("/trace") else ():
            for turn in trace["turns"]:
                turn[self._field] = list(reversed(turn[self._field]))


class NoTurns(Fault):
    """A trace has the newest turn only."""

    def other(self, method: str, path: str, body: Json) -> None:
        for trace in body.get("traces", ()) if path.endswith("/trace") else ():
            trace["turns"] = trace["turns"][-1:]


class WrongSpans(Fault):
    def other(self, method: str, path: str, body: Json) -> None:
        for trace in body.get("traces", ()) if path.endswith("/trace") else ():
            for turn in trace["turns"]:
                turn["snapshots"][0]["snapshot"] = "another"


class FirstReward(Fault):
    """Of several rewards of a name the first one counts."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.endswith("/reward") and isinstance(body["reward"], float):
            name = f"{path.removeprefix('/v1')} {body.get('turn')} {body.get('name')}"
            if name in self._given:
                return JSONResponse({"object": "session.reward"})
            self._given.add(name)
        return None


class AnyReward(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.endswith("/reward") and isinstance(body["reward"], str):
            return JSONResponse({"object": "session.reward"})
        return None


class OneWorker(Fault):
    def other(self, method: str, path: str, body: Json) -> None:
        if path in ("/get_world_size", "/server_info"):
            body.update({name: 1 for name in ("world_size", "dp_size") if name in body})


class OldVersion(Fault):
    """What serves is told wrongly, once an update was asked for or before."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == "/weight_info":
            body["weight_version"] = "before"


class NeverPaused(Fault):
    """Pauses are answered and not made."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.startswith("/pause"):
            return JSONResponse({"status": "paused"})
        return None


class SaysNotPaused(Fault):
    def other(self, method: str, path: str, body: Json) -> None:
        if path == "/is_paused":
            body.update(is_paused=False, mode=None)


class Busy(Fault):
    """Whoever will not wait in a pause gets a 503."""

    def response(self, status: int, headers: dict[str, str]) -> int:
        return 503 if status == 425 else status


class CutByLength(Fault):
    """What a trainer ended says that it came to its length."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        for choice in chunk["choices"]:
            if choice["finish_reason"] == "abort":
                choice["finish_reason"] = "length"


class OtherAfterPause(Fault):
    """Every second stream has another token at its end."""

    def __init__(self) -> None:
        self._streams = 0

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        self._streams += not memory
        memory.setdefault("odd", self._streams % 2)
        for choice in chunk["choices"] if memory["odd"] else ():
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                memory["seen"] = memory.get("seen", 0) + 1
                entry["token_id"] ^= memory["seen"] > 8


class UpdatesNothing(Fault):
    """Updates are answered and not made."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path == "/update_weights":
            return JSONResponse({"status": "ok", "weight_version": "update-000001-none"})
        if path == "/update_weights_from_disk":
            return JSONResponse(
                {"success": True, "message": "", "weight_version": body.get("weight_version")}
            )
        return None


class RefusedChanges(Fault):
    """An update that was refused counts as what serves."""

    def __init__(self) -> None:
        self._asked = False

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        self._asked |= path == "/update_weights" and "weight_dir" in body
        return None

    def other(self, method: str, path: str, body: Json) -> None:
        if path == "/server_info" and self._asked:
            body["weight_version"] = "refused"


class AnyTransfer(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path in ("/init_communicator/", "/update_weights_from_tensor"):
            return JSONResponse({"success": True})
        return None


FAULTS: list[tuple[Fault, list[str]]] = [
    (HeaderIsNone(), ["sessions.path", "sessions.conflict", "sessions.exact", "sessions.branch"]),
    (TellsNoBranch(), ["sessions.branch"]),
    (RepeatsBranch(), ["sessions.branch"]),
    (AlwaysBranch(), ["sessions.path", "sessions.exact", "sessions.branch"]),
    (NoTurns(), ["sessions.path", "sessions.trace"]),
    (OtherTrace("token_ids"), ["sessions.trace"]),
    (OtherTrace("logprobs"), ["sessions.trace"]),
    (OtherTrace("sampling_logprobs"), ["sessions.trace"]),
    (OtherTrace("added"), ["sessions.trace"]),
    (WrongSpans(), ["sessions.trace"]),
    (FirstReward(), ["sessions.reward"]),
    (AnyReward(), ["sessions.reward"]),
    (OneWorker(), ["trainer.info"]),
    (OldVersion(), ["trainer.info", "trainer.update"]),
    (NeverPaused(), ["trainer.pause", "trainer.abort", "trainer.keep"]),
    (SaysNotPaused(), ["trainer.pause", "trainer.keep"]),
    (Busy(), ["trainer.pause", "trainer.keep"]),
    (CutByLength(), ["trainer.abort"]),
    (OtherAfterPause(), ["trainer.keep"]),
    (UpdatesNothing(), ["trainer.update", "trainer.missing"]),
    (RefusedChanges(), ["trainer.missing"]),
    (AnyTransfer(), ["trainer.transfer"]),
    (AnyVersion(), ["contract.versions", "contract.refusal", "contract.admission"]),
    (AnyParent(), ["contract.lineage"]),
]
