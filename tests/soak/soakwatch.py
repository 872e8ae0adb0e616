"""What the processes of a real server hold, over time: memory, descriptors, threads, sessions, caches, files.

Owns: the samples, as lines of JSON and in memory, and the verdicts on them.
Always holds: each life of a process is a series of its own, named by its role and its pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import soakflat
from serving import Server
from simclient import Broken, Oracle, exchange
from simtrainer import HOT_LOAD
from soaktrouble import processes

MB = 2**20
_OF_PROCESS = {"rss_mb": soakflat.RSS_MB, "fds": soakflat.FDS, "threads": soakflat.THREADS}
_OF_SERVER = {
    "sessions": soakflat.SESSIONS,
    "processes": soakflat.PROCESSES,
    "cache_mb": soakflat.CACHE_MB,
}
#: Told and not judged: a pool that is taken once, and what grows with each signal by its nature.
_TOLD = ("kv_blocks_used", "in_flight", "long_texts", "ledger_mb")
_METRICS = {
    "sessions": "midstream_gateway_sessions",
    "kv_blocks_used": "midstream_replica_kv_blocks_used",
    "in_flight": "midstream_gateway_in_flight",
    "long_texts": "midstream_replica_long_texts",
}


_STALLS = re.compile(
    r'^midstream_event_loop_stall_seconds_(count|sum)\{process="([^"]+)"\} (\S+)$', re.MULTILINE
)


class Stalls:
    """The stalls of event loops, as /metrics tells them by process."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, float]] = {}

    def look(self, text: str) -> list[str]:
        """What came since the last look. A process that began anew counts from nothing."""
        told: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for what, process, value in _STALLS.findall(text):
            told[process][what] = float(value)
        found = []
        for process, now in told.items():
            before = self._told.get(process, {})
            if now["count"] < before.get("count", 0.0):
                before = {}
            count, seconds = (now[what] - before.get(what, 0.0) for what in ("count", "sum"))
            if count > 0:
                found.append(
                    f"the event loop of {process} stood still for {seconds:.3f} s, in {count:.0f} steps"
                )
        self._told.update(told)
        return found


def of_process(pid: int) -> dict[str, float]:
    """Raises OSError when it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {
        name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)
    }
    if "VmRSS" not in found:
        raise ProcessLookupError(pid)
    return {
        "rss_mb": found["VmRSS"] / 1024,
        "threads": found["Threads"],
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
    }


def of_metrics(text: str) -> dict[str, float]:
    """Sums over replicas."""
    return {
        name: sum(
            float(value) for value in re.findall(rf"^{metric}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        )
        for name, metric in _METRICS.items()
    }


def of_files(state: Path) -> dict[str, float]:
    """What lies in the state directory, the ledger apart."""
    ledger = cache = 0
    for folder, _, names in os.walk(state):
        for name in names:
            with contextlib.suppress(OSError):
                size = os.lstat(Path(folder) / name).st_size
                if name.startswith("ledger.db"):
                    ledger += size
                else:
                    cache += size
    return {"ledger_mb": ledger / MB, "cache_mb": cache / MB}


class Watch:
    """state: the state directory as this process reaches it. out: gets a line for each sample."""

    def __init__(self, server: Server, port: int, state: Path, oracle: Oracle, out: TextIO) -> None:
        self._server, self._port, self._state, self._oracle, self._out = server, port, state, oracle, out
        #: By what is measured ("replica 123"), and kind.
        self.series: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._stalls = Stalls()
        self._found: list[str] | None = None

    async def run(self, every_s: float, over: Callable[[], bool]) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        while not over():
            at = clock() - begun
            for of, values in (await self._sample()).items():
                self._out.write(json.dumps({"at": round(at, 2), "of": of, **values}) + "\n")
                for kind, value in values.items():
                    self.series[of, kind].append((at, value))
            self._out.flush()
            await self._see_who_left_the_base()
            await asyncio.sleep(every_s)

    def judge_stalls(self, found: list[str]) -> None:
        """From now on each stall is told there."""
        self._found = found

    async def _sample(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        there = processes(self._server)
        for pid, role in there.items():
            with contextlib.suppress(OSError):
                found[f"{role} {pid}"] = of_process(pid)
        found["server"] = {"processes": len(found), **await asyncio.to_thread(of_files, self._state)}
        with contextlib.suppress(Broken):
            answer = await exchange(self._port, "GET", "/metrics")
            if answer.status == 200:
                text = answer.body.decode()
                found["server"] |= of_metrics(text)
                stalls = self._stalls.look(text)
                for stall in stalls if self._found is not None else ():
                    self._found.append(stall)
        return found

    async def _see_who_left_the_base(self) -> None:
        with contextlib.suppress(Broken):
            rows: list[dict[str, Any]] = (
                (await exchange(self._port, "GET", HOT_LOAD)).json().get("replicas", [])
            )
            for row in rows:
                if row["readiness"] and row["current_snapshot_identity"] != "base":
                    self._oracle.left_base.add(row["midstream"]["replica"])

    def verdicts(self, warm_up_s: float, calm_from: float) -> list[soakflat.Verdict]:
        """calm_from: of the server as a whole, only what was measured since then counts."""
        found = []
        for (of, kind), samples in sorted(self.series.items()):
            if of == "server" and kind in _OF_SERVER:
                calm = [one for one in samples if one[0] >= calm_from]
                if calm:
                    found.append(soakflat.judged(of, kind, calm, warm_up_s, _OF_SERVER[kind]))
            elif of != "server" and not of.startswith("other"):
                found.append(soakflat.judged(of, kind, samples, warm_up_s, _OF_PROCESS[kind]))
        return found

    def now(self) -> dict[str, float]:
        """The newest number of each kind: of processes, the greatest of each role."""
        last: dict[str, float] = {}
        for (of, kind), samples in self.series.items():
            if of == "server":
                last[kind] = samples[-1][1]
        return last
