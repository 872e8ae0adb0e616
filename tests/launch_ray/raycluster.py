"""A Ray cluster of several nodes on this machine, each with a loopback address of its own, and `midstream serve` on it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

READY = re.compile(r"midstream ready on (https?://\S+) \((\d+) replicas, model (\S+), deployment (\S+)\)(.*)")
DEADLINE_S = 120.0
STORE_BYTES = 80 * 2**20  # the least that Ray takes
HEAD = "127.0.0.2"  # not 127.0.0.1, which Ray replaces by the machine's own address


def until(holds: Callable[[], Any], what: str, within_s: float = DEADLINE_S) -> Any:
    """Poll until it is true; what it was then."""
    deadline = time.monotonic() + within_s
    while not (value := holds()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.1)
    return value


class Nodes:
    """The cluster. A node's number is the last part of its address, 127.0.0.N; the head is node 2 and has no slots."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # Telemetry and dashboard stay off; a dead node is noticed within a few seconds instead of a minute.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        logging.getLogger("ray").setLevel(logging.ERROR)
        health = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500}
        health |= {"health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                "node_ip_address": HEAD,
                "_system_config": health,
            },
        )
        self.address: str = self.cluster.address
        self._nodes: dict[int, Any] = {}

    def add(self, number: int, *, slots: int = 2, **resources: float) -> None:
        """A node for so many replicas."""
        self._nodes[number] = self.cluster.add_node(
            num_cpus=slots,
            object_store_memory=STORE_BYTES,
            node_ip_address=f"127.0.0.{number}",
            resources={"slot": slots, **resources},
        )

    def kill(self, number: int) -> None:
        """SIGKILL for the node's raylet; its workers end with it."""
        self.cluster.remove_node(self._nodes.pop(number), allow_graceful=False)

    def close(self) -> None:
        self.cluster.shutdown()


@dataclass
class RayServer:
    process: subprocess.Popen[str]
    log: Path
    state_dir: Path
    url: str = ""
    places: dict[str, str] = field(default_factory=dict)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60.0, trust_env=False))

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        match = READY.fullmatch(line)
        assert match, f"no ready line, but {line!r}; log:\n{self.text()[-4000:]}"
        self.url = match[1]
        self.places = dict(re.findall(r"(\S+) on node (\S+?)(?:,|$)", match[5]))

    def text(self) -> str:
        return self.log.read_text()

    def deployment(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"{self.url}/health").json()["deployments"][0]
        return found


@contextlib.contextmanager
def serving(
    path: Path, nodes: Nodes, *arguments: str, config: str = "", ready: bool = True
) -> Iterator[RayServer]:
    """`midstream serve --launcher ray`. path: a directory for its state, log and settings."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "midstream.toml").write_text(config or "[ray]\nresources = {slot = 1}\n")
    log = path / "serve.log"
    command = [sys.executable, "-m", "midstream.cli", "serve", "--launcher", "ray", "--port", "0"]
    command += ["--ray-address", nodes.address, "--state-dir", str(path / "state")]
    command += ["--config", str(path / "midstream.toml"), *arguments]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    server = RayServer(process, log, path / "state")
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.http.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()


def running(mark: str, *words: str) -> list[int]:
    """Pids whose command line has all words, of processes whose working files lie below `mark` or anywhere if empty."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(word in line for word in words) and (not mark or mark in line):
                    found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
