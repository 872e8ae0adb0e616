"""verl's own PPO trainer, unmodified, on a CPU: GRPO, with rollouts that go on while it trains and publishes.

    midstream serve
    python examples/verl/train.py http://127.0.0.1:8080 .midstream/bucket .midstream/models/tiny-moe 12

The task: write digits. digits.yaml has verl's settings.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
OWN = "actor_rollout_ref.rollout.engine_kwargs.midstream"
BEHIND = "training/off_policy/trajectory_staleness_worst/mean"
MODULES = "midstream.integrations.verl_cpu,midstream.integrations.verl"
# For all of Ray's processes. The level is no taste: an info message of verl 0.9.1 raises.
ENVIRONMENT = {"VERL_USE_EXTERNAL_MODULES": MODULES, "VERL_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
A_CPU = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
PROMPTS, TOKENS = 8, 16


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """verl's reward function: the share of digits."""
    return sum(character.isdigit() for character in solution_str) / TOKENS


def write_prompts(path: Path) -> None:
    import pandas

    asked = [[{"role": "user", "content": f"Write digits, {number}: "}] for number in range(PROMPTS)]
    graded = {"data_source": "digits", "reward_model": {"ground_truth": ""}}
    rows = [{"prompt": one, "extra_info": {"index": at}, **graded} for at, one in enumerate(asked)]
    pandas.DataFrame(rows).to_parquet(path)


def main(url: str, bucket: str, base: str, steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="verl-") as folder:
        prompts, log = Path(folder, "prompts.parquet"), Path(folder, "metrics.jsonl")
        write_prompts(prompts)
        os.environ |= ENVIRONMENT | A_CPU | {"VERL_FILE_LOGGER_PATH": str(log)}
        own = {"url": url, "bucket": os.path.abspath(bucket), "run": time.strftime("verl-%Y%m%d-%H%M%S")}
        sys.argv[1:] = [f"--config-dir={HERE.parent}", "--config-name=digits", f"hydra.run.dir={folder}"]
        sys.argv += [f"{OWN}.{name}={value}" for name, value in own.items()]
        sys.argv += [f"actor_rollout_ref.model.path={os.path.abspath(base)}", f"trainer.total_epochs={steps}"]
        sys.argv += [f"data.{name}_files={prompts}" for name in ("train", "val")]
        sys.argv += [f"reward.custom_reward_function.path={HERE}"]
        from verl.trainer.main_ppo import main as train

        train()
        for told in map(json.loads, log.read_text().splitlines()):
            reward, behind = told["data"]["critic/score/mean"], told["data"][BEHIND]
            print(f"step {told['step']}: reward {reward:.3f}, {behind:.2f} snapshots behind", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], steps=int(sys.argv[4]))
