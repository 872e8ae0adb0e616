"""The cookbook's own RL loop against a local midstream: a small environment that needs no dataset, and importance sampling.

The task: answer with digits; the reward is the share of the answer's characters that are digits, so that a tiny untrained model
can learn it in a minute on a CPU. Everything else (`tinker_cookbook.rl.train`) is the cookbook's.

    python train.py --tokenizer DIR [--url http://127.0.0.1:8080] [--steps 20] [--lora-rank 32] [--log-path ./run]

Needs tinker-cookbook 0.6.1 (README.md). Prints the reward of each step; metrics.jsonl in the log path has all there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz
from tinker_cookbook import renderers, tokenizer_utils
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder

RENDERER = "role_colon"


class DigitsEnv(ProblemEnv):
    def __init__(self, count: int, renderer: renderers.Renderer) -> None:
        super().__init__(renderer, format_coef=0.0)
        self.count = count

    def get_question(self) -> str:
        return f"Write {self.count} digits."

    def check_answer(self, sample_str: str) -> float:  # type: ignore[override]
        """0.0 to 1.0; the cookbook takes what this returns as a number."""
        return sum(c.isdigit() for c in sample_str) / max(1, len(sample_str))

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "7" * self.count


class DigitsDataset(RLDataset):
    def __init__(self, steps: int, groups: int, group_size: int, renderer: renderers.Renderer) -> None:
        self._steps, self._groups, self._group_size, self._renderer = steps, groups, group_size, renderer

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        counts = (2 + (index * self._groups + number) % 9 for number in range(self._groups))
        return [
            ProblemGroupBuilder(partial(DigitsEnv, count, self._renderer), num_envs=self._group_size)
            for count in counts
        ]

    def __len__(self) -> int:
        return self._steps


@chz.chz
class DigitsBuilder(RLDatasetBuilder):
    model_name: str
    steps: int
    groups: int
    group_size: int

    async def __call__(self) -> tuple[DigitsDataset, None]:
        renderer = renderers.get_renderer(RENDERER, tokenizer=tokenizer_utils.get_tokenizer(self.model_name))
        return DigitsDataset(self.steps, self.groups, self.group_size, renderer), None


def rewards(log_path: Path) -> list[float]:
    """Of each step, in order."""
    steps = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    return [step["env/all/reward/total"] for step in steps if "env/all/reward/total" in step]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="tiny-moe", help="as the server calls it")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a directory that holds the model's tokenizer"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--log-path", type=Path, default=Path("run"))
    args = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")

    from transformers import AutoTokenizer

    tokenizer_utils.register_tokenizer(args.model, lambda: AutoTokenizer.from_pretrained(args.tokenizer))
    config = train.Config(
        base_url=args.url,
        model_name=args.model,
        recipe_name="midstream-digits",
        renderer_name=RENDERER,
        dataset_builder=DigitsBuilder(
            model_name=args.model, steps=args.steps, groups=args.groups, group_size=args.group_size
        ),
        learning_rate=args.learning_rate,
        loss_fn="importance_sampling",
        max_tokens=args.max_tokens,
        lora_rank=args.lora_rank,
        log_path=str(args.log_path),
        eval_every=0,
        save_every=0,
    )
    asyncio.run(train.main(config))
    print("reward by step: " + " ".join(f"{reward:.3f}" for reward in rewards(args.log_path)))


if __name__ == "__main__":
    main()
