"""What wires of other APIs than chat share in reading a body: blocks, tools, and errors that name fields as the API does. Pure.

Always holds: an error names the place in the client's own body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from midstream.core.decoding import converted
from midstream.core.errors import InvalidRequest, UnknownField
from midstream.replica.text.tools import Name

_OF_TOOLS = frozenset({"type", "name", "description", "strict"})
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_TOOL = re.compile(r"(tools\[\d+\])\.function(?:\.parameters)?(?=:)")


class SentText(msgspec.Struct, frozen=True):
    text: str


def same_fields(body: msgspec.Struct, names: Collection[str]) -> dict[str, Any]:
    """Fields that have the same name and meaning in a body of OpenAI's API."""
    return {name: getattr(body, name) for name in names}


def text_of(given: Any, where: str, param: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a string or of text blocks, which follow each other without anything between."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidRequest(f"{where}: must be a string or a list of blocks", param=param)
    texts = []
    for index, block in enumerate(given):
        at = f"{where}[{index}]"
        kind_of(block, at, kinds, param)
        texts.append(converted(block, SentText, at, param).text)
    return "".join(texts)


def kind_of(block: Any, where: str, known: tuple[str, ...], param: str, what: str = "blocks") -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in known:
        expected = ", ".join(known)
        raise InvalidRequest(
            f"{where}: {what} of type {kind!r} are not supported here, only {expected}", param=param
        )
    return str(kind)


def function_tool(
    tool: dict[str, Any], where: str, schema: str, tolerated: Collection[str]
) -> dict[str, Any]:
    """The tool of a chat that a flat one is. schema: its field for the parameters. tolerated: fields without a meaning here."""
    for name in tool:
        if name not in _OF_TOOLS and name not in tolerated and name != schema:
            raise UnknownField(f"{where}.{name}")
    function: dict[str, Any] = {"name": _field(tool, "name", Name, where)}
    if tool.get("description") is not None:
        function["description"] = _field(tool, "description", str, where)
    function["parameters"] = _field(tool, schema, dict[str, Any], where)
    if tool.get("strict") is not None:
        function["strict"] = _field(tool, "strict", bool, where)
    return {"type": "function", "function": function}


def _field(tool: dict[str, Any], name: str, kind: Any, where: str) -> Any:
    at = f"{where}.{name}"
    if name not in tool:
        raise InvalidRequest(f"{at}: this field is required", param=at)
    return converted(tool[name], kind, at, at)


#: A field of chat -> the field of the other API, and its place within it.
Renamed = Mapping[str, tuple[str, str]]


def rename_fields(
    error: InvalidRequest, fields: Renamed, place_of: Callable[[int], tuple[str, str]], schema: str
) -> None:
    """Make an error that was raised for a chat body name the fields of another API. place_of: of a chat message, the field
    that it came from, and the place in it. schema: the field of a tool's parameters."""
    message, param = error.message, error.param
    if param is not None and param in fields:
        error.param = fields[param][0]
        names = "|".join(map(re.escape, fields))
        message = re.sub(rf"(?:{names})(?=[:. ])", lambda found: fields[found[0]][1], message, count=1)
    elif param == "messages" and (found := _MESSAGE.match(message)):
        error.param, place = place_of(int(found[1]))
        message = place + message[found.end() :]
    elif param == "tools" and (found := _TOOL.match(message)):
        error.param = f"{found[1]}.{schema}"
        message = error.param + message[found.end() :]
    error.message, error.args = message, (message,)
