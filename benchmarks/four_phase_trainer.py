"""A trainer in the environment of vLLM: vLLM's own client and the backend of midstream's push, with each phase timed.

Always holds: all updates of one run send the same tensors in the same order, whoever answers. Orders come as lines of JSON, and
each is answered with a line: the seconds of each phase of control, as the client waited for them.

    VLLM_PYTHON four_phase_trainer.py CHECKPOINT
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from midstream.integrations.vllm_push import MidstreamTrainerInitInfo, register


class TimedClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """seconds: how long its caller waited in each call, by the first word of the call."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.seconds: dict[str, float] = {}

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        began = time.perf_counter()
        super()._post(path, json)
        self.seconds[path.partition("_")[0]] = time.perf_counter() - began


class Checkpoint(WeightSource):  # type: ignore[misc]
    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, torch.Tensor] = load_file(path / "model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def four_phases(url: str, source: Checkpoint, version: str) -> dict[str, float]:
    """A group, an update, and the group's end."""
    world_size = 1 + int(requests.get(f"{url}/get_world_size", timeout=60).json()["world_size"])
    client = TimedClient(url)
    info = MidstreamTrainerInitInfo("127.0.0.1", 0, world_size, rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    engine.send_weights(weight_version=version)
    engine.shutdown()
    return client.seconds


def main(checkpoint: str) -> None:
    register()
    source = Checkpoint(Path(checkpoint))
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(four_phases(order["url"], source, order["version"])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
