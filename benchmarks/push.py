"""Pushes of whole models to embedded replicas on one machine, beside a bare gloo broadcast of the same tensors.

Owns: `make bench-push`. For each number of replicas one server runs. Pushes to it alternate with broadcasts to as many plain
processes (bare_broadcast.py). The replicas have no requests. Reported for each number, in medians:
    bare_s       from the first broadcast until every process has all tensors
    sent_s       of `publish`: from its first call until the receivers of all replicas have them
    served_s     of `publish`: until every replica has verified, staged, proved and switched, the time to send included
    blocked_s    of `begin`: how long its caller waits, for the copy to memory of its own
    ratio        sent_s to bare_s, of each pair of rounds

    python benchmarks/push.py [--model 1GB] [--replicas 1 2 4] [--rounds 5] [--write]
    python benchmarks/push.py --bare --bytes 50000000     # the broadcast alone, without a server
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bare_broadcast import Bare
from hardware import provenance, write_result
from loadgen import take_priority
from push_table import write_table
from safetensors.torch import load_file
from servers import Midstream, Model
from swaps import say, write_models

from midstream.client import SnapshotPublisher

State = dict[str, torch.Tensor]
#: Of a bare run without a model: one large tensor in four, and small ones.
SHARES = (0.5, 0.25, 0.125, 0.0625, 0.0625)
KV_GIB = 1


#: Uncounted pairs of pushes. After them the file of a snapshot that left the cache is there to be written over.
WARM = 2


class MidstreamReplicas(Midstream):
    """Some replicas behind a gateway."""

    replicas = 1

    def command(self) -> list[str]:
        command = super().command()
        command[command.index("--replicas") + 1] = str(self.replicas)
        # What is kept for restarts is written behind the commit, and would run beside the next round.
        config = Path(command[command.index("--config") + 1])
        config.write_text(config.read_text() + "[push]\nkeep = false\n")
        return command


def made_up(size: int) -> State:
    """Tensors of about `size` bytes."""
    return {
        str(number): torch.ones(max(1, int(size * share / 2)), dtype=torch.bfloat16)
        for number, share in enumerate(SHARES)
    }


def size_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def pushed(publisher: SnapshotPublisher, name: str, state: State) -> dict[str, float]:
    """One push by `publish`, and one of the same tensors by `begin`."""
    began = time.perf_counter()
    done = publisher.publish(name, state)
    served = time.perf_counter()
    publication = publisher.begin(f"{name}-again", state)
    blocked = time.perf_counter()
    publication.wait()
    return {"sent_s": done.upload_s, "served_s": served - began, "blocked_s": blocked - served}


def measured(
    model: Model, states: Sequence[State], replicas: int, rounds: int, folder: Path
) -> dict[str, Any]:
    """The line of one number of replicas."""
    MidstreamReplicas.replicas = replicas
    logs = folder / f"{replicas}-replicas"
    logs.mkdir()
    found = []
    with (
        MidstreamReplicas(model, logs) as server,
        SnapshotPublisher(f"http://127.0.0.1:{server.port}", to="push") as publisher,
        Bare([*states[0].values()], replicas) as bare,
    ):
        # Both have made their groups and touched their memory.
        bare.round()
        for number in range(WARM):
            pushed(publisher, f"warm-{number}", states[1 - number % 2])
        for number in range(rounds):
            pair = {"bare_s": bare.round()}
            pair |= pushed(publisher, f"round-{number}", states[number % 2])
            found.append({**pair, "ratio": pair["sent_s"] / pair["bare_s"]})
            say(f"{replicas} replicas: {', '.join(f'{key} {value:.3f}' for key, value in found[-1].items())}")
    return {"replicas": replicas, "bytes": size_of(states[0]), **medians(found)}


def medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(one[key] for one in found), 4) for key in found[0]}


def bare_alone(size: int, replicas: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    lines = []
    for count in replicas:
        with Bare([*made_up(size).values()], count) as bare:
            bare.round()
            found = [{"bare_s": bare.round()} for _ in range(rounds)]
        lines.append({"replicas": count, "bytes": size, **medians(found)})
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="1GB", choices=["10MB", "1GB"])
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="the broadcast alone, of made-up tensors")
    parser.add_argument("--bytes", type=int, default=10**9, help="of the made-up tensors")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/push.json")
    options = parser.parse_args()
    if options.bare:
        print(json.dumps(bare_alone(options.bytes, options.replicas, options.rounds), indent=2))
        return 0
    take_priority()
    with tempfile.TemporaryDirectory(prefix="bench-push-") as folder:
        model, directories = write_models([options.model], Path(folder), "cpu")[options.model]
        model = Model(model.name, model.directory, model.vocabulary, 2, model.vllm_cores, KV_GIB)
        states = [load_file(directory / "model.safetensors") for directory in directories]
        lines = [measured(model, states, count, options.rounds, Path(folder)) for count in options.replicas]
    result = provenance(model=options.model, rounds=options.rounds, kv_gib=KV_GIB, threads=2)
    result["lines"] = lines
    if options.write:
        say(f"wrote {write_result('push', result)}")
        write_table(result)
    print(json.dumps(lines, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
