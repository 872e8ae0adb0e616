"""What an open dashboard costs the gateway: CPU time of its process with and without open event streams, alternating.

    python benchmarks/dashboard.py [--pages 8] [--sessions 1000] [--seconds 20] [--rounds 3]

Prints JSON with the share of one core that a page takes, and writes it to benchmarks/results/dashboard.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from hardware import provenance, write_result

REPLICAS = 4


def gateway_of(supervisor: int) -> int:
    """The pid of the gateway process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words, parent = (entry / "cmdline").read_bytes(), (entry / "stat").read_text().split()[3]
            except OSError:
                continue
            if b"midstream.launch.gateway" in words and int(parent) == supervisor:
                return int(entry.name)
    raise SystemExit("no gateway process was found")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_sessions(url: str, count: int) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        for number in range(count):
            body = {"model": "tiny-moe", "prompt": [1, 2, 3], "max_tokens": 1}
            http.post(
                "/v1/completions", json=body, headers={"x-session-affinity": f"s-{number}"}
            ).raise_for_status()


class Pages:
    """Open event streams, which read all that comes."""

    def __init__(self, url: str, count: int) -> None:
        self.bytes, self._over = 0, threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(url,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("GET", f"{url}/dashboard/events", timeout=60) as answer:
            for piece in answer.iter_bytes():
                self.bytes += len(piece)
                if self._over.is_set():
                    return

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def measure(pid: int, seconds: float) -> float:
    """The share of one core that the process took."""
    before, begun = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("pages", 8), ("sessions", 1000), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "midstream.cli", "serve", "--port", "0", "--replicas", str(REPLICAS)]
        server = subprocess.Popen(
            [*command, "--state-dir", f"{folder}/state"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            ready = next(filter(None, (re.search(r"ready on (\S+)", line) for line in server.stdout)))
            pid = gateway_of(server.pid)
            make_sessions(ready[1], options.sessions)
            shares: dict[str, list[float]] = {"without": [], "with": []}
            sent = []
            for _ in range(options.rounds):
                shares["without"].append(measure(pid, options.seconds))
                pages = Pages(ready[1], options.pages)
                shares["with"].append(measure(pid, options.seconds))
                pages.close()
                sent.append(pages.bytes / options.pages / options.seconds)
        finally:
            server.terminate()
            server.wait()
    without, by = statistics.median(shares["without"]), statistics.median(shares["with"])
    result = {
        **provenance(replicas=REPLICAS, **vars(options)),
        "gateway_core_share": shares,
        "core_share_of_a_page": (by - without) / options.pages,
        "bytes_a_second_of_a_page": statistics.median(sent),
    }
    print(json.dumps(result, indent=2))
    write_result("dashboard", result)


if __name__ == "__main__":
    main()
