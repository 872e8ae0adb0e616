"""RL on an environment of verifiers, over live hot loads. Needs verifiers, torch and transformers.

    midstream serve
    python examples/verifiers/train.py http://127.0.0.1:8080 .midstream/bucket .midstream/models/tiny-moe 12

With `text` behind it, verifiers' client is the one of chat completions. Data are one snapshot old at most.
"""

import asyncio
import os
import sys
import tempfile

import verifiers.v1 as vf
from reinforce import Reinforce
from transformers import AutoTokenizer

from midstream.client import SnapshotPublisher, TrainingRun, fresh, staleness
from midstream.integrations.verifiers import request_headers, sample_groups

GROUP, STALE_MOST = 8, 1
ENVIRONMENT = {"taskset": {"id": "digits"}, "agent": {"runtime": {"type": "subprocess"}}}
SAMPLING = vf.SamplingConfig(temperature=1.0, max_tokens=16)


def renderer(base: str, folder: str) -> dict[str, object]:
    """verifiers' renderer for Qwen 3 looks up tokens that tiny-moe lacks. They stand behind its own, and none is sent."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<tool_response>", "</tool_response>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return {"renderer": {"name": "qwen3", "enable_thinking": False}, "renderer_model_name": folder}


async def main(url: str, bucket: str, base: str, steps: int, text: bool) -> None:
    trainer = Reinforce(base)
    env = vf.load_environment(vf.resolve_env_config(ENVIRONMENT))
    how = {"model": trainer.model, "config_dir": base, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder, SnapshotPublisher(url, bucket) as publisher:
        at = {"base_url": f"{url}/v1", "api_key_var": "MIDSTREAM_API_KEY"}
        kind, more = (vf.EvalClientConfig, {}) if text else (vf.TrainClientConfig, renderer(base, folder))
        with TrainingRun(publisher, **how) as run:
            # Whatever an earlier run left there, this one begins with its own weights.
            run.publish()
            for step in range(1, steps + 1):
                client = kind(**at, **more, headers=request_headers(run.at_least))
                context = vf.ModelContext(os.path.basename(base), client, SAMPLING)
                groups = await sample_groups(env, context, publisher.server, GROUP)
                trainer.step([kept for group in groups if (kept := fresh(group, run.signalled, STALE_MOST))])
                every = [one for group in groups for one in group]
                behind = sum(staleness(one, run.signalled) for one in every) / len(every)
                mean = sum(one.reward for one in every) / len(every)
                print(f"step {step}: reward {mean:.3f}, {behind:.2f} snapshots behind", flush=True)
                run.publish()


if __name__ == "__main__":
    url, bucket, base, steps, *text = sys.argv[1:]
    asyncio.run(main(url, os.path.abspath(bucket), base, int(steps), text == ["text"]))
