"""The parsers of tool-call markups: the same items however the text is cut, and not a character lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from midstream.replica.text.tool_dialects import DIALECTS
from midstream.replica.text.toolcalls import Item, ParsedCall
from midstream.replica.text.xml_calls import read_value

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
SCHEMAS = {"f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}}
FRAGMENTS = [
    *(
        "<function=f>",
        "<function=",
        "<parameter=x>",
        "<parameter=s>\n",
        "\n</parameter>",
        "</parameter>",
        "</function>",
        "<tool_call>\n<function=f>\n<parameter=s>\n",
        "\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
    ),
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "</", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>"),
    *(
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": "g", "arguments": {"s": "</tool_call>\\" <tool_call>"}}',
    ),
    *('{"name": "f", "parameters": {"x": [1, {}]}}', '{"name": "", "arguments": {}}', '{"name": "f"}', "{}"),
    *("{", "}", "[", "]", '"', "\\", ",", ", ", " ", "\n", "\n\n", "so", "é", "<", "1"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join) | st.text(max_size=20)
OBJECTS = st.dictionaries(
    st.text(max_size=4),
    st.integers() | st.text(max_size=12) | st.lists(st.booleans(), max_size=2),
    max_size=3,
)
Seen = list[str | tuple[ParsedCall, ...]]


def parse(dialect: str, pieces: list[str]) -> list[Item]:
    parser = BY_NAME[dialect].parser(SCHEMAS)
    items = [item for piece in pieces for item in parser.push(piece)]
    return items + parser.flush()


def seen(items: list[Item]) -> Seen:
    """Texts and calls in order, neighbouring texts joined."""
    result: Seen = []
    for item in items:
        assert not (item.text and item.calls)
        if item.calls:
            result.append(item.calls)
        elif item.text and result and isinstance(result[-1], str):
            result[-1] += item.text
        elif item.text:
            result.append(item.text)
    return result


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(i % (len(text) + 1) for i in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("dialect", sorted(BY_NAME))
@settings(max_examples=examples(400))
@given(text=TEXTS, at=st.lists(st.integers(min_value=0), max_size=8))
def test_any_split_of_a_text_gives_the_same_and_loses_nothing(dialect: str, text: str, at: list[int]) -> None:
    whole, parts, characters = (
        parse(dialect, [text]),
        parse(dialect, cut(text, at)),
        parse(dialect, list(text)),
    )
    for items in (whole, parts, characters):
        assert "".join(item.raw for item in items) == text
        assert seen(items) == seen(whole)
        for item in items:
            assert item.text in ("", item.raw)
            # Only blanks are left out.
            assert item.text or item.calls or not item.raw.strip()


@given(
    before=st.text("ab {\n", max_size=6),
    calls=st.lists(st.tuples(st.text("fgh_-.", min_size=1, max_size=5), OBJECTS), min_size=1, max_size=3),
    spaced=st.booleans(),
    ascii_only=st.booleans(),
    at=st.lists(st.integers(min_value=0), max_size=8),
)
def test_whatever_arguments_hold_they_come_back_character_for_character(
    before: str, calls: list[tuple[str, dict[str, Any]]], spaced: bool, ascii_only: bool, at: list[int]
) -> None:
    dump = json.JSONEncoder(ensure_ascii=ascii_only, indent=1 if spaced else None).encode
    expected = tuple(ParsedCall(name, dump(arguments)) for name, arguments in calls)
    bodies = [f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}' for c in expected]
    hermes = before + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    text = [before.rstrip()] if before.strip() else []
    assert seen(parse("hermes", cut(hermes, at))) == [*text, *((call,) for call in expected)]
    mistral = f"{before}[TOOL_CALLS] [{', '.join(bodies)}]"
    assert seen(parse("mistral", cut(mistral, at))) == [*text, expected]
    llama = f'{{"name": {json.dumps(calls[0][0])}, "parameters": {expected[0].arguments}}}'
    assert seen(parse("llama3", cut(llama, at))) == [expected[:1]]


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
F1 = (ParsedCall("f", '{"x": 1}'),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"so\n{CALL}\n{CALL}\n", ["so", F1, F1]),
        (f"{CALL} and then", [F1, " and then"]),
        # Cut short.
        (f"{CALL}{CALL[:-1]}", [F1, CALL[:-1]]),
        (f"<tool_call>{CALL}", ["<tool_call>", F1]),
        ("<tool_call>f(x=1)</tool_call>", ["<tool_call>f(x=1)</tool_call>"]),
        ('<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),
        (CALL.replace("1", "NaN"), [CALL.replace("1", "NaN")]),
        # Arguments are an object.
        (CALL.replace('{"x": 1}', '"{}"'), [CALL.replace('{"x": 1}', '"{}"')]),
        (CALL.replace("}}", "}} }"), [CALL.replace("}}", "}} }")]),
        ("a < b and <tool", ["a < b and <tool"]),
        ("  \n ", ["  \n "]),
        ("", []),
    ],
)
def test_hermes_calls_and_what_only_looks_like_one(text: str, expected: list[Any]) -> None:
    assert seen(parse("hermes", [text])) == expected


@pytest.mark.parametrize(
    ("dialect", "text", "expected"),
    [
        (
            "mistral",
            '[TOOL_CALLS][{"name":"f","arguments":{},"id":"abc123DEF"}]',
            [(ParsedCall("f", "{}", "abc123DEF"),)],
        ),
        ("mistral", "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name":"f","arguments":{}}',
            ['[TOOL_CALLS] [{"name":"f","arguments":{}}'],
        ),
        ("mistral", "[TOOL] ok", ["[TOOL] ok"]),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', [(ParsedCall("f", "{}"),)]),
        ("llama3", ' {"name": "f", "parameters": {"x": 1}} \n', [F1]),
        ("llama3", '{"answer": 42}', ['{"answer": 42}']),
        ("llama3", 'It is {"name": "f", "parameters": {}}', ['It is {"name": "f", "parameters": {}}']),
    ],
)
def test_calls_of_other_dialects(dialect: str, text: str, expected: list[Any]) -> None:
    assert seen(parse(dialect, list(text))) == expected


XML_CALL = (
    "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n"
    "<parameter=s>\na\n<b>\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"so\n\n{XML_CALL}\n", ["so", (ParsedCall("f", '{"x": 3, "s": "a\\n<b>"}'),)]),
        ("<tool_call><function=g></function></tool_call>", [(ParsedCall("g", "{}"),)]),
        # A parameter twice.
        (XML_CALL.replace("=s>", "=x>"), [XML_CALL.replace("=s>", "=x>")]),
        (
            XML_CALL.replace("</function>", "so </function>"),
            [XML_CALL.replace("</function>", "so </function>")],
        ),
        (XML_CALL.replace("<function=f>", "<function=>"), [XML_CALL.replace("<function=f>", "<function=>")]),
        (
            f"<tool_call><function={XML_CALL}",
            ["<tool_call><function=", (ParsedCall("f", '{"x": 3, "s": "a\\n<b>"}'),)],
        ),
        (XML_CALL[:-1], [XML_CALL[:-1]]),
    ],
)
def test_calls_in_angle_brackets_and_what_only_looks_like_one(text: str, expected: list[Any]) -> None:
    assert seen(parse("qwen_xml", [text])) == seen(parse("qwen_xml", list(text))) == expected


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        ("3", None, "3"),
        ("3", {}, "3"),
        ("3", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        # To JSON Schema, a number without a fraction is an integer.
        ("3.0", {"type": "integer"}, 3.0),
        ("3.0", {"enum": [3]}, 3.0),
        ("3", {"type": "number"}, 3),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nothing", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "nothing"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("NaN", {"type": "number"}, "NaN"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
    ],
)
def test_the_schema_says_what_a_bare_value_stands_for(text: str, schema: Any, value: Any) -> None:
    found = read_value(text, schema)
    assert (found, type(found)) == (value, type(value))


#: As pydantic writes them.
REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/Place"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None},
        "count": {"allOf": [{"$ref": "#/definitions/Count"}], "default": 1},
        "kind": {"$ref": "#/$defs/Kind"},
        "same": {"$ref": "#/properties/count"},
        "version": {"const": 2},
    },
    "$defs": {
        "Place": {"type": "object", "properties": {"city": {"type": "string"}}},
        "Kind": {"enum": ["1", "2"], "type": "string"},
    },
    "definitions": {"Count": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("place", '{"city": "Ulm"}', {"city": "Ulm"}),
        ("maybe", '{"city": "Ulm"}', {"city": "Ulm"}),
        ("maybe", "null", None),
        ("count", "3", 3),
        ("kind", "1", "1"),
        ("same", "4", 4),
        ("version", "2", 2),
    ],
)
def test_a_reference_in_the_parameters_says_what_a_value_stands_for(name: str, text: str, value: Any) -> None:
    call = f"<tool_call>\n<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parser = BY_NAME["qwen_xml"].parser({"f": REFERRING})
    (item,) = [*parser.push(call), *parser.flush()]
    assert json.loads(item.calls[0].arguments) == {name: value}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Nowhere"},
        {"$ref": "https://example.com/schema"},
        {"$ref": 5},
        {"$ref": "#/properties/x"},
        {"anyOf": [{"$ref": "#/properties/x"}]},
        {"allOf": 5},
    ],
)
def test_a_reference_that_leads_nowhere_leaves_the_value_as_it_is_spelled(schema: Any) -> None:
    assert read_value("1", schema, {"properties": {"x": schema}}) == "1"


def test_text_flows_at_once_and_only_what_may_be_markup_waits() -> None:
    parser = BY_NAME["hermes"].parser(SCHEMAS)
    shown = [
        [item.text for item in parser.push(piece)] for piece in ["Hi", " there", " <", "3", " <tool_ca", "n"]
    ]
    assert shown == [["Hi"], [" there"], [], [" <3"], [], [" <tool_can"]]
    plain = BY_NAME["llama3"].parser(SCHEMAS)
    assert [item.text for piece in ("It", " is {", "}") for item in plain.push(piece)] == ["It", " is {", "}"]


def test_a_call_comes_out_with_its_last_character() -> None:
    parser = BY_NAME["hermes"].parser(SCHEMAS)
    assert [item for character in CALL[:-1] for item in parser.push(character)] == []
    assert parser.push(CALL[-1]) == [Item(CALL, "", F1)]


def test_deep_nesting_is_text_not_a_failure() -> None:
    deep = '{"name": "f", "arguments": ' + '{"x":' * 5000 + "1" + "}" * 5000 + "}"
    text = f"<tool_call>{deep}</tool_call>"
    assert seen(parse("hermes", [text])) == [text]
    assert seen(parse("llama3", [deep])) == [deep]


@pytest.mark.parametrize("spelled", ["1e999", "-1e999", '"\\ud800"', '["\\udc00"]', '{"a": [1e400]}'])
def test_what_no_json_text_can_hold_stays_text(spelled: str) -> None:
    schema = {"type": ["number", "string", "array", "object"]}
    assert read_value(spelled, schema) == spelled


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5},
        {"type": {"a": 1}},
        {"anyOf": 5},
        {"oneOf": {"a": 1}},
        {"anyOf": True},
        {"type": [1, None]},
    ],
)
def test_a_schema_that_is_none_leaves_the_value_as_it_is_spelled(schema: Any) -> None:
    assert read_value("1", schema) == "1"
