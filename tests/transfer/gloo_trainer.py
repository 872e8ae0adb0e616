"""A trainer that sends the tensors of a safetensors file to a group of receivers, step by step.

It runs as a process of its own, so that it can be stopped and killed. It writes the port of its store, then a line for each
thing done. A line on its standard input names the tensors to send next, and after how many pieces to stop for ever.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import load_file

from midstream.core.transfer import PIECE_BYTES, STORE_PREFIX, Rendezvous, SentTensors

KEY = "only-members-know-it"


class GlooTrainer:
    """The test's end of such a process."""

    def __init__(self, process: asyncio.subprocess.Process, file: Path, rendezvous: Rendezvous) -> None:
        self.process = process
        self.rendezvous = rendezvous
        self._tensors = load_file(file)
        self.names = list(self._tensors)

    def sent(self, names: Iterable[str]) -> SentTensors:
        chosen = {name: self._tensors[name] for name in names}
        return SentTensors(
            names=tuple(chosen),
            dtype_names=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in chosen.values()),
            shapes=tuple(tuple(tensor.shape) for tensor in chosen.values()),
        )

    async def reports(self, what: str) -> None:
        assert self.process.stdout is not None
        assert (await self.process.stdout.readline()).decode().strip() == what

    def send(self, names: Iterable[str], *, stop_after: int | None = None) -> None:
        """stop_after: so many pieces; it stands still then, and reports `stopped`."""
        assert self.process.stdin is not None
        order = {"names": list(names), "stop_after": stop_after}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def die(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def gloo_trainer(
    file: Path, *, receivers: int = 1, packed: bool = True, piece_bytes: int = PIECE_BYTES
) -> AsyncIterator[GlooTrainer]:
    arguments = [str(file), str(receivers + 1), str(piece_bytes if packed else 0)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        rendezvous = Rendezvous(
            master_address="127.0.0.1",
            master_port=port,
            world_size=receivers + 1,
            key=KEY,
            packed=packed,
            packed_buffer_size_bytes=piece_bytes,
        )
        yield GlooTrainer(process, file, rendezvous)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _pieces(tensors: Sequence[torch.Tensor], piece_bytes: int) -> Iterator[torch.Tensor]:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    yield from torch.cat(raw).split(piece_bytes) if piece_bytes else raw


def main() -> None:
    file, world_size, piece_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    distributed: Any = torch.distributed
    timeout = timedelta(seconds=60)
    store = distributed.TCPStore("127.0.0.1", 0, world_size, True, timeout, wait_for_workers=False)
    print(store.port, flush=True)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    prefixed = distributed.PrefixStore(f"{STORE_PREFIX}/{KEY}", store)
    group = distributed.ProcessGroupGloo(prefixed, 0, world_size, options)
    print("joined", flush=True)
    broadcast = distributed.BroadcastOptions()
    broadcast.rootRank = broadcast.rootTensor = 0
    tensors = load_file(file)
    for line in sys.stdin:
        order = json.loads(line)
        for number, piece in enumerate(_pieces([tensors[name] for name in order["names"]], piece_bytes)):
            if number == order["stop_after"]:
                print("stopped", flush=True)
                # It keeps the interpreter's lock, as a long step of a trainer may.
                ctypes.PyDLL(None).pause()
            group.broadcast([piece], broadcast).wait()
        print("sent", flush=True)


if __name__ == "__main__":
    main()
