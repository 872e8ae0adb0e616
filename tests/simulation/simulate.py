"""Runs simulated histories: `python tests/simulation/simulate.py --seeds 0:1000`, or one of them with all it did: `--seed 17`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import simclock

HERE = Path(__file__).parent


def model_and_variants(place: Path) -> tuple[Path, list[dict[str, bytes]]]:
    """A small checkpoint, made by another process so that this one stays without PyTorch, and six that fit it."""
    directory = place / "sim"
    made = (
        "from pathlib import Path; from midstream.models.tiny_moe import write_tiny_moe; "
        f"write_tiny_moe(Path({str(directory)!r}), layers=1, hidden=64, experts=2, top_k=2, max_positions=512, dtype='float32')"
    )
    subprocess.run([sys.executable, "-c", made], check=True)
    from safetensors.numpy import load, save

    from midstream.snapshots.content import MANIFEST_FILE, directory_content, encode_manifest

    base = (directory / "model.safetensors").read_bytes()
    variants = []
    for number in range(6):
        tensors = load(base)
        name = sorted(tensors)[0]
        raw = tensors[name].view("uint8").copy()
        raw.reshape(-1)[:2] = (number + 1, 60)
        tensors[name] = raw.view(tensors[name].dtype)
        files = {"config.json": (directory / "config.json").read_bytes()}
        files["model.safetensors"] = save(tensors, metadata={"format": "pt"})
        child = place / str(number)
        child.mkdir()
        for file, data in files.items():
            (child / file).write_bytes(data)
        manifest = encode_manifest(directory_content(child, files))
        variants.append({**files, MANIFEST_FILE: manifest})
    return directory, variants


def run_one(
    seed: int, directory: Path, variants: list[dict[str, bytes]], left_out: tuple[int, ...] = ()
) -> dict[str, Any]:
    """In a process of its own, so that nothing of a history is left for the next one."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 1
        try:
            from simhistory import History

            outcome = History(seed, directory, variants, left_out).run()
            said: dict[str, Any] = {
                "seed": seed,
                "wrong": outcome.wrong,
                "counts": dict(outcome.counts),
                "steps": outcome.steps,
                "simulated_s": outcome.seconds,
                "tokens": outcome.tokens,
                "log": outcome.log,
            }
        except BaseException:
            said = {"seed": seed, "wrong": [traceback.format_exc()], "counts": {}, "log": []}
        try:
            with os.fdopen(write, "w") as out:
                json.dump(said, out)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    found: dict[str, Any] = (
        json.loads(text) if text else {"seed": seed, "wrong": ["the history's process died"], "counts": {}}
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:20")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--without", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "sim")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "simulated")
    os.environ.setdefault("AWS_REGION", "sim")
    with tempfile.TemporaryDirectory() as place:
        directory, variants = model_and_variants(Path(place))
        import simhistory  # noqa: F401 - before the forks

        if arguments.seed is not None:
            found = run_one(arguments.seed, directory, variants, tuple(arguments.without))
            print("\n".join(found["log"]))
            print(json.dumps({**found, "log": None}, indent=1))
            return bool(found["wrong"])
        first, _, last = arguments.seeds.partition(":")
        bad = 0
        for seed in range(int(first), int(last)):
            begun = simclock.real_monotonic()
            found = run_one(seed, directory, variants)
            took = simclock.real_monotonic() - begun
            print(
                seed,
                f"{took:.2f} s",
                found.get("steps"),
                found.get("tokens"),
                [w[:300] for w in found["wrong"]][:3],
                flush=True,
            )
            bad += bool(found["wrong"])
        return bool(bad)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    raise SystemExit(main())
