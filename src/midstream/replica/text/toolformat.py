"""What a chat template does with tools, found out by rendering probes. Pure, given a way to render.

Always holds: a format describes what the template itself writes, whitespace included, so a call generated in it and rendered
again as history gives the same text.

The formats of tool calls that chat templates write, and the parser of each. Pure.

Always holds: a dialect is recognised by what a template renders, never by the name of a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from midstream.core.errors import InvalidRequest
from midstream.replica.text.toolcalls import (
    ArrayParser,
    JsonBody,
    ObjectParser,
    Schemas,
    TaggedParser,
    ToolParser,
    XmlBody,
)


@dataclass(frozen=True)
class Dialect:
    """How a family of chat templates writes calls.

    pattern: finds the calls named `first` and `second` (or the first alone) in a rendered conversation; its groups are the
        literal text around names and arguments. markers: tags that may be special tokens, which detokenizing would leave out.
        opening: the one that begins calls wherever it stands; None: calls are known by being all of the answer.
    """

    name: str
    pattern: re.Pattern[str]
    markers: tuple[str, ...]
    opening: str | None
    parser: Callable[[Schemas], ToolParser]
    #: The length of call ids, where templates insist on one.
    id_length: int | None = None
    #: Whether calls can be held to a grammar.
    forcible: bool = True


PROBE_NAMES = ("probe_first", "probe_second")
_ARGUMENTS = r'\{{"probe":(?P<colon{0}>\s*){0}(?P<comma{0}>,\s*)"more":\s*0\}}'
_FIRST, _SECOND = _ARGUMENTS.format(1), _ARGUMENTS.format(2)
_HERMES = (
    r'(?P<open><tool_call>\s*\{"name":\s*")probe_first(?P<between>",\s*"arguments":\s*)'
    + _FIRST
    + r'(?P<close>\}\s*</tool_call>)(?:(?P<joint>\s*)<tool_call>\s*\{"name":\s*"probe_second",\s*"arguments":\s*'
    + _SECOND
    + r"\}\s*</tool_call>)?"
)
_MISTRAL = (
    r'(?P<begin>\[TOOL_CALLS\]\s*\[)(?P<open>\{"name":\s*")probe_first(?P<between>",\s*"arguments":\s*)'
    + _FIRST
    + r'(?P<id>,\s*"id":\s*"\w+")?(?P<close>\})(?:(?P<joint>,\s*)\{"name":\s*"probe_second",\s*"arguments":\s*'
    + _SECOND
    + r'(?:,\s*"id":\s*"\w+")?\})?(?P<end>\])'
)
_LLAMA = (
    r'(?P<open>(?:<\|python_tag\|>)?\{"name":\s*")probe_first(?P<between>",\s*"parameters":\s*)'
    + _FIRST
    + r"(?P<close>\})"
)

_XML = (
    r"<tool_call>\s*<function=probe_first>\s*<parameter=probe>\s*1\s*</parameter>\s*<parameter=more>\s*0\s*</parameter>"
    r"\s*</function>\s*</tool_call>"
)

#: Looked through in order. To add one: a pattern, a parser, and a template that shows it in the tests.
DIALECTS = (
    Dialect(
        "hermes",
        re.compile(_HERMES),
        ("<tool_call>", "</tool_call>"),
        "<tool_call>",
        lambda _: TaggedParser("<tool_call>", lambda start: JsonBody(start, "</tool_call>")),
    ),
    Dialect(
        "qwen_xml",
        re.compile(_XML),
        ("<tool_call>", "</tool_call>"),
        "<tool_call>",
        lambda schemas: TaggedParser("<tool_call>", lambda start: XmlBody(start, schemas)),
        forcible=False,
    ),
    Dialect(
        "mistral",
        re.compile(_MISTRAL),
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        lambda _: ArrayParser("[TOOL_CALLS]"),
        id_length=9,
    ),
    Dialect(
        "llama3", re.compile(_LLAMA), ("<|python_tag|>",), None, lambda _: ObjectParser("<|python_tag|>")
    ),
)


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
