"""Promises about OpenAI's Responses API, broken one at a time."""

from __future__ import annotations

from messages_faults import Nameless, NoBranch, OtherTokens, Retokenized, TooLikely
from starlette.responses import Response
from tampering import Fault, Json

RESPONSES = "/v1/responses"


class Unadded(Fault):
    """Usage does not add up."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == RESPONSES:
            body["usage"]["total_tokens"] += 1


class Uncounted(Fault):
    """Events have numbers of which one is missing."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        event["sequence_number"] += event["sequence_number"] > 4
        return [event]


class Undone(Fault):
    """A text is not said to be done; the numbers are right."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if event["type"] == "response.output_text.done":
            memory["left_out"] = 1
            return []
        event["sequence_number"] -= memory.get("left_out", 0)
        return [event]


class LostText(Fault):
    """A stream's first delta has no text, and no records."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if event["type"].endswith(".delta") and not memory.get("lost"):
            event |= {"delta": "", "midstream": {}}
            memory["lost"] = True
        return [event]


class LostItems(Fault):
    """The last event has no items."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if event["type"] in ("response.completed", "response.incomplete"):
            event["response"]["output"] = []
        return [event]


class FreeCalls(Fault):
    """No call is forced."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("tool_choice", None)
        return None


class OtherArguments(Fault):
    """A stream's call has other arguments."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if event["type"] == "response.function_call_arguments.delta":
            event["delta"] += " "
        return [event]


class Rewritten(Fault):
    """What is retrieved has another text than what was answered."""

    def other(self, method: str, path: str, body: Json) -> None:
        if method == "GET" and path.startswith(RESPONSES):
            for item in body.get("output", ()):
                item["content"][0]["text"] += " "


class OtherItems(Fault):
    """Input items have lost their text."""

    def other(self, method: str, path: str, body: Json) -> None:
        for item in body["data"] if path.endswith("/input_items") else ():
            item["content"][0]["text"] = ""


class Undead(Fault):
    """What is gone is found."""

    def response(self, status: int, headers: dict[str, str]) -> int:
        return 200 if status == 404 else status


class KeepsAll(Fault):
    """Responses are stored against their client's will."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("store", None)
        return None


class BareErrors(Fault):
    """Errors have no param."""

    def error(self, path: str, body: Json) -> Json:
        return {"error": {name: value for name, value in body["error"].items() if name != "param"}}


class Lax(Fault):
    """Tools of OpenAI's own are left out, and the answer is made without them."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path == RESPONSES:
            body["tools"] = [tool for tool in body.get("tools", ()) if tool["type"] == "function"]
        return None


class OpenShelf(Fault):
    """Stored responses are read with any key."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.startswith(f"{RESPONSES}/"):
            headers["authorization"] = "Bearer conformance-key"
        return None


class BareModel(Fault):
    """model names no snapshot."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == RESPONSES:
            body["model"] = body["model"].partition("@")[0]


class SomeSnapshot(Fault):
    """A delta's object names a snapshot that nobody serves."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        if event["type"].endswith(".delta"):
            event["midstream"]["snapshot"] = "another"
        return [event]


class NoPrevious(Fault):
    """previous_response_id is taken and ignored."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("previous_response_id", None)
        return None


FAULTS: list[tuple[Fault, list[str]]] = [
    (Unadded(), ["responses.shape"]),
    (Uncounted(), ["responses.events"]),
    (Undone(), ["responses.events"]),
    (LostText(), ["responses.events", "responses.stream", "responses.records"]),
    (LostItems(), ["responses.events", "responses.stream"]),
    (FreeCalls(), ["responses.call"]),
    (OtherArguments(), ["responses.call"]),
    (Rewritten(), ["responses.stored"]),
    (OtherItems(), ["responses.stored", "responses.deleted"]),
    (Undead(), ["responses.deleted"]),
    (KeepsAll(), ["responses.deleted"]),
    (Nameless(), ["responses.errors", "responses.refused"]),
    (BareErrors(), ["responses.errors", "responses.key"]),
    (Lax(), ["responses.refused"]),
    (OpenShelf(), ["responses.key"]),
    (BareModel(), ["responses.labels"]),
    (SomeSnapshot(), ["responses.labels"]),
    (OtherTokens(), ["responses.records", "responses.previous", "responses.turns"]),
    (TooLikely(), ["responses.records"]),
    (NoPrevious(), ["responses.previous", "responses.deleted"]),
    (Retokenized(), ["responses.turns"]),
    (NoBranch(), ["responses.turns"]),
]
