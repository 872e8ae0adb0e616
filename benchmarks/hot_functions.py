"""Where the time of a request, a chunk, a token and a step is spent: a profile by function, of a live server's processes.

    python hot_functions.py [--pieces gateway embedded vllm] [--write]

Three pieces: a gateway in front of mock replicas (benchmarks/gateway), a server with the embedded engine, and one in front of
vLLM. Each window counts the calls of all functions, and the CPU time that each took itself under cProfile. That makes a
call of a Python function about a microsecond slower: the figures compare functions, not servers. Prints JSON. --write: also to
benchmarks/results/profile.json and docs/profile.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import site
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from document import table, write_part
from engine import write_models
from gateway import loads
from gateway.bench import QUICK, Bench
from gateway.routers import Midstream as Gateway
from gateway.routers import temporary_folder
from hardware import provenance, write_result
from loadgen import Load, run
from servers import VLLM_PYTHON, Endpoint, Midstream, Server, family
from vllm_servers import OURS, OverVllm, SharedVllm
from walk import process_of

import midstream

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "profile.md"
SOURCE = str(Path(midstream.__file__).parents[1]) + os.sep
#: For files of processes.
LOOK_EVERY_S = 0.02
#: Functions of a process that the document shows.
SHOWN = 12
#: Tokens of a stream.
NEW_TOKENS = 256
STREAMS = (1, 16)
PIECES = ("gateway", "embedded", "vllm")
LOADS = {
    "1 KB": "a 1 KB request",
    "64 KB": "a 64 KB request",
    "paced": "a paced chunk",
    "burst": "a burst chunk",
}


@dataclass
class Window:
    """Calls and own seconds of each function of one process, and how many units of work it did meanwhile."""

    units: int
    calls: Counter[str] = field(default_factory=Counter)
    own_s: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        """Per unit."""
        ours = sum(count for name, count in self.calls.items() if name.startswith(SOURCE))
        python = sum(count for name, count in self.calls.items() if is_python(name))
        return {
            "calls of Python": round(python / self.units, 2),
            "of midstream": round(ours / self.units, 2),
            "own us": round(self.own_s.total() / self.units * 1e6, 2),
            "functions": [
                {
                    "name": shown(name),
                    "calls": round(self.calls[name] / self.units, 3),
                    "own us": round(own_s / self.units * 1e6, 2),
                }
                for name, own_s in self.own_s.most_common(SHOWN)
            ],
        }


def is_python(name: str) -> bool:
    """Whether it is a function with code, not one of C."""
    return ".py:" in name


def shown(name: str) -> str:
    """A function's name without the folders of this machine."""
    for folder in (
        SOURCE,
        *(one + os.sep for one in site.getsitepackages()),
        str(Path(os.__file__).parent) + os.sep,
    ):
        name = name.removeprefix(folder)
    return name[1:-1] if name.startswith("<") and name.endswith(">") else name


class Profiled:
    """The windows of processes that a server runs. place: their files."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environment = {"MIDSTREAM_PROFILE": str(place), "PYTHONPATH": str(HERE / "profiling")}

    @contextmanager
    def window(
        self, name: str, pid: int, units: Callable[[], int], found: dict[str, Window]
    ) -> Iterator[None]:
        """Profiles what runs within, in the process `pid` and all under it. found: gets a window for each of them, by module.
        units: how many were done, before and behind it."""
        switch = self.place / "on"
        switch.write_text(name)
        self._files(f"{name}-*.open", pid)
        before = units()
        yield
        done = units() - before
        switch.unlink()
        files = self._files(f"{name}-*.json", pid)
        for file in files:
            wrote = json.loads(file.read_text())
            window = found.setdefault(process_of(wrote["command"]), Window(done))
            for function, (calls, own_s) in wrote["functions"].items():
                window.calls[function] += calls
                window.own_s[function] += own_s
        for file in self.place.glob(f"{name}-*"):
            file.unlink()

    def _files(self, pattern: str, pid: int) -> list[Path]:
        """Those of that name, once the process `pid` and each under it has one."""
        while len(files := list(self.place.glob(pattern))) < sum(map(is_profiled, family(pid))):
            time.sleep(LOOK_EVERY_S)
        return files


def is_profiled(pid: int) -> bool:
    """Whether it is a Python process that has the profiler. Helpers of multiprocessing run isolated, without it."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"MIDSTREAM_PROFILE=" in environment and b"midstream." in command


def gateway(profiled: Profiled, folder: Path) -> dict[str, dict[str, Any]]:
    """A gateway process in front of mock replicas."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the gateway's piece needs two cores")

    class ProfiledGateway(Gateway):
        def environment(self) -> dict[str, str]:
            return profiled.environment

    found = {}
    with Bench(folder, QUICK, (cores[0], cores[1])) as bench:
        bench.start([ProfiledGateway])
        for shape in (shape for shape in loads.SHAPES if shape.name in LOADS):
            windows: dict[str, Window] = {}
            pid = bench.running[Gateway.name].pid
            name = shape.name.replace(" ", "-")
            # Sessions and connections are there then.
            bench.measure(Gateway.name, shape)
            with profiled.window(name, pid, lambda shape=shape: bench.bed.total(shape.counter), windows):
                bench.measure(Gateway.name, shape)
            found[LOADS[shape.name]] = {process: window.figures() for process, window in windows.items()}
    return found


def streams(
    profiled: Profiled, server: Server, endpoint: Endpoint, vocabulary: int
) -> dict[str, dict[str, Any]]:
    """Streams with logprobs, through the gateway: per token."""
    found = {}
    for count in STREAMS:
        load = Load(
            port=endpoint.port,
            path=endpoint.path,
            model=endpoint.model,
            vocabulary=vocabulary,
            streams=count,
            prompt_tokens=64,
            new_tokens=NEW_TOKENS,
            headers=endpoint.headers,
            extra=endpoint.extra,
            seed=count,
        )
        # Connections, caches and compiled kernels are there then.
        asyncio.run(run(load))
        windows: dict[str, Window] = {}
        done = iter((0, count * NEW_TOKENS))
        with profiled.window(f"streams-{count}", server.pid, lambda done=done: next(done), windows):
            asyncio.run(run(load))
        what = (
            f"a token of {count} streams with logprobs"
            if count > 1
            else "a token of one stream with logprobs"
        )
        found[what] = {
            process: window.figures()
            for process, window in windows.items()
            if window.calls.total() > window.units
        }
    return found


def embedded(profiled: Profiled, folder: Path) -> dict[str, dict[str, Any]]:
    class ProfiledServer(Midstream):
        def environment(self) -> dict[str, str]:
            return profiled.environment

    [model] = write_models(["tiny-moe"], folder)
    with ProfiledServer(model, folder) as server:
        endpoint = server.endpoints()["midstream through the gateway"]
        return streams(profiled, server, endpoint, model.vocabulary)


def vllm(profiled: Profiled, folder: Path) -> dict[str, dict[str, Any]]:
    class ProfiledServer(OverVllm):
        def environment(self) -> dict[str, str]:
            return profiled.environment

    if not VLLM_PYTHON.exists():
        raise SystemExit("the vllm piece needs `make setup-vllm`")
    [model] = write_models(["tiny-moe"], folder)
    with SharedVllm(model, folder) as shared:
        url = f"http://127.0.0.1:{shared.port}"
        with ProfiledServer(model, folder, urls=(url,)) as server:
            return streams(profiled, server, server.endpoints()[OURS], model.vocabulary)


def render(result: dict[str, Any]) -> str:
    cpu = result["hardware"]["cpu"]
    python = result["versions"]["python"]
    parts = [f"{result['at'][:10]}, commit {result['commit'][:10]}; {cpu}, Python {python}.\n"]
    for piece, windows in result["pieces"].items():
        for what, processes in windows.items():
            for process, figures in processes.items():
                parts.append(
                    f"### {what[0].upper()}{what[1:]}: {process} ({piece})\n\n"
                    f"{figures['calls of Python']:g} calls of Python functions, {figures['of midstream']:g} of them of "
                    f"midstream's; {figures['own us']:.0f} us in all functions.\n"
                )
                rows = [
                    [f"`{one['name']}`", f"{one['calls']:g}", f"{one['own us']:.2f}"]
                    for one in figures["functions"]
                ]
                parts.append(table(["function", "calls", "own us"], rows) + "\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pieces", nargs="+", choices=PIECES, default=PIECES)
    parser.add_argument(
        "--write", action="store_true", help="also to benchmarks/results/profile.json and docs/profile.md"
    )
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    for piece in options.pieces:
        print(f"profiling the piece {piece}", file=sys.stderr, flush=True)
        with temporary_folder() as folder, tempfile.TemporaryDirectory(prefix="midstream-profile-") as place:
            measured[piece] = {"gateway": gateway, "embedded": embedded, "vllm": vllm}[piece](
                Profiled(Path(place)), Path(folder)
            )
    result = {**provenance(new_tokens=NEW_TOKENS, streams=STREAMS), "pieces": measured}
    print(json.dumps(result, indent=1))
    if options.write:
        write_result("profile", result)
        write_part("profile", render(result), DOCUMENT)


if __name__ == "__main__":
    main()
