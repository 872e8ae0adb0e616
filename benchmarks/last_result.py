"""What a benchmark's lines cost beside the last committed result of the same machine, and which became slower.

    python last_result.py gateway|engine|vllm

`make bench-gateway`, `bench-engine` and `bench-vllm` print this at their end. The command compares the file in results/.
Always holds: the last result is of the newest tag, or of the newest commit where there is no tag. A figure is compared as its
ratio to the same peer in the same run, if both runs have that peer: the speed of a machine changes from hour to hour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hardware import RESULTS

HERE = Path(__file__).parent
#: A line that is worse by less than this share may be as fast as before.
NOISE = 0.05
Result = dict[str, Any]


class Figure(NamedTuple):
    """value: in the unit of its name. peer: the peer's value in the same run; None where the run had none."""

    value: float
    peer: float | None
    more_is_better: bool


class Change(NamedTuple):
    """before, now: ratios to the peer, or values. slower: 0.1 is a tenth slower than before, less than 0 is faster."""

    name: str
    before: float
    now: float
    slower: float


def gateway_figures(result: Result) -> Iterator[tuple[str, Figure]]:
    """CPU of a request or chunk, beside vllm-router's."""
    for placement in result["placements"]:
        for shape, cells in placement["cells"].items():
            name = f"{shape}, router on core {placement['router_core']}"
            yield from _beside(name, cells.get("midstream"), cells.get("vllm-router"), {"cpu_us": False})


def engine_figures(result: Result) -> Iterator[tuple[str, Figure]]:
    """Each column of midstream beside vLLM's."""
    better = {
        "tokens_per_s": True,
        "prompt_tokens_per_s": True,
        "gap_ms_p99": False,
        "server_cpu_ms_per_token": False,
    }
    for line in result["lines"]:
        about = f"{line['model']}, {line['kind']}, {line['streams']} x ({line['prompt']} + {line['new']})"
        for column, figures in line["columns"].items():
            if column.startswith("midstream"):
                yield from _beside(f"{about}, {column}", figures, line["columns"].get("vllm"), better)


def vllm_figures(result: Result) -> Iterator[tuple[str, Figure]]:
    """midstream in front of vLLM beside vLLM's own server, and its rollouts beside vLLM's by hash."""
    better = {"tokens_per_s": True, "gap_ms_p99": False, "front_cpu_ms_per_token": False}
    for line in result.get("front", {}).get("lines", ()):
        about = f"{line['model']}, {line['streams']} x ({line['prompt']} + {line['new']})"
        own_server = line["columns"].get("vLLM /v1/completions")
        yield from _beside(about, line["columns"].get("midstream"), own_server, better)
    ways = result.get("rollout", {}).get("ways", {})
    for way, figures in ways.items():
        if not way.startswith("vLLM"):
            yield from _beside(f"rollout, {way}", figures, ways.get("vLLM, hash"), {"wall_s": False})


FIGURES: dict[str, Callable[[Result], Iterator[tuple[str, Figure]]]] = {
    "gateway": gateway_figures,
    "engine": engine_figures,
    "vllm": vllm_figures,
}


def _beside(
    about: str, ours: Result | None, peers: Result | None, better: dict[str, bool]
) -> Iterator[tuple[str, Figure]]:
    """A figure that is 0 or missing was not measured."""
    for name, more_is_better in better.items():
        if value := (ours or {}).get(name):
            yield f"{about}, {name}", Figure(value, (peers or {}).get(name) or None, more_is_better)


def changes(bench: str, before: Result, now: Result) -> list[Change]:
    """Of all lines that both have, the slowest first."""
    old = dict(FIGURES[bench](before))
    found = []
    for name, figure in FIGURES[bench](now):
        if name not in old:
            continue
        was, is_now = old[name].value, figure.value
        if (peer_then := old[name].peer) and (peer_now := figure.peer):
            was, is_now = was / peer_then, is_now / peer_now
        worse = was / is_now if figure.more_is_better else is_now / was
        found.append(Change(name, was, is_now, worse - 1))
    return sorted(found, key=lambda change: -change.slower)


def machine(bench: str, result: Result) -> tuple[str, int, str]:
    """What must be equal for two results to be of one machine: processor, cores, vector instructions."""
    part = next((result[name] for name in ("front", "rollout") if name in result), result)
    hardware = part.get("hardware", {})
    return hardware.get("cpu", ""), hardware.get("cores", 0), hardware.get("vectors", "")


def last_result(bench: str, of: tuple[str, int, str], checkout: Path = HERE) -> tuple[str, Result] | None:
    """Its commit and the result; None if no committed result is of that machine. One that names no vectors fits any."""
    tag = _git(checkout, "describe", "--tags", "--abbrev=0").strip()
    path = f"benchmarks/results/{bench}.json"
    for commit in _git(checkout, "log", "--format=%H", tag or "HEAD", "--", f":/{path}").split():
        try:
            result = json.loads(_git(checkout, "show", f"{commit}:{path}"))
        # Not a result yet, or removed in that commit.
        except json.JSONDecodeError:
            continue
        cpu, cores, vectors = machine(bench, result)
        if (cpu, cores) == of[:2] and vectors in ("", of[2]):
            return commit, result
    return None


def _git(checkout: Path, *words: str) -> str:
    """What git says; nothing where there is no git, or no such object."""
    try:
        return subprocess.run(
            ["git", *words], capture_output=True, text=True, check=False, cwd=checkout
        ).stdout
    except OSError:
        return ""


def report(bench: str, result: Result) -> str:
    """In words, a line for each line of the benchmark that became slower."""
    of = machine(bench, result)
    last = last_result(bench, of)
    if last is None:
        return f"no committed result of {bench} is of this machine ({', '.join(map(str, of))})"
    commit, before = last
    found = changes(bench, before, result)
    slower = [change for change in found if change.slower > NOISE]
    faster = sum(change.slower < -NOISE for change in found)
    lines = [
        f"beside the last result of this machine (commit {commit[:10]}): of {len(found)} lines"
        f" {len(slower)} are slower and {faster} faster by more than {NOISE:.0%}"
    ]
    lines += [
        f"  slower by {change.slower:.0%}: {change.name}: {change.before:.3g} -> {change.now:.3g}"
        for change in slower
    ]
    return "\n".join(lines)


def say(bench: str, result: Result) -> None:
    print(report(bench, result), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bench", choices=list(FIGURES))
    bench = parser.parse_args().bench
    print(report(bench, json.loads((RESULTS / f"{bench}.json").read_text())))


if __name__ == "__main__":
    main()
