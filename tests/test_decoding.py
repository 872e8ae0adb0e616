"""Which part of a value a decoder refused, by msgspec's messages."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from midstream.core.decoding import converted, fault
from midstream.core.errors import InvalidRequest


class Part(msgspec.Struct):
    size: Annotated[int, Meta(ge=1)]
    sizes: dict[int, int] = {}


class Whole(msgspec.Struct):
    parts: list[Part] = []

    def __post_init__(self) -> None:
        if len(self.parts) == 2:
            raise ValueError("Two parts - at `$.parts` they end")


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ([], "", "expected object, got array"),
        ({"parts": 1}, "parts", "parts: expected array, got int"),
        ({"parts": [{}]}, "parts[0].size", "parts[0].size: this field is required"),
        ({"parts": [{"size": 0}]}, "parts[0].size", "parts[0].size: expected int >= 1"),
        (
            {"parts": [{"size": 1, "sizes": {"a": 1}}]},
            "parts[0].sizes",
            "parts[0].sizes: expected int, got str",
        ),
        ({"parts": [{"size": 1}] * 2}, "", "two parts - at $.parts they end"),
    ],
)
def test_the_part_at_fault_is_named(value: Any, field: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert(value, Whole, str_keys=True)
    assert (fault(raised.value).field, str(fault(raised.value))) == (field, words)


def test_a_part_of_a_body_is_named_with_its_place() -> None:
    with pytest.raises(InvalidRequest) as raised:
        converted({"parts": [{"size": 0}]}, Whole, "tools[3]", "tools")
    assert (raised.value.param, raised.value.message) == (
        "tools",
        "tools[3].parts[0].size: expected int >= 1",
    )
