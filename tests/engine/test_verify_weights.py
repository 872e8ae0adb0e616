"""Recorded router weights are computed again: clean ones are clean, and each planted fault is named with its token."""

from __future__ import annotations

import copy
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import needs_compiler, request, run
from msgspec.structs import replace
from test_verify_hostile import Fixed, turn, verified

from midstream.core.config import EngineSettings
from midstream.engine.embedded.core import EngineCore
from midstream.verify.findings import Cause, Finding
from midstream.verify.jobs import Computer
from midstream.verify.paged import PagedComputer
from midstream.verify.plain import PlainComputer

PROMPT = [*range(7, 40)]
TOKENS = 12
Faults = dict[int, np.ndarray]


def settings(kernels: Any) -> EngineSettings:
    return EngineSettings(kernels=kernels, kv_cache_tokens=1024, threads=1, router_weights=True)


@pytest.fixture(scope="module", params=["native", "torch"])
def sampled(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> tuple[str, dict[str, Any]]:
    """The kernels, and the record of a turn that they sampled, in float32."""
    needs_compiler(request.param)
    return request.param, turn_of(tiny_model(), request.param)


def turn_of(model: Path, kernels: str) -> dict[str, Any]:
    core = EngineCore(model, settings(kernels))
    asked = replace(request("r", PROMPT, max_tokens=TOKENS, seed=1), want_router_weights=True)
    tokens, info = run(core, [asked])["r", 0].tokens, core.info()
    more = {
        "token_ids": [record.token_id for record in tokens],
        "routing_matrix": [b64encode(record.route or b"").decode() for record in tokens],
        "routing_matrix_dtype": "uint8",
        "routing_matrix_shape": [info.moe_layers, info.top_k],
        "router_weights": [b64encode(record.router_weights or b"").decode() for record in tokens],
    }
    return turn([record.logprob for record in tokens], added=PROMPT, **more)


@pytest.fixture(scope="module", params=["engine", "transformers"])
def computer(
    request: pytest.FixtureRequest, sampled: tuple[str, dict[str, Any]], tiny_model: Callable[..., Path]
) -> Computer:
    model = tiny_model()
    if request.param == "transformers":
        return PlainComputer(lambda _: model, "base")
    return PagedComputer(lambda _: model, "base", settings(sampled[0]))


def rows_of(turn: dict[str, Any]) -> np.ndarray:
    """[tokens, layers, top_k]"""
    data = b"".join(b64decode(row) for row in turn["router_weights"])
    return np.frombuffer(data, "<f4").reshape(-1, *turn["routing_matrix_shape"]).copy()


def faulty(turn: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    return {**copy.deepcopy(turn), "router_weights": [b64encode(row.tobytes()).decode() for row in rows]}


def swapped(rows: np.ndarray) -> int:
    """Two weights of a layer, those that differ most."""
    at, layer = divmod(int(np.ptp(rows, axis=-1).argmax()), rows.shape[1])
    rows[at, layer] = rows[at, layer, ::-1].copy()
    return at


def moved(rows: np.ndarray) -> int:
    rows[5, 1, 0] += 1e-3
    return 5


def of_another_token(rows: np.ndarray) -> int:
    rows[7] = rows[2]
    return 7


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (swapped, "its experts have each other's"),
        (moved, "layer 1: expert "),
        (of_another_token, "they are those of token 2"),
    ],
)
def test_a_fault_in_router_weights_is_named_with_its_token(
    sampled: tuple[str, dict[str, Any]],
    computer: Computer,
    fault: Callable[[np.ndarray], int],
    told: str,
) -> None:
    _, clean = sampled
    report = verified(clean, computer)
    assert (report.clean, report.weights) == (True, {"computed": TOKENS})
    rows = rows_of(clean)
    at = fault(rows)
    [finding] = verified(faulty(clean, rows), computer).findings
    assert finding.cause == Cause.WEIGHTS == "router weights"
    assert finding.detail.startswith(f"router weights of token {at}")
    assert told in finding.detail
    assert [(one.token, one.column) for one in finding.tokens] == [(at, "router_weights")]


def test_weights_are_compared_by_expert_and_not_by_place(
    sampled: tuple[str, dict[str, Any]], computer: Computer
) -> None:
    _, clean = sampled
    routes = [b64encode(b64decode(row)[::-1]).decode() for row in clean["routing_matrix"]]
    # All layers are reversed with them, so this turns them back.
    shape = clean["routing_matrix_shape"]
    order = np.frombuffer(b"".join(map(b64decode, routes)), np.uint8).reshape(-1, *shape)[:, ::-1]
    turned = faulty(clean, np.ascontiguousarray(rows_of(clean)[..., ::-1]))
    turned["routing_matrix"] = [b64encode(row.tobytes()).decode() for row in order]
    assert verified(turned, computer).clean


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_what_is_no_weight_is_found(
    sampled: tuple[str, dict[str, Any]], computer: Computer, value: float
) -> None:
    _, clean = sampled
    rows = rows_of(clean)
    rows[3, 0, 1] = value
    [finding] = verified(faulty(clean, rows), computer).findings
    assert (finding.cause, [one.token for one in finding.tokens]) == (Cause.WEIGHTS, [3])


def problem_of(changed: dict[str, Any]) -> Finding:
    [finding] = verified(changed, Fixed(routes=np.zeros((1, 2), np.int64))).findings
    return finding


def test_weights_that_are_none_of_a_route_contradict_the_record() -> None:
    routes = {"routing_matrix": ["AAA="] * 2, "routing_matrix_dtype": "uint8", "routing_matrix_shape": [1, 2]}
    whole = b64encode(np.zeros(2, "<f4").tobytes()).decode()
    told = "its router weights are not those of its routes"
    for rows in ([whole, whole[:4]], ["?", whole], [whole, b64encode(bytes(12)).decode()]):
        assert told in problem_of(turn([-5.0, -5.0], **routes, router_weights=rows)).detail
    assert told in problem_of(turn([-5.0, -5.0], router_weights=[whole, whole])).detail
    one_missing = problem_of(turn([-5.0, -5.0], **routes, router_weights=[whole]))
    assert "1 router_weights" in one_missing.detail


def test_weights_that_the_models_code_hides_are_counted() -> None:
    routes = {"routing_matrix": ["AAA="] * 2, "routing_matrix_dtype": "uint8", "routing_matrix_shape": [1, 2]}
    whole = b64encode(np.zeros(2, "<f4").tobytes()).decode()
    given = turn([-5.0, -5.0], **routes, router_weights=[whole, whole])
    report = verified(given, Fixed(routes=np.zeros((1, 2), np.int64)))
    assert (report.clean, report.weights) == (True, {"not computed": 2})
