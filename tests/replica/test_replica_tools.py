"""Tools in requests: what templates do with them, history, grammars of answers, labels of calls."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken

from midstream.core.errors import InvalidRequest
from midstream.core.types import TokenRecord
from midstream.engine.embedded.constraint import Constraints
from midstream.models.tiny_moe import CHAT_TEMPLATE, TOKEN_ID, build_tokenizer
from midstream.replica.request.schema import parse_chat
from midstream.replica.response.choice import CallStage, Choice, Piece, ToolCall, id_maker
from midstream.replica.text import grammar as grammars
from midstream.replica.text.chat import TextModel
from midstream.replica.text.grammar import response_schema
from midstream.replica.text.grammarcheck import compile_problem
from midstream.replica.text.tool_dialects import DIALECTS
from midstream.replica.text.tools import ToolPlan, check_template, plan_tools, prepare_history

EOS = TOKEN_ID["<|im_end|>"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
# The markups of three families, reduced to what matters here.
LISTING = "{%- if tools -%}{{ tools | tojson }}{%- endif -%}"
TURN = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
OBJECTS_ONLY = (
    LISTING + TURN + "{{ m.content }}{%- for c in m.tool_calls -%}{{ '\\n<tool_call>\\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ "\\n" }}</tool_call>'
    "{%- endfor -%}<|im_end|>{%- endfor -%}"
)
MISTRAL = (
    LISTING + TURN + "{%- if m.tool_calls -%}[TOOL_CALLS] [{%- for c in m.tool_calls -%}"
    "{%- if c.id | length != 9 -%}{{ raise_exception('ids have 9 characters') }}{%- endif -%}"
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{%- if not loop.last -%}, {% endif -%}{%- endfor -%}]{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
)
LLAMA = (
    LISTING + TURN + "{%- if 'tool_calls' in m -%}{%- if m.tool_calls | length != 1 -%}"
    "{{ raise_exception('one call only') }}{%- endif -%}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
)
XML = (
    LISTING
    + TURN
    + "{%- for c in m.tool_calls -%}<call>{{ c.function.name }}</call>{%- endfor -%}{%- endfor -%}"
)
QWEN_XML = (
    LISTING
    + TURN
    + "{{ m.content }}{%- for c in m.tool_calls -%}{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{%- for key, value in c.function.arguments.items() -%}{{ '<parameter=' + key + '>\\n' }}"
    "{{ (value if value is string else value | tojson) + '\\n</parameter>\\n' }}{%- endfor -%}"
    "{{ '</function>\\n</tool_call>' }}{%- endfor -%}{%- endfor -%}"
)
NO_TOOLS = TURN + "{{ m.content }}<|im_end|>{%- endfor -%}"


def build(*given: Any) -> str | None:
    """The grammar, compiled in this process to find mistakes."""
    return grammars.build(
        *given, lambda text, *, begun: compile_problem(LLTokenizer("byte"), text, begun=begun)
    )


def text_model(template: str) -> TextModel:
    tokenizer = build_tokenizer().backend_tokenizer
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    return TextModel(tokenizer, template, {})


def plan(**fields: Any) -> ToolPlan | None:
    body = {"model": "m", "messages": [], "tools": TOOLS, **fields}
    return plan_tools(parse_chat(json.dumps(body).encode()))


def refusal(call: Any, *arguments: Any, **fields: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        call(*arguments, **fields)
    return caught.value.message, caught.value.param


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, (True, "text", "hermes")),
        (OBJECTS_ONLY, (True, "object", "hermes")),
        (MISTRAL, (True, "object", "mistral")),
        (LLAMA, (True, "object", "llama3")),
        (QWEN_XML, (True, "object", "qwen_xml")),
        (XML, (True, "object", None)),
        (NO_TOOLS, (False, None, None)),
        ("{{ raise_exception('never') }}", (False, None, None)),
    ],
)
def test_a_template_is_asked_what_it_does_with_tools(template: str, expected: tuple[Any, ...]) -> None:
    found = text_model(template).tools
    dialect = found.format.dialect.name if found.format else None
    assert (found.listed, found.arguments, dialect) == expected


def test_a_format_is_the_templates_own_spelling() -> None:
    hermes = text_model(OBJECTS_ONLY).tools.format
    assert hermes is not None
    assert hermes.open == '<tool_call>\n{"name": "'
    assert (hermes.between, hermes.close, hermes.joint) == ('", "arguments": ', "}\n</tool_call>", "\n")
    assert hermes.separators == (", ", ": ")
    mistral = text_model(MISTRAL).tools.format
    assert mistral is not None
    assert (mistral.begin, mistral.joint, mistral.end) == ("[TOOL_CALLS] [", ", ", "]")
    llama = text_model(LLAMA).tools.format
    assert llama is not None
    assert (llama.open, llama.between, llama.joint) == ('{"name": "', '", "parameters": ', None)


def test_tools_need_a_template_that_defines_them() -> None:
    for template, why in [
        (NO_TOOLS, "tools: this model's chat template does not define tools"),
        (
            XML,
            "tools: the calls that this model's chat template writes are of a format this server does not read",
        ),
    ]:
        assert refusal(check_template, text_model(template).tools) == (why, "tools")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type: invalid enum value 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: this field is required"),
        (
            {"tools": [*TOOLS, {"type": "function", "function": {"name": "a b"}}]},
            "tools[2].function.name: expected str matching regex '^[a-zA-Z0-9_.-]{1,128}$'",
        ),
        ({"tools": TOOLS + TOOLS[:1]}, "tools: the name 'weather' is given twice"),
        ({"tools": TOOLS * 65}, "tools: at most 128, got 130"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice: needs tools"),
        (
            {"tool_choice": "any"},
            "tool_choice: must be none, auto, required or an object that names a function, got 'any'",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice: 'x' is not among the tools",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: this field is required"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls: expected bool | null, got int"),
    ],
)
def test_a_mistake_in_the_tools_is_named(fields: dict[str, Any], message: str) -> None:
    assert refusal(plan, **fields) == (message, re.split(r"[:.\[]", message)[0])


@pytest.mark.parametrize(("size", "taken"), [(128, True), (129, False)])
def test_a_tool_of_an_mcp_server_has_room_for_the_name_of_the_server(size: int, taken: bool) -> None:
    """Claude Code calls it mcp__SERVER__TOOL, which is often longer than the 64 characters that OpenAI takes."""
    name = "mcp__" + "a" * (size - 5)
    tools = [{"type": "function", "function": {"name": name}}]
    named = {"type": "function", "function": {"name": name}}
    if taken:
        planned = plan(tools=tools, tool_choice=named)
        assert planned is not None
        assert planned.forced
    else:
        assert refusal(plan, tools=tools)[0].startswith("tools[0].function.name: expected str matching regex")


def test_the_choice_says_which_tools_may_be_called_and_whether_they_must() -> None:
    named = {"type": "function", "function": {"name": "stop"}}
    found = [plan(), plan(tool_choice="auto"), plan(tool_choice="required"), plan(tool_choice=named)]
    assert [(p.callable, p.forced, p.parallel) for p in found if p] == [
        ((0, 1), False, True),
        ((0, 1), False, True),
        ((0, 1), True, True),
        ((1,), True, False),
    ]
    assert plan(tool_choice="none") is None
    single = plan(parallel_tool_calls=False)
    assert single is not None
    assert not single.parallel


def test_earlier_calls_reach_the_template_in_the_form_it_renders() -> None:
    def history(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    as_generated = '{"city":"Oslo",  "days": 3}'
    kept = text_model(CHAT_TEMPLATE)
    rendered = kept.render(prepare_history(history(as_generated), kept.tools.arguments), TOOLS)
    assert f'{{"name": "weather", "arguments": {as_generated}}}\n</tool_call><|im_end|>' in rendered
    parsed = text_model(OBJECTS_ONLY)
    for arguments in (as_generated, {"city": "Oslo", "days": 3}):
        rendered = parsed.render(prepare_history(history(arguments), parsed.tools.arguments), TOOLS)
        assert '"arguments": {"city": "Oslo", "days": 3}}\n</tool_call>' in rendered
    where = "messages[0].tool_calls[0].function.arguments"
    message = f"{where}: this model's chat template needs a JSON object"
    assert refusal(prepare_history, history("[1]"), "object") == (message, "messages")
    assert refusal(prepare_history, history("{"), "object") == (message, "messages")
    wrong = "messages[0].tool_calls[0].function.arguments: expected str | object | null, got int"
    assert refusal(prepare_history, history(1), "text") == (wrong, "messages")


def test_earlier_calls_that_the_template_would_leave_out_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    expected = "messages[0].tool_calls: this model's chat template does not define them"
    assert refusal(prepare_history, [message], None) == (expected, "messages")
    by_user = [{"role": "user", "content": "", "tool_calls": [call]}]
    assert refusal(prepare_history, by_user, "text")[0].startswith(
        "messages[0].tool_calls: must be a list, on"
    )
    old = [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]
    assert refusal(prepare_history, old, "text")[0].startswith("messages[0].function_call: not supported")
    empty = {"role": "assistant", "content": "x", "tool_calls": None}
    assert prepare_history([empty], None) == [{"role": "assistant", "content": "x"}]


def accepts(grammar: str, text: str, model: TextModel) -> bool:
    """Whether the grammar allows exactly this text, token by token as the model's tokenizer cuts it, and then the end."""
    constraints = Constraints(model.tokenizer.to_str(), model.tokenizer.get_vocab_size(), [EOS])
    matcher = constraints.matcher(grammar, [EOS])
    for token in [*model.tokenizer.encode(text).ids, EOS]:
        mask = matcher.mask()
        assert mask is not None, matcher.error
        if not np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[token]:
            return False
        if token != EOS:
            matcher.accept(token)
    return True


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, OBJECTS_ONLY, MISTRAL, LLAMA], ids=lambda t: str(len(t)))
def test_forced_calls_are_spelled_as_the_template_spells_them_again(template: str) -> None:
    model = text_model(template)
    form = model.tools.format
    assert form is not None

    def written(*calls: tuple[str, str]) -> str:
        bodies = (form.open + name + form.between + arguments + form.close for name, arguments in calls)
        return form.begin + (form.joint or " ").join(bodies) + form.end

    one, stop = ("weather", '{"city": "Oslo", "days": 3}'), ("stop", "{}")
    named = {"type": "function", "function": {"name": "stop"}}
    several, single, only = (
        build(None, plan(**fields), form, model, (EOS,))
        for fields in (
            {"tool_choice": "required"},
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": named},
        )
    )
    assert several is not None
    assert single is not None
    assert only is not None
    assert accepts(several, written(one), model)
    assert accepts(several, written(one, stop, one), model) == (form.joint is not None)
    assert not accepts(several, written(("weather", '{"city": "Bonn"}')), model)
    assert not accepts(several, written(("stop", '{"x": 1}')), model)
    assert not accepts(several, "so " + written(one), model)
    assert not accepts(several, "", model)
    assert accepts(single, written(stop), model)
    assert not accepts(single, written(one, stop), model)
    assert accepts(only, written(stop), model)
    assert not accepts(only, written(one), model)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MISTRAL, LLAMA], ids=lambda t: str(len(t)))
def test_strict_tools_leave_text_free_and_hold_calls_to_their_schemas(template: str) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    model = text_model(template)
    form = model.tools.format
    assert form is not None
    grammar = build(None, plan(tools=strict), form, model, (EOS,))
    assert grammar is not None
    good, bad = (
        form.begin + form.open + "weather" + form.between + arguments + form.close + form.end
        for arguments in ('{"city": "Rome"}', '{"town": "Rome"}')
    )
    for text in ("", "Hello {} é", "<think>hm</think>so", good):
        assert accepts(grammar, text, model), text
    assert not accepts(grammar, bad, model)
    # Nothing is strict: nothing to follow.
    assert build(None, plan(), form, model, (EOS,)) is None


def test_a_call_whose_values_are_typed_by_the_schema_renders_again_as_it_was_written() -> None:
    model = text_model(QWEN_XML)
    assert model.tools.format is not None
    written = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    wanted = plan()
    assert wanted is not None
    parser = model.tools.format.dialect.parser(wanted.schemas)
    (item,) = parser.push(written)
    (call,) = item.calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo", "days": 3})
    earlier = {"function": {"name": call.name, "arguments": call.arguments}}
    history = [{"role": "assistant", "content": "", "tool_calls": [earlier]}]
    assert model.render(prepare_history(history, model.tools.arguments), TOOLS).endswith(written)


def test_calls_that_cannot_be_held_to_a_grammar_are_not_forced() -> None:
    model = text_model(QWEN_XML)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    end = "is not supported with the calls that this model's chat template writes"
    for schema, fields, what, param in [
        (None, {"tool_choice": "required"}, "required or a named function", "tool_choice"),
        (None, {"tools": strict}, "strict", "tools"),
        (SCHEMA, {}, "with tools", "response_format"),
    ]:
        wanted = plan(**fields)  # type: ignore[arg-type]
        found = refusal(build, schema, wanted, model.tools.format, model, (EOS,))
        assert found == (f"{param}: {what} {end}", param)
    assert build(None, plan(), model.tools.format, model, (EOS,)) is None


def test_an_answer_may_be_json_or_calls_when_both_are_asked_for() -> None:
    model = text_model(CHAT_TEMPLATE)
    grammar = build(SCHEMA, plan(), model.tools.format, model, (EOS,))
    assert grammar is not None
    assert accepts(grammar, '{"city":"Oslo"}', model)
    assert accepts(grammar, '{ "city" :\n  "Rome", "days": 1}', model)
    assert accepts(grammar, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', model)
    assert not accepts(grammar, "so", model)
    # Blanks have a bound.
    assert not accepts(grammar, '{"city":' + " " * 33 + '"Oslo"}', model)


def test_response_formats() -> None:
    named = {"name": "city", "schema": SCHEMA, "strict": True}
    assert response_schema({"type": "json_schema", "json_schema": named}) == SCHEMA
    assert response_schema({"type": "json_object"}) == {"type": "object"}
    assert response_schema({"type": "json_object", "schema": SCHEMA}) == SCHEMA
    assert response_schema({"type": "text"}) is None
    assert response_schema(None) is None
    missing = refusal(response_schema, {"type": "json_schema"})
    assert missing == ("response_format.json_schema: this field is required", "response_format")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "colour"}, "Invalid type: colour"),
        ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"enum": ["x" * 300_000]}, "longer than 262144 characters"),
        (
            {"type": "string", "pattern": "(?=a)"},
            "regex parse error: look-around, including look-ahead and look-behind, is not supported",
        ),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_the_reason(
    schema: dict[str, Any], why: str
) -> None:
    model = text_model(CHAT_TEMPLATE)
    expected = (f"response_format: the schema: {why}", "response_format")
    assert refusal(build, schema, None, None, model, (EOS,)) == expected
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}},
    ]
    forced = plan(tools=tools, tool_choice="required")
    message, param = refusal(build, None, forced, model.tools.format, model, (EOS,))
    assert message.startswith("tools[2].function.parameters: ")
    assert param == "tools"


def test_grammars_that_are_too_large_together_are_refused() -> None:
    big = {"enum": ["x" * 9000]}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": {"a": big}}}}
        for i in range(30)
    ]
    model = text_model(CHAT_TEMPLATE)
    message, param = refusal(
        build, None, plan(tools=tools, tool_choice="required"), model.tools.format, model, (EOS,)
    )
    assert message.startswith("tools: the schemas make a grammar of 2")
    assert param == "tools"


def run_stage(text: str, snapshots: list[str], parallel: bool = True) -> list[Piece]:
    """One token per character, each under its snapshot; tags are single special tokens."""
    model = text_model(CHAT_TEMPLATE)
    dialect = DIALECTS[0]
    choice = Choice(0, model.vocabulary, (), {EOS}, model.marker_ids(dialect.markers))
    numbers = iter(range(9))
    stage, pieces = CallStage(dialect.parser({}), parallel, lambda: f"call-{next(numbers)}"), list[Piece]()
    for token, snapshot in zip(model.tokenizer.encode(text).ids, snapshots, strict=False):
        pieces += stage.feed(choice.feed(TokenRecord(token, -1.0, -1.0, snapshot)))
        if stage.complete:
            break
    return pieces + stage.end()


def test_every_record_stays_with_its_snapshot_and_a_call_with_the_token_that_completed_it() -> None:
    body = '{"name": "f", "arguments": {}}'
    text = f"Hi <tool_call>{body}</tool_call> <tool_call>?"
    count = len(text_model(CHAT_TEMPLATE).tokenizer.encode(text).ids)
    labels = ["v1"] * 10 + ["v2"] * (count - 11) + ["v3"]
    pieces = run_stage(text, labels)
    records = [(s.record.token_id, s.record.snapshot) for p in pieces for s in p.tokens]
    assert records == list(zip(text_model(CHAT_TEMPLATE).tokenizer.encode(text).ids, labels, strict=True))
    assert all(s.record.snapshot == piece.snapshot for piece in pieces for s in piece.tokens)
    assert [(p.snapshot, p.calls) for p in pieces if p.calls] == [("v2", (ToolCall(0, "call-0", "f", "{}"),))]
    texts = [(p.snapshot, p.text) for p in pieces if p.text]
    assert texts == [("v1", "H"), ("v1", "i"), ("v2", " <tool_call>"), ("v3", "?")]


def test_a_single_call_is_complete_at_its_closing_tag() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    pieces = run_stage(text * 2, ["v1"] * 200, parallel=False)
    assert [call.name for piece in pieces for call in piece.calls] == ["f"]
    assert sum(len(piece.tokens) for piece in pieces) == 2 + len('{"name": "f", "arguments": {}}')


def test_ids_are_unique_and_of_the_length_a_template_insists_on() -> None:
    default, nine = id_maker(None, "a"), id_maker(9, "b")
    made = [default(), default(), nine(), nine()]
    assert len(set(made)) == 4
    assert [len(i) for i in made] == [29, 29, 9, 9]
    assert all(i.startswith("call_") for i in made[:2])
    assert all(i.isalnum() for i in made[2:])
    assert [id_maker(9, "b")(), id_maker(None, "c")()] == [made[2], id_maker(None, "c")()]
    assert id_maker(9, "c")() not in made
