"""Many policies on one replica: what adapters cost, how long a hot load of one takes, and what it does to others' streams.

One server of the model is started, and 64 adapters of rank 16 on every linear map are published to it. Then the same 16 streams
run on the base weights and spread over 1, 8 and 64 policies, in another order each round; medians of the rounds are kept.
At the end adapters are published one after the other while 16 streams of other policies run.

    python policies.py [--models tiny-moe dense-0.5b] [--rounds 5] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from engine import Line, measure_column, write_models
from hardware import provenance, without_autogroups, write_result
from safetensors.torch import save_file
from servers import Endpoint, Midstream, Model, Server, family

from midstream.snapshots.layout import read_spec

RANK, POLICIES, STREAMS = 16, 64, 16
COLUMNS = {"base": 0, "1 policy": 1, "8 policies": 8, "64 policies": 64}
HOT_LOAD = "/hot_load/v1/models/hot_load"
SWAPS = 8


def write_adapter(model: Path, directory: Path, seed: int) -> int:
    """A random adapter on every linear map but the output layer, as PEFT names its tensors. Returns its bytes."""
    spec, config = read_spec(model), json.loads((model / "config.json").read_text())
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(path: str, inputs: int, outputs: int, experts: int = 1) -> None:
        shapes = {"A": (RANK * experts, inputs), "B": (outputs, RANK * experts)}
        for side, shape in shapes.items():
            name = f"base_model.model.{path}.lora_{side}.weight"
            tensors[name] = (torch.randn(shape, generator=random) * 0.02).bfloat16()

    for name, tensor in spec.tensors.items():
        path = name.removesuffix(".weight")
        plain = path.endswith("_proj") and ".experts." not in path
        if plain and len(tensor.shape) == 2:
            add(path, tensor.shape[1], tensor.shape[0])
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size")
    for experts in sorted({name.partition(".experts.")[0] for name in spec.tensors if ".experts." in name}):
        count = config.get("num_experts") or config["num_local_experts"]
        add(f"{experts}.experts.base_layer", hidden, 2 * inner, count)
        add(f"{experts}.experts", inner, hidden, count)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK})
    )
    return sum(tensor.nbytes for tensor in tensors.values())


class Published:
    """Adapters on a running server."""

    def __init__(self, server: Midstream, model: Model) -> None:
        self.url = f"http://127.0.0.1:{server.port}"
        self.bucket = server.log.with_suffix("") / "state" / "bucket"
        self.model = model

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))

    def write(self, identity: str, seed: int) -> int:
        return write_adapter(self.model.directory, self.bucket / identity, seed)

    def load(self, identity: str, policy: str) -> float:
        """Seconds from the signal until the replica serves it."""
        began = time.perf_counter()
        self.ask(HOT_LOAD, {"identity": identity, "policy": policy})
        while True:
            (row,) = self.ask(f"{HOT_LOAD}?policy={policy}")["replicas"]
            if row["readiness"] and row["current_snapshot_identity"] == identity:
                return time.perf_counter() - began
            time.sleep(0.002)


def resident_mib(server: Server) -> float:
    """Of all processes of the server."""
    assert server._process is not None
    total = 0
    for pid in family(server._process.pid):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return total / 1024


def read_s(directory: Path) -> float:
    """Seconds to read the files there."""
    began = time.perf_counter()
    for file in directory.iterdir():
        file.read_bytes()
    return time.perf_counter() - began


def throughput(server: Midstream, published: Published, line: Line, rounds: int) -> dict[str, Any]:
    endpoint = server.endpoints()["midstream through the gateway"]
    runs: dict[str, list[dict[str, float]]] = {column: [] for column in COLUMNS}
    for number in range(rounds):
        order = list(COLUMNS)
        for column in order[number % len(order) :] + order[: number % len(order)]:
            count = COLUMNS[column]
            models = tuple(f"p{i}" for i in range(min(count, STREAMS)))
            runs[column].append(measured(server, endpoint, published.model, line, number, models))
    found: dict[str, Any] = {}
    for column, made in runs.items():
        keys = ("tokens_per_s", "gap_ms_p50", "gap_ms_p99", "server_cpu_ms_per_token", "other_cpu_share")
        found[column] = {key: statistics.median(run[key] for run in made) for key in keys}
    for key, better in (("tokens_per_s", 1), ("server_cpu_ms_per_token", -1)):
        for column in COLUMNS:
            ratios = [
                (run[key] / base[key]) ** better for run, base in zip(runs[column], runs["base"], strict=True)
            ]
            found[column][f"{key}_ratio"] = statistics.median(ratios)
    return found


def measured(
    server: Server, endpoint: Endpoint, model: Model, line: Line, seed: int, models: tuple[str, ...]
) -> dict[str, float]:
    run, _ = measure_column(server, endpoint, model, line, seed, models=models)
    return run


def hot_loads(server: Midstream, published: Published, line: Line) -> dict[str, Any]:
    """Adapters of one policy switched while streams of eight others run."""
    endpoint = server.endpoints()["midstream through the gateway"]
    quiet = measured(server, endpoint, published.model, line, 99, tuple(f"p{i}" for i in range(8)))
    seconds: list[float] = []
    reads = []
    for number in range(SWAPS):
        published.write(f"moving-{number}", 1000 + number)
        reads.append(read_s(published.bucket / f"moving-{number}"))
    stop = threading.Event()

    def swap() -> None:
        for number in range(SWAPS):
            if stop.wait(0.1):
                return
            seconds.append(published.load(f"moving-{number}", "moving"))

    thread = threading.Thread(target=swap)
    thread.start()
    busy = measured(server, endpoint, published.model, line, 100, tuple(f"p{i}" for i in range(8)))
    stop.set()
    thread.join()
    return {
        "swaps": len(seconds),
        "signal_to_served_s": {"median": statistics.median(seconds), "max": max(seconds)},
        "read_s": statistics.median(reads),
        "quiet": {key: quiet[key] for key in ("gap_ms_p50", "gap_ms_p99", "gap_ms_max")},
        "under_swaps": {key: busy[key] for key in ("gap_ms_p50", "gap_ms_p99", "gap_ms_max")},
    }


def of_model(model: Model, folder: Path, rounds: int, new: int) -> dict[str, Any]:
    line = Line(model.name, "decode", STREAMS, 32, new)
    with Midstream(model, folder) as server:
        published = Published(server, model)
        before = resident_mib(server)
        sizes = [published.write(f"a{number}", number) for number in range(POLICIES)]
        loads = [published.load(f"a{number}", f"p{number}") for number in range(POLICIES)]
        after = resident_mib(server)
        return {
            "adapters_mib": sum(sizes) / 2**20,
            "resident_mib_more": after - before,
            "signal_to_served_s_median": statistics.median(loads),
            "throughput": throughput(server, published, line, rounds),
            "hot_loads": hot_loads(server, published, line),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny-moe", "dense-0.5b"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, nargs="+", default=[512, 48], help="new tokens, by model")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/policies.json")
    options = parser.parse_args()
    result = provenance(rank=RANK, streams=STREAMS, rounds=options.rounds, prompt=32, new=options.new)
    with tempfile.TemporaryDirectory() as folder, without_autogroups():
        for model, new in zip(write_models(options.models, Path(folder)), options.new, strict=False):
            result[model.name] = of_model(model, Path(folder), options.rounds, new)
            print(json.dumps({model.name: result[model.name]}, indent=1), flush=True)
    if options.write:
        print(write_result("policies", result))


if __name__ == "__main__":
    main()
