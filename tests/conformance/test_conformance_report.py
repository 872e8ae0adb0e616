"""Numbers compared, and results written: nothing counts as equal that was not there, and the JSON is JSON."""

from __future__ import annotations

import json
import math
import os
import re

import pytest

from midstream_conformance import command as conformance
from midstream_conformance import report
from midstream_conformance.answers import is_hit, is_miss, largest_difference
from midstream_conformance.rows import Result, Row
from midstream_conformance.target import Target
from midstream_conformance.variants import _FINAL_NORM

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        ([-1.0, -2.0], [-1.0, -2.5], 0.5),
        ([-1.0], [-1.0], 0.0),
        ([], [], math.inf),
        ([-1.0], [-1.0, -2.0], math.inf),
        ([math.nan, -1.0], [-1.0, -1.0], math.inf),
        ([-1.0, math.nan], [-1.0, -1.0], math.inf),
        ([-math.inf], [-math.inf], math.inf),
    ],
)
def test_what_is_not_there_is_not_equal(first: list[float], second: list[float], apart: float) -> None:
    assert largest_difference(first, second) == apart
    assert largest_difference(second, first) == apart


@pytest.mark.parametrize(
    ("found", "hit", "miss"), [(0, False, True), (15, False, True), (16, False, False), (207, False, False), (208, True, False)]
)  # fmt: skip
def test_a_hit_is_half_of_the_prompt_and_a_miss_a_few_tokens(found: int, hit: bool, miss: bool) -> None:
    assert (is_hit(found, 416), is_miss(found, 416)) == (hit, miss)


def test_no_short_prompt_is_hit_and_missed() -> None:
    assert not any(is_hit(found, 20) and is_miss(found, 20) for found in range(21))


def result(verdict: str, **evidence: object) -> Result:
    row = Row("group.row", "it holds", "a document", (), lambda _: None)  # type: ignore[arg-type, return-value]
    return Result(row, verdict, "", evidence, 0.1)  # type: ignore[arg-type]


def test_numbers_that_json_does_not_have_are_null() -> None:
    worst = {"max_difference": math.inf, "each": [math.nan, 1.5], "inner": {"least": -math.inf}}
    target = Target("m", False, serving=("step-400",))
    body = report.as_json([result("fail", **worst)], target, "http://x", report.Left(None, True), 1)
    read = json.loads(json.dumps(body, allow_nan=False))
    evidence = {"max_difference": None, "each": [None, 1.5], "inner": {"least": None}}
    assert read["rows"][0]["evidence"] == evidence


@pytest.mark.parametrize(
    ("verdicts", "strict", "put_back", "code"),
    [
        (["pass", "skip"], False, True, 0),
        (["pass", "skip"], True, True, 1),
        (["pass", "fail"], False, True, 1),
        (["pass"], False, False, 1),
    ],
)
def test_a_deployment_that_was_not_put_back_is_no_success(
    verdicts: list[str], strict: bool, put_back: bool, code: int
) -> None:
    assert report.exit_code([result(verdict) for verdict in verdicts], strict, put_back) == code


@pytest.mark.parametrize(
    ("serving", "says"),
    [
        ((), ""),
        (("step-400",), '"step-400"'),
        (("step-399", "step-400"), '"step-400"'),
        (("base",), "DELETE /v1/accounts/a/deployments/d/ledger"),
    ],
)
def test_the_way_back_to_what_served_before_is_told(serving: tuple[str, ...], says: str) -> None:
    told = report.had_before(Target("m", False, serving=serving, deployment="accounts/a/deployments/d"))
    assert says in told
    assert '"base"' not in told, "the base weights cannot be signalled"
    assert bool(told) == bool(serving)


@pytest.mark.parametrize(
    ("name", "final"),
    [
        ("model.norm.weight", True),
        ("model.decoder.final_layer_norm.weight", True),
        ("transformer.ln_f.weight", True),
        ("model.final_layernorm.weight", True),
        ("model.embed_norm.weight", False),
    ],
)
def test_the_norm_before_the_output_layer_is_known_by_its_names(name: str, final: bool) -> None:
    assert bool(re.search(_FINAL_NORM, name)) == final


def test_results_can_go_into_a_pipe() -> None:
    read, write = os.pipe()
    try:
        with conformance._output(f"/dev/fd/{write}") as output:
            assert output is not None
            print("{}", file=output)
        os.close(write)
        write = -1
        assert os.read(read, 100) == b"{}\n"
    finally:
        for descriptor in (read, write):
            if descriptor >= 0:
                os.close(descriptor)
