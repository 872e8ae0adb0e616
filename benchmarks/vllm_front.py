"""What stands in front of a vLLM server, and what it costs: the same server asked directly and through others.

Owns: the first part of `make bench-vllm`. One vLLM server, with the flags that midstream gives; everything else is attached
to it, so the difference between two columns is what is in front. Columns alternate, in another order each round.
Always holds: no two measurements share a prompt; a stream that is not answered whole fails the run.

Per column and line: what loadgen.py measures, and
    front_cpu_ms_per_token  CPU time of the processes in front of vLLM: supervisor, gateway and replica; or the router
    vllm_cpu_ms_per_token   of vLLM's own
    other_cpu_share         cores that other processes of the machine used meanwhile
Lost, in %, against vLLM asked directly at /v1/completions and at /inference/v1/generate (which midstream asks itself): the
median over the rounds of what was lost in a round, and the least and the most of them.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine import SETTLE_S, Line, machine_busy_s, measure, summary
from gateway.routers import RouterFailed
from gateway.tools import tree_cpu_s
from servers import Endpoint, Model
from vllm_servers import DIRECT, DIRECT_IDS, OURS, REPLICA, ROUTER, OverVllm, SharedVllm, started_router

PROMPT = 64
#: New tokens of a stream by how many streams there are. A measurement shall last a second at least.
NEW = {"tiny-moe": {1: 512, 16: 512, 64: 256}, "dense-0.5b": {1: 128, 16: 128}}
ROUNDS = {"tiny-moe": 9, "dense-0.5b": 5}
#: Where vLLM computes. tiny-moe's server keeps off one core; the dense model computes on one alone, as on an accelerator: what
#: is in front takes nothing from it, and no barrier between its threads waits for a core that another process has.
CORES = {"tiny-moe": "auto", "dense-0.5b": "0"}
COLUMNS = (DIRECT, DIRECT_IDS, ROUTER, REPLICA, OURS)
# What a loss is counted against, and its name in the result.
BASES = {
    DIRECT: "direct",
    DIRECT_IDS: "direct_ids",
}
FIGURES = ("tokens_per_s", "ttft_ms_p50", "gap_ms_mean", "gap_ms_p99")
IDLE_S = 5.0
# CPU of the load generator's start, which it does not count itself.
CLIENT_START_S = 0.2


@dataclass(frozen=True)
class Column:
    endpoint: Endpoint
    # Process in front of vLLM, with all under it; None: the server is asked directly.
    front: int | None


@dataclass
class Bed:
    """Running servers."""

    vllm: SharedVllm
    columns: dict[str, Column]
    about: dict[str, Any]

    @property
    def vllm_pid(self) -> int:
        return pid_of(self.vllm)

    def cpu_s(self) -> dict[int, float]:
        pids = {self.vllm_pid, *(column.front for column in self.columns.values() if column.front)}
        return {pid: tree_cpu_s(pid) for pid in pids}


def pid_of(server: SharedVllm | OverVllm) -> int:
    assert server._process is not None
    return server._process.pid


@contextlib.contextmanager
def started(model: Model, folder: Path, *, eager: bool) -> Iterator[Bed]:
    """vLLM, midstream attached to it, and the router unless it cannot run (about["absent"] says why)."""
    with contextlib.ExitStack() as stack:
        say(f"{model.name}: starting vLLM")
        vllm = stack.enter_context(SharedVllm(model, folder, eager=eager))
        say(f"  ready after {vllm.startup_s:.0f} s; starting midstream and vllm-router")
        ours = stack.enter_context(OverVllm(model, folder, urls=(f"http://127.0.0.1:{vllm.port}",)))
        columns = {name: Column(endpoint, None) for name, endpoint in vllm.endpoints().items()}
        columns |= {name: Column(endpoint, pid_of(ours)) for name, endpoint in ours.endpoints().items()}
        about: dict[str, Any] = {"vllm": vllm.configuration(), "midstream": ours.configuration()}
        try:
            router = stack.enter_context(started_router(vllm, folder))
        except RouterFailed as error:
            about["absent"] = {ROUTER: str(error)}
        else:
            endpoint = Endpoint(router.port, model.name, {}, vllm.endpoints()[DIRECT].extra)
            columns[ROUTER] = Column(endpoint, router.pid)
            about[ROUTER] = {"version": router.version(), "command": router.configuration()["command"]}
        yield Bed(vllm, {name: columns[name] for name in COLUMNS if name in columns}, about)


def idle_cores(bed: Bed) -> dict[str, float]:
    """Cores that each server uses while nobody asks it anything."""
    names = {bed.vllm_pid: "vLLM"} | {
        column.front: name for name, column in bed.columns.items() if column.front is not None
    }
    time.sleep(2)
    before = bed.cpu_s()
    time.sleep(IDLE_S)
    return {names[pid]: round((after - before[pid]) / IDLE_S, 4) for pid, after in bed.cpu_s().items()}


def measure_column(bed: Bed, column: Column, line: Line, seed: int) -> dict[str, float]:
    """What the client saw, with the servers' own costs."""
    time.sleep(SETTLE_S)
    began, cpu, busy = time.monotonic(), bed.cpu_s(), machine_busy_s()
    run = measure(column.endpoint, bed.vllm.model, line, seed)
    busy, seconds = machine_busy_s() - busy, time.monotonic() - began
    spent = {pid: after - cpu[pid] for pid, after in bed.cpu_s().items()}
    run["front_cpu_ms_per_token"] = spent[column.front] / run["tokens"] * 1e3 if column.front else 0.0
    run["vllm_cpu_ms_per_token"] = spent[bed.vllm_pid] / run["tokens"] * 1e3
    others = busy - sum(spent.values()) - run["client_cpu_s"] - CLIENT_START_S
    run["other_cpu_share"] = max(0.0, others / seconds)
    return run


def measure_line(bed: Bed, line: Line, rounds: int, seed: int) -> dict[str, Any]:
    """Every column in every round, rotated."""
    names = list(bed.columns)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            own = zlib.crc32(repr((seed, line, turn, name)).encode())
            run = measure_column(bed, bed.columns[name], line, own)
            runs[name].append(run)
            say(
                f"  {line.label()} round {turn + 1} {name}: {run['tokens_per_s']:.0f} tok/s, ttft {run['ttft_ms_p50']:.1f}, "
                f"gap {run['gap_ms_mean']:.2f} / {run['gap_ms_p99']:.2f} ms, front {run['front_cpu_ms_per_token']:.3f} ms, "
                f"others {run['other_cpu_share']:.2f}"
            )
    columns = {name: {**summary(done), "lost": losses(runs, name)} for name, done in runs.items()}
    return {**asdict(line), "columns": columns}


def losses(runs: dict[str, list[dict[str, float]]], name: str) -> dict[str, dict[str, list[float]]]:
    """Of one column against each base that it is not: per figure [median, least, most] of the rounds, in %."""
    found: dict[str, dict[str, list[float]]] = {}
    for base, short in BASES.items():
        if base == name or base not in runs or name in BASES:
            continue
        figures = {}
        for figure in FIGURES:
            pairs = zip(runs[base], runs[name], strict=True)
            lost = [loss(figure, ours[figure], direct[figure]) for direct, ours in pairs]
            known = [one for one in lost if one is not None]
            if known:
                figures[figure] = [round(pick(known), 2) for pick in (statistics.median, min, max)]
        found[short] = figures
    return found


def loss(figure: str, ours: float, direct: float) -> float | None:
    """How much worse `ours` is, in %; negative: better; None: nothing to compare with.

    Of a throughput, the share that is missing; of a time, what it is longer.
    """
    if direct <= 0:
        return None
    share = ours / direct
    return (1 - share if figure == "tokens_per_s" else share - 1) * 100


def warm(bed: Bed, streams: Sequence[int]) -> None:
    """Bursts nobody looks at: code, connections, kernels of each batch size."""
    for column in bed.columns.values():
        for n, count in enumerate(streams):
            line = Line(bed.vllm.model.name, "warm-up", count, PROMPT, 8)
            measure(column.endpoint, bed.vllm.model, line, 1_000_000 + n)


def measure_model(
    model: Model, folder: Path, *, streams: Sequence[int], rounds: int, seed: int, eager: bool
) -> dict[str, Any]:
    """{"about": servers, "lines": [...]} of one model. streams: a part of NEW's."""
    with started(replace(model, vllm_cores=CORES[model.name]), folder, eager=eager) as bed:
        warm(bed, streams)
        bed.about["idle_cores"] = idle_cores(bed)
        lines = [Line(model.name, "front", n, PROMPT, NEW[model.name][n]) for n in streams]
        rows = [measure_line(bed, line, rounds, seed) for line in lines]
        bed.about["kv_bytes_per_token"] = bed.vllm.kv_bytes_per_token()
        return {"about": bed.about, "lines": rows}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
