"""Makes verl's own classes of our records, and has verl work with them. Prints JSON.

Standard input: {"rows": of verl_rows, "batch": of verl_batch, "groups": the task of each row}. Runs in the project's own
environment, with .venv-harness/verl on the path.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
import verl
from pydantic import BaseModel
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.model import compute_position_id_with_mask


def agent_loop_output() -> Any:
    """verl's AgentLoopOutput, alone: its module imports all of verl's data loading, which needs half a gigabyte."""
    file = Path(verl.__file__).parent / "experimental" / "agent_loop" / "agent_loop.py"
    wanted = {"AgentLoopMetrics", "AgentLoopOutput"}
    classes = [
        each
        for each in ast.parse(file.read_text()).body
        if isinstance(each, ast.ClassDef) and each.name in wanted
    ]
    names: dict[str, Any] = {
        "BaseModel": BaseModel,
        "Any": Any,
        "Optional": Optional,
        "torch": torch,
        "np": np,
    }
    exec(compile(ast.Module(classes, []), str(file), "exec", dont_inherit=True), names)
    return names["AgentLoopOutput"]


def outputs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kind = agent_loop_output()
    found = []
    for row in rows:
        experts = row["routed_experts"]
        made = kind(**row | {"routed_experts": None if experts is None else np.array(experts)})
        told = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in made.as_dict().items()
        }
        found.append(told | {"unknown": sorted(set(row) - set(kind.model_fields))})
    return found


def worked(batch: dict[str, list[Any]], groups: list[str]) -> dict[str, Any]:
    int16 = {"routed_experts": torch.int16}
    tensors = {name: torch.tensor(rows, dtype=int16.get(name)) for name, rows in batch.items()}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(groups, dtype=object)})
    fields = {name: [str(value.dtype), list(value.shape)] for name, value in data.batch.items()}
    count = len(data)

    data = data.union(DataProto.from_dict(tensors={"old_log_probs": data.batch["rollout_log_probs"].clone()}))
    both = DataProto.concat([data, data[:1]])
    padded, more = pad_dataproto_to_divisor(both, 4)
    chunks = padded.chunk(4)
    again = unpad_dataproto(DataProto.concat(chunks), more)[:count]
    repeated = data.repeat(2, interleave=True).select(batch_keys=["responses"])
    data.reorder(torch.tensor(range(count - 1, -1, -1)))

    mask = again.batch["response_mask"]
    advantages, _ = compute_grpo_outcome_advantage(
        again.batch["rm_scores"], mask, again.non_tensor_batch["uid"]
    )
    return {
        "fields": fields,
        "lengths": [count, len(both), len(padded), *map(len, chunks), len(repeated)],
        "kept": {name: again.batch[name].tolist() == rows for name, rows in batch.items()},
        "reversed": data.batch["responses"].tolist() == batch["responses"][::-1],
        "interleaved": repeated.batch["responses"].tolist()
        == [row for row in batch["responses"] for _ in (0, 1)],
        "positions": compute_position_id_with_mask(again.batch["attention_mask"]).tolist(),
        "advantages": advantages.tolist(),
    }


given = json.load(sys.stdin)
print(json.dumps({"outputs": outputs(given["rows"]), "worked": worked(given["batch"], given["groups"])}))
