"""What an open dashboard costs the gateway, and how soon a person sees it.

    python benchmarks/dashboard.py [--pages 8] [--sessions 1000] [--seconds 20] [--rounds 3] [--rate 20]

Compares the CPU time of the gateway's process with and without open event streams, alternating: where nothing moves, and while
turns of the sessions come at a rate. Then Chromium opens the page, with an empty cache each time.

Prints JSON with the share of one core that a page takes, and writes it to benchmarks/results/dashboard.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from hardware import provenance, write_result
from playwright.sync_api import sync_playwright

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


class Turns:
    """Turns of the sessions, so many in a second whether or not earlier ones have ended."""

    def __init__(self, url: str, rate: float, sessions: int) -> None:
        self.ended, self._over = 0, threading.Event()
        self._http = httpx.Client(base_url=url, timeout=60)
        self._pool = ThreadPoolExecutor(64)
        self._thread = threading.Thread(target=self._run, args=(rate, sessions), daemon=True)
        self._thread.start()

    def _run(self, rate: float, sessions: int) -> None:
        begun = time.monotonic()
        for number in itertools.count():
            if self._over.wait(max(0.0, begun + number / rate - time.monotonic())):
                return
            self._pool.submit(self._turn, f"s-{number * 7 % sessions}")

    def _turn(self, session: str) -> None:
        body = {"model": "tiny-moe", "prompt": [1, 2, 3], "max_tokens": 8}
        self._http.post(
            "/v1/completions", json=body, headers={"x-session-affinity": session}
        ).raise_for_status()
        self.ended += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._pool.shutdown()
        self._http.close()


def compared(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """The gateway's share of a core without and with pages, alternating."""
    shares: dict[str, list[float]] = {"without": [], "with": []}
    sent = []
    for _ in range(options.rounds):
        shares["without"].append(measure(pid, options.seconds))
        pages = Pages(url, options.pages)
        shares["with"].append(measure(pid, options.seconds))
        pages.close()
        sent.append(pages.bytes / options.pages / options.seconds)
    without, by = statistics.median(shares["without"]), statistics.median(shares["with"])
    return {
        "gateway_core_share": shares,
        "core_share_of_a_page": (by - without) / options.pages,
        "bytes_a_second_of_a_page": statistics.median(sent),
    }


def first_paints_ms(url: str, times: int) -> list[float] | None:
    """From the start of a page's load to its first content, each time in a browser context of its own. None: no Chromium."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        return None
    found = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(times):
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{url}/dashboard")
            page.wait_for_function(f"() => {_PAINT}.length > 0")
            found.append(float(page.evaluate(f"{_PAINT}[0].startTime")))
            context.close()
        browser.close()
    return found


_PAINT = "performance.getEntriesByName('first-contentful-paint')"


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
    parser.add_argument("--rate", type=float, default=20.0, help="turns in a second")
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
            still = compared(ready[1], pid, options)
            turns, begun = Turns(ready[1], options.rate, options.sessions), time.monotonic()
            moving = compared(ready[1], pid, options)
            turns.close()
            moving["turns_a_second"] = turns.ended / (time.monotonic() - begun)
            paints = first_paints_ms(ready[1], 5 * options.rounds)
        finally:
            server.terminate()
            server.wait()
    result = {
        **provenance(replicas=REPLICAS, **vars(options)),
        "nothing_moves": still,
        "turns_come": moving,
        "first_paint_ms": paints,
    }
    print(json.dumps(result, indent=2))
    write_result("dashboard", result)


if __name__ == "__main__":
    main()
