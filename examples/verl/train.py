"""verl's own PPO trainer, unmodified, with rollouts from a server: GRPO on FSDP, on a CPU. The task: write digits.

    midstream serve
    python examples/verl/train.py http://127.0.0.1:8080 .midstream/bucket .midstream/models/tiny-moe 12
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

MODULES = "midstream.integrations.verl_cpu,midstream.integrations.verl"
PROMPTS, ROLLOUTS, TOKENS = 8, 8, 16


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """verl's reward function: the share of digits."""
    return sum(character.isdigit() for character in solution_str) / TOKENS


def write_prompts(path: Path) -> None:
    import pandas

    row = {"data_source": "digits", "reward_model": {"ground_truth": ""}}
    asked = [[{"role": "user", "content": f"Write digits, {number}: "}] for number in range(PROMPTS)]
    pandas.DataFrame([{"prompt": one, "extra_info": {"index": at}, **row} for at, one in enumerate(asked)]).to_parquet(path)


def main(url: str, bucket: str, base: str, steps: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="verl-"))
    log = folder / "metrics.jsonl"
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": MODULES}
    os.environ |= {"VERL_FILE_LOGGER_PATH": str(log), "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1"}
    write_prompts(folder / "prompts.parquet")
    run = time.strftime("verl-%Y%m%d-%H%M%S")
    own = {"url": url, "bucket": os.path.abspath(bucket), "served": os.path.abspath(base), "run": run}
    settings = Path(__file__).with_name("settings.txt").read_text().split()
    sys.argv = [
        *(sys.argv[0], *settings, f"hydra.run.dir={folder}", f"trainer.total_epochs={steps}"),
        *(f"data.{name}_files={folder}/prompts.parquet" for name in ("train", "val")),
        *(f"actor_rollout_ref.model.path={os.path.abspath(base)}", f"data.train_batch_size={PROMPTS}"),
        *(f"actor_rollout_ref.rollout.n={ROLLOUTS}", f"data.max_response_length={TOKENS}"),
        *(f"+actor_rollout_ref.rollout.engine_kwargs.midstream.{name}={value}" for name, value in own.items()),
        f"reward.custom_reward_function.path={os.path.abspath(__file__)}",
    ]
    import ray
    from verl.trainer.main_ppo import main as train

    try:
        train()
    finally:
        ray.shutdown()
    for line in log.read_text().splitlines():
        told = json.loads(line)
        reward = told["data"]["critic/score/mean"]
        behind = told["data"]["training/off_policy/trajectory_staleness_worst/mean"]
        print(f"step {told['step']}: reward {reward:.3f}, {behind:.2f} snapshots behind", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], steps=int(sys.argv[4]))
