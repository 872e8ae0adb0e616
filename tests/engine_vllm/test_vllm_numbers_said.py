"""What midstream's parts of vLLM read of a request that anybody may have sent to the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import SESSION, said

DEFAULT = ("", 0.0, 0.0)


@pytest.mark.parametrize(
    "given", [None, 7, "abc", {}, [], ["a", 1.0], ["a", "x", 1.0], ["a", None, 1.0], ["a", 1.0, [2.0]]]
)
def test_what_is_no_word_of_midstream_counts_as_not_said(given: Any) -> None:
    assert said(SimpleNamespace(extra_args={SESSION: given}), SESSION, DEFAULT) == DEFAULT


def test_numbers_come_in_the_types_that_are_asked_for() -> None:
    params = SimpleNamespace(extra_args={SESSION: ["a", 1, 2]})
    found = said(params, SESSION, DEFAULT)
    assert (found, [type(one) for one in found]) == (("a", 1.0, 2.0), [str, float, float])
    assert said(SimpleNamespace(extra_args={"kv": [1, float("inf")]}), "kv", (0, -1)) == (0, -1)
    for nothing in (None, SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={})):
        assert said(nothing, SESSION, DEFAULT) == DEFAULT
