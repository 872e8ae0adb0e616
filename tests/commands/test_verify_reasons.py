"""Why `midstream verify` computes nothing for a turn."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.verify.claims import gather


def of(label: str, kv: str) -> dict[str, Any]:
    """A record of a turn: a prompt of three tokens, and two that were sampled."""
    turn = {
        "model": "m",
        "turn": 1,
        "parent": 0,
        "added": [5, 6, 7],
        "token_ids": [8, 9],
        "loss_mask": [0, 0, 0, 1, 1],
        "routing_matrix": None,
        "routing_matrix_dtype": None,
        "routing_matrix_shape": None,
        "logprobs": [-1.0, -2.0],
        "sampling_logprobs": [-1.0, -2.0],
        "snapshots": [{"snapshot": label, "start": 0, "end": 2}],
        "kv_snapshots": [{"snapshot": kv, "start": 0, "end": 4}],
        "finish_reason": "length",
        "created": 1.0,
    }
    head = {"n": 1, "replica": "r", "boot": "b", "kind": "turn", "segment": "s", "line": 1}
    return {**head, "deployment": "d", "tenant": "", "session": "k", "tree": 1, "turn": turn}


@pytest.mark.parametrize(
    ("label", "kv", "why"),
    [
        ("red-1", "red-1", None),
        ("red-1@step-5", "red-1@step-5", "it is of adapters on swapped full weights, which are not computed"),
        ("red-1", "red-1@7", "files that it names were overwritten"),
        ("red-1@step-5", "?", "its engine does not say what computed its KV"),
    ],
)
def test_labels_of_an_adapter_and_a_base_are_no_overwritten_files(
    label: str, kv: str, why: str | None
) -> None:
    [tree] = gather([of(label, kv)], []).trees
    [claim] = tree.claims.values()
    assert (claim.problem, claim.unverified) == (None, why)
