"""One benchmark of two checkouts, in turns: what a change did to rollout, agents or deltas.

Each checkout runs its own copy of the benchmark against its own sources; the Python environment is this one's.
The benchmarks of the gateway, the engine, swaps and turns have `--before` themselves: this one's copy asks both servers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware import commit_of, provenance, source_of, write_result

HERE = Path(__file__).resolve().parents[1]

# The script and its arguments for one round.
BENCHES = {
    "rollout": ("rollout.py", "--rounds", "1", "--ways", "affinity", "no keys"),
    "agents": ("-m", "agentic.bench", "--rounds", "1", "--ways", "midstream", "--no-disturbed"),
    "delta": ("delta.py", "--rounds", "3"),
}


def one_round(bench: str, checkout: Path, extra: list[str]) -> Any:
    """What the benchmark prints. Raises `subprocess.CalledProcessError` when it fails."""
    done = subprocess.run(
        [sys.executable, *BENCHES[bench], *extra],
        cwd=checkout / "benchmarks",
        env={**os.environ, **source_of(checkout)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def figures(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a result by its path; what only describes the run is left out."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in ("range", "rounds", "configuration", "hardware", "versions"):
                yield from figures(value, f"{path}/{key}")
    elif isinstance(found, list) and all(isinstance(value, dict) for value in found):
        for value in found:
            name = "-".join(str(one) for one in value.values() if isinstance(one, str))
            yield from figures(value, f"{path}/{name}")
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield path, float(found)


def compared(before: list[Any], after: list[Any]) -> dict[str, dict[str, float]]:
    """Per figure: the medians of both, and after / before."""
    sides = []
    for rounds in (before, after):
        taken = [dict(figures(found)) for found in rounds]
        sides.append(
            {path: statistics.median(one[path] for one in taken if path in one) for path in taken[0]}
        )
    old, new = sides
    return {
        path: {
            "before": old[path],
            "after": new[path],
            **({"ratio": round(new[path] / old[path], 3)} if old[path] else {}),
        }
        for path in old
        if path in new
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--before", metavar="DIR", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/BENCH-before.json")
    options, extra = parser.parse_known_args()
    found: dict[Path, list[Any]] = {options.before.resolve(): [], HERE: []}
    for number in range(options.rounds):
        # The first of one round is the second of the next.
        for checkout in sorted(found, reverse=bool(number % 2)):
            found[checkout].append(one_round(options.bench, checkout, extra))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    before, after = found.values()
    result = provenance(before=commit_of(options.before), command=BENCHES[options.bench], extra=extra)
    result |= {"rounds": options.rounds, "figures": compared(before, after)}
    print(json.dumps(result, indent=2))
    if options.write:
        write_result(f"{options.bench}-before", result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
