"""How many policies may there be: what 10 and 10,000 of them cost two idle gateways and their PostgreSQL, and lists of them.

A PostgreSQL server of its own is started, and a server with two gateway processes and one replica. The first policies are forks
of one with an adapter, and the replica loads them. At each size, once everything rests: the CPU time of
each gateway process and the transactions of the database over some seconds, and the time of a page of the list.

    python many_policies.py [--sizes 10 10000] [--makers 8] [--seconds 30] [--write]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
from dashboard import cpu_s
from document import table, write_part
from hardware import provenance, without_autogroups, write_result
from policies import HOT_LOAD, write_adapter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from postgres import Postgres, find_server, postgres_server

DEPLOYMENT = "accounts/local/deployments/default"
LISTED = f"/v1/{DEPLOYMENT}/policies"
GATEWAYS = 2
PAGES_TIMED = 30
#: Policies that have an adapter. Each further one would cost the replica a load, which is no cost of the ledger.
LOADED = 10


@contextmanager
def server(folder: Path, database: str) -> Iterator[tuple[str, int]]:
    """Its URL and process id."""
    command = [sys.executable, "-m", "midstream.cli", "serve", "--port", "0", "--replicas", "1"]
    command += [
        "--gateway-workers",
        str(GATEWAYS),
        "--database",
        database,
        "--state-dir",
        str(folder / "state"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = next(filter(None, (re.search(r"ready on (\S+)", line) for line in process.stdout)))
        yield ready[1], process.pid
    finally:
        process.terminate()
        process.wait()


def gateways_of(supervisor: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(supervisor)], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "midstream.launch.gateway" in line]


def transactions(postgres: Postgres, database: str) -> int:
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as db:
        found = db.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s", (database,)
        ).fetchone()
    assert found is not None
    return int(found[0])


def make(url: str, first: int, last: int, makers: int) -> list[tuple[float, float]]:
    """Of each policy that is made: when it was answered, and how long that took."""
    begun = time.perf_counter()

    def one(number: int) -> tuple[float, float]:
        at = time.perf_counter()
        body = {"policy": f"p{number:05}"} | ({"from": "p00000"} if number < LOADED else {})
        http.post(LISTED, json=body).raise_for_status()
        return time.perf_counter() - begun, time.perf_counter() - at

    with httpx.Client(base_url=url, timeout=120) as http, ThreadPoolExecutor(makers) as pool:
        return list(pool.map(one, range(first, last)))


def at_rest(url: str, pids: list[int]) -> None:
    """Until every policy that has room is loaded, and the gateways use no more than they did before."""
    with httpx.Client(base_url=url, timeout=60) as http:
        while True:
            before = sum(map(cpu_s, pids))
            time.sleep(10)
            page = http.get(LISTED).json()["policies"]
            stages = {row["loading_state"]["stage"] for policy in page for row in policy["replicas"]}
            if stages <= {"done", "unloaded", "pending"} and sum(map(cpu_s, pids)) - before < 2:
                return


def measured(url: str, pids: list[int], postgres: Postgres, database: str, seconds: float) -> dict[str, Any]:
    at_rest(url, pids)
    before, counted, begun = [cpu_s(pid) for pid in pids], transactions(postgres, database), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begun
    cores = [(cpu_s(pid) - one) / took for pid, one in zip(pids, before, strict=True)]
    pages, rest = [], ""
    with httpx.Client(base_url=url, timeout=60) as http:
        for _ in range(PAGES_TIMED):
            at = time.perf_counter()
            answer = http.get(LISTED, params={"pageSize": 50, "pageToken": rest}).raise_for_status().json()
            pages.append((time.perf_counter() - at) * 1000)
            rest = answer["nextPageToken"]
        total = answer["totalSize"]
    return {
        "policies": total,
        "gateway_cores": cores,
        "transactions_per_s": (transactions(postgres, database) - counted) / took,
        "page_of_50_ms": statistics.median(pages),
        "page_of_50_ms_worst": max(pages),
    }


def render(result: dict[str, Any]) -> str:
    """The marked part of docs/benchmarks.md."""
    hardware = result["hardware"]
    head = ["policies", "each idle gateway, cores", "transactions a second", "a page of 50, ms (worst)"]
    head += ["made, a second", "one made, ms (median of the last tenth)"]
    body = []
    for size in result["sizes"]:
        made = size["made"]
        body.append(
            [
                f"{size['policies']:,}",
                " and ".join(f"{cores:.4f}" for cores in size["gateway_cores"]),
                f"{size['transactions_per_s']:.1f}",
                f"{size['page_of_50_ms']:.0f} ({size['page_of_50_ms_worst']:.0f})",
                f"{made['per_s']:.0f}",
                f"{made['last_ms']:.0f}",
            ]
        )
    words = (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}. {result['configuration']['makers']} clients make policies at once."
    )
    return f"{words}\n\n{table(head, body)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--makers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--write", action="store_true", help="write results/many-policies.json and docs")
    options = parser.parse_args()
    programs = find_server()
    assert programs is not None, "no PostgreSQL here (Debian: apt-get install postgresql)"
    result = provenance(gateways=GATEWAYS, makers=options.makers, seconds=options.seconds)
    result["sizes"] = []
    with tempfile.TemporaryDirectory() as name, postgres_server(programs) as postgres, without_autogroups():
        folder, database = Path(name), "bench"
        from midstream.models.tiny_moe import write_tiny_moe

        write_tiny_moe(folder / "tiny-moe")
        with server(folder, postgres.create(database)) as (url, supervisor):
            write_adapter(folder / "tiny-moe", folder / "state" / "bucket" / "first", 1)
            body = {"identity": "first", "policy": "p00000"}
            httpx.post(f"{url}{HOT_LOAD}", json=body, timeout=60).raise_for_status()
            pids, there = gateways_of(supervisor), 1
            for size in options.sizes:
                begun = time.perf_counter()
                made = make(url, there, size, options.makers)
                took, last = (
                    time.perf_counter() - begun,
                    [ms * 1000 for _, ms in made[-max(1, len(made) // 10) :]],
                )
                found = measured(url, pids, postgres, database, options.seconds)
                found["made"] = {
                    "took_s": took,
                    "per_s": len(made) / took,
                    "last_ms": statistics.median(last),
                }
                result["sizes"].append(found)
                there = size
                print(json.dumps(found, indent=1), flush=True)
    if options.write:
        print(write_result("many-policies", result))
        write_part("many-policies", render(result))


if __name__ == "__main__":
    main()
