"""Anthropic's Messages API: its requests as chat requests, and how many tokens one has.

Owns: what a body may hold, and how its errors name fields. Its responses are in messages_response.py.
Always holds: a field or a block that would change the result and is not supported is refused by name. What follows from a body
does not depend on its cache marks, its beta flags or other fields that change no token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from midstream.core.decoding import converted
from midstream.core.errors import InvalidRequest, UnknownField
from midstream.replica.request.schema import (
    MAX_STOPS,
    ChatBody,
    check_supported,
    decode,
)
from midstream.replica.wire.base import Read, TextCall, Texts, Wire
from midstream.replica.wire.bodies import CountBody, MessagesBody, OutputConfig, OwnFieldsOfChats, ToolChoice
from midstream.replica.wire.messages_response import MessagesEncoder
from midstream.replica.wire.reading import (
    SentText,
    function_tool,
    kind_of,
    rename_fields,
    same_fields,
    text_of,
)

#: Of a tool: what changes neither the prompt nor the answer.
_TOLERATED_OF_TOOLS = frozenset(
    {"cache_control", "defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"}
)


class _Thinking(msgspec.Struct, frozen=True):
    thinking: str


class _ToolUse(msgspec.Struct, frozen=True):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(msgspec.Struct, frozen=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class Places(NamedTuple):
    """The place in `messages` that each chat message came from; None: `system`."""

    of_chat: list[int | None]


#: What Claude Code writes before its system prompt. It has a hash of the request, so no turn would continue another one.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:(?: *\w+=[^;\s]*;)+(?: *\n)?")
_messages = msgspec.json.Decoder(MessagesBody)
_count = msgspec.json.Decoder(CountBody)


def read(body: bytes) -> Read:
    return _as_chat(decode(body, _messages))


async def count_tokens(texts: Texts, body: bytes, headers: Mapping[str, str]) -> dict[str, int]:
    given = await texts.beside(body, lambda body: _as_chat(decode(body, _count)), headers)
    parsed, places = given.body, given.details
    try:
        texts.names.wanted(texts.names.model if parsed.model is None else parsed.model)
        (prompt,) = await texts.prompts(parsed, len(body), headers)
    except InvalidRequest as error:
        rename(error, places)
        raise
    return {"input_tokens": len(prompt.token_ids)}


def _as_chat(body: CountBody) -> Read:
    check_supported(body)
    messages, places = _chat_messages(body)
    stops = _stops(body.stop_sequences)
    choice, config = body.tool_choice, body.output_config or OutputConfig()
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=_tools(body.tools),
        tool_choice=None if choice is None else _chat_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        max_tokens=body.max_tokens or 1,
        stop=stops,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        thinking=_thinking(body.thinking),
        reasoning_effort=config.effort,
        response_format=_response_format(config.format),
        user=None if body.metadata is None else body.metadata.user_id,
        top_logprobs=body.top_logprobs,
        **same_fields(body, OwnFieldsOfChats.__struct_fields__),
    )
    try:
        check_supported(chat)
    except InvalidRequest as error:
        rename(error, places)
        raise
    return Read(chat, places)


# Messages


def _chat_messages(body: CountBody) -> tuple[list[dict[str, Any]], Places]:
    messages: list[dict[str, Any]] = []
    places: list[int | None] = []
    if body.system and (system := _system(body.system)):
        messages.append({"role": "system", "content": system})
        places.append(None)
    if not body.messages:
        raise InvalidRequest("messages: must hold at least one message", param="messages")
    for index, message in enumerate(body.messages):
        made = _chat_of(message, f"messages[{index}]")
        messages += made
        places += [index] * len(made)
    if body.messages[-1]["role"] == "assistant":
        what = f"messages[{len(body.messages) - 1}]: the last message is the assistant's"
        raise InvalidRequest(f"{what}; going on with one (prefill) is not supported", param="messages")
    return messages, Places(places)


def _system(given: str | list[dict[str, Any]]) -> str:
    text = text_of(given, "system", "system")
    first = given if isinstance(given, str) else text_of(given[:1], "system", "system")
    return _BILLING.sub("", first) + text[len(first) :]


def _chat_of(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The chat messages that one message is: each tool result is one."""
    for name in message:
        if name not in ("role", "content"):
            raise UnknownField(f"{where}.{name}")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(
            f"{where}.role: must be user, assistant or system, got {role!r}", param="messages"
        )
    if role == "system":
        return [{"role": role, "content": text_of(content, f"{where}.content", "messages")}]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content: must be a string or a list of blocks", param="messages")
    blocks = [(block, f"{where}.content[{i}]") for i, block in enumerate(content)]
    return [_assistant(blocks)] if role == "assistant" else _user(blocks)


def _assistant(blocks: list[tuple[Any, str]]) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block, where in blocks:
        kind = kind_of(block, where, ("text", "tool_use", "thinking", "redacted_thinking"), "messages")
        if kind == "text":
            texts.append(converted(block, SentText, where, "messages").text)
        elif kind == "thinking":
            thoughts.append(converted(block, _Thinking, where, "messages").thinking)
        elif kind == "tool_use":
            use = converted(block, _ToolUse, where, "messages")
            arguments = json.dumps(use.input, ensure_ascii=False)
            function = {"name": use.name, "arguments": arguments}
            calls.append({"id": use.id, "type": "function", "function": function})
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _user(blocks: list[tuple[Any, str]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for block, where in blocks:
        if kind_of(block, where, ("text", "tool_result"), "messages") == "text":
            text = converted(block, SentText, where, "messages").text
            if made and made[-1]["role"] == "user":
                made[-1]["content"] += text
            else:
                made.append({"role": "user", "content": text})
            continue
        result = converted(block, _ToolResult, where, "messages")
        content = text_of(result.content or "", f"{where}.content", "messages")
        answer = {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
        made.append(answer | ({"is_error": True} if result.is_error else {}))
    return made or [{"role": "user", "content": ""}]


# Tools, stop sequences, formats


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if given is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        message = f"{where}.type: {kind!r} is one of Anthropic's own tools; only custom ones are supported"
        raise InvalidRequest(message, param=f"{where}.type")
    return function_tool(tool, where, "input_schema", _TOLERATED_OF_TOOLS)


def _chat_choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice.name: this field is required", param="tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _stops(given: list[str] | None) -> list[str] | None:
    param = "stop_sequences"
    if given and len(given) > MAX_STOPS:
        raise InvalidRequest(f"{param}: at most {MAX_STOPS} strings, got {len(given)}", param=param)
    if given and any(not text for text in given):
        raise InvalidRequest(f"{param}: strings must not be empty", param=param)
    return given


def _thinking(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is left to be refused. How long a model thinks is its own matter, so a budget bounds nothing."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "adaptive":
        return None
    if kind != "enabled":
        return given
    budget = given.get("budget_tokens")
    if type(budget) is not int or budget < 1:
        message = f"thinking.budget_tokens: must be a number of tokens, got {budget!r}"
        raise InvalidRequest(message, param="thinking")
    return None


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    param = "output_config"
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise InvalidRequest(f"{param}.format: must be a json_schema with a schema", param=param)
    wanted = {"name": "answer", "schema": given["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": wanted}


# Errors

_FIELDS = {
    "stop": ("stop_sequences", "stop_sequences"),
    "user": ("metadata.user_id", "metadata.user_id"),
    "response_format": ("output_config", "output_config.format"),
    "reasoning_effort": ("output_config", "output_config.effort"),
}


def rename(error: InvalidRequest, places: Places) -> None:
    """Make the error name fields as this API has them. It was raised for a chat body that `read` made."""

    def place_of(message: int) -> tuple[str, str]:
        index = places.of_chat[message]
        return ("system", "system") if index is None else ("messages", f"messages[{index}]")

    rename_fields(error, _FIELDS, place_of, "input_schema")


MESSAGES = Wire("messages", "msg_", lambda body, _: read(body), MessagesEncoder, rename)
COUNT_TOKENS = TextCall("count_tokens", count_tokens)
