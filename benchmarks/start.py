"""How soon `midstream serve` is ready and gives a token: gateway, Tinker front and two replicas of tiny-moe.

    python benchmarks/start.py [--rounds 7] [--against CHECKOUT] [--write]
    python benchmarks/start.py --since SECONDS

A first start makes the model, a later one finds it. With --against, starts alternate with those of the source of another
checkout, in the same Python environment. Prints JSON with medians. --write: also to benchmarks/results/start.json.

--since: seconds since the epoch at which the caller began to install. One first start, and a line that says how long each
part took. `make first-token` does this.
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
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from hardware import commit_of, provenance, source_of, write_result
from servers import TICKS, family

ASKED = {
    "model": "tiny-moe",
    "messages": [{"role": "user", "content": "Digits."}],
    "max_tokens": 8,
    "stream": True,
}


class Start(NamedTuple):
    """Seconds since the command: until it is ready, until the first token has come. cpu_s: of all processes until then."""

    ready_s: float
    first_token_s: float
    cpu_s: float


def started(state: Path, environment: dict[str, str]) -> Start:
    """Start a server, ask for a token, end the server."""
    command = [sys.executable, "-m", "midstream.cli", "serve", "--port", "0", "--state-dir", str(state)]
    begun = time.monotonic()
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        ready = next(filter(None, (re.search(r"ready on (\S+)", line) for line in server.stdout)), None)
        if ready is None:
            raise SystemExit(f"{' '.join(command)} ended with {server.wait()} before it was ready")
        ready_s = time.monotonic() - begun
        first_token(ready[1])
        took = time.monotonic() - begun
        return Start(ready_s, took, sum(cpu_s(pid) for pid in family(server.pid)))
    finally:
        server.terminate()
        server.wait()


def first_token(url: str) -> None:
    """Returns when the first event with a token has come."""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=ASKED, timeout=60) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                return
    raise SystemExit("the stream ended without a token")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def compared(rounds: int, against: Path | None) -> dict[str, Any]:
    """Medians by source and kind of start; each round has one of every kind, and the first one goes last in the next."""
    sources = {"this": dict(os.environ)}
    if against is not None:
        sources["against"] = os.environ | source_of(against)
    found: dict[str, dict[str, list[Start]]] = {name: {"first": [], "later": []} for name in sources}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name in sorted(sources, reverse=bool(number % 2)):
                state = Path(folder) / f"{name}-{number}"
                for kind in ("first", "later"):
                    found[name][kind].append(started(state, sources[name]))
    return {name: {kind: summary(starts) for kind, starts in kinds.items()} for name, kinds in found.items()}


def summary(starts: list[Start]) -> dict[str, Any]:
    columns = {field: [round(getattr(start, field), 2) for start in starts] for field in Start._fields}
    return {field: {"median": statistics.median(values), "all": values} for field, values in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--since", type=float)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.since is not None:
        installed_s = time.time() - options.since
        with tempfile.TemporaryDirectory() as folder:
            start = started(Path(folder) / "state", dict(os.environ))
        print(
            f"first token {installed_s + start.first_token_s:.1f} s after the command: installed in "
            f"{installed_s:.1f} s, ready {start.ready_s:.1f} s after that, a token "
            f"{1000 * (start.first_token_s - start.ready_s):.0f} ms later"
        )
        return
    against = None if options.against is None else commit_of(options.against)
    result = {
        **provenance(rounds=options.rounds, replicas=2, against=against),
        **compared(options.rounds, options.against),
    }
    print(json.dumps(result, indent=2))
    if options.write:
        write_result("start", result)


if __name__ == "__main__":
    main()
