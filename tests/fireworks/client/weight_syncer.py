"""WeightSyncer as a training loop drives it. The trainer, which is Fireworks' own service, is replaced by one that puts
checkpoints made beforehand into the bucket: `saves` is {name: {"base"|"delta": directory}}."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fireworks.training.sdk import types
from fireworks.training.sdk.weight_syncer import WeightSyncer
from sdk import BytesTokenizer, answer, arguments, manager, samples

given = arguments()


class Trainer:
    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_weights_for_sampler_ext(self, name: str, checkpoint_type: str) -> SimpleNamespace:
        self.saved.append(checkpoint_type)
        snapshot = f"{name}-{checkpoint_type}"
        target = Path(given.bucket, snapshot)
        if not target.exists():
            shutil.copytree(given.saves[name][checkpoint_type], target)
        return SimpleNamespace(snapshot_name=snapshot)


trainer = Trainer()
syncer = WeightSyncer(
    policy_client=trainer,
    deploy_mgr=manager(given),
    deployment_id=given.deployment,
    base_model=given.model,
    hotload_timeout=200,
)


def sync(name: str) -> dict[str, Any]:
    try:
        return {"snapshot": syncer.save_and_hotload(name), "error": None}
    except RuntimeError as error:
        return {"snapshot": None, "error": str(error)}


steps = []
for name in given.steps:
    step = sync(name)
    step["samples"] = samples(given, given.prompt, n=2, max_tokens=5)
    step["state"] = syncer.check_deployment_state()
    step["timing"] = syncer.last_timing
    steps.append(step)

client = syncer.get_sampling_client(BytesTokenizer())
response = client.sample(
    types.ModelInput.from_ints(given.prompt),
    num_samples=2,
    sampling_params=types.SamplingParams(max_tokens=5, temperature=1.0),
    include_prompt_logprobs=True,
).result(timeout=60)
sequences = [{"tokens": list(s.tokens), "logprobs": list(s.logprobs)} for s in response.sequences]
answer(
    {
        "steps": steps,
        "saved": trainer.saved,
        "sampling_client": {"sequences": sequences, "prompt_logprobs": list(response.prompt_logprobs)},
    }
)
