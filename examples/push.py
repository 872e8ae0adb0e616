"""A training loop whose weights go from its memory straight to the replicas. No file is written before they serve.

The weights are copied and sent while the next step computes. Its `optimizer.step()` waits until they are copied. The replicas
have to reach ADDRESS, which is of this machine.

python examples/push.py http://127.0.0.1:8080 CHECKPOINT_DIR [STEPS] [ADDRESS]
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from midstream.client import SnapshotPublisher


def main(url: str, checkpoint: str, steps: str = "3", address: str = "127.0.0.1") -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    tokens = torch.arange(16)[None]
    with SnapshotPublisher(url, to="push", address=address) as publisher:
        running = None
        for step in range(int(steps)):
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if running is not None:
                done = running.wait()
                print(
                    f"{done.identity}: {done.bytes_sent / 1e6:.1f} MB, {len(done.replicas)} replicas serve it"
                )
            running = publisher.begin(f"push/{step}", model=model, dtype="bfloat16", optimizer=optimizer)
        if running is not None:
            print(f"{running.wait().identity} serves")


if __name__ == "__main__":
    main(*sys.argv[1:])
