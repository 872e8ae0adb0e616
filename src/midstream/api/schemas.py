"""JSON schemas of answers, made of the types that are encoded. Pure.

Owns: the schema of each type of an answer. msgspec makes the schemas of what is decoded. Those differ: a field with a default
may be left out by whoever sends it, but is always there in an answer.
Always holds:
- A field is required unless it may be UNSET. It has no default.
- An object may have more members than its schema names, so that a new field breaks no client.
- Two structs of one name are refused.
"""

from __future__ import annotations

import collections.abc
import enum
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import UnsetType

Json = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"

_SIMPLE: dict[Any, Json] = {
    Any: {},
    msgspec.Raw: {},
    None: {"type": "null"},
    type(None): {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}
_LISTS = (list, tuple, collections.abc.Sequence)
_OBJECTS = (dict, collections.abc.Mapping)


class Schemas:
    """The components of a document: the structs of all types that it was given."""

    def __init__(self) -> None:
        self.components: dict[str, Json] = {}
        self._structs: dict[str, Any] = {}

    def of(self, kind: Any) -> Json:
        """The schema of a type; its structs are references. Raises TypeError on a type that no answer has."""
        origin, args = get_origin(kind), get_args(kind)
        if kind in _SIMPLE:
            return dict(_SIMPLE[kind])
        if origin is Annotated:
            return self.of(args[0]) | _documented(kind.__metadata__)
        if origin in (Union, types.UnionType):
            return self._one_of(args)
        if origin is Literal:
            return _enum(args)
        if origin in _LISTS or kind in _LISTS:
            return self._list(origin, args)
        if origin in _OBJECTS or kind in _OBJECTS:
            values = self.of(args[1]) if args else {}
            return {"type": "object"} | ({"additionalProperties": values} if values else {})
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return _enum([one.value for one in kind])
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(kind)
        raise TypeError(f"no schema is known of {kind}")

    def _one_of(self, kinds: Iterable[Any]) -> Json:
        schemas = [self.of(one) for one in kinds if one is not UnsetType]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _list(self, origin: Any, args: tuple[Any, ...]) -> Json:
        if origin is tuple and Ellipsis not in args:
            size = len(args)
            return {
                "type": "array",
                "prefixItems": [self.of(one) for one in args],
                "minItems": size,
                "maxItems": size,
            }
        items = self.of(args[0]) if args else {}
        return {"type": "array"} | ({"items": items} if items else {})

    def _struct(self, kind: type[msgspec.Struct]) -> Json:
        name = kind.__name__
        known = self._structs.setdefault(name, kind)
        assert known is kind, f"two structs have one name: {known} and {kind}"
        if name not in self.components:
            # A struct may hold itself.
            self.components[name] = {}
            self.components[name] = self._object(kind)
        return {"$ref": REFERENCE.format(name=name)}

    def _object(self, kind: type[msgspec.Struct]) -> Json:
        made: Json = {"type": "object"}
        # A struct without words of its own has those of msgspec.
        words = kind.__dict__.get("__doc__")
        if words:
            made["description"] = " ".join(words.split())
        properties, required = {}, []
        config = kind.__struct_config__
        if config.tag is not None:
            properties[config.tag_field] = _enum([config.tag])
            required.append(config.tag_field)
        for field in msgspec.structs.fields(kind):
            properties[field.encode_name] = self.of(field.type)
            if UnsetType not in get_args(field.type):
                required.append(field.encode_name)
        return made | {"properties": properties, "required": required}


def _enum(values: Iterable[Any]) -> Json:
    listed = list(values)
    kinds = {type(one) for one in listed}
    return ({"type": "string"} if kinds == {str} else {}) | {"enum": listed}


def _documented(metadata: Iterable[Any]) -> Json:
    """What Meta says beside bounds, which are for what is read."""
    found: Json = {}
    for one in metadata:
        if isinstance(one, msgspec.Meta):
            found |= {"description": one.description} if one.description else {}
            found |= one.extra_json_schema or {}
    return found
