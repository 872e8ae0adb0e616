"""Tools in a chat request: which may be called, and how earlier calls stand in the history. Pure.

Always holds: tools and messages reach the template as the client wrote them, but for the arguments of earlier calls, which
it gets in the form it renders (toolformat.py); what it would silently leave out is refused instead.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from midstream.core.decoding import converted
from midstream.core.errors import InvalidRequest
from midstream.replica.text.toolformat import Arguments, TemplateTools, ToolFormat

MAX_TOOLS = 128
#: As MCP names tools. Harnesses put the name of a server before it, and Anthropic's API takes as many characters.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(msgspec.Struct, frozen=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class _Named(msgspec.Struct, frozen=True):
    name: str


class _NamedChoice(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: _Named


class _EarlierFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class _EarlierCall(msgspec.Struct, frozen=True):
    function: _EarlierFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ToolPlan(msgspec.Struct, frozen=True):
    """forced: the answer must be calls, of the tools in `callable` only.
    strict: calls match their schemas also where none is forced."""

    tools: tuple[Tool, ...]
    callable: tuple[int, ...]
    forced: bool
    strict: bool
    parallel: bool

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The parameters of each tool, by its name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def constrained(self) -> bool:
        return self.forced or self.strict


class AsksTools(Protocol):
    """The fields of a request's body that are about tools."""

    @property
    def tools(self) -> list[dict[str, Any]] | None: ...
    @property
    def tool_choice(self) -> Any: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...


def plan_tools(body: AsksTools) -> ToolPlan | None:
    """None: the request has no tools, or says that none may be called. Raises InvalidRequest."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: needs tools", param="tool_choice")
        return None
    if len(body.tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(body.tools)}", param="tools")
    tools = tuple(converted(tool, Tool, f"tools[{i}]", "tools") for i, tool in enumerate(body.tools))
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools: the name {twice!r} is given twice", param="tools")
    named = _chosen(choice, names)
    if choice == "none":
        return None
    forced = named is not None or choice == "required"
    return ToolPlan(
        tools=tools,
        callable=tuple(range(len(tools))) if named is None else (named,),
        forced=forced,
        strict=any(tool.function.strict for tool in tools),
        parallel=body.parallel_tool_calls is not False and named is None,
    )


def _chosen(choice: Any, names: list[str]) -> int | None:
    """The index of the tool that `tool_choice` names, if it names one."""
    if choice is None or choice in ("none", "auto", "required"):
        return None
    if not isinstance(choice, dict):
        message = (
            f"tool_choice: must be none, auto, required or an object that names a function, got {choice!r}"
        )
        raise InvalidRequest(message, param="tool_choice")
    name = converted(choice, _NamedChoice, "tool_choice", "tool_choice").function.name
    if name not in names:
        raise InvalidRequest(f"tool_choice: {name!r} is not among the tools", param="tool_choice")
    return names.index(name)


def check_template(template: TemplateTools) -> ToolFormat:
    """The format of the calls to expect. Raises InvalidRequest where the template does not define one."""
    if not template.listed:
        raise InvalidRequest("tools: this model's chat template does not define tools", param="tools")
    if template.format is None:
        message = "tools: the calls that this model's chat template writes are of a format this server does not read"
        raise InvalidRequest(message, param="tools")
    return template.format


def prepare_history(messages: list[dict[str, Any]], arguments: Arguments | None) -> list[dict[str, Any]]:
    """Earlier calls as the template renders them; `arguments` is how it takes theirs. Raises InvalidRequest."""
    return [_earlier(message, f"messages[{i}]", arguments) for i, message in enumerate(messages)]


def _earlier(message: dict[str, Any], where: str, arguments: Arguments | None) -> dict[str, Any]:
    if message.get("function_call"):
        raise InvalidRequest(f"{where}.function_call: not supported; use tool_calls", param="messages")
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    where = f"{where}.tool_calls"
    if message["role"] != "assistant" or not isinstance(calls, list):
        raise InvalidRequest(f"{where}: must be a list, on assistant messages only", param="messages")
    if arguments is None:
        raise InvalidRequest(f"{where}: this model's chat template does not define them", param="messages")
    return message | {
        "tool_calls": [_earlier_call(call, f"{where}[{i}]", arguments) for i, call in enumerate(calls)]
    }


def _earlier_call(call: Any, where: str, arguments: Arguments) -> dict[str, Any]:
    given = converted(call, _EarlierCall, where, "messages").function.arguments
    if given is None or (isinstance(given, str) and not given.strip()):
        # Clients write the arguments of a call that has none so.
        given = "{}"
    if arguments == "object" and isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = ""
        if not isinstance(given, dict):
            message = f"{where}.function.arguments: this model's chat template needs a JSON object"
            raise InvalidRequest(message, param="messages")
    filled: dict[str, Any] = {"type": "function"} | call
    filled["function"] = call["function"] | {"arguments": given}
    return filled
