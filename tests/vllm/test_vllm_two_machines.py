"""One vLLM server over two machines (--nnodes): both numbers, a swap under streams, and the end of one machine's processes.

Here both are this machine. The second one's processes know the first one by its address alone, and share no memory with it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_vllm_sampling_numbers import TOLERANCE, Recomputed, engine_of, requests, snapshots
from vllm_bed import PYTHON

from midstream.engine.base import EngineDied
from midstream.engine.vllm.arguments import WORKER, WORKER_DIR

_FIXTURES = (snapshots,)
STREAMS, TOKENS = 8, 160
# `vllm serve --headless`: the build for CPUs has no such command.
HEADLESS = """
from vllm.entrypoints.cli.serve import make_arg_parser, run_headless
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args()
args.api_server_count = 0
run_headless(args)
"""
# Until a request that can no longer be served has ended, after the machine is gone.
LOUD_S = 10.0


def flags(rank: int, port: int) -> list[str]:
    own = [
        f"--node-rank={rank}",
        "--seed=71",
        "--nnodes=2",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
    ]
    return [
        *own,
        "--tensor-parallel-size=2",
        "--distributed-executor-backend=mp",
        f"--worker-extension-cls={WORKER}",
    ]


@contextmanager
def second_machine(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    same = ["--enforce-eager", "--max-model-len=2048", "--dtype=float32", "--no-enable-chunked-prefill"]
    command = [str(PYTHON), "-P", "-c", HEADLESS, f"--model={model}", "--headless", *same]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(WORKER_DIR), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *flags(1, port)], env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.variant
def test_a_server_over_two_machines_swaps_under_streams_and_its_end_is_noticed(
    vllm_python: Path, snapshots: Any, tmp_path: Path
) -> None:
    places = snapshots("qwen3")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def main(second: subprocess.Popen[bytes]) -> Any:
        async with engine_of(places["base"], tmp_path / "cache", *flags(0, port)) as served:
            few = [r for r in itertools.islice(requests("two"), 60) if r.grammar is None][::7][:STREAMS]
            asked = [
                replace(
                    r, n=1, sampling=replace(r.sampling, max_tokens=TOKENS, stop_token_ids=(), min_tokens=0)
                )
                for r in few
            ]
            await served.swap_under(asked, "next", places["next"])
            drawn = list(served.drawn)
            begun = asyncio.Event()
            long = replace(asked[0], sampling=replace(asked[0].sampling, max_tokens=1500))
            lost = asyncio.create_task(served.ask(long, begun.set))
            await begun.wait()
            kill(second)
            with pytest.raises(EngineDied):
                async with asyncio.timeout(LOUD_S):
                    await lost
            return drawn

    with second_machine(places["base"], port, tmp_path / "second.log") as second:
        drawn = asyncio.run(main(second))
    recomputed = Recomputed(places)
    assert max(recomputed.check(one) for one in drawn) <= TOLERANCE
    assert {label for one in drawn for label in {r.snapshot for r in one.records}} == {"base", "next"}
