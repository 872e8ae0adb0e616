"""OpenAI's Responses API: its requests as chat requests. Its responses are in responses_response.py.

Owns: what a body may hold, how items become the messages of a chat, and how errors name fields.
Always holds:
- A field, an item or a part that would change the result and is not supported is refused by name.
- A request with previous_response_id has the messages that one with all items would have.
"""

from __future__ import annotations

from typing import Any

import msgspec

from midstream.core.decoding import converted
from midstream.core.errors import InvalidRequest, UnknownTools
from midstream.core.responses import ID_PREFIX, new_id
from midstream.replica.request.schema import (
    ChatBody,
    check_supported,
    decode,
)
from midstream.replica.stored import Shelf, Stored
from midstream.replica.wire.base import Read, Wire
from midstream.replica.wire.bodies import OwnFieldsOfChats, ResponsesBody, TextConfig, TextFormat
from midstream.replica.wire.reading import (
    function_tool,
    kind_of,
    rename_fields,
    same_fields,
    text_of,
)
from midstream.replica.wire.responses_response import ResponsesDetails, ResponsesEncoder

_LOGPROBS = "message.output_text.logprobs"
#: The text of reasoning is in its items as it is.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
#: Of a tool: what changes neither the prompt nor the answer.
_TOLERATED_OF_TOOLS = frozenset({"async", "allowed_callers", "defer_loading", "output_schema"})
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text")
_INPUT = "input"


class _Reasoned(msgspec.Struct, frozen=True):
    content: list[dict[str, Any]] | None = None


class _Call(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str


class _CallOutput(msgspec.Struct, frozen=True):
    call_id: str
    output: str | list[dict[str, Any]]


_responses = msgspec.json.Decoder(ResponsesBody)
_encode = msgspec.json.Encoder().encode


def read(body: bytes, shelf: Shelf) -> Read:
    """Raises InvalidRequest, PreviousNotFound."""
    given = decode(body, _responses)
    check_supported(given)
    for name in given.include or ():
        if name not in _INCLUDED:
            message = f"include: {name!r} is not supported; only {', '.join(_INCLUDED)}"
            raise InvalidRequest(message, param="include")
    before = None if given.previous_response_id is None else shelf.previous(given.previous_response_id)
    own = new_id(shelf.store.replica)
    items = _items(given.input, own)
    chat = _Conversation()
    if given.instructions is not None:
        chat.add_message({"role": "system", "content": given.instructions}, "instructions", "instructions")
    for item in () if before is None else before.input + before.output:
        chat.add(item, "previous_response_id", "previous_response_id")
    for index, item in enumerate(items):
        chat.add(item, _INPUT if isinstance(given.input, str) else f"{_INPUT}[{index}]", _INPUT)
    if not chat.messages:
        raise InvalidRequest(f"{_INPUT}: must hold at least one item", param=_INPUT)
    return _as_chat(given, chat, items, before, own, shelf)


def _as_chat(
    given: ResponsesBody,
    chat: _Conversation,
    items: list[dict[str, Any]],
    before: Stored | None,
    own: str,
    shelf: Shelf,
) -> Read:
    text = given.text or TextConfig()
    included = _LOGPROBS in (given.include or ())
    lost = given.previous_response_id is not None and before is None
    stores = given.store is not False and not lost
    thread = before.thread if before is not None else None
    if stores and thread is None:
        thread = ID_PREFIX + own
    own_fields = same_fields(given, OwnFieldsOfChats.__struct_fields__)
    own_fields["logprobs"] = True if included or given.logprobs else None
    body = ChatBody(
        model=given.model,
        messages=chat.messages,
        tools=_tools(given.tools),
        tool_choice=_tool_choice(given.tool_choice),
        parallel_tool_calls=given.parallel_tool_calls,
        max_tokens=given.max_output_tokens,
        stream=given.stream,
        temperature=given.temperature,
        top_p=given.top_p,
        reasoning_effort=None if given.reasoning is None else given.reasoning.effort,
        verbosity=text.verbosity,
        response_format=_response_format(text.format),
        user=given.user,
        request_id=own,
        top_logprobs=given.top_logprobs,
        session_id=given.session_id,
        **own_fields,
    )

    def keep(response_id: str, response: bytes) -> None:
        node = Stored(response_id, before, thread, _encode(items), response)
        shelf.store.keep(shelf.tenant, node)

    echoed = _echoed(given, text)
    details = ResponsesDetails(echoed, chat.places, included, bool(given.logprobs), keep if stores else None)
    try:
        check_supported(body)
    except InvalidRequest as error:
        rename(error, details)
        raise
    whole = given.previous_response_id is None
    return Read(body, details, thread=thread, whole=whole, resumable=not included)


# Items


def _items(given: str | list[dict[str, Any]], own: str) -> list[dict[str, Any]]:
    """Items as they are listed later: each has an id and a type, and a message a list of parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    found = []
    for index, item in enumerate(given):
        made = {**item}
        if "type" not in made and "role" in made:
            made["type"] = "message"
        if made.get("type") == "message" and isinstance(content := made.get("content"), str):
            assistant = made.get("role") == "assistant"
            part: dict[str, Any] = {"type": "output_text" if assistant else "input_text", "text": content}
            made["content"] = [part | ({"annotations": []} if assistant else {})]
        made["id"] = made.get("id") or f"item_{own[:32]}{index}"
        found.append({"status": "completed", **made})
    return found


class _Conversation:
    """The messages of a chat, made of items. places: of each, the field that it came from, and the place in it.

    Reasoning, text and calls that follow each other are one answer; a second text right behind a text is another one.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[tuple[str, str]] = []
        #: The type of the item that came last.
        self._last = ""

    def add(self, item: dict[str, Any], where: str, param: str) -> None:
        kind = kind_of(item, where, _ITEMS, param, "items")
        role = item.get("role")
        if kind == "message" and role not in _ROLES:
            expected = ", ".join(_ROLES)
            raise InvalidRequest(f"{where}.role: must be one of {expected}, got {role!r}", param=param)
        if kind == "function_call_output":
            output = converted(item, _CallOutput, where, param)
            content = text_of(output.output, f"{where}.output", param, _PARTS)
            self.add_message(
                {"role": "tool", "tool_call_id": output.call_id, "content": content}, where, param
            )
        elif kind == "message" and role != "assistant":
            self.add_message({"role": role, "content": _content(item, where, param)}, where, param)
        else:
            self._add_answer(kind, item, where, param)
        self._last = kind

    def add_message(self, message: dict[str, Any], where: str, param: str) -> None:
        self.messages.append(message)
        self.places.append((param, where))

    def _add_answer(self, kind: str, item: dict[str, Any], where: str, param: str) -> None:
        goes_on = self.messages and self.messages[-1]["role"] == "assistant"
        if not goes_on or self._last == kind == "message":
            self.add_message({"role": "assistant", "content": ""}, where, param)
        answer = self.messages[-1]
        if kind == "message":
            answer["content"] += _content(item, where, param)
        elif kind == "reasoning":
            parts = converted(item, _Reasoned, where, param).content or []
            text = text_of(parts, f"{where}.content", param, ("reasoning_text",))
            if text:
                answer["reasoning_content"] = answer.get("reasoning_content", "") + text
        else:
            call = converted(item, _Call, where, param)
            function = {"name": call.name, "arguments": call.arguments}
            made = {"id": call.call_id, "type": "function", "function": function}
            answer["tool_calls"] = [*answer.get("tool_calls", ()), made]


def _content(item: dict[str, Any], where: str, param: str) -> str:
    return text_of(item.get("content"), f"{where}.content", param, _PARTS)


# Tools and formats


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    unknown = [at for at, tool in enumerate(given) if tool.get("type") != "function"]
    if unknown:
        raise UnknownTools(unknown, given[unknown[0]].get("type"))
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    parameters = tool.get("parameters")
    if parameters is None:
        tool = tool | {"parameters": {"type": "object", "properties": {}}}
    return function_tool(tool, where, "parameters", _TOLERATED_OF_TOOLS)


def _tool_choice(given: str | dict[str, Any] | None) -> Any:
    if not isinstance(given, dict):
        return given
    kind_of(given, "tool_choice", ("function",), "tool_choice", "choices")
    if not isinstance(given.get("name"), str):
        raise InvalidRequest("tool_choice.name: this field is required", param="tool_choice")
    return {"type": "function", "function": {"name": given["name"]}}


def _response_format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.type != "json_schema" or given.schema is None:
        message = "text.format: must be text, json_object, or a json_schema with a schema"
        raise InvalidRequest(message, param="text")
    wanted = {"name": given.name, "schema": given.schema, "strict": True}
    return {"type": "json_schema", "json_schema": wanted}


def _echoed(given: ResponsesBody, text: TextConfig) -> dict[str, Any]:
    """What a response says of its request."""
    form = {"type": "text"} if text.format is None else msgspec.to_builtins(text.format)
    if form["type"] != "json_schema":
        form = {"type": form["type"]}
    return {
        "background": False,
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "metadata": given.metadata or {},
        "parallel_tool_calls": given.parallel_tool_calls is not False,
        "previous_response_id": given.previous_response_id,
        "reasoning": {"effort": None if given.reasoning is None else given.reasoning.effort, "summary": None},
        "store": given.store is not False,
        "temperature": 1.0 if given.temperature is None else given.temperature,
        "text": {"format": form},
        "tool_choice": given.tool_choice or "auto",
        "tools": given.tools or [],
        "top_logprobs": given.top_logprobs or 0,
        "top_p": 1.0 if given.top_p is None else given.top_p,
        "truncation": "disabled",
        "user": given.user,
    }


# Errors

_FIELDS = {
    "max_tokens": ("max_output_tokens", "max_output_tokens"),
    "response_format": ("text", "text.format"),
    "reasoning_effort": ("reasoning", "reasoning.effort"),
    "verbosity": ("text", "text.verbosity"),
}


def rename(error: InvalidRequest, details: ResponsesDetails) -> None:
    """Make the error name fields as this API has them. It was raised for a chat body that `read` made."""
    rename_fields(error, _FIELDS, details.places.__getitem__, "parameters")
    if error.param == "messages":
        error.param = _INPUT
        message = error.message.replace("messages:", f"{_INPUT}:", 1)
        error.message, error.args = message, (message,)


RESPONSES = Wire("responses", ID_PREFIX, read, ResponsesEncoder, rename)
