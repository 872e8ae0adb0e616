"""A Ray cluster of several nodes on this machine, each with a loopback address of its own, and `midstream serve` on it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from serving import with_built_in_model

READY = re.compile(
    r"midstream ready on (https?://[^(]+) \((\d+) replicas, model (\S+), deployment (\S+)\)(.*)"
)
DEADLINE_S = 120.0
# The least that Ray takes.
STORE_BYTES = 80 * 2**20
MARK = "MIDSTREAM_TEST_CLUSTER"
# Not 127.0.0.1, which Ray replaces by the machine's own address.
HEAD = "127.0.0.2"


def until(holds: Callable[[], Any], what: Callable[[], str], within_s: float = DEADLINE_S) -> Any:
    """Poll until it is true; what it was then. what: what to say if that takes too long."""
    deadline = time.monotonic() + within_s
    while not (value := holds()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
    return value


class Nodes:
    """The cluster. A node's number is the last part of its address, 127.0.0.N; the head is node 2 and has no slots."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # Telemetry and dashboard stay off; a dead node is noticed within a few seconds instead of a minute.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # All processes of the cluster inherit it.
        self.mark = os.environ[MARK] = secrets.token_hex(8)
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

    def add(self, number: int, *, slots: int = 0, **resources: float) -> None:
        """A node for so many replicas, with one core and one more for each of them."""
        self._nodes[number] = self.cluster.add_node(
            num_cpus=slots + 1,
            object_store_memory=STORE_BYTES,
            node_ip_address=f"127.0.0.{number}",
            resources={"slot": slots, **resources},
        )

    def numbers(self) -> set[int]:
        """Of the nodes there are, without the head."""
        return set(self._nodes)

    def processes(self, number: int) -> list[int]:
        """Of a node: its raylet, the actors' workers and what those started."""
        [raylet] = self._nodes[number].all_processes["raylet"]
        return [raylet.process.pid, *descendants(raylet.process.pid)]

    def node_of(self, name: str) -> int | None:
        """Where a replica or the gateway runs."""
        pids = self.children(name)
        return next((n for n in self._nodes if any(pid in pids for pid in self.processes(n))), None)

    def lose(self, number: int) -> None:
        """The machine is gone: SIGKILL for all of the node at once."""
        for pid in self.processes(number):
            kill(pid)
        self.cluster.remove_node(self._nodes.pop(number), allow_graceful=False)

    def remove(self, number: int) -> None:
        self.cluster.remove_node(self._nodes.pop(number))

    def children(self, name: str = "") -> list[int]:
        """Pids of replicas, gateways and engines of any server on this cluster, or only of that name."""
        return [
            pid
            for pid, words in marked(self.mark)
            if "midstream.l" in words or "midstream.e" in words
            if not name or name in words.split()
        ]

    def close(self) -> None:
        """Raises AssertionError when a process of the cluster stays."""
        self.cluster.shutdown()
        del os.environ[MARK]
        until(lambda: not marked(self.mark), lambda: f"still there: {marked(self.mark)}", 30.0)


@dataclass
class RayServer:
    process: subprocess.Popen[str]
    log: Path
    state_dir: Path
    url: str = ""
    # Of its gateways.
    urls: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60.0, trust_env=False))

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        match = READY.fullmatch(line)
        assert match, f"no ready line, but {line!r}; log:\n{self.text()[-4000:]}"
        self.urls = match[1].split(", ")
        self.url = self.urls[0]
        self.places = dict(re.findall(r"(\S+) on node (\S+?)(?:,|$)", match[5]))

    def text(self) -> str:
        return self.log.read_text()

    def health(self, url: str | None = None) -> dict[str, Any]:
        """As the gateway at that URL sees it, or the first one."""
        found: dict[str, Any] = self.http.get(f"{url or self.url}/health").json()
        return found

    def usable(self) -> list[str]:
        return sorted(r["name"] for r in self.health()["replicas"] if r["usable"])

    def scale(self, replicas: int, gateway: int = 0) -> None:
        name = self.health()["deployments"][0]["name"]
        body = {"minReplicaCount": replicas, "maxReplicaCount": replicas}
        mask = {"updateMask": "min_replica_count,max_replica_count"}
        self.http.patch(f"{self.urls[gateway]}/v1/{name}", params=mask, json=body).raise_for_status()

    def wait_serving(self, *replicas: str) -> None:
        """Until exactly these do."""
        until(lambda: self.usable() == sorted(replicas) == self.names(), self.state)

    def names(self) -> list[str]:
        return sorted(r["name"] for r in self.health()["replicas"])

    def state(self) -> str:
        return f"{self.health()}; log:\n{self.text()[-4000:]}"


@contextlib.contextmanager
def serving(
    path: Path, nodes: Nodes, *arguments: str, config: str = "", ready: bool = True
) -> Iterator[RayServer]:
    """`midstream serve --launcher ray`. path: a directory for its state, log and settings."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "midstream.toml").write_text(config or "[ray]\nresources = {slot = 1}\n")
    log = path / "serve.log"
    with_built_in_model(path / "state")
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


def marked(mark: str) -> list[tuple[int, str]]:
    """Pid and command line of all processes that inherited the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append((int(entry.name), words.decode(errors="replace")))
    return found


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
