"""The formats of tool calls that chat templates write, and the parser of each. Pure.

Always holds: a dialect is recognised by what a template renders, never by the name of a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from midstream.replica.text.toolcalls import ArrayParser, JsonBody, ObjectParser, TaggedParser, ToolParser
from midstream.replica.text.xml_calls import Schemas, XmlBody


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
