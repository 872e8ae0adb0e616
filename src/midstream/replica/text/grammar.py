"""What an answer must match, as a grammar for the engine: response formats and forced tool calls. Imports no torch.

Always holds: a grammar that this module returns is within the bounds of schema_bounds.py and has been compiled by the library
once, so the engine can compile it too, but for what depends on the tokenizer; a schema that cannot be compiled is refused with
the field it stands in.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from midstream.core.decoding import converted
from midstream.core.errors import InvalidRequest
from midstream.replica.text import schemarules
from midstream.replica.text.reasoning_tags import Place, ReasoningFormat
from midstream.replica.text.schema_bounds import CHARACTERS_MAX, problem_of_size
from midstream.replica.text.toolformat import ToolFormat
from midstream.replica.text.tools import ToolPlan

GRAMMAR_MAX = CHARACTERS_MAX
#: Without a bound a model may write blanks for ever.
_SPACE_BETWEEN = r"[ \t\r\n]{1,32}"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Lexicon(Protocol):
    """The tokenizer's part in a grammar (TextModel is one)."""

    def literally(self, text: str) -> str:
        """`text` in the grammar language, with special tokens as such."""

    def specials(self, without: frozenset[int]) -> str:
        """Any special token but those."""

    def marker_ids(self, markers: tuple[str, ...]) -> frozenset[int]:
        """The ids of the tags that are tokens of their own."""


class ProblemWith(Protocol):
    """Why a grammar does not compile, None if it does (GrammarChecks.problem is one)."""

    def __call__(self, grammar: str, *, begun: bool) -> str | None: ...


class _JsonSchema(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class _SchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: _JsonSchema


class _ObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None


class _TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    pass


_FORMATS: Any = _SchemaFormat | _ObjectFormat | _TextFormat


def response_schema(response_format: Any) -> dict[str, Any] | None:
    """The JSON schema of the answer, not compiled yet; None: any text. Raises InvalidRequest."""
    if response_format is None:
        return None
    param = "response_format"
    wanted: _SchemaFormat | _ObjectFormat | _TextFormat = converted(response_format, _FORMATS, param, param)
    if isinstance(wanted, _TextFormat):
        return None
    schema = wanted.json_schema.schema if isinstance(wanted, _SchemaFormat) else wanted.schema
    return {"type": "object"} if schema is None else schema


def build(
    schema: dict[str, Any] | None,
    plan: ToolPlan | None,
    tool_format: ToolFormat | None,
    lexicon: Lexicon,
    eos_token_ids: tuple[int, ...],
    problem_with: ProblemWith,
    rule: str | None = None,
    answer_param: str = "response_format",
) -> str | None:
    """The grammar of an answer, None where any text will do. Takes as long as `problem_with`. Raises InvalidRequest.

    rule: what the answer must be where it is no JSON. answer_param: the field that asked for schema or rule.
    """
    rules: list[str] = []
    starts: list[str] = []
    if schema is not None and not (plan and plan.forced):
        _check_schema(schema, f"{answer_param}: the schema", answer_param, problem_with)
        rules.append(f"body: %json {_json(schema, whitespace_pattern=_SPACE_BETWEEN)}")
        starts.append("body")
    elif rule is not None:
        rules.append(f"body: {rule}")
        starts.append("body")
    if plan is not None and tool_format is not None and (plan.constrained or schema is not None):
        _check_forcible(plan, tool_format)
        rules += _calls(plan, tool_format, lexicon, problem_with)
        if plan.forced or schema is not None:
            starts.append("calls")
        else:
            rules += _text_and_calls(plan, tool_format, lexicon, eos_token_ids)
            starts.append("text_and_calls")
    if not starts:
        return None
    grammar = "\n".join([f"start: {' | '.join(starts)}", *rules])
    param = answer_param if starts == ["body"] else "tools"
    if len(grammar) > GRAMMAR_MAX:
        message = f"{param}: the schemas make a grammar of {len(grammar)} characters, at most {GRAMMAR_MAX}"
        raise InvalidRequest(message, param=param)
    problem = problem_with(grammar, begun=False)
    if problem is not None:
        raise InvalidRequest(f"{param}: {problem}", param=param)
    return grammar


def behind_thinking(
    grammar: str,
    form: ReasoningFormat,
    place: Place,
    lexicon: Lexicon,
    eos_token_ids: tuple[int, ...],
    *,
    exact: bool,
) -> str:
    """A grammar of `build`, which begins behind the thinking: of a thought that is open, or that the answer may begin with.

    exact: no blanks may stand before what must match but those that the template writes there.
    """
    if place == "outside":
        return grammar
    closing = lexicon.marker_ids((form.closing,))
    special = lexicon.specials(closing | frozenset(eos_token_ids))
    text = f"THOUGHT ({special} THOUGHT)*" if special else "THOUGHT"
    closed = lexicon.literally(form.closing)
    if not closing:
        # Apart from each other, the library would take the tag for more of the thought.
        text, closed = f"(THOUGHT {special})*" if special else "", "CLOSED"
    after = f"({json.dumps(form.after_close)})?" if form.after_close else ""
    opened = lexicon.literally(form.opening)
    rules = [
        "start: thought answer" if place == "inside" else f"start: answer | {opened} thought answer",
        f"thought: {text} {closed} {after if exact else 'BLANKS?'}",
        r"BLANKS: /[ \t\r\n]{1,32}/",
        r"ANYTHING: /(.|\n)*/",
        f"ENDED: ANYTHING {json.dumps(form.closing)} ANYTHING",
        "THOUGHT: ANYTHING & ~ENDED",
        f"CLOSED: THOUGHT {json.dumps(form.closing)}",
    ]
    return "\n".join([*rules, f"answer: {grammar.removeprefix('start: ')}"])


def _check_forcible(plan: ToolPlan, tool_format: ToolFormat) -> None:
    if tool_format.dialect.forcible:
        return
    param, what = ("tools", "strict") if plan.strict else ("response_format", "with tools")
    if plan.forced:
        param, what = "tool_choice", "required or a named function"
    message = f"{param}: {what} is not supported with the calls that this model's chat template writes"
    raise InvalidRequest(message, param=param)


def _calls(plan: ToolPlan, tool_format: ToolFormat, lexicon: Lexicon, problem_with: ProblemWith) -> list[str]:
    """Rules for one call or several, in the template's own spelling."""
    f, literally = tool_format, lexicon.literally
    item, key = f.separators
    rules = []
    for index in plan.callable:
        function = plan.tools[index].function
        schema = _NO_ARGUMENTS if function.parameters is None else {"type": "object"} | function.parameters
        _check_schema(schema, f"tools[{index}].function.parameters", "tools", problem_with)
        arguments = _json(schema, whitespace_flexible=False, item_separator=item, key_separator=key)
        head, tail = literally(f.open + function.name + f.between), literally(f.close)
        rules += [f"call_{index}: {head} arguments_{index} {tail}", f"arguments_{index}: %json {arguments}"]
    several = f" ({literally(f.joint)} call)*" if plan.parallel and f.joint is not None else ""
    begin, end = (literally(text) if text else "" for text in (f.begin, f.end))
    call = " | ".join(f"call_{index}" for index in plan.callable)
    return [f"calls: {begin} call{several} {end}", f"call: {call}", *rules]


def _text_and_calls(
    plan: ToolPlan, tool_format: ToolFormat, lexicon: Lexicon, eos_token_ids: tuple[int, ...]
) -> list[str]:
    """Rules for any text in which whatever begins as a call is one."""
    opening = tool_format.dialect.opening
    own = lexicon.marker_ids(tool_format.dialect.markers)
    special = lexicon.specials(own | frozenset(eos_token_ids))
    rules = [r"TEXT: /(.|\n)*/", f"text: TEXT ({special} TEXT)*" if special else "text: TEXT"]
    if opening is None:
        # An answer that begins as an object is a call.
        plain = r"PLAIN: /[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"
        first = f"PLAIN ({special} TEXT)* | {special} text" if special else "PLAIN"
        return [*rules, plain, f"text_and_calls: {first} | calls"]
    if not lexicon.marker_ids((opening,)):
        message = f"tools: strict needs tool_choice required or a named function here, since {opening} is not a token"
        raise InvalidRequest(message, param="tools")
    if tool_format.begin:
        return [*rules, "text_and_calls: text calls?"]
    return [*rules, f"text_and_calls: text (call text){'*' if plan.parallel else '?'}"]


def _json(schema: dict[str, Any], **options: Any) -> str:
    ready = schemarules.prepared(schema)
    return json.dumps(ready | {"x-guidance": ready["x-guidance"] | options}, ensure_ascii=False)


def _check_schema(schema: dict[str, Any], where: str, param: str, problem_with: ProblemWith) -> None:
    problem = problem_of_size(schema) or schemarules.problem_of_keywords(schema)
    if problem is None:
        problem = problem_with(f"start: %json {_json(schema)}", begun=True)
    if problem is None:
        # Without blanks, which could repeat for ever in place of a name.
        left = [_json(asked, whitespace_flexible=False) for asked in schemarules.left_for_patterns(schema)]
        if any(problem_with(f"start: %json {asked}", begun=True) is not None for asked in left):
            problem = (
                "patternProperties: every name that it matches is in properties or required; leave it out"
            )
    if problem is not None:
        raise InvalidRequest(f"{where}: {problem}", param=param)
