"""What the grammar library follows wrongly in a JSON schema, keyword by keyword. Pure.

Owns: the rules that refuse such a schema by the name of the keyword, and the form in which the library gets a schema.
Always holds: every answer that fits `prepared(schema)` of a schema without a problem fits the schema, as far as we know:
tests/replica/test_schema_search.py looks for schemas and answers that do not. A rule may refuse more than it must, where
the library combines parts of a schema that the rule sees one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

#: A double holds every whole number below it.
EXACT_MAX = 2**53
#: Powers of ten that the library multiplies by without rounding.
PLACES_MAX = 22

NO_ANSWER = "no answer can match it: it asks for itself before it asks for anything"
#: Values of these are data and no schemas.
_DATA = frozenset(("const", "enum", "default", "examples", "required"))
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMBINE = ("$ref", "allOf", "anyOf", "oneOf")
#: These say nothing of the value.
_NOTES = frozenset(
    (
        *("$defs", "definitions", "$schema", "$id", "id", "$anchor", "$comment", "title", "description"),
        *("default", "examples", "readOnly", "writeOnly"),
    )
)
#: Characters of a string that JSON has to escape by their number.
_BY_NUMBER = frozenset(map(chr, range(32))) - frozenset("\b\f\n\r\t") | {"\x7f"}
_ESCAPES_WITHOUT_NUMBERS = 'nrbtf\\"'

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
#: Begins every day of the calendar, and no 29th of February of another year. The library's own formats have the other months.
_DAY = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_DAYS = frozenset(("date", "date-time"))


def problem_of_keywords(schema: dict[str, Any]) -> str | None:
    """Why the library would not follow a schema that it takes; None: no reason is known."""
    objects = list(_objects(schema))
    for value in objects:
        problem = _numbers(value) or _format(value) or _min_properties(value)
        if problem is not None:
            return problem
    return _zero(objects) or _escaped(objects) or _own_reference(schema, objects)


def left_for_patterns(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Schemas to ask the library about. Where no answer can match one, patterns match no name but those that have a schema of
    their own. The library then begins a property that it cannot name."""
    objects = list(_objects(schema))
    combined = any(map(_combines, objects))
    names = [name for value in objects for name in _names(value)] if combined else []
    for value in objects:
        patterns = value.get("patternProperties")
        if not isinstance(patterns, dict) or not (combined or value.get("additionalProperties") is False):
            continue
        matched = {pattern: True for pattern, wanted in patterns.items() if wanted is not False}
        taken = dict.fromkeys(names if combined else _names(value), False)
        if matched and taken:
            alone = {"type": "object", "properties": taken, "patternProperties": matched}
            yield alone | {"additionalProperties": False, "minProperties": 1}


def prepared(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as the library gets it, with its options `x-guidance`."""
    options = {"json_allowed_escapes": _ESCAPES_WITHOUT_NUMBERS} if _spells(_objects(schema)) else {}
    ready: dict[str, Any] = _with_days(schema)
    return ready | {"x-guidance": options}


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects that may be schemas, also where only a $ref leads, and maps of schemas, which look like them."""
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo += [item for key, item in value.items() if key not in _DATA or isinstance(item, dict)]
        elif isinstance(value, list):
            todo += value


def _combines(value: dict[str, Any]) -> bool:
    """Whether the library makes one schema of several here."""
    keywords = value.keys() - _NOTES
    return "allOf" in keywords or (len(keywords) > 1 and any(name in keywords for name in _COMBINE))


def _names(value: dict[str, Any]) -> set[str]:
    properties, required = value.get("properties"), value.get("required")
    named = set(properties) if isinstance(properties, dict) else set()
    return (
        named | {name for name in required if isinstance(name, str)} if isinstance(required, list) else named
    )


def _numbers(value: dict[str, Any]) -> str | None:
    """The library holds numbers as doubles, and reads some of them a little wrong."""
    for keyword in (*_BOUNDS, "const", "enum"):
        for number in _numbers_in(value.get(keyword), deep=keyword in _DATA):
            if not _is_exact(number):
                return f"{keyword} {number}: a number must be below 2**53 and have at most 15 digits"
    return None


def _numbers_in(value: Any, *, deep: bool) -> Iterator[int | float]:
    if type(value) in (int, float):
        yield value
    elif deep and isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(item, deep=True)


def _is_exact(number: int | float) -> bool:
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    written = int("".join(map(str, digits)))
    return abs(number) < EXACT_MAX and written < EXACT_MAX and abs(int(exponent)) <= PLACES_MAX


def _format(value: dict[str, Any]) -> str | None:
    # The library takes this name for any text.
    return "Unknown format: unknown" if value.get("format") == "unknown" else None


def _min_properties(value: dict[str, Any]) -> str | None:
    """A grammar cannot see that a name comes twice. Required names come once, and one more is another one."""
    least, required = value.get("minProperties"), value.get("required")
    if type(least) is not int:
        return None
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if least <= named + 1:
        return None
    return f"minProperties {least}: at most one more than the required properties, which are {named}"


def _zero(objects: list[dict[str, Any]]) -> str | None:
    """The library takes 0 for a number above 0 where the other bound is below 1, and likewise below."""
    combined = any(map(_combines, objects))
    for group in [objects] if combined else [[value] for value in objects]:
        numeric = [value for value in group if _may_be_number(value)]
        for exclusive, inclusive, opposite, sign in (
            ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
            ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
        ):
            at_zero = any(_exclusive(value, exclusive, inclusive) == 0 for value in numeric)
            near = [value[name] for value in numeric for name in opposite if _is_number(value.get(name))]
            if at_zero and any(0 < sign * bound < 1 for bound in near):
                side = "below 1" if sign == 1 else "above -1"
                return f"{exclusive} 0: not supported with another bound that is {side}; use {inclusive}"
    return None


def _exclusive(value: dict[str, Any], exclusive: str, inclusive: str) -> Any:
    """The bound; in old schemas true makes the inclusive one exclusive."""
    return value.get(inclusive) if value.get(exclusive) is True else value.get(exclusive)


def _may_be_number(value: dict[str, Any]) -> bool:
    kinds = value.get("type", "number")
    return kinds == "number" or (isinstance(kinds, list) and "number" in kinds)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _spells(objects: Iterable[dict[str, Any]]) -> bool:
    """Whether the library may spell a name that has a schema by the numbers of its characters, and give it any value."""
    found = list(objects)
    if any(map(_combines, found)):
        return True
    return any(
        value.get("additionalProperties") is not False and (_names(value) or value.get("patternProperties"))
        for value in found
    )


def _escaped(objects: list[dict[str, Any]]) -> str | None:
    if not _spells(objects):
        return None
    for value in objects:
        for keyword in ("const", "enum"):
            if any(_BY_NUMBER & set(text) for text in _texts_in(value.get(keyword))):
                return f"{keyword}: control characters need additionalProperties: false in all objects"
    return None


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts_in(item)


def _own_reference(schema: dict[str, Any], objects: list[dict[str, Any]]) -> str | None:
    """A schema that has to be itself before it is anything. The library begins a value for it that has no first character."""
    done = set[int]()
    for value in objects:
        path = dict[int, None]()
        while (target := referred(schema, value)) is not None and id(value) not in done:
            if id(value) in path:
                return NO_ANSWER
            path[id(value)] = None
            value = target
        done |= path.keys()
    return None


def referred(schema: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema that a $ref inside the same schema leads to."""
    reference = value.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = schema
    for step in filter(None, reference[1:].split("/")):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(name)] if name.isdecimal() and int(name) < len(target) else None
        else:
            target = target.get(name) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else None


def _with_days(value: Any) -> Any:
    """Dates are also held to the calendar."""
    if isinstance(value, list):
        return [_with_days(item) for item in value]
    if not isinstance(value, dict):
        return value
    copied = {key: item if key in _DATA else _with_days(item) for key, item in value.items()}
    if not isinstance(copied.get("format"), str) or copied["format"] not in _DAYS:
        return copied
    several = copied.get("allOf")
    return copied | {"allOf": [*(several if isinstance(several, list) else []), {"pattern": _DAY}]}
