"""midstream in front of vLLM, beside vLLM asked directly and through vllm-router; rollouts on vLLM while weights change.

Owns: `make bench-vllm`. vllm_front.py and vllm_rollout.py say what each part does and reports. The client shares the machine's
cores with everything it measures; everything runs on loopback. About 35 minutes on two idle cores.

    python vllm_bench.py [--parts front rollout] [--models tiny-moe dense-0.5b] [--rounds N] [--trajectories 16] [--turns 8]
                         [--swaps 5] [--ways NAME...] [--quick] [--write]

(Not called vllm.py: vLLM's own server, started from this folder, would import that.)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import last_result
import vllm_front
import vllm_rollout
from document import DOCUMENT, replaced
from engine import vllm_versions, write_models
from hardware import RESULTS, autogroups, provenance, without_autogroups, write_result
from loadgen import take_priority
from servers import VLLM_PYTHON
from vllm_table import render, write_table

PARTS = ("front", "rollout")
RESULT = "vllm"


def front(options: argparse.Namespace, folder: Path, result: dict[str, Any]) -> None:
    rounds = {name: options.rounds or vllm_front.ROUNDS[name] for name in options.models}
    part = result["front"] = {**heading(options, rounds), "models": {}, "lines": []}
    for model in write_models(options.models, folder):
        shapes = vllm_front.NEW[model.name]
        streams = [n for n in shapes if not options.concurrency or n in options.concurrency]
        if not streams:
            continue
        measured = vllm_front.measure_model(
            model, folder, streams=streams, rounds=rounds[model.name], seed=options.seed, eager=options.quick
        )
        part["models"][model.name] = measured["about"]
        part["lines"] += measured["lines"]
        save(options, result)


def rollout(options: argparse.Namespace, folder: Path, result: dict[str, Any]) -> None:
    work = vllm_rollout.workload(options.trajectories, options.turns)
    ours = folder / "rollout"
    ours.mkdir()
    rounds = options.rounds or vllm_rollout.ROUNDS
    # Of what the servers load, whatever is committed while they run.
    about = heading(options, rounds)
    measured = vllm_rollout.run(ours, work, options.ways, rounds, options.swaps)
    result["rollout"] = {**about, "workload": asdict(work), **measured}
    save(options, result)


def save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.write:
        write_result(RESULT, result)
        write_table(result)


def heading(options: argparse.Namespace, rounds: int | dict[str, int]) -> dict[str, Any]:
    """Where a part comes from. rounds: of all, or of each model."""
    found = provenance(rounds=rounds, quick=options.quick, stream=True, logprobs=True, temperature=1.0)
    found["versions"]["vllm environment"] = vllm_versions()
    found["hardware"]["autogroups"] = autogroups()
    return found


def older(options: argparse.Namespace) -> dict[str, Any]:
    """The parts that are not measured now, as they are written."""
    path = RESULTS / f"{RESULT}.json"
    if not options.write or not path.exists():
        return {}
    written = json.loads(path.read_text())
    return {part: written[part] for part in PARTS if part in written and part not in options.parts}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=list(vllm_front.NEW), default=list(vllm_front.NEW))
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=int,
        choices=sorted({n for shapes in vllm_front.NEW.values() for n in shapes}),
        help="streams of the front's lines; default: all of the model's",
    )
    parser.add_argument("--rounds", type=int, help="of every measurement; default: by part and model")
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=vllm_rollout.WAYS, default=list(vllm_rollout.WAYS))
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the front's prompts")
    parser.add_argument(
        "--quick", action="store_true", help="a trial: one round of little; its figures say nothing"
    )
    parser.add_argument("--write", action="store_true", help="results/vllm.json and docs/benchmarks.md")
    options = parser.parse_args()
    if options.quick:
        options.models, options.concurrency, options.rounds = ["tiny-moe"], [16], 1
        options.trajectories, options.turns, options.swaps = 4, 3, 1
    if not VLLM_PYTHON.exists():
        parser.error(f"{VLLM_PYTHON} is missing; `make bench-vllm` makes it")
    if options.write:
        # Raises before anything is measured.
        replaced(DOCUMENT.read_text(), RESULT, "")
    return options


def main() -> int:
    options = arguments()
    result = older(options)
    take_priority()
    # The thread that swaps must not keep the one that looks at the clock waiting.
    sys.setswitchinterval(0.0005)
    began = time.monotonic()
    with without_autogroups(), tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        for part in options.parts:
            {"front": front, "rollout": rollout}[part](options, Path(folder), result)
    print(f"measured in {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    print(json.dumps(result, indent=2) if not options.write else render(result))
    if not options.quick:
        last_result.say(RESULT, result)
    ways = result.get("rollout", {}).get("ways", {})
    return 1 if any(one["failures"] for one in ways.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
