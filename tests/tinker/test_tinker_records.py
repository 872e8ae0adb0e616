"""Training records as the real SDK's Datum."""

from __future__ import annotations

from pathlib import Path

import pytest
from sdk_venvs import VERSIONS, run_sdk

from midstream.client import export, records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_sequence_is_a_datum_of_the_sdk() -> None:
    one = records.TrainingSequence(
        session="s",
        replica="r",
        model="m",
        turns=[records.TurnSpan(1, 2, 4, "stop"), records.TurnSpan(2, 5, 6, "stop")],
        prompt_length=2,
        token_ids=[5, 6, 7, 8, 9, 2**31 - 1],
        loss_mask=[0, 0, 1, 1, 0, 1],
        logprobs=[0.0, 0.0, -0.5, -0.25, 0.0, -1.5],
        snapshots=[None, None, "a", "a", None, "b"],
        routes=[None] * 6,
        routes_shape=None,
        masks=[None] * 6,
        rewards=[{"reward": 2.0, "turn": None, "name": "reward"}],
    )
    told = {"data": export.tinker_data([one]), "export": export.__file__}
    ((tokens, inputs),) = run_sdk(VERSIONS[0], Path(__file__).with_name("datum_in_sdk.py"), told)
    assert tokens == [5, 6, 7, 8, 9]
    assert inputs == {
        "target_tokens": ["int64", [6, 7, 8, 9, 2**31 - 1]],
        "weights": ["float32", [0, 1, 1, 0, 1]],
        "logprobs": ["float32", [0, -0.5, -0.25, 0, -1.5]],
        "advantages": ["float32", [0, 2, 2, 0, 2]],
    }
