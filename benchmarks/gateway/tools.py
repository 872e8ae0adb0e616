"""The test bed, which is load generator and mock replicas in one process: built, run, read. And what processes use.

Always holds: a process that was started is gone when its owner is closed, and ends when this process dies; counters are
read from memory shared with the bed, so that reading them costs it nothing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from midstream.core.kv import KvStats
from midstream.core.measures import TURN_MEASURES, Distribution, Trajectories
from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.types import EngineStats

HERE = Path(__file__).parent
STATE_BYTES = 4096
# Words, as in mock.c.
GLOBALS, PER_REPLICA = 8, 8
COUNTERS = ("requests", "chunks", "connections", "streams", "resumable", "listeners")
IN_FLIGHT_MARK = b"@INFLT@@"
IN_FLIGHT_STAND_IN = 12345678


def build(folder: Path) -> None:
    """Compile it into `folder`. Raises CalledProcessError."""
    sources = [HERE / name for name in ("bed.c", "mock.c", "load.c")]
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", folder / "bed", *sources], check=True)


def cpu_s(pid: int) -> float:
    """CPU time of a process, user and system, of threads that ended too. Raises OSError when it is gone."""
    # What clock_getcpuclockid(pid) gives.
    return time.clock_gettime(~pid << 3 | 2)


def tree(pid: int) -> list[int]:
    """A process and all under it."""
    found, pids = [], [pid]
    while pids:
        found.append(pids.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            # A thread that ended meanwhile.
            with contextlib.suppress(OSError):
                pids += map(int, children.read_text().split())
    return found


def tree_cpu_s(pid: int) -> float:
    return sum(cpu_s(one) for one in tree(pid))


def rss_bytes(pid: int) -> int:
    """Resident memory of the process tree; pages that processes share count in each."""
    pages = (int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in tree(pid))
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def listens_on(pid: int) -> set[int]:
    """The TCP ports that the process listens on, of IPv4."""
    own = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(OSError):
            own.add(os.readlink(one).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    # 0A: LISTEN.
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and line[9] in own}


def pin(pid: int, *cores: int) -> None:
    """Every thread of the process tree on these cores."""
    for one in tree(pid):
        for thread in Path(f"/proc/{one}/task").iterdir():
            # It ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


class Bed:
    """A running test bed. urls: of the mock replicas."""

    def __init__(self, folder: Path, mocks: int, core: int | None = None, *, rests: bool = False) -> None:
        """folder: where it was built; the bed keeps its files there. core: the one it runs on. rests: it sleeps when it has
        nothing to do, also during a load."""
        state, reports = folder / "state", folder / "reports"
        state.write_bytes(bytes(STATE_BYTES))
        lines = [line for i in range(mocks) for line in (_report(i), _trajectories())]
        reports.write_bytes(b"".join(line + b"\n" for line in lines))
        with state.open("r+b") as file:
            self._state = mmap.mmap(file.fileno(), STATE_BYTES)
        self.process = subprocess.Popen(
            [folder / "bed", state, reports, *(["rests"] if rests else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if core is not None:
            pin(self.process.pid, core)
        self.ports = [int(port) for port in self._line().split()]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the test bed has ended; it said why on standard error")
        return line

    def begin(
        self,
        port: int,
        request: Path,
        connections: int,
        mode: str,
        amount: float,
        *,
        rate: float = 0.0,
        keys: int = 1024,
        record: Path | None = None,
    ) -> None:
        """Begin a load (bed.c says what the arguments are) and wait until every connection has an answer begun."""
        words = ["load", port, request, connections, mode, amount, rate, keys, record or ""]
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        self._line()

    def end(self) -> dict[str, Any]:
        """What the load counted, once it is over."""
        found: dict[str, Any] = json.loads(self._line())
        return found

    def pace(self, interval_s: float, chunks: int) -> None:
        """How streams that begin from now on are paced: seconds between two chunks (0: at once), and their number."""
        struct.pack_into("QQ", self._state, 0, int(interval_s * 1e9), chunks)

    def counts(self) -> list[dict[str, int]]:
        """COUNTERS of each replica; requests and chunks only grow."""
        words = struct.unpack_from(f"{STATE_BYTES // 8}Q", self._state)
        starts = (GLOBALS + PER_REPLICA * i for i in range(len(self.ports)))
        return [dict(zip(COUNTERS, words[at : at + len(COUNTERS)], strict=True)) for at in starts]

    def total(self, counter: str) -> int:
        return sum(counts[counter] for counts in self.counts())


def _report(index: int) -> bytes:
    """What midstream's replica would report, with a mark instead of the requests under way."""
    report = ReplicaReport(
        replica=f"replica-{index}",
        boot=f"{index:032x}",
        alive=True,
        policies=(PolicyReport(),),
        in_flight=IN_FLIGHT_STAND_IN,
        engine=EngineStats(running=12, kv=KvStats(used=1234, total=4096), prompt_tokens=123456, steps=9),
    )
    return msgspec.json.encode(report).replace(b"%d" % IN_FLIGHT_STAND_IN, IN_FLIGHT_MARK)


def _trajectories() -> bytes:
    measures = {
        name: Distribution([1000 + i for i in range(len(bounds) + 1)], 123.456)
        for name, bounds in TURN_MEASURES.items()
    }
    return msgspec.json.encode(Trajectories(measures=measures))


def busy_s(cores: Iterable[int]) -> float:
    """Time that these cores worked so far, seconds, for whomever."""
    wanted = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")
