"""RL on an environment of verifiers, over tokens and live hot loads. Needs verifiers, torch and transformers.

    midstream serve
    python examples/verifiers/train.py http://127.0.0.1:8080 .midstream/bucket .midstream/models/tiny-moe 12

Sampling goes on while a step's weights are published, so data are one snapshot old at most.
"""

import asyncio
import os
import sys
import tempfile
import time

import verifiers.v1 as vf
from reinforce import Reinforce
from transformers import AutoTokenizer

from midstream.client import SnapshotPublisher, fresh, staleness
from midstream.integrations.verifiers import request_headers, sample_groups

GROUP, STALE_MOST = 8, 2
ENVIRONMENT = {"taskset": {"id": "digits"}, "agent": {"runtime": {"type": "subprocess"}}}
CLIENT = {"api_key_var": "MIDSTREAM_API_KEY", "renderer": {"name": "qwen3", "enable_thinking": False}}
SAMPLING = vf.SamplingConfig(temperature=1.0, max_tokens=16)


async def main(url: str, bucket: str, base: str, steps: int) -> None:
    trainer = Reinforce(base)
    env = vf.load_environment(vf.resolve_env_config(ENVIRONMENT))
    weights = {"model": trainer.model, "config_dir": base, "dtype": "bfloat16"}
    run = time.strftime("verifiers-%Y%m%d-%H%M%S")
    signalled = [f"{run}/0"]
    # verifiers' renderer for Qwen 3 looks up tokens that tiny-moe lacks. They stand behind its own, and none is sent.
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<tool_response>", "</tool_response>"], special_tokens=True)
    with tempfile.TemporaryDirectory() as folder, SnapshotPublisher(url, bucket) as publisher:
        tokenizer.save_pretrained(folder)
        at = CLIENT | {"base_url": f"{url}/v1", "renderer_model_name": folder}
        # Whatever an earlier run left there, this one begins with its own weights.
        publication = publisher.begin(signalled[0], **weights)
        for step in range(1, steps + 1):
            # One behind the newest serves already, and so nobody waits for the newest to be loaded.
            client = vf.TrainClientConfig(**at, headers=request_headers(signalled[max(0, step - 2)]))
            how = vf.ModelContext(os.path.basename(base), client, SAMPLING)
            groups = await sample_groups(env, how, publisher.server, GROUP)
            publication.wait()
            trainer.step([kept for kept in (fresh(group, signalled, STALE_MOST) for group in groups) if kept])
            every = [one for group in groups for one in group]
            behind = sum(staleness(one, signalled) for one in every) / len(every)
            mean = sum(one.reward for one in every) / len(every)
            print(f"step {step}: reward {mean:.3f}, {behind:.2f} snapshots behind", flush=True)
            signalled.append(f"{run}/{step}")
            publication = publisher.begin(signalled[-1], **weights)
        publication.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], os.path.abspath(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
