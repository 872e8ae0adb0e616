"""A plain gloo broadcast of tensors to receiving processes, with nothing of midstream: what a push is compared with.

Always holds: the receivers have the memory for the tensors before the clock starts. They end with this process.

    python bare_broadcast.py --receive PORT RANK WORLD     # a receiver; it reads sizes, then rounds, from its standard input
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from servers import free_port

HOST = "127.0.0.1"
LIMIT = timedelta(seconds=600)
#: Without it gloo takes the address that this machine's name resolves to.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"}


class Bare:
    """A group of this process, which sends `tensors`, and so many receivers."""

    def __init__(self, tensors: Sequence[Any], receivers: int) -> None:
        self._bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        self._count = receivers
        self._receivers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Bare:
        port, world = free_port(), self._count + 1
        for rank in range(1, world):
            receiver = subprocess.Popen(
                [sys.executable, __file__, "--receive", str(port), str(rank), str(world)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **ENVIRONMENT},
            )
            self._receivers.append(receiver)
            _say(receiver, json.dumps([len(each) for each in self._bytes]))
        try:
            os.environ.update(ENVIRONMENT)
            join(port, 0, world)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dist.destroy_process_group()
        self._end()

    def round(self) -> float:
        """Broadcast all tensors once. Returns the seconds until every receiver has them all."""
        for receiver in self._receivers:
            _say(receiver, "go")
        for receiver in self._receivers:
            _hear(receiver)
        began = time.perf_counter()
        broadcast(self._bytes)
        for receiver in self._receivers:
            _hear(receiver)
        return time.perf_counter() - began

    def _end(self) -> None:
        for receiver in self._receivers:
            receiver.kill()
            receiver.communicate()


def join(port: int, rank: int, world: int) -> None:
    address = f"tcp://{HOST}:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=LIMIT)


def broadcast(tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        dist.broadcast(tensor, 0)


def receive(port: int, rank: int, world: int) -> None:
    # Ones: memory that was never written has no pages yet.
    tensors = [torch.ones(size, dtype=torch.uint8) for size in json.loads(sys.stdin.readline())]
    join(port, rank, world)
    for _ in sys.stdin:
        print("ready", flush=True)
        broadcast(tensors)
        print("done", flush=True)


def _say(receiver: subprocess.Popen[str], line: str) -> None:
    assert receiver.stdin is not None
    receiver.stdin.write(line + "\n")
    receiver.stdin.flush()


def _hear(receiver: subprocess.Popen[str]) -> None:
    assert receiver.stdout is not None
    if not receiver.stdout.readline():
        raise SystemExit("a receiver ended")


if __name__ == "__main__":
    receive(*map(int, sys.argv[2:]))
