"""Runs simulated histories.

`--seeds 0:1000` runs many of them, on all cores. `--seed 17` runs one, and shows all that happened in it.
"""

from __future__ import annotations

# Before anything that binds a clock.
import simclock  # noqa: F401

# isort: split
import argparse
import contextlib
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simkinds import WORDS, HistoryKind

if TYPE_CHECKING:
    from simtrainer import Weights


def make_bed(place: Path) -> None:
    """Writes a small checkpoint, six that fit it, and the deltas. Another process makes the first: this one has no PyTorch."""
    directory = place / "sim"
    made = (
        "from pathlib import Path; from midstream.models.tiny_moe import write_tiny_moe; "
        f"write_tiny_moe(Path({str(directory)!r}), layers=1, hidden=64, experts=2, top_k=2, max_positions=512, dtype='float32')"
    )
    subprocess.run([sys.executable, "-c", made], check=True)
    from safetensors.numpy import load, save
    from simpolicies import ADAPTERS, adapter

    from midstream.snapshots.arc2.encode import encode_delta
    from midstream.snapshots.content import MANIFEST_FILE, directory_content, encode_manifest

    base = (directory / "model.safetensors").read_bytes()
    for number in range(CHECKPOINTS):
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
        (child / MANIFEST_FILE).write_bytes(encode_manifest(directory_content(child, files)))
    for parent, number in _pairs():
        encode_delta(place / str(parent), place / str(number), place / f"{parent}-{number}", threads=1)
    hidden, outputs = _query_shape(base)
    for number in range(ADAPTERS):
        files = adapter(number, hidden, outputs)
        child = place / f"adapter-{number}"
        child.mkdir()
        for file, data in files.items():
            (child / file).write_bytes(data)
        (child / MANIFEST_FILE).write_bytes(encode_manifest(directory_content(child, files)))
    for parent, number in itertools.permutations(range(ADAPTERS), 2):
        ends = (place / f"adapter-{parent}", place / f"adapter-{number}")
        encode_delta(*ends, place / f"adapter-{parent}-{number}", threads=1)
    (place / _WHOLE).touch()


def _query_shape(checkpoint: bytes) -> tuple[int, int]:
    from safetensors.numpy import load

    outputs, inputs = load(checkpoint)["model.layers.0.self_attn.q_proj.weight"].shape
    return inputs, outputs


def model_and_weights(place: Path) -> tuple[Path, Weights]:
    """The checkpoint that the server starts with, and what the trainer may publish. An empty place is filled first."""
    if not (place / _WHOLE).exists():
        make_bed(place)
    from simpolicies import ADAPTERS
    from simtrainer import Weights

    from midstream.snapshots.content import MANIFEST_FILE

    names = ("config.json", "model.safetensors", MANIFEST_FILE)
    variants = [
        {name: (place / str(number) / name).read_bytes() for name in names} for number in range(CHECKPOINTS)
    ]
    deltas = {
        (parent, number): {file.name: file.read_bytes() for file in (place / f"{parent}-{number}").iterdir()}
        for parent, number in _pairs()
    }
    adapters = [
        {file.name: file.read_bytes() for file in sorted((place / f"adapter-{number}").iterdir())}
        for number in range(ADAPTERS)
    ]
    between = {
        (parent, number): {
            file.name: file.read_bytes() for file in (place / f"adapter-{parent}-{number}").iterdir()
        }
        for parent, number in itertools.permutations(range(ADAPTERS), 2)
    }
    return place / "sim", Weights(variants, deltas, adapters, between)


def _pairs() -> Iterator[tuple[int, ...]]:
    return itertools.permutations(range(CHECKPOINTS), 2)


#: That the trainer has.
CHECKPOINTS = 6
#: An empty file that is written last into a place with checkpoints.
_WHOLE = ".whole"
#: Of the history that runs before the others: a short one with a Tinker front, swaps and a killed replica.
WARM_SEED = 4
#: Says to a program that it was started anew, with hashes and addresses that are the same in each run.
_STEADY = "MIDSTREAM_SIMULATE_STEADY"
#: Of personality(2).
_ADDR_NO_RANDOMIZE = 0x0040000


@dataclass(frozen=True)
class Bed:
    """What every history of a run is made from. plant: the name of a planted fault."""

    directory: Path
    weights: Weights
    plant: str | None = None
    kind: HistoryKind = HistoryKind.PLAIN


def run_one(bed: Bed, seed: int, left_out: tuple[int, ...] = ()) -> dict[str, Any]:
    [found] = run_many(bed, [(seed, left_out)], 1)
    return found


def run_many(
    bed: Bed, histories: Iterable[tuple[int, tuple[int, ...]]], processes: int
) -> Iterator[dict[str, Any]]:
    """The outcomes, as they come. histories: seeds, with the entries to leave out.

    Each history has a process of its own, so that nothing of it is left for the next one.
    """
    waiting, running = iter(histories), dict[int, _Running]()
    while True:
        for seed, left_out in itertools.islice(waiting, processes - len(running)):
            one = _begin(bed, seed, left_out)
            running[one.pipe] = one
        if not running:
            return
        for pipe in select.select(list(running), [], [])[0]:
            one = running[pipe]
            piece = os.read(pipe, 2**16)
            one.text += piece
            if not piece:
                del running[pipe]
                yield one.ended()


@dataclass
class _Running:
    seed: int
    pid: int
    pipe: int
    text: bytes = b""

    def ended(self) -> dict[str, Any]:
        os.close(self.pipe)
        os.waitpid(self.pid, 0)
        if not self.text:
            return _nothing(self.seed, "the history's process died")
        found: dict[str, Any] = json.loads(self.text)
        return found


def _nothing(seed: int, why: str) -> dict[str, Any]:
    return {"seed": seed, "wrong": [why], "counts": {}, "log": [], "tokens": 0, "seconds": 0.0}


def _begin(bed: Bed, seed: int, left_out: tuple[int, ...]) -> _Running:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Running(seed, pid, read)
    try:
        try:
            said = json.dumps(_history(bed, seed, left_out))
        # Whatever it is, the parent shows it.
        except BaseException:  # noqa: BLE001
            said = json.dumps(_nothing(seed, traceback.format_exc()))
        with os.fdopen(write, "w") as out:
            out.write(said)
    finally:
        os._exit(0)


#: What ran before the forks. It is kept, so that nothing of it is cleaned up in a later history.
_warmed: list[Any] = []


def _warm(bed: Bed) -> Any:
    """Runs a history, so that each fork begins with all modules, statements and decoders of one; the history."""
    from simhistory import History

    history = History(WARM_SEED, bed.directory, bed.weights)
    history.run()
    gc.freeze()
    return history


def _history(bed: Bed, seed: int, left_out: tuple[int, ...]) -> dict[str, Any]:
    from planted import PLANTED
    from simhistory import History

    if bed.plant is not None:
        PLANTED[bed.plant]()
    # The process ends with its history: what it leaves is not worth a search for cycles, a tenth of the time.
    gc.disable()
    history = History(seed, bed.directory, bed.weights, left_out, bed.kind)
    return vars(history.run())


def smaller(bed: Bed, seed: int) -> list[int]:
    """Numbers of the plan's entries without which the history fails as well: all that can be left out, one by one."""
    from simhistory import plan_of

    out: list[int] = []
    for number in reversed(range(len(plan_of(seed, bed.kind).entries))):
        if run_one(bed, seed, (*out, number))["wrong"]:
            out.append(number)
    return sorted(out)


def report(bed: Bed, seeds: Sequence[int], processes: int, keep_going: bool, strikes: int = 0) -> int:
    """Runs the seeds; the exit code. An interrupt ends the run, and what was found so far is told. So do so many kills and
    stalls, unless they are 0."""
    from simstrikes import struck, table

    begun, counts, bad, tokens, simulated = time.monotonic(), Counter[str](), [], 0, 0.0
    number = 0
    with contextlib.suppress(KeyboardInterrupt):
        for found in run_many(bed, ((seed, ()) for seed in seeds), processes):
            number += 1
            counts.update(found["counts"])
            tokens, simulated = tokens + found["tokens"], simulated + found["seconds"]
            if found["wrong"]:
                bad.append(found["seed"])
                print(f"seed {found['seed']}: {found['wrong'][0][:2000]}", flush=True)
                if not keep_going:
                    break
            if number % 100 == 0:
                print(f"{number} histories, {len(bad)} wrong, {time.monotonic() - begun:.0f} s", flush=True)
            if 0 < strikes <= struck(counts):
                seeds = seeds[:number]
                break
    for what, count in sorted(counts.items()):
        print(f"{count:8} {what}")
    if bed.kind is HistoryKind.PUSHES:
        print(table(counts))
    print(f"{tokens} tokens checked, {simulated:.0f} s simulated in {time.monotonic() - begun:.0f} s")
    if not bad:
        whole = number == len(seeds)
        print(
            f"{f'seeds {seeds[0]} to {seeds[-1]}' if whole else f'interrupted after {number}'}: nothing is wrong"
        )
        return 0 if whole else 1
    seed = min(bad)
    out, mode = smaller(bed, seed), "" if bed.kind is HistoryKind.PLAIN else f" --{bed.kind.value}"
    again = f"{sys.argv[0]}{mode} --seed {seed} --without {' '.join(map(str, out))}"
    print(f"wrong: {sorted(bad)}. The smallest of seed {seed}: {again}")
    found = run_one(bed, seed, tuple(out))
    print("\n".join([*found["log"], *found["wrong"]])[-6000:])
    return 1


def prove(bed: Bed, among: Sequence[int], processes: int) -> int:
    """Plants each fault in turn, or those of `bed` alone, and says which seed finds it first; the exit code."""
    from planted import FOUND_AT, FOUND_IN, PLANTED

    missed = 0
    for name in PLANTED if bed.plant is None else bed.plant.split(","):
        plant = PLANTED[name]
        seed, words = FOUND_AT.get(name, (among[0], ""))
        seeds = [seed, *among]
        histories = ((seed, ()) for seed in seeds)
        kind = FOUND_IN.get(name, bed.kind)
        planted = dataclasses.replace(bed, plant=name, kind=kind)
        outcomes = run_many(planted, histories, processes)
        said_wrong = ((one["seed"], wrong) for one in outcomes for wrong in one["wrong"])
        found = next((one for one in said_wrong if words in one[1]), None)
        missed += found is None
        said = "not found" if found is None else f"seed {found[0]}: {found[1][:150]!r}"
        print(f"{name} ({(plant.__doc__ or '').strip()}): {said}", flush=True)
    return int(missed > 0)


def seeds_of(text: str) -> Sequence[int]:
    first, colon, last = text.partition(":")
    return range(int(first), int(last)) if colon else [int(seed) for seed in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="FIRST:BEHIND_LAST, or single ones: 14,188")
    parser.add_argument("--seed", type=int, help="one history, with all that happened in it")
    parser.add_argument("--without", type=int, nargs="*", default=[], help="entries of its plan to leave out")
    parser.add_argument("--plant", help="a fault of planted.py to put into the production code")
    kinds = parser.add_mutually_exclusive_group()
    for kind, words in WORDS.items():
        kinds.add_argument(f"--{kind.value}", dest="kind", action="store_const", const=kind, help=words)
    parser.set_defaults(kind=HistoryKind.PLAIN)
    parser.add_argument(
        "--strikes", type=int, default=0, help="end behind so many kills and stalls of pushes"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--keep-going", action="store_true", help="go on behind the first history that is wrong"
    )
    parser.add_argument(
        "--bed",
        type=Path,
        help="an empty directory for the checkpoints, or one that has them from another run",
    )
    parser.add_argument("--prove", action="store_true", help="plant each fault, and say which seed finds it")
    arguments = parser.parse_args()
    if _STEADY not in os.environ:
        # Sets of objects are in the order of their addresses, so those have to be the same in each run.
        if ctypes.CDLL(None, use_errno=True).personality(_ADDR_NO_RANDOMIZE) == -1:
            raise SystemExit(
                "a seed is one history only where addresses are not random: personality(2) failed"
            )
        steady = {**os.environ, "PYTHONHASHSEED": "0", _STEADY: "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], steady)
    os.environ |= {"AWS_ACCESS_KEY_ID": "sim", "AWS_SECRET_ACCESS_KEY": "simulated", "AWS_REGION": "sim"}
    with tempfile.TemporaryDirectory() as place:
        made = model_and_weights(arguments.bed or Path(place))
        bed = Bed(*made, arguments.plant, arguments.kind)
        # Before the forks.
        import planted  # noqa: F401

        _warmed.append(_warm(bed))
        if arguments.seed is None:
            seeds = seeds_of(arguments.seeds)
            if arguments.prove:
                return prove(bed, seeds, arguments.processes)
            return report(bed, seeds, arguments.processes, arguments.keep_going, arguments.strikes)
        found = run_one(bed, arguments.seed, tuple(arguments.without))
        print("\n".join([*found["log"], *found["wrong"]]))
        return bool(found["wrong"])


if __name__ == "__main__":
    raise SystemExit(main())
