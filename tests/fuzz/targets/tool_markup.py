"""Tool calls in generated text: every parser of replica/text/toolformat.py.

Checked: no character is lost. The calls and the text are the same however the text is cut. The arguments of a call are a JSON
object that can be sent as UTF-8. No schema that a client may send makes a parser fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from midstream.core.sse import sse_event
from midstream.replica.text.tool_dialects import DIALECTS, Dialect
from midstream.replica.text.toolcalls import Item, ParsedCall
from targets.target import Target, check, controlled

#: Between the schemas of the tools, as JSON, and the text.
BETWEEN = b"\n=====\n"


def run(data: bytes) -> None:
    control, data = controlled(data)
    cut, data = controlled(data)
    given, found, generated = data.partition(BETWEEN)
    schemas = schemas_of(given) if found else {}
    text = (generated if found else data).decode("utf-8", "replace")
    dialect = DIALECTS[control % len(DIALECTS)]
    whole, in_pieces = parsed(dialect, schemas, [text]), parsed(dialect, schemas, cut_text(text, cut))
    check("".join(item.raw for item in whole) == text, "characters are lost", text, whole)
    check("".join(item.raw for item in in_pieces) == text, "characters of pieces are lost", text, in_pieces)
    check(seen(whole) == seen(in_pieces), "other calls when the text is cut", seen(whole), seen(in_pieces))
    for call in (call for item in whole for call in item.calls):
        check(call.name, "a call of nothing", call)
        arguments = json.loads(call.arguments, parse_constant=no_constant)
        check(isinstance(arguments, dict), "arguments that are no object", call)
        sse_event([call.name, call.arguments, call.id])


def no_constant(name: str) -> Any:
    check(False, "arguments that are no JSON", name)


def schemas_of(given: bytes) -> dict[str, dict[str, Any]]:
    try:
        value = msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    named = value.items() if isinstance(value, dict) else ()
    return {name: schema for name, schema in named if isinstance(schema, dict)}


def cut_text(text: str, control: int) -> Iterator[str]:
    size = 1 + control % 32
    for at in range(0, len(text), size):
        yield text[at : at + size]


def parsed(dialect: Dialect, schemas: dict[str, dict[str, Any]], parts: Any) -> list[Item]:
    parser = dialect.parser(schemas)
    items = [item for part in parts for item in parser.push(part)]
    return items + parser.flush()


def seen(items: list[Item]) -> list[str | tuple[ParsedCall, ...]]:
    """Texts and calls in order, neighbouring texts joined."""
    result: list[str | tuple[ParsedCall, ...]] = []
    for item in items:
        if item.calls:
            result.append(item.calls)
        elif item.text and result and isinstance(result[-1], str):
            result[-1] += item.text
        elif item.text:
            result.append(item.text)
    return result


def seeds() -> Iterator[bytes]:
    schema = {
        "f": {
            "properties": {
                "x": {"type": "integer"},
                "s": {"type": ["string", "null"]},
                "l": {"anyOf": [{"type": "array"}]},
            }
        }
    }
    tools = json.dumps(schema).encode() + BETWEEN
    hermes = b'so <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    xml = b"<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\nNone\n</parameter>\n"
    xml += b"</function>\n</tool_call>"
    lists = b"<tool_call><function=f><parameter=l>[1, {}]</parameter></function></tool_call>"
    mistral = b'a [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abc"}]'
    llama = b'<|python_tag|>{"name": "f", "parameters": {"x": [1, {}]}}'
    for number, texts in enumerate(
        ((hermes, hermes * 2), (xml, lists), (mistral, mistral[2:]), (llama, llama[14:]))
    ):
        for text in texts:
            yield bytes([number, 0]) + tools + text
            yield bytes([number, 5]) + text
            yield bytes([number, 2]) + text[:-3]
    yield (
        b"\x00\x00"
        + b'<tool_call>{"name": "f", "arguments": {"s": "</tool_call>\\" <tool_call>"}}</tool_call>'
    )


WORDS = (
    *(
        b"<tool_call>",
        b"</tool_call>",
        b"<function=f>",
        b"</function>",
        b"<parameter=x>",
        b"</parameter>",
        b"[TOOL_CALLS]",
    ),
    *(
        b"<|python_tag|>",
        b'{"name": "f", "arguments": ',
        b'{"name": "f", "parameters": ',
        b"1e999",
        b"NaN",
        b'"\\ud800"',
    ),
    *(b'"anyOf":', b'"oneOf":', b'"type":', b'"enum":[', b"\n", BETWEEN, b"[" * 32, b"True", b"null", b"-"),
)
TARGET = Target(run, seeds, WORDS)
