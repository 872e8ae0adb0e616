"""A receiver of a push in a process of its own, written from the words of core/transfer.py alone.

It reads orders as lines of JSON, and answers each with one: "join" takes part in a group, "receive" writes the bytes of an
update to a file.
"""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)


def join(rendezvous: dict[str, Any], rank: int) -> Any:
    address, world = rendezvous["master_address"], rendezvous["world_size"]
    store = dist.TCPStore(
        address, rendezvous["master_port"], world, False, timeout=LIMIT, wait_for_workers=False
    )
    options = dist.ProcessGroupGloo._Options()
    options._timeout = LIMIT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    prefix = dist.PrefixStore(f"midstream/{rendezvous['key']}", store)
    return dist.ProcessGroupGloo(prefix, rank, world, options)


def sizes(sent: dict[str, Any]) -> list[int]:
    return [
        math.prod(shape) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        for dtype, shape in zip(sent["dtype_names"], sent["shapes"], strict=True)
    ]


def pieces(rendezvous: dict[str, Any], sent: dict[str, Any]) -> list[int]:
    if not rendezvous["packed"]:
        return [size for size in sizes(sent) if size]
    whole, left = divmod(sum(sizes(sent)), rendezvous["packed_buffer_size_bytes"])
    return [rendezvous["packed_buffer_size_bytes"]] * whole + ([left] if left else [])


def receive(group: Any, rendezvous: dict[str, Any], sent: dict[str, Any], file: str) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    data = torch.empty(sum(sizes(sent)), dtype=torch.uint8)
    at = 0
    for size in pieces(rendezvous, sent):
        group.broadcast([data[at : at + size]], options).wait()
        at += size
    Path(file).write_bytes(data.numpy().tobytes())


def main() -> None:
    group: Any = None
    rendezvous: dict[str, Any] = {}
    print("{}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["order"] == "join":
                group = None
                rendezvous = order["rendezvous"]
                group = join(rendezvous, order["rank"])
            elif order["order"] == "leave":
                group = None
            else:
                receive(group, rendezvous, order["sent"], order["file"])
        except RuntimeError as error:
            group = None
            print(json.dumps({"error": str(error).partition("\n")[0]}), flush=True)
        else:
            print("{}", flush=True)


if __name__ == "__main__":
    main()
