"""A training loop that publishes its weights while it trains: full every fifth step, deltas in between.

`PublishWeights` is a callback of transformers' Trainer, which TRL's trainers are; `main` drives it as they do, around an
"optimizer" that moves a few weights at random.

python examples/publish.py http://127.0.0.1:8080 file:///path/to/bucket CHECKPOINT_DIR [STEPS]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback, TrainerControl, TrainerState

from midstream.client import SnapshotPublisher
from midstream.client.publication import Publication


class PublishWeights(TrainerCallback):
    """Publishes `run/step-N` after every optimizer step. `served_model`: the directory the server started from."""

    def __init__(self, publisher: SnapshotPublisher, served_model: str, run: str) -> None:
        self.publisher = publisher
        self.served_model = served_model
        self.run = run
        self.last: Publication | None = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.wait()
        self.last = (
            # Copies the weights; encoding, upload and waiting go on beside training.
            self.publisher.begin(
                f"{self.run}/step-{state.global_step}",
                model=kwargs["model"],
                # The configuration is checked against the served model's.
                config_dir=self.served_model,
                dtype="bfloat16",
                reset_prompt_cache="new_session",
            )
        )

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.wait()

    def wait(self) -> None:
        """The publication before: how it went, or why it failed."""
        if self.last is not None:
            done = self.last.wait()
            share = done.bytes_sent / done.bytes_whole
            print(
                f"{done.identity}: {done.kind}, {share:.0%} of the whole, {len(done.replicas)} replicas serve it"
            )


def main(url: str, bucket: str, checkpoint: str, steps: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    state = TrainerState(is_world_process_zero=True)
    # With work_dir=..., a restarted trainer would go on with deltas; so it begins with a full snapshot.
    with SnapshotPublisher(url, bucket, full_every=5) as publisher:
        callback = PublishWeights(publisher, checkpoint, "run-7")
        for state.global_step in range(1, steps + 1):
            with torch.no_grad():
                for weights in model.parameters():
                    weights[torch.rand_like(weights) < 0.02] *= 1.02
            callback.on_step_end(None, state, TrainerControl(), model=model)
        callback.on_train_end(None, state, TrainerControl())


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]) if len(sys.argv) > 4 else 7)
