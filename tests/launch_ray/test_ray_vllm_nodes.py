"""One vLLM server over two nodes of a Ray cluster: served, hot-loaded, one node lost. Part of `make test-ray-vllm`."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raycluster import Nodes, serving, until
from test_ray_vllm import LOADED_S, PYTHON, Reader, pytestmark, serve

from midstream.engine.vllm.arguments import WORKER, WORKER_DIR

FIRST, SECOND = 7, 8
_MARKS = pytestmark
CONFIG = """
[ray]
resources = {{first = 1}}
[vllm]
python = "{python}"
args = {args}
env = {{ VLLM_CPU_KVCACHE_SPACE = "1", VLLM_HOST_IP = "127.0.0.{first}" }}
"""
#: Runs a command on the second node, until it ends. What `vllm serve --headless` does: the build for CPUs has no such command.
ON_NODE = """
import json, subprocess, sys
import ray
address, command, env = sys.argv[1], *map(json.loads, sys.argv[2:])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
run = ray.remote(lambda: subprocess.call(command, env=env)).options(resources={"second": 1}, max_retries=0)
ray.get(run.remote())
"""
HEADLESS = """
from vllm.entrypoints.cli.serve import make_arg_parser, run_headless
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args()
args.api_server_count = 0
run_headless(args)
"""


def flags(rank: int, port: int) -> list[str]:
    found = [
        "--enforce-eager",
        "--max-model-len=2048",
        "--dtype=float32",
        "--tensor-parallel-size=2",
        "--nnodes=2",
    ]
    found += [f"--node-rank={rank}", f"--master-addr=127.0.0.{FIRST}", f"--master-port={port}", "--seed=71"]
    return [*found, "--distributed-executor-backend=mp", f"--worker-extension-cls={WORKER}"]


@contextmanager
def second_node(nodes: Nodes, model: Path, port: int) -> Iterator[None]:
    command = [str(PYTHON), "-P", "-c", HEADLESS, f"--model={model}", "--headless", *flags(1, port)]
    command.append("--no-enable-chunked-prefill")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": f"127.0.0.{SECOND}", "PYTHONPATH": str(WORKER_DIR)}
    env |= {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    words = [sys.executable, "-c", ON_NODE, nodes.address, json.dumps(command), json.dumps(env)]
    with subprocess.Popen(words) as driver:
        try:
            yield
        finally:
            driver.kill()


def on_node(nodes: Nodes, number: int, word: str) -> bool:
    """Whether a process of the node has it in its command line."""
    lines = (Path(f"/proc/{pid}/cmdline") for pid in nodes.processes(number))
    return any(word.encode() in line.read_bytes() for line in lines if line.exists())


def test_a_vllm_server_over_two_nodes(nodes: Nodes, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes.add(FIRST, first=1)
    nodes.add(SECOND, second=1)
    config = CONFIG.format(python=PYTHON, args=json.dumps(flags(0, port)), first=FIRST)
    arguments = ("--engine", "vllm", "--model", str(tiny_model()), "--replicas", "1", "--no-tinker")
    try:
        with (
            second_node(nodes, tiny_model(), port),
            serving(tmp_path, nodes, *arguments, config=config) as server,
        ):
            assert server.places == {"replica-0": f"127.0.0.{FIRST}"}
            assert on_node(nodes, FIRST, "api_server")
            assert on_node(nodes, SECOND, "--headless")
            model = server.http.get(f"{server.url}/v1/models").json()["data"][0]
            assert {"short_swap", "sampling_masks", "kv_provenance"} <= {
                *model["midstream"]["engine"]["features"]
            }
            shutil.copytree(tiny_model(seed=3), server.state_dir / "bucket" / "step-1")
            loaded = server.http.post(
                f"{server.url}/hot_load/v1/models/hot_load", json={"identity": "step-1"}
            )
            loaded.raise_for_status()
            until(lambda: serve(server, "step-1", 1), server.state, LOADED_S)
            reader = Reader(server, tiny_model().name, 0, threading.Event())
            reader.start()
            assert reader.under_way.wait(300.0)
            nodes.lose(SECOND)
            reader.join(60.0)
            assert not reader.is_alive()
            assert '"error"' in reader.said, reader.said[-500:]
    finally:
        for number in (FIRST, SECOND):
            if number in nodes.numbers():
                nodes.remove(number)
