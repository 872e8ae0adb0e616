"""No schema that is accepted gives an answer that does not fit it, or none at all: searched, and seen one by one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import tiers
from schema_search import Schema, SchemaMaker, answer, why_invalid

from midstream.core.errors import InvalidRequest
from midstream.engine.embedded.constraint import Constraints
from midstream.models.tiny_moe import TOKEN_ID, VOCAB_SIZE, build_tokenizer
from midstream.replica.text import grammar
from midstream.replica.text.grammarcheck import GrammarChecks

EOS = TOKEN_ID["<|im_end|>"]
ANSWERS = 9
INTEGER = {"type": "integer"}


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(build_tokenizer().backend_tokenizer.to_str(), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def checks() -> Any:
    made = GrammarChecks()
    yield made
    made.close()


def built(schema: Schema, checks: GrammarChecks) -> str:
    # Only tools need the tokenizer.
    made = grammar.build(schema, None, None, None, (EOS,), checks.problem)  # type: ignore[arg-type]
    assert made is not None
    return made


def test_no_accepted_schema_has_an_answer_that_does_not_fit_it(
    constraints: Constraints, checks: GrammarChecks
) -> None:
    seen, wrong = Counter[str](), list[tuple[int, str, Schema, bytes]]()
    for seed in range(tiers.of_tier(fast=15, test=60, all=2000)):
        rng = random.Random(seed)
        schema = SchemaMaker(rng).make()
        try:
            accepted = built(schema, checks)
        except InvalidRequest:
            seen["refused"] += 1
            continue
        for _ in range(ANSWERS):
            end, text = answer(constraints, accepted, EOS, rng)
            seen[end] += 1
            problem = why_invalid(schema, text) if end == "stop" else end if end == "dead_end" else None
            if problem is not None:
                wrong.append((seed, problem, schema, text))
    assert wrong == []
    # The search is not in vain.
    assert seen["stop"] > 5 * seen["refused"], seen


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (
            {
                "properties": {"score": INTEGER},
                "patternProperties": {"^score$": INTEGER},
                "additionalProperties": False,
            },
            "patternProperties: every name that it matches is in properties or required; leave it out",
        ),
        (
            {"allOf": [{"patternProperties": {"^(a|b)$": INTEGER}}, {"required": ["a", "b"]}]},
            "patternProperties: every name that it matches is in properties or required; leave it out",
        ),
        (
            {"patternProperties": {"^a": INTEGER, "b$": {"type": "null"}}},
            "patternProperties: patterns that may match the same name are not supported",
        ),
        (
            {"type": "object", "minProperties": 2},
            "minProperties 2: at most one more than the required properties, which are 0",
        ),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
            "exclusiveMinimum 0: not supported with another bound that is below 1; use minimum",
        ),
        (
            {"type": "number", "exclusiveMaximum": True, "maximum": 0, "minimum": -0.5},
            "exclusiveMaximum 0: not supported with another bound that is above -1; use maximum",
        ),
        (
            {"const": 2**53 + 1},
            "const 9007199254740993: a number must be below 2**53 and have at most 15 digits",
        ),
        ({"enum": [[1e-30]]}, "enum 1e-30: a number must be below 2**53 and have at most 15 digits"),
        (
            {"type": "number", "minimum": 1e19},
            "minimum 1e+19: a number must be below 2**53 and have at most 15 digits",
        ),
        ({"type": "string", "format": "unknown"}, "Unknown format: unknown"),
        ({"type": "string", "format": "color"}, "Unknown format: color"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        (
            {"oneOf": [INTEGER, {"type": "number"}]},
            "oneOf is not supported where its alternatives may overlap; use anyOf",
        ),
        (
            {"properties": {"a": {"const": "\x01"}}},
            "const: control characters need additionalProperties: false in all objects",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
            "no answer can match it: it asks for itself before it asks for anything",
        ),
        (
            {"type": "string", "pattern": "^a$", "minLength": 2},
            "no text matches its pattern, format and length together",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_the_library_would_follow_wrongly_is_refused_by_name(
    schema: Schema, why: str, checks: GrammarChecks
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        built(schema, checks)
    assert refused.value.message == f"response_format: the schema: {why}"


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "object", "properties": {"a": INTEGER}}, b'{"b":"x"}'),
        ({"patternProperties": {"^x": INTEGER}, "additionalProperties": False}, b'{"x1":1}'),
        ({"properties": {"a": INTEGER}, "patternProperties": {"^a": INTEGER}}, b'{"a":1,"ab":2}'),
        ({"type": "object", "minProperties": 2, "required": ["a"]}, b'{"a":1,"b":2}'),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, b"0.5"),
        ({"type": "string", "format": "date"}, b'"2024-02-29"'),
        ({"const": "\x01"}, b'"\\u0001"'),
        ({"const": 2**53 - 1}, b"9007199254740991"),
        ({"oneOf": [INTEGER, {"type": "string"}]}, b'"a"'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_stands_beside_it_is_accepted(
    schema: Schema, fits: bytes, constraints: Constraints, checks: GrammarChecks
) -> None:
    assert why_invalid(schema, fits) is None
    assert takes(constraints, built(schema, checks), fits)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": INTEGER}}, b'{"\\u0061":"x"}'),
        ({"patternProperties": {"^a": INTEGER}}, b'{"\\u0061":"x"}'),
        ({"type": "string", "format": "date"}, b'"2023-02-29"'),
        ({"type": "string", "format": "date-time"}, b'"1900-02-29T00:00:00Z"'),
        ({"type": "string", "format": "date"}, b'"0000-01-01"'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_does_not_fit_is_not_written(
    schema: Schema, text: bytes, constraints: Constraints, checks: GrammarChecks
) -> None:
    assert not takes(constraints, built(schema, checks), text)


def takes(constraints: Constraints, accepted: str, text: bytes) -> bool:
    """Whether the grammar allows the text and an end behind it."""
    follower = constraints.matcher(accepted, (EOS,))
    for token in [*text, EOS]:
        mask = follower.mask()
        if mask is None or not mask[token >> 3] >> (token & 7) & 1:
            return False
        if token != EOS:
            follower.accept(token)
    return True
