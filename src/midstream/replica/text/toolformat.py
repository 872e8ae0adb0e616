"""What a chat template does with tools, found out by rendering probes. Pure, given a way to render.

Always holds: a format describes what the template itself writes, whitespace included, so a call generated in it and rendered
again as history gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from midstream.core.errors import InvalidRequest
from midstream.replica.text.tool_dialects import DIALECTS, PROBE_NAMES, Dialect

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]
Arguments = Literal["text", "object"]

_LISTED = "probe_listed"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _LISTED,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probe": {"type": "integer", "description": "One."}}},
    },
}
_USER = {"role": "user", "content": "probe"}
#: No serializer spaces it like this.
_VERBATIM = '{"probe" :1}'


@dataclass(frozen=True)
class ToolFormat:
    """The literal text around the calls of one answer: begin (open NAME between ARGUMENTS close), joint between calls, end.
    Only the dialect counts where calls cannot be forced.

    joint: None where the template writes one call only. separators: between items and after keys of the arguments.
    """

    dialect: Dialect
    begin: str
    open: str
    between: str
    close: str
    joint: str | None
    end: str
    separators: tuple[str, str]


@dataclass(frozen=True)
class TemplateTools:
    """listed: the template shows tools to the model. arguments: how it takes those of earlier calls, "text" keeps them as
    they were generated; None: it does not render calls. format: None: its calls are of no known dialect."""

    listed: bool
    arguments: Arguments | None
    format: ToolFormat | None


def examine(render: Render) -> TemplateTools:
    """`render` raises InvalidRequest where the template refuses."""
    listed = _LISTED in _try(render, [_USER], [PROBE_TOOL])
    verbatim = _try(render, _conversation([_VERBATIM]), [PROBE_TOOL])
    objects: list[Any] = [{"probe": 1, "more": 0}, {"probe": 2, "more": 0}]
    texts: list[Any] = ['{"probe": 1, "more": 0}', '{"probe": 2, "more": 0}']
    rendered = [
        _try(render, _conversation(given), [PROBE_TOOL]) for given in (objects, objects[:1], texts, texts[:1])
    ]
    arguments: Arguments | None = "object" if any(PROBE_NAMES[0] in text for text in rendered) else None
    if _VERBATIM in verbatim:
        arguments = "text"
    found = next((f for text in rendered if (f := _match(text))), None)
    return TemplateTools(listed, arguments, found)


def _conversation(arguments: list[Any]) -> list[dict[str, Any]]:
    calls = [
        {"id": f"probe{i:04}", "type": "function", "function": {"name": PROBE_NAMES[i], "arguments": given}}
        for i, given in enumerate(arguments)
    ]
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}]


def _try(render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    try:
        return render(messages, tools)
    except InvalidRequest:
        return ""


def _match(rendered: str) -> ToolFormat | None:
    for dialect in DIALECTS:
        found = dialect.pattern.search(rendered)
        if found is None:
            continue
        part = found.groupdict()
        return ToolFormat(
            dialect=dialect,
            begin=part.get("begin") or "",
            open=part.get("open") or "",
            between=part.get("between") or "",
            close=part.get("close") or "",
            joint=part.get("joint"),
            end=part.get("end") or "",
            separators=(part.get("comma1") or ",", ":" + (part.get("colon1") or "")),
        )
    return None
