"""Promises about Anthropic's Messages API, broken one at a time."""

from __future__ import annotations

from faults import AnyKey
from starlette.responses import Response
from tampering import Fault, Json

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SESSION_HEADERS = ("x-multi-turn-session-id", "x-session-affinity", "x-session-id")


class Miscounted(Fault):
    """A token too many, in what was generated and in what is counted."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == MESSAGES:
            body["usage"]["output_tokens"] += 1
        elif path == COUNT:
            body["input_tokens"] += 1


class Unclosed(Fault):
    """Blocks do not end."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        return [] if event["type"] == "content_block_stop" else [event]


class FromOne(Fault):
    """Blocks are counted from 1."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        return [event | ({"index": event["index"] + 1} if "index" in event else {})]


class CutShort(Fault):
    """A stream has no message_stop."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        return [] if event["type"] == "message_stop" else [event]


class LostDelta(Fault):
    """A stream's first delta is lost, with its text and its records."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if event["type"] == "content_block_delta" and not memory.get("lost"):
            memory["lost"] = True
            return []
        return [event]


class OtherStart(Fault):
    """A stream begins with a token too many in usage, which its end corrects."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if event["type"] == "message_start":
            event["message"]["usage"]["input_tokens"] += 1
        return [event]


class NoTools(Fault):
    """Tools, system and stop sequences are taken and ignored."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.startswith(MESSAGES):
            for name in ("tools", "tool_choice", "system", "stop_sequences"):
                body.pop(name, None)
        return None


class OtherInput(Fault):
    """A stream's call has another input."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if (event.get("delta") or {}).get("type") == "input_json_delta":
            event["delta"]["partial_json"] = '{"where": "nowhere"}'
        return [event]


class OpenAiErrors(Fault):
    """Errors have OpenAI's shape."""

    def error(self, path: str, body: Json) -> Json:
        return {"error": body["error"]}


class Nameless(Fault):
    """Errors do not say what they are about."""

    def error(self, path: str, body: Json) -> Json:
        return {**body, "error": {**body["error"], "message": "a bad request", "param": None}}


class Blind(Fault):
    """Images are left out, and what is left is answered."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        for message in body.get("messages", ()) if path == MESSAGES else ():
            if isinstance(message["content"], list):
                message["content"] = [block for block in message["content"] if block["type"] != "image"]
        return None


class OtherSnapshot(Fault):
    """A delta's object names a snapshot that nobody serves."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if event["type"] == "content_block_delta":
            event["midstream"]["snapshot"] = "another"
        return [event]


class ShortSpan(Fault):
    """The last token has no snapshot."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == MESSAGES:
            body["midstream"]["snapshots"][-1]["end"] -= 1


class OtherTokens(Fault):
    """The ids are those of another tokenization: the last one differs, in the answer and in its log-probabilities."""

    def _tell(self, body: Json) -> None:
        told = body.get("midstream") or {}
        if told.get("token_ids"):
            told["token_ids"][-1] ^= 1
            told["logprobs"]["content"][-1]["token_id"] ^= 1

    def other(self, method: str, path: str, body: Json) -> None:
        self._tell(body)


class TooLikely(Fault):
    """Log-probabilities are not those of the model, in plain answers and streams alike."""

    def _tell(self, body: Json) -> None:
        for entry in ((body.get("midstream") or {}).get("logprobs") or {}).get("content", ()):
            entry["logprob"] /= 2

    def other(self, method: str, path: str, body: Json) -> None:
        self._tell(body)

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        self._tell(event)
        return [event]


class Retokenized(Fault):
    """Nobody has a session: each conversation is rendered and tokenized anew."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        for name in SESSION_HEADERS:
            headers.pop(name, None)
        return None


class NoBranch(Fault):
    """Nothing says that a turn continues none."""

    def other(self, method: str, path: str, body: Json) -> None:
        (body.get("midstream") or {}).pop("branch", None)


class BearerOnly(Fault):
    """x-api-key is not looked at."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        headers.pop("x-api-key", None)
        return None


FAULTS: list[tuple[Fault, list[str]]] = [
    (Miscounted(), ["messages.shape", "messages.count", "messages.stream", "messages.records"]),
    (Unclosed(), ["messages.events"]),
    (FromOne(), ["messages.events"]),
    (CutShort(), ["messages.events"]),
    (LostDelta(), ["messages.stream", "messages.records"]),
    (OtherStart(), ["messages.stream"]),
    (NoTools(), ["messages.call", "messages.stop", "messages.count"]),
    (OtherInput(), ["messages.call"]),
    (OpenAiErrors(), ["messages.errors", "messages.refused", "messages.key"]),
    (Nameless(), ["messages.errors", "messages.refused"]),
    (Blind(), ["messages.refused"]),
    (OtherSnapshot(), ["messages.labels"]),
    (ShortSpan(), ["messages.labels"]),
    (OtherTokens(), ["messages.records", "messages.turns"]),
    (TooLikely(), ["messages.records"]),
    (Retokenized(), ["messages.turns"]),
    (NoBranch(), ["messages.turns"]),
    (BearerOnly(), ["messages.key"]),
    (AnyKey(), ["messages.key"]),
]
