"""A delta of 2 % to replicas over limited links: what it takes beside its bytes over the link and a bare rebuild.

Owns: the first part of `make bench-push`. The replicas' ends are processes with the production code (link_replica.py), each
with a cache and a link of its own (limited_bucket.py: a token bucket of 100 MB/s for each). No engine is there, and nothing
is staged. Rounds with one and with all replicas alternate. Files lie in memory (--directory), so no disk is measured.

Eight rebuilds on two cores take turns whatever a server does, where eight machines would work at once. So a round is timed in
two ways:
    apart      all fetch at once, each over its link. Then one after the other rebuilds and verifies, with all cores. The time
               of a replica is that of its own steps, as on a machine of its own.
    together   all do all at once, on the cores that there are.

Reported in medians over the rounds, of the replica in the middle of each round:
    fetch_s rebuild_s verify_s   the steps. total_s: all three. slowest_s: total_s of the slowest replica
    bare_s                       a rebuild alone, by as many replicas at once as in `together`, or by one in `apart`
    link_s                       the delta's bytes over the link
    ratio                        total_s to link_s + bare_s, of each round
    without_verify               the same, without the check that numbers are finite
    cpu_s                        of one replica
    peak_bytes                   the most memory of one replica's end
    others_cores                 cores that the bucket and everything else on the machine used meanwhile

    python links.py [--replicas 8] [--rounds 5] [--megabytes 1000] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from delta import busy_s, write_pair
from hardware import provenance, write_result
from limited_bucket import limited_bucket
from link_replica import CHILD, PARENT
from swaps import say

from midstream.snapshots.arc2.encode import encode_delta

LINK_BYTES_PER_S = 100e6
Way = Literal["apart", "together"]
Took = dict[str, float]


class Ends:
    """The replicas' ends, as processes."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def at_once(self, command: str, count: int) -> list[Took]:
        """By the first `count`, each at the same time."""
        for process in self._processes[:count]:
            _say(process, command)
        return [_hear(process) for process in self._processes[:count]]

    def in_turns(self, command: str, count: int) -> list[Took]:
        found = []
        for process in self._processes[:count]:
            _say(process, command)
            found.append(_hear(process))
        return found


@contextmanager
def ends(bucket: Path, place: Path, ports: Sequence[int], free: int) -> Iterator[Ends]:
    """One for each port. Their caches share the bytes of the parent, which nobody writes to."""
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for number, port in enumerate(ports):
            cache = place / f"cache-{number}"
            if number:
                shutil.copytree(place / "cache-0", cache, copy_function=os.link)
            command = [
                *(sys.executable, str(Path(__file__).with_name("link_replica.py"))),
                *(str(cache), str(bucket / PARENT), str(port), str(free)),
            ]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            stack.callback(_end, process)
            assert process.stdout is not None
            process.stdout.readline()
            _say(process, "parent")
            _hear(process)
            processes.append(process)
        yield Ends(processes)


def round_of(replicas: Ends, way: Way, count: int, link_s: float) -> Took:
    """One round of `count` replicas."""
    run = replicas.in_turns if way == "apart" else replicas.at_once
    # What is made is another file each time, in memory that is new to it, as in `rebuild`.
    replicas.at_once("fetch", count)
    bare = run("bare", count)
    replicas.at_once("drop", count)
    busy, began = busy_s(), time.perf_counter()
    fetched = replicas.at_once("fetch", count)
    rebuilt, verified = run("rebuild", count), run("verify", count)
    used, elapsed = busy_s() - busy, time.perf_counter() - began
    replicas.at_once("drop", count)
    steps = {"fetch": fetched, "rebuild": rebuilt, "verify": verified}
    own = sum(one["cpu_s"] for step in steps.values() for one in step)
    totals = [sum(one["wall_s"] for one in steps) for steps in zip(fetched, rebuilt, verified, strict=True)]
    middle = {f"{name}_s": statistics.median(one["wall_s"] for one in took) for name, took in steps.items()}
    total_s, bare_s = statistics.median(totals), statistics.median(one["wall_s"] for one in bare)
    return {
        **middle,
        "bare_s": bare_s,
        "total_s": total_s,
        "slowest_s": max(totals),
        "ratio": total_s / (link_s + bare_s),
        "without_verify": (middle["fetch_s"] + middle["rebuild_s"]) / (link_s + bare_s),
        "cpu_s": own / count,
        "peak_bytes": max(one["peak_bytes"] for step in steps.values() for one in step),
        "others_cores": max(0.0, used - own) / elapsed,
    }


def measured(root: Path, replicas: int, rounds: int, megabytes: int) -> dict[str, Any]:
    bucket = root / "bucket"
    write_pair(root, megabytes, 1)
    encode_delta(root / "parent", root / "child", root / "encoded")
    shutil.rmtree(root / "child")
    bucket.mkdir()
    (root / "parent").rename(bucket / PARENT)
    (root / "encoded").rename(bucket / CHILD)
    sizes = {name: sum(f.stat().st_size for f in (bucket / name).iterdir()) for name in (PARENT, CHILD)}
    link_s = sizes[CHILD] / LINK_BYTES_PER_S
    found: dict[tuple[Way, int], list[Took]] = {}
    with (
        limited_bucket(bucket, replicas, LINK_BYTES_PER_S) as (*ports, free),
        ends(bucket, root, ports, free) as opened,
    ):
        for number in range(rounds + 1):
            for way, count in (("apart", 1), ("apart", replicas), ("together", replicas)):
                took = round_of(opened, way, count, link_s)
                say(
                    f"round {number}, {way}, {count}: {json.dumps({k: round(v, 3) for k, v in took.items()})}"
                )
                if number:
                    # The first one warms.
                    found.setdefault((way, count), []).append(took)
    lines = [
        {"way": way, "replicas": count, "link_s": round(link_s, 4), **medians(took)}
        for (way, count), took in found.items()
    ]
    return {"bytes": sizes[PARENT], "delta_bytes": sizes[CHILD], "lines": lines}


def medians(found: Sequence[Took]) -> Took:
    return {key: round(statistics.median(one[key] for one in found), 4) for key in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/links.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-links-") as folder:
        found = measured(Path(folder), options.replicas, options.rounds, options.megabytes)
    result = provenance(
        link_bytes_per_s=LINK_BYTES_PER_S, changed=0.02, rounds=options.rounds, megabytes=options.megabytes
    )
    result |= found
    if options.write:
        say(f"wrote {write_result('links', result)}")
    print(json.dumps(found, indent=2))
    return 0


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> Took:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a replica's end has ended")
    took: Took = json.loads(line)
    return took


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


if __name__ == "__main__":
    raise SystemExit(main())
