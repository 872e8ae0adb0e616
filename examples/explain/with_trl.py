"""The same mistakes in numbers of TRL's GRPOTrainer. Needs TRL 1.16 (../trl/README.md), and what mistakes.py left in DIRECTORY.

    python examples/explain/with_trl.py DIRECTORY

TRL computes each log-probability by its own method, at its own temperature. Routes are replayed by hooks on its model. Writes
DIRECTORY/trainer.jsonl in the place of those of mistakes.py, and `midstream explain` is run as there. A turn whose only filter
TRL cannot replay is named `mask`, also where the trainer makes no mistake of its own.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from mistakes import train
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def trainer_of(model: Any, temperature: float) -> GRPOTrainer:
    """A new one: TRL puts the temperature into the model's head once."""
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), temperature=temperature, report_to=[], use_cpu=True, bf16=False
    )
    data = Dataset.from_dict({"prompt": ["none"]})
    return GRPOTrainer(
        model=model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(Path(sys.argv[1]) / "step-0"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=data,
    )


def by_trl(
    model: Any, ids: list[int], start: int, temperature: float, masks: list[list[int] | None]
) -> list[float]:
    """As mistakes.by_one_pass, but for the masks: TRL makes no logits that they could be put on."""
    trainer, given = trainer_of(model, temperature), torch.tensor([ids])
    logprobs, *_ = trainer._get_per_token_logps_and_entropies(
        model, given, torch.ones_like(given), logits_to_keep=len(ids) - start
    )
    found: list[float] = logprobs[0].double().tolist()
    return found


if __name__ == "__main__":
    train(Path(sys.argv[1]).absolute(), by_trl)
