"""A trainer in the environment of vLLM, which has nothing of midstream but its backend. URL; commands as lines.

It answers each with a line of JSON. Its weights come from a module, by vLLM's own source, client and factory, or from the
checkpoint that a command to send names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from midstream.integrations.vllm_push import MidstreamTrainerInitInfo, register


def module() -> torch.nn.Module:
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7, dtype=torch.bfloat16))
    made.register_parameter("scale", torch.nn.Parameter(torch.tensor(0.5)))
    return made


class Sent(WeightSource):  # type: ignore[misc]
    """dies_after: so many tensors, the trainer is killed; None: it is not."""

    def __init__(self) -> None:
        self._of: WeightSource = ModuleSource(module())
        self._tensors: dict[str, torch.Tensor] = {}
        self.dies_after: int | None = None

    def take(self, directory: str) -> None:
        self._tensors = load_file(Path(directory) / "model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        if not self._tensors:
            return self._of.metadata()
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for count, pair in enumerate(self._tensors.items() if self._tensors else self._of):
            if count == self.dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair


def main(url: str) -> None:
    register()
    register()
    source = Sent()
    engine: Any = None
    print("{}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            match order.pop("order"):
                case "init":
                    world_size = 1 + requests.get(f"{url}/get_world_size", timeout=60).json()["world_size"]
                    info = MidstreamTrainerInitInfo("127.0.0.1", 0, world_size, **order)
                    engine = WeightTransferTrainerFactory.trainer_init(
                        info, client=HTTPVLLMWeightSyncClient(url), source=source
                    )
                    answer = {"repr": repr(info)}
                case "send":
                    if "directory" in order:
                        source.take(order.pop("directory"))
                    source.dies_after = order.pop("dies_after", None)
                    engine.send_weights(**order)
                    answer = {}
                case "shutdown":
                    engine.shutdown()
                    answer = {}
        except Exception as error:  # noqa: BLE001 - the test reads it
            answer = {"error": f"{type(error).__name__}: {error}", "notes": getattr(error, "__notes__", [])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
