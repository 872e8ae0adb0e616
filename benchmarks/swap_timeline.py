"""The time line of one swap: where a full snapshot's time goes from the signal until it serves.

One server with one embedded replica takes full snapshots from a local bucket, idle and with four
streams. Boundaries are the replica's own stage changes, as the ledger has them. Reported for each stage and process, in
medians over the swaps:
    wall_s       how long the stage took
    cpu_s        CPU time of the process within it
    read_bytes   bytes that it asked the system to read or copy; reads of mapped files are not among them
    write_bytes  likewise written or copied
    faults       pages that it touched for the first time

    python benchmarks/swap_timeline.py [--model 1GB] [--streams 0 4] [--swaps 5] [--before DIR] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from hardware import provenance, write_result
from loadgen import take_priority
from servers import TICKS, Midstream, MidstreamBefore, Model, Server, family
from swaps import Streams, VllmDevelopment, say, write_models

from midstream.client import ServerClient, SnapshotPublisher

EVERY_S = 0.01
COUNTERS = ("cpu_s", "read_bytes", "write_bytes", "faults")
#: By what its command line has.
ROLES = {"midstream.engine.embedded.loop": "engine", "replica-": "replica", "gateway": "gateway"}
#: Stages of the replica in their order, after "signal" and before "seen".
STAGES = ("fetching", "verifying", "staging", "staged", "committing", "checking", "idle")

SHOWN = ("replica", "engine")
DEPLOYMENT = "accounts/local/deployments/default"
QUIET_TOKENS = 30

Stage = dict[str, Any]
Sample = tuple[float, dict[str, tuple[float, ...]]]


class Sampler:
    """Counters of a server's processes over time, by role, on the clock of the ledger."""

    def __init__(self, root: int) -> None:
        self._processes = {pid: _role(pid) for pid in family(root)}
        self._stop = threading.Event()
        self._samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._samples.append((time.time(), self._sample()))
            if self._stop.wait(EVERY_S):
                return

    def _sample(self) -> dict[str, tuple[float, ...]]:
        found: dict[str, tuple[float, ...]] = {}
        for pid, role in self._processes.items():
            with contextlib.suppress(OSError):
                now = _counters(pid)
                before = found.get(role, (0.0,) * len(now))
                found[role] = tuple(a + b for a, b in zip(now, before, strict=True))
        return found

    def between(self, first: float, last: float) -> dict[str, dict[str, float]]:
        """By role: by how much each counter grew, from the samples nearest to these times."""
        before, after = self._at(first), self._at(last)
        return {
            role: {
                name: round(b - a, 6)
                for name, a, b in zip(COUNTERS, before.get(role, after[role]), after[role], strict=True)
            }
            for role in after
        }

    def _at(self, when: float) -> dict[str, tuple[float, ...]]:
        times = [at for at, _ in self._samples]
        return self._samples[min(bisect_left(times, when), len(times) - 1)][1]


def _role(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        for word, role in ROLES.items():
            if any(word in each for each in words[:6]):
                return role
    return "others"


def _counters(pid: int) -> tuple[float, ...]:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    asked = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    cpu_s = (int(stat[11]) + int(stat[12])) / TICKS
    return cpu_s, float(asked["rchar"]), float(asked["wchar"]), float(stat[7])


def reached_at(client: ServerClient, identity: str) -> dict[str, float]:
    """When the replica reached each stage with this snapshot. The ledger learns of the last ones a moment later."""
    for _ in range(50):
        snapshots = client.deployments.ledger(DEPLOYMENT)["snapshots"]
        moves = next(one["transitions"] for one in snapshots if one["identity"] == identity)
        reached = {move["stage"].lower(): float(move["at"]) for move in moves}
        if reached.keys() >= set(STAGES):
            return reached
        time.sleep(0.1)
    raise RuntimeError(f"{identity} has not passed all stages: {moves}")


def stages_of(sampler: Sampler, reached: dict[str, float], times: tuple[float, float]) -> dict[str, Stage]:
    """What happened in each stage, from its beginning to that of the next one."""
    marks = [("signal", times[0]), *((stage, reached[stage]) for stage in STAGES), ("seen", times[1])]
    return {
        stage: {"wall_s": end - begin, **sampler.between(begin, end)}
        for (stage, begin), (_, end) in itertools.pairwise(marks)
    }


async def swapped(
    server: Server, model: Model, client: ServerClient, identity: str, streams: int
) -> tuple[tuple[float, float], dict[str, float]]:
    """One swap to `identity`: when it was signalled and seen, and what the streams noticed."""

    def swap() -> tuple[float, float]:
        signal = time.time()
        client.snapshots.signal(identity)
        # As callers do it. Asking more often takes time from the swap.
        client.snapshots.wait_until_ready(identity)
        return signal, time.time()

    if not streams:
        return await asyncio.to_thread(swap), {}
    url = f"http://127.0.0.1:{server.port}"
    async with Streams(url, model.directory.name, model, streams, seed=len(identity)) as running:
        began = time.perf_counter()
        await running.after(QUIET_TOKENS)
        asked = time.perf_counter()
        times = await asyncio.to_thread(swap)
        ready = time.perf_counter()
        await running.after(QUIET_TOKENS)
    step = statistics.median(gap for gaps in running.gaps(began, asked) for gap in gaps)
    during = running.gaps(asked, ready)
    _, end = max(
        (b - a, b) for each in running.times for a, b in itertools.pairwise(each) if asked <= b and a <= ready
    )
    return times, {
        "longest_ended_after_s": end - asked,
        "step_ms": step * 1e3,
        "step_during_ms": statistics.median(gap for gaps in during for gap in gaps) * 1e3,
        "worst_wait_steps": max(max(gaps) for gaps in during) / step,
        "switch_steps": max(running.switch_gaps(identity)) / step,
    }


def measured(
    server: Server, model: Model, directories: list[Path], streams: int, swaps: int
) -> list[dict[str, Any]]:
    url, found = f"http://127.0.0.1:{server.port}", []
    bucket = server.log.with_suffix("") / "state" / "bucket"
    client = ServerClient(url)
    with SnapshotPublisher(url, bucket.as_uri()) as publisher:
        for number in range(swaps):
            identity = f"{swaps}-swaps-{streams}-streams-{number}"
            publisher.write_full(identity, directories[(number + 1) % 2])
            with Sampler(server.pid) as sampler:
                times, noticed = asyncio.run(swapped(server, model, client, identity, streams))
            reached = reached_at(client, identity)
            stages = stages_of(sampler, reached, times)
            found.append({"served_s": reached["idle"] - times[0], **noticed, "stages": stages})
            walls = ", ".join(f"{stage} {one['wall_s']:.3f}" for stage, one in stages.items())
            noticed_text = ", ".join(f"{name} {value:.2f}" for name, value in noticed.items())
            say(f"{server.name} {identity}: {found[-1]['served_s']:.2f} s ({walls}) {noticed_text}")
    return found


def reloaded(server: Server, directories: list[Path], swaps: int) -> list[float]:
    """Seconds that vLLM takes to load each of these directories again, while it has no requests. It needs no pause then."""
    found = []
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=600, trust_env=False) as http:
        for number in range(swaps + 1):
            path = str(directories[(number + 1) % 2])
            began = time.perf_counter()
            reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            http.post("/collective_rpc", json=reload).raise_for_status()
            found.append(time.perf_counter() - began)
    # The first one warms up, as ours does.
    return found[1:]


def medians(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each number, however deep it lies."""
    return {
        key: medians([one[key] for one in found])
        if isinstance(value, dict)
        else round(statistics.median(one.get(key, 0.0) for one in found), 4)
        for key, value in found[0].items()
    }


def shown(line: dict[str, Any]) -> str:
    """A table for people."""
    rows = [
        f"{line['engine']}, {line['model']}, {line['streams']} streams: served after {line['served_s']} s"
    ]
    if "ratio" in line:
        rows[0] += f", {line['ratio']} times vLLM's reload of {line['vllm_reload_s']} s"
    rows.append(
        f"{'stage':12}{'wall s':>8}" + "".join(f"{role + ' cpu, MB in/out, faults':>36}" for role in SHOWN)
    )
    for stage, one in line["stages"].items():
        cells = "".join(
            f"{one[role]['cpu_s']:>12.2f}{one[role]['read_bytes'] / 1e6:>8.0f}/{one[role]['write_bytes'] / 1e6:<6.0f}"
            f"{one[role]['faults']:>9.0f}"
            for role in SHOWN
        )
        rows.append(f"{stage:12}{one['wall_s']:>8.3f}{cells}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="1GB", choices=["10MB", "330MB", "1GB"])
    parser.add_argument("--streams", nargs="+", type=int, default=[0, 4])
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument(
        "--before", metavar="DIR", type=Path, help="a checkout of another commit, alternating with this"
    )
    parser.add_argument(
        "--models", metavar="DIR", type=Path, help="where the model's files stay for the next run"
    )
    parser.add_argument("--vllm", action="store_true", help="its reload of the same files, in the same run")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/swap-timeline.json")
    options = parser.parse_args()
    kinds: list[type[Midstream]] = [Midstream]
    if options.before is not None:
        MidstreamBefore.checkout = options.before.resolve()
        kinds.append(MidstreamBefore)
    take_priority()
    sys.setswitchinterval(0.0005)
    lines = []
    with tempfile.TemporaryDirectory(prefix="bench-timeline-") as folder:
        kept = options.models or Path(folder)
        model, directories = write_models([options.model], kept, "cpu")[options.model]
        for kind in kinds:
            with kind(model, Path(folder)) as server:
                measured(server, model, directories, 0, 1)
                for streams in options.streams:
                    found = measured(server, model, directories, streams, options.swaps)
                    line = {"engine": kind.name, "model": options.model, "streams": streams}
                    lines.append({**line, **medians(found)})
        if options.vllm:
            with VllmDevelopment(model, Path(folder)) as server:
                reload_s = statistics.median(reloaded(server, directories, options.swaps))
            lines = [
                {**line, "vllm_reload_s": round(reload_s, 4), "ratio": round(line["served_s"] / reload_s, 3)}
                for line in lines
            ]
    result = provenance(model=options.model, swaps=options.swaps, threads=model.threads)
    result["lines"] = lines
    if options.write:
        say(f"wrote {write_result('swap-timeline', result)}")
    for line in lines:
        say(shown(line))
    print(json.dumps(lines, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
