"""The bounds of a schema that an answer must match: its size, depth, patterns and multiples. Pure.

Always holds: looking at a schema stops where a bound is passed, so it takes no longer than the bounds allow. A schema within
them compiles in a few tenths of a second at most, as far as we know; grammarcheck.py stops what does not.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

#: Of all strings of a schema, and of the grammar that it becomes.
CHARACTERS_MAX = 1 << 18
#: Objects, arrays and values. An enumeration of as many strings compiles in 0.1 s.
NODES_MAX = 20_000
#: Objects and arrays inside one another. The grammar library itself stops at 128.
DEPTH_MAX = 64
#: Of one object. Each is four items of the library's parser, which takes 2,000; and the time grows with the square.
PROPERTIES_MAX = 480
#: Characters of one regular expression.
PATTERN_MAX = 4096
#: Of all of them together.
PATTERNS_MAX = 16_384
#: A `multipleOf` becomes as many states: 0.04 s for 10,000, 9 s for a million.
MULTIPLE_MAX = 10_000
#: Of all of them together.
MULTIPLES_MAX = 50_000

_PATTERNS = ("pattern",)


def problem_of_size(schema: Any) -> str | None:
    """Which bound a schema passes; None: none of them."""
    return _Walk().look_at(schema)


class _Walk:
    def __init__(self) -> None:
        self._nodes = self._characters = self._patterns = self._multiples = 0

    def look_at(self, schema: Any) -> str | None:
        todo: list[tuple[Any, int]] = [(schema, 0)]
        while todo:
            value, depth = todo.pop()
            problem = self._count(value, depth)
            if problem is not None:
                return problem
            if isinstance(value, dict):
                problem = self._object(value)
                if problem is not None:
                    return problem
                todo += [(item, depth + 1) for item in value.values()]
            elif isinstance(value, list):
                todo += [(item, depth + 1) for item in value]
            if self._nodes + len(todo) > NODES_MAX:
                return f"more than {NODES_MAX} objects, arrays and values"
        return None

    def _count(self, value: Any, depth: int) -> str | None:
        self._nodes += 1
        if depth > DEPTH_MAX and isinstance(value, dict | list):
            return f"deeper than {DEPTH_MAX} objects and arrays inside one another"
        if isinstance(value, str):
            self._characters += len(value)
        elif isinstance(value, dict):
            self._characters += sum(map(len, value))
        if self._characters > CHARACTERS_MAX:
            return f"longer than {CHARACTERS_MAX} characters"
        return None

    def _object(self, value: dict[str, Any]) -> str | None:
        properties = value.get("properties")
        if isinstance(properties, dict) and len(properties) > PROPERTIES_MAX:
            return f"an object of {len(properties)} properties, at most {PROPERTIES_MAX}"
        by_pattern = value.get("patternProperties")
        patterns = [*by_pattern] if isinstance(by_pattern, dict) else []
        patterns += [value[name] for name in _PATTERNS if isinstance(value.get(name), str)]
        longest = max(map(len, patterns), default=0)
        if longest > PATTERN_MAX:
            return f"a regular expression of {longest} characters, at most {PATTERN_MAX}"
        self._patterns += sum(map(len, patterns))
        if self._patterns > PATTERNS_MAX:
            return f"regular expressions of more than {PATTERNS_MAX} characters in all"
        return self._multiple(value.get("multipleOf"))

    def _multiple(self, step: Any) -> str | None:
        if type(step) not in (int, float):
            return None
        _, digits, _ = Decimal(repr(step)).normalize().as_tuple()
        states = int("".join(map(str, digits)) or "0")
        if isinstance(step, int):
            states = abs(step)
        if states > MULTIPLE_MAX:
            return f"multipleOf {step}: at most {MULTIPLE_MAX}, not counting places after the point"
        self._multiples += states
        if self._multiples > MULTIPLES_MAX:
            return f"multipleOf: more than {MULTIPLES_MAX} in all"
        return None
