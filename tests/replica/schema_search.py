"""Random schemas, random answers that their grammars allow, and a JSON Schema validator that judges both exactly.

Always holds: a seed gives the same schemas and answers. The validator is the draft 2020-12 one of jsonschema, with numbers as
fractions, formats checked, and ECMA 262's classes in patterns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jsonschema
import numpy as np

from midstream.engine.embedded.constraint import Constraints

Schema = dict[str, Any]

_NAMES = ("a", "b", "ab", "é", "x1", 'q"', "\\", "/", "")
#: Few of these may match the same name.
_PATTERNS = ("^a$", "^b", "^[0-9]+$", r"^\\", "^x", "^$", "^(q|é)", r"^\/", "^ab$", r"^\w{3}$")
_TEXT_PATTERNS = (*_PATTERNS, "b$", r"\d", ".", "[^a]", "a|^b", r"\.", "é", "")
_FORMATS = ("date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration", "color")
_KINDS = ("string", "integer", "number", "null", "boolean", "object", "array")


class SchemaMaker:
    """A random schema of at most so many levels for each `make`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def make(self) -> Schema:
        kinds: tuple[Callable[[int], Schema], ...] = (self._object, self._object, self._array, self._any)
        schema = self._rng.choice(kinds)(3)
        if "#/$defs" in json.dumps(schema):
            schema = {**schema, "$defs": {"X": self._any(2), "Y": self._leaf()}}
        return schema

    def _maybe(self, share: float) -> bool:
        return self._rng.random() < share

    def _any(self, depth: int) -> Schema:
        rng = self._rng
        if depth <= 0 or self._maybe(0.35):
            return self._leaf()
        kind = rng.choice(("object",) * 5 + ("array",) * 3 + ("anyOf", "allOf", "oneOf", "ref", "mixed"))
        if kind == "object":
            return self._object(depth)
        if kind == "array":
            return self._array(depth)
        if kind == "ref":
            return {"$ref": f"#/$defs/{rng.choice('XY')}"} | (self._leaf() if self._maybe(0.3) else {})
        if kind == "mixed":
            types = {"type": rng.sample(_KINDS, rng.randint(1, 3))} if self._maybe(0.7) else {}
            parts = (self._text(), self._number(), self._properties(depth - 1), self._items(depth - 1))
            return types | {key: value for part in parts if self._maybe(0.4) for key, value in part.items()}
        beside = rng.choice(({}, {}, self._leaf(), self._object(depth - 1)))
        return {kind: [self._any(depth - 1) for _ in range(rng.randint(1, 3))]} | beside

    def _leaf(self) -> Schema:
        kind = self._rng.choice(
            ("string", "string", "integer", "number", "null", "boolean", "enum", "const", "")
        )
        if kind == "string":
            return {"type": kind} | self._text()
        if kind in ("integer", "number"):
            return {"type": kind} | self._number()
        if kind == "enum":
            return {kind: [self._value() for _ in range(self._rng.randint(1, 4))]}
        if kind == "const":
            return {kind: self._value()}
        return {"type": kind} if kind else {}

    def _part(self, depth: int) -> Any:
        return self._rng.choice((True, False, True)) if self._maybe(0.12) else self._any(depth)

    def _object(self, depth: int) -> Schema:
        return {"type": "object"} | self._properties(depth)

    def _array(self, depth: int) -> Schema:
        return {"type": "array"} | self._items(depth)

    def _properties(self, depth: int) -> Schema:
        rng, made = self._rng, Schema()
        names = rng.sample(_NAMES, rng.randint(0, 3))
        if self._maybe(0.7):
            made["properties"] = {name: self._part(depth - 1) for name in names}
        if self._maybe(0.4):
            made["patternProperties"] = {
                pattern: self._part(depth - 1) for pattern in rng.sample(_PATTERNS, rng.choice((1, 1, 2)))
            }
        if self._maybe(0.6):
            made["additionalProperties"] = rng.choice((False, False, True, self._any(depth - 1)))
        if self._maybe(0.4):
            made["required"] = names[: rng.randint(0, len(names))] + rng.sample(_NAMES, rng.choice((0, 0, 1)))
            made["required"] = list(dict.fromkeys(made["required"]))
        for keyword in ("minProperties", "maxProperties"):
            if self._maybe(0.12):
                made[keyword] = rng.randint(0, 3)
        return made

    def _items(self, depth: int) -> Schema:
        rng, made = self._rng, Schema()
        if self._maybe(0.6):
            made["items"] = self._part(depth - 1)
        if self._maybe(0.3):
            made["prefixItems"] = [self._part(depth - 1) for _ in range(rng.randint(1, 3))]
        for keyword, most in (("minItems", 3), ("maxItems", 4)):
            if self._maybe(0.35):
                made[keyword] = rng.randint(0, most)
        if self._maybe(0.03):
            made["uniqueItems"] = True
        return made

    def _text(self) -> Schema:
        rng, made = self._rng, Schema()
        for keyword, most in (("minLength", 3), ("maxLength", 6)):
            if self._maybe(0.25):
                made[keyword] = rng.randint(0, most)
        if self._maybe(0.3):
            made["pattern"] = rng.choice(_TEXT_PATTERNS)
        if self._maybe(0.15):
            made["format"] = rng.choice(_FORMATS)
        return made

    def _number(self) -> Schema:
        rng, made = self._rng, Schema()
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self._maybe(0.2):
                made[keyword] = rng.choice(
                    (0, 0.5, 1e3, 1e-3, rng.randint(-20, 20), round(rng.uniform(-5, 5), 2))
                )
        if self._maybe(0.2):
            made["multipleOf"] = rng.choice((1, 2, 3, 0.5, 0.1, 0.25, 10, 7, 1.0))
        return made

    def _value(self, inner: bool = True) -> Any:
        rng = self._rng
        texts = ("a\nb", "é", "\u2028", "😀", "</s>", "\x7f", *_NAMES)
        numbers = (0.0, -0.0, 1e20, 1e-7, 10**17, 1.0, 12, -3, round(rng.uniform(-3, 3), 2))
        plain = [None, True, False, rng.choice(texts), rng.choice(texts), rng.choice(numbers)]
        if not inner:
            return rng.choice(plain)
        return rng.choice([*plain, [self._value(False)], {rng.choice(_NAMES): self._value(False)}])


class Answered(NamedTuple):
    """end: "stop", "length" (it was cut) or "dead_end"."""

    end: str
    text: bytes


def answer(
    constraints: Constraints, grammar: str, eos: int, rng: random.Random, longest: int = 300
) -> Answered:
    """A random answer, byte by byte, by one of several habits: closing soon or late, in few characters or in all."""
    follower, made = constraints.matcher(grammar, (eos,)), bytearray()
    habit = rng.choice((b'ab0.-1e"\\', bytes(range(33, 127)), grammar.encode()))
    stops, closes, wild = (
        rng.choice((0.05, 0.3, 0.9)),
        rng.choice((0.05, 0.2, 0.5)),
        rng.choice((0, 0.02, 0.3)),
    )
    while len(made) < longest:
        mask = follower.mask()
        if mask is None:
            return Answered("dead_end", bytes(made))
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        if eos in allowed and (len(allowed) == 1 or rng.random() < stops or len(made) > longest // 2):
            return Answered("stop", bytes(made))
        allowed = [token for token in allowed if token < 256]
        ends = [token for token in allowed if token in b'"}],:']
        usual = [token for token in allowed if token in habit and token not in ends]
        # A long answer comes to its end.
        if len(made) > longest // 3 and (inner := [token for token in ends if token in b'"}]']):
            token = rng.choice(inner)
        elif ends and rng.random() < closes:
            token = rng.choice(ends)
        else:
            token = rng.choice(usual if usual and rng.random() >= wild else allowed)
        follower.accept(token)
        made.append(token)
    return Answered("length", bytes(made))


def why_invalid(schema: Schema, text: bytes) -> str | None:
    """What an answer violates; None: it fits."""
    try:
        value = json.loads(text, parse_float=_exactly)
    except ValueError as error:
        return f"not JSON: {error}"
    ascii_only = json.dumps(schema).replace(r"\\w", "[0-9A-Za-z_]").replace(r"\\d", "[0-9]")
    judge = _Exact(json.loads(ascii_only, parse_float=_exactly), format_checker=_Exact.FORMAT_CHECKER)
    error = next(judge.iter_errors(value), None)
    return None if error is None else f"{error.validator}: {error.message}"


def _exactly(text: str) -> Fraction:
    digits, _, exponent = text.lower().partition("e")
    if not digits.strip("-0."):
        return Fraction(0)
    # No schema here has a number beyond.
    return Fraction(digits) * Fraction(10) ** max(-400, min(400, int(exponent or 0)))


def _is_number(_: Any, value: Any) -> bool:
    return isinstance(value, int | Fraction) and not isinstance(value, bool)


_Exact = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("number", _is_number).redefine(
        "integer", lambda _, value: _is_number(_, value) and value == int(value)
    ),
)
