"""verl itself, unmodified, takes our records: its AgentLoopOutput, its DataProto and what it computes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_training_records import LAYERS, TOP_K, a_reward, a_trace

from midstream.client.export import verl_batch, verl_rows
from midstream.client.records import sequences_of

VERL = Path(__file__).parents[2] / ".venv-harness" / "verl"
BEFORE, BEHIND = 5, 9

pytestmark = pytest.mark.slow


def verl(given: Any) -> Any:
    if not (VERL.parent / ".installed").exists():
        pytest.fail("verl is not installed in .venv-harness: run `make setup-harness`")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("verl_records.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(VERL)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.variant
def test_verls_own_classes_take_our_records_and_work_with_them() -> None:
    rewards = [a_reward(1.0), a_reward(0.5, 2), a_reward(4.0, 3)]
    sequences = sequences_of(a_trace([(0, 2, 2), (1, 1, 2), (1, 1, 3)], [(0, 4, 3)], rewards=rewards))
    rows = verl_rows(sequences)
    batch = verl_batch(rows, pad_token_id=7, prompt_length=BEFORE, response_length=BEHIND)
    groups = ["one", "one", "other"]
    said = verl({"rows": rows, "batch": batch, "groups": groups})

    for row, output, one in zip(rows, said["outputs"], sequences, strict=True):
        assert output["unknown"] == []
        assert output["prompts"] + output["responses"] == one.token_ids
        assert output["response_mask"] == one.loss_mask[one.prompt_length :]
        assert output["rollout_log_probs"] == row["response_logprobs"]
        assert output["rm_scores"] == [0.0] * (len(row["response_ids"]) - 1) + [one.reward]
        assert output["routed_experts"] == row["routed_experts"]
        # A turn of the user, or of tools, before each answer.
        assert output["num_turns"] == 2 * len(one.turns)

    worked = said["worked"]
    of_all, of_response = [3, BEFORE + BEHIND], [3, BEHIND]
    ids = {name: ["torch.int64", of_all] for name in ("input_ids", "attention_mask", "position_ids")}
    assert worked["fields"] == ids | {
        "prompts": ["torch.int64", [3, BEFORE]],
        "responses": ["torch.int64", of_response],
        "response_mask": ["torch.int64", of_response],
        "rollout_log_probs": ["torch.float32", of_response],
        "rm_scores": ["torch.float32", of_response],
        "routed_experts": ["torch.int16", [*of_all, LAYERS, TOP_K]],
        "routed_experts_mask": ["torch.int64", of_all],
    }
    assert worked["lengths"] == [3, 4, 4, 1, 1, 1, 1, 6]
    assert worked["kept"] == dict.fromkeys(batch, True)
    assert worked["reversed"]
    assert worked["interleaved"]
    for attended, ours, theirs in zip(
        batch["attention_mask"], batch["position_ids"], worked["positions"], strict=True
    ):
        assert [at for at, counts in zip(ours, attended, strict=True) if counts] == [
            at for at, counts in zip(theirs, attended, strict=True) if counts
        ]
    # Two sequences of one task have 1.5 and 5.0: an advantage of one deviation each, on sampled tokens alone.
    values = (-1 / 2**0.5, 1 / 2**0.5, 1.0)
    for told, value, mask in zip(worked["advantages"], values, batch["response_mask"], strict=True):
        assert told == pytest.approx([value * counts for counts in mask], abs=1e-4)
