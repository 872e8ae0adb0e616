"""What `midstream verify` makes of records and buckets that were forged, and of bounds that are met exactly."""

from __future__ import annotations

import base64
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midstream.cli import main
from midstream.core.config import EngineSettings
from midstream.core.errors import SnapshotIncompatible
from midstream.verify.claims import gather
from midstream.verify.findings import Cause
from midstream.verify.jobs import Computer, Numbers, OnComputed, PassJob
from midstream.verify.paged import PagedComputer
from midstream.verify.plain import PlainComputer
from midstream.verify.statement import statement_body
from midstream.verify.verifier import Report, Verifier

PROMPT = [3, 4, 5]


class Fixed(Computer):
    """Says the same of every token. tied: as of a router, of each pass."""

    def __init__(self, logprob: float = -5.0, routes: np.ndarray | None = None, tied: bool = False) -> None:
        self.vocab, self.longest, self.dtype, self.about = 256, 64, "float32", {}
        self.routes = None if routes is None else (routes.shape[0], routes.shape[1])
        self._logprob, self._route, self._tied = logprob, routes, tied

    def compute(self, jobs: Sequence[PassJob], done: OnComputed | None = None) -> list[Numbers]:
        return [self._numbers(len(job.ids) - 1 - job.first) for job in jobs]

    def _numbers(self, rows: int) -> Numbers:
        said = np.full(rows, self._logprob)
        routes = None if self._route is None else np.repeat(self._route[None], rows, axis=0)
        return Numbers(said, said, routes, self._tied)


def record(turn: dict[str, Any], number: int = 1) -> dict[str, Any]:
    about = {"n": number, "replica": "r", "boot": "b", "kind": "turn", "segment": "s", "line": number}
    return {**about, "deployment": "d", "tenant": "", "session": f"s-{number}", "tree": number, "turn": turn}


def turn(logprobs: list[float], added: Sequence[int] = PROMPT, **more: Any) -> dict[str, Any]:
    size = len(logprobs)
    kept = {
        "turn": 1,
        "parent": 0,
        "model": "m",
        "added": list(added),
        "token_ids": [7] * size,
        "loss_mask": [],
        "finish_reason": "length",
        "created": 1.0,
        "logprobs": logprobs,
        "sampling_logprobs": None,
        "routing_matrix": None,
        "routing_matrix_dtype": None,
        "routing_matrix_shape": None,
        "snapshots": [{"snapshot": "base", "start": 0, "end": size}],
        "kv_snapshots": [{"snapshot": "base", "start": 0, "end": len(added) + size - 1}],
    }
    return kept | more


def verified(turn: dict[str, Any], computer: Computer, **more: Any) -> Report:
    found = gather([record(turn)], [])
    assert found.findings == []
    return Verifier(computer, lambda _: None, lambda _: False, **more).verify(found.trees)


def test_a_huge_number_is_no_log_probability() -> None:
    assert verified(turn([-5.0, -5.0]), Fixed()).clean
    for told in (-9999.0, -1e12, 1e12, -1e300):
        [finding] = verified(turn([-5.0, told]), Fixed()).findings
        assert [one.token for one in finding.tokens] == [1], told


def test_a_token_without_a_token_before_it_is_no_record() -> None:
    """No pass gave its logits, so nothing would be computed of its turn."""
    report = verified(turn([-1.0, -1.0, -1.0], added=()), Fixed())
    [finding] = report.findings
    assert "no token before it" in finding.detail
    assert report.turns == 0


def test_a_turn_that_fills_the_cache_to_its_last_position_is_verified(
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model()
    for size in (40, 32):
        computer = PagedComputer(
            lambda _: model, "base", EngineSettings(kv_cache_tokens=size, threads=1, dtype="float32")
        )
        # The last token has no KV.
        full, longer = (
            turn([0.0], added=range(2, 2 + positions))
            for positions in (computer.longest, computer.longest + 1)
        )
        [numbers] = computer.compute([PassJob([*full["added"], 7], ["base"] * computer.longest, 0)])
        full["logprobs"] = [float(numbers.logprobs[-1])]
        assert (report := verified(full, computer)).clean
        assert (report.tokens, report.unverified) == (1, {})
        report = verified(longer, computer)
        assert (report.clean, report.tokens) == (True, 0)
        assert sum(report.unverified.values()) == 1


def test_routes_of_a_model_without_experts_are_found() -> None:
    given = {"routing_matrix": ["AAE="] * 2, "routing_matrix_dtype": "uint8", "routing_matrix_shape": [1, 2]}
    [finding] = verified(turn([-5.0, -5.0], **given), Fixed()).findings
    assert finding.cause == Cause.ROUTE
    assert finding.count == 2


def test_routes_to_experts_that_a_model_lacks_are_found_where_a_router_was_tied(
    tiny_model: Callable[..., Path],
) -> None:
    """The second look replays the recorded routes."""
    model = tiny_model()
    plain = PlainComputer(lambda _: model, "base")
    assert plain.routes is not None
    [own] = plain.compute([PassJob([*PROMPT, 7, 7], ["base"] * 4, 2)])
    assert own.routes is not None
    told = own.routes.astype(np.uint8)
    told[1] = 255
    rows = [base64.b64encode(row.tobytes()).decode() for row in told]
    given = {
        "routing_matrix": rows,
        "routing_matrix_dtype": "uint8",
        "routing_matrix_shape": [*plain.routes],
    }
    tied = Fixed(routes=own.routes[0], tied=True)
    [finding] = verified(turn(own.logprobs.tolist(), **given), tied, with_ties=plain.with_ties).findings
    assert finding.count == 2


def test_spans_of_a_small_record_make_no_large_lists() -> None:
    wide = [{"snapshot": "base", "start": 0, "end": 2**22}]
    earlier = [{"tokens": 0, "kv_snapshots": wide} for _ in range(8)]
    tracemalloc.start()
    found = gather([record(turn([-5.0], earlier_kv_snapshots=earlier))], [])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    [claim] = found.trees[0].claims.values()
    assert claim.problem is not None
    assert most < 2**26


@pytest.mark.parametrize("seed", [str(2**64), str(-(2**64))])
def test_a_seed_that_no_statement_can_hold_is_refused_at_once(
    seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["verify", str(tmp_path), "--bucket", tmp_path.as_uri(), "--sample", "1", "--seed", seed]
    assert main(options) == 2
    assert "--seed must be" in capsys.readouterr().err


def mask(*raw: int) -> str:
    return base64.b64encode(bytes(raw)).decode()


#: Of the token 7: alone, every one, ids of two and of four bytes, bits.
TRUE_MASKS = (mask(0), mask(1), mask(2, 7, 0, 9, 0), mask(4, 7, 0, 0, 0, 255, 0, 0, 0), mask(8, 0b11000001))
#: No mask, no base64, without the token, beyond the vocabulary of 256, descending, of any size.
WRONG_MASKS = (
    mask(),
    mask(3),
    "!",
    mask(2, 8, 0, 9, 0),
    mask(8, 0b01111111),
    mask(2, 7, 0, 0, 1),
    mask(2, 9, 0, 7, 0),
    base64.b64encode(b"\x08" + b"\xff" * 2000).decode(),
)


def test_a_mask_is_of_its_token_and_of_the_vocabulary() -> None:
    size = len(TRUE_MASKS)
    drawn: list[float | None] = [0.0, *[-0.5] * (size - 1)]
    said = {"sampling_masks": list(TRUE_MASKS), "sampling_logprobs": drawn}
    report = verified(turn([-5.0] * size, **said), Fixed())
    assert (report.findings, report.masks) == ([], size)
    for wrong in WRONG_MASKS:
        planted = {**said, "sampling_masks": [*TRUE_MASKS[:3], wrong, TRUE_MASKS[4]]}
        # Also where nothing is computed of the turn.
        for more in ({}, {"logprobs": None}, {"logprob_of": "allowed"}):
            [finding] = verified(turn([-5.0] * size, **planted) | more, Fixed()).findings
            assert (finding.cause, [one.token for one in finding.tokens]) == (Cause.MASK, [3]), wrong


def test_a_token_that_was_alone_was_certain() -> None:
    for drawn, wrong in ((0.0, []), (None, []), (-0.01, [1]), (-5.0, [1])):
        said = {"sampling_masks": [mask(1), mask(0)], "sampling_logprobs": [-5.0, drawn]}
        found = verified(turn([-5.0, -5.0], **said), Fixed()).findings
        assert [one.token for finding in found for one in finding.tokens] == wrong, drawn
        assert {finding.cause for finding in found} <= {Cause.MASK}


def test_a_turn_with_a_mask_too_few_contradicts_itself_and_other_faults_are_told_once() -> None:
    [finding] = verified(turn([-5.0, -5.0], sampling_masks=[mask(1)]), Fixed()).findings
    assert "1 sampling_masks" in finding.detail
    [finding] = verified(turn([-5.0, -4.0], sampling_masks=[mask(1), mask(3)]), Fixed()).findings
    assert finding.cause == Cause.LOGPROB


def test_snapshots_of_another_shape_are_named_by_both_computers(tiny_model: Callable[..., Path]) -> None:
    files = {"base": tiny_model(), "other": tiny_model(hidden=64)}
    settings = EngineSettings(kv_cache_tokens=64, threads=1)
    for computer in (
        PlainComputer(files.__getitem__, "base"),
        PagedComputer(files.__getitem__, "base", settings),
    ):
        with pytest.raises(SnapshotIncompatible, match="other: "):
            computer.compute([PassJob([*PROMPT, 7], ["base", "base", "other"], 1)])


def test_a_statement_says_what_replicas_lost() -> None:
    gap = {"n": 2, "replica": "r", "boot": "b", "kind": "gap", "lost": 3, "segment": "s", "line": 2}
    found = gather([record(turn([-5.0])), gap], [])
    assert found.findings == []
    body = statement_body(found, Report(), [], {}, {}, {})
    assert body["other_records"] == {"gap": 1}


def test_earlier_kv_that_is_too_short_is_told_where_another_choice_has_the_same_prompt() -> None:
    """The other choice's ids are tried in its place."""
    short = [{"tokens": 2, "kv_snapshots": [{"snapshot": "base", "start": 0, "end": 1}]}]
    broken = turn([-5.0] * 4, earlier_kv_snapshots=short, token_ids=[7, 8, 7, 7])
    found = gather([record(broken), record(turn([-5.0] * 4), 2)], [])
    [finding] = Verifier(Fixed(), lambda _: None, lambda _: False).verify(found.trees).findings
    assert (finding.cause, finding.detail) == (Cause.TOKENS, "its earlier KV ends at position 1")
