"""Tool calls in angle brackets (Qwen3-Coder, Qwen3.5): the function and each parameter have a tag, values are bare text. Pure.

Always holds: what a parameter's text stands for is decided by its schema alone, references in it followed: text where the
schema says string or nothing, else the JSON it spells, else text again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from midstream.replica.text.schemarules import referred
from midstream.replica.text.toolcalls import SPACE, ParsedCall

#: The parameters of each tool, by its name.
Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_PARAMETER, _END_FUNCTION, _END_CALL = "</parameter>", "</function>", "</tool_call>"
_MEMBERS = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
#: How templates write Python's values.
_SPELLINGS = {"True": "true", "False": "false", "None": "null"}
#: Keywords with a list of schemas of the same value.
_PARTS = ("anyOf", "oneOf", "allOf")
_NO_SCHEMA: Mapping[str, Any] = MappingProxyType({})


class XmlBody:
    """`<function=NAME>`, a `<parameter=KEY>` with its value for each argument, and the closing tags."""

    def __init__(self, start: int, schemas: Schemas) -> None:
        self.start = self.at = start
        self._schemas = schemas
        #: Tags that may stand next, after whitespace.
        self._expected: tuple[str, ...] = (_FUNCTION,)
        #: Inside a tag's name or a value: the text that ends it.
        self._until: str | None = None

    def follow(self, text: str) -> bool | None:
        while True:
            step = self._skip_to_end(text) if self._until else self._take_tag(text)
            if step is not True:
                return step
            if not self._expected:
                return True

    def _skip_to_end(self, text: str) -> bool | None:
        assert self._until is not None
        end = text.find(self._until, self.at)
        if self._until == ">":
            seen = text[self.at : end if end >= 0 else len(text)]
            if "<" in seen or "\n" in seen or (end == self.at):
                return False
        if end < 0:
            if self._until != ">":
                self.at = max(self.at, len(text) - len(self._until) + 1)
            return None
        self.at = end + len(self._until)
        in_value = self._until == ">" and self._expected == (_END_PARAMETER,)
        self._until = _END_PARAMETER if in_value else None
        if not in_value:
            self._expected = (_PARAMETER, _END_FUNCTION)
        return True

    def _take_tag(self, text: str) -> bool | None:
        while self.at < len(text) and text[self.at] in SPACE:
            self.at += 1
        rest = text[self.at : self.at + len(_END_CALL)]
        for tag in self._expected:
            if rest.startswith(tag):
                self.at += len(tag)
                self._enter(tag)
                return True
        return None if any(tag.startswith(rest) for tag in self._expected) else False

    def _enter(self, tag: str) -> None:
        if tag == _FUNCTION:
            self._until = ">"
        elif tag == _PARAMETER:
            self._until, self._expected = ">", (_END_PARAMETER,)
        else:
            self._expected = (_END_CALL,) if tag == _END_FUNCTION else ()

    def read(self, text: str) -> ParsedCall | None:
        body = text[self.start : self.at]
        name = body.partition(_FUNCTION)[2].partition(">")[0]
        schema = self._schemas.get(name, {})
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        arguments: dict[str, Any] = {}
        for key, value in _MEMBERS.findall(body):
            if key in arguments:
                return None
            arguments[key] = read_value(value, known.get(key), schema)
        return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


def read_value(text: str, schema: Any, whole: Mapping[str, Any] = _NO_SCHEMA) -> Any:
    """What a parameter's text stands for under its schema. whole: the one that it stands in, which references are into."""
    types = _types(schema, whole)
    if not types or types == {"string"}:
        return text
    spelled = text.strip(SPACE)
    try:
        value = json.loads(_SPELLINGS.get(spelled, spelled), parse_constant=_no_constant, parse_float=_finite)
        # Half a surrogate pair cannot be sent.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return value if _type_of(value) & types else text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(spelled: str) -> float:
    value = float(spelled)
    if math.isinf(value):
        raise ValueError(f"{spelled} is beyond a float")
    return value


def _types(schema: Any, whole: Mapping[str, Any]) -> set[str]:
    """The JSON types a schema names, through alternatives, parts and references; empty when it names none. What is no schema
    names none."""
    found = set[str]()
    seen = set[int]()
    todo = [schema]
    while todo:
        one = todo.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        found |= _own_types(one)
        todo += [each for key in _PARTS if isinstance(one.get(key), list) for each in one[key]]
        todo.append(referred(whole, one))
    return found


def _own_types(schema: dict[str, Any]) -> set[str]:
    """Without those that its alternatives, parts and references name."""
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    found = {t for t in listed if isinstance(t, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not found and isinstance(values, list):
        found = set().union(*map(_type_of, values))
    return found


def _type_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    kinds = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}
