"""A trainer in the environment of vLLM, which has nothing of midstream but its backend. URL ADDRESS; commands as lines.

It answers each with a line of JSON. Its weights come from a module, by vLLM's own source, client and factory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import requests
import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from midstream.integrations.vllm_push import MidstreamTrainerInitInfo, register


def module() -> torch.nn.Module:
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7, dtype=torch.bfloat16))
    made.register_parameter("scale", torch.nn.Parameter(torch.tensor(0.5)))
    return made


def main(url: str) -> None:
    register()
    register()
    source = ModuleSource(module())
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
