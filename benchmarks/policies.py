"""Many policies on one replica: what adapters cost, how long a hot load of one takes, and what it does to others' streams.

One server of the model is started, and 64 adapters of rank 16 on every linear map are published to it. Then the same 16 streams
run on the base weights and spread over 1, 8 and 64 policies, in another order each round; medians of the rounds are kept. vLLM
with its own LoRA serving runs the same in between, on models that it can run with adapters on a CPU. Then bursts of streams run
in turn without a hot load and with one of another policy's adapter in their middle. At last two resident snapshots share the
streams.

    python policies.py [--models tiny-moe dense-0.5b] [--rounds 5] [--without-vllm] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from document import write_part
from engine import Line, measure_column, vllm_versions, write_models
from hardware import provenance, without_autogroups, write_result
from policies_table import render
from safetensors.torch import load_file, save_file
from servers import Endpoint, Midstream, Model, Server, Vllm, family

from midstream.client import SnapshotPublisher
from midstream.snapshots.layout import read_spec

RANK, POLICIES, STREAMS = 16, 64, 16
COLUMNS = {"base": 0, "1 policy": 1, "8 policies": 8, "64 policies": 64}
HOT_LOAD = "/hot_load/v1/models/hot_load"
#: vLLM 0.32 ends with an error when a mixture of experts gets an adapter on a CPU.
NOT_IN_VLLM = ("tiny-moe",)
#: Of a burst's time, until the signal of a hot load.
SIGNAL_AT = 0.5
#: Of all elements of the second resident snapshot.
CHANGED = 0.02


def write_adapter(model: Path, directory: Path, seed: int) -> int:
    """A random adapter on every linear map but the output layer, as PEFT names its tensors. Returns its bytes."""
    spec, config = read_spec(model), json.loads((model / "config.json").read_text())
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    modules: set[str] = set()

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
            modules.add(path.rpartition(".")[2])
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size")
    for experts in sorted({name.partition(".experts.")[0] for name in spec.tensors if ".experts." in name}):
        count = config.get("num_experts") or config["num_local_experts"]
        add(f"{experts}.experts.base_layer", hidden, 2 * inner, count)
        add(f"{experts}.experts", inner, hidden, count)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": sorted(modules)}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return sum(tensor.nbytes for tensor in tensors.values())


class VllmAdapters(Vllm):
    """vLLM with room for an adapter of each stream in a step, and for all of them in memory."""

    name = "vllm-adapters"

    def command(self) -> list[str]:
        places = ("--max-loras", str(STREAMS), "--max-cpu-loras", str(POLICIES), "--max-lora-rank", str(RANK))
        return [*super().command(), "--enable-lora", *places]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


class Resident(Midstream):
    """Two snapshots stay loaded."""

    name = "midstream-resident"

    def command(self) -> list[str]:
        return [*super().command(), "--resident-snapshots", "2"]


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


class Published:
    """Adapters on a running server."""

    def __init__(self, server: Midstream, model: Model) -> None:
        self.port = server.port
        self.bucket = server.log.with_suffix("") / "state" / "bucket"
        self.model = model

    def write(self, identity: str, seed: int) -> int:
        return write_adapter(self.model.directory, self.bucket / identity, seed)

    def load(self, identity: str, policy: str) -> float:
        """Seconds from the signal until the replica serves it."""
        began = time.perf_counter()
        ask(self.port, HOT_LOAD, {"identity": identity, "policy": policy})
        while True:
            (row,) = json.loads(ask(self.port, f"{HOT_LOAD}?policy={policy}"))["replicas"]
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


#: Runs a burst. It takes the burst's seed, and the names that its streams ask for in turn.
Burst = Callable[[int, tuple[str, ...]], dict[str, float]]


def burst_of(server: Server, endpoint: Endpoint, model: Model, line: Line) -> Burst:
    return lambda seed, models: measure_column(server, endpoint, model, line, seed, models=models)[0]


def throughput(bursts: dict[str, Burst], rounds: int) -> dict[str, Any]:
    """By engine, then by column. A ratio is that of the same round's run on the base weights."""
    places = [(engine, column) for engine in bursts for column in COLUMNS]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {place: [] for place in places}
    for number in range(rounds):
        for place in places[number % len(places) :] + places[: number % len(places)]:
            engine, column = place
            models = tuple(f"p{i}" for i in range(min(COLUMNS[column], STREAMS)))
            runs[place].append(bursts[engine](number, models))
    keys = ("tokens_per_s", "gap_ms_p50", "gap_ms_p99", "server_cpu_ms_per_token", "other_cpu_share")
    found: dict[str, Any] = {engine: {} for engine in bursts}
    for (engine, column), made in runs.items():
        told = {key: statistics.median(run[key] for run in made) for key in keys}
        for key, better in (("tokens_per_s", 1), ("server_cpu_ms_per_token", -1)):
            pairs = zip(made, runs[engine, "base"], strict=True)
            told[f"{key}_ratio"] = statistics.median((run[key] / base[key]) ** better for run, base in pairs)
        found[engine][column] = told
    return found


def hot_loads(burst: Burst, published: Published, rounds: int) -> dict[str, Any]:
    """Bursts of eight policies' streams, in turn without a hot load and with one of a ninth policy in their middle."""
    models = tuple(f"p{i}" for i in range(8))
    seconds: list[float] = []
    reads: list[float] = []
    runs: dict[str, list[dict[str, float]]] = {"quiet": [], "under a hot load": []}
    for number in range(rounds):
        quiet = burst(200 + number, models)
        runs["quiet"].append(quiet)
        identity = f"moving-{number}"
        published.write(identity, 1000 + number)
        reads.append(read_s(published.bucket / identity))
        timer = threading.Timer(
            quiet["seconds"] * SIGNAL_AT, lambda name=identity: seconds.append(published.load(name, "moving"))
        )
        timer.start()
        runs["under a hot load"].append(burst(300 + number, models))
        timer.join()
    keys = ("steady_gap_ms_mean", "steady_gap_ms_max")
    gaps = {
        which: {key: statistics.median(run[key] for run in made) for key in keys}
        for which, made in runs.items()
    }
    return {
        "rounds": rounds,
        "signal_to_served_s": {"median": statistics.median(seconds), "max": max(seconds)},
        "read_s": statistics.median(reads),
        **gaps,
        "worst_gap_in_steps": {
            which: statistics.median(run["steady_gap_ms_max"] / run["steady_gap_ms_mean"] for run in made)
            for which, made in runs.items()
        },
    }


def write_changed(model: Path, directory: Path) -> None:
    """The model's checkpoint with a little noise on CHANGED of all elements."""
    directory.mkdir(parents=True)
    random = torch.Generator().manual_seed(7)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for tensor in tensors.values():
            chosen = torch.rand(tensor.shape, generator=random) < CHANGED
            tensor[chosen] *= 1.01
        save_file(tensors, directory / file.name, metadata={"format": "pt"})


def resident(model: Model, folder: Path, line: Line, rounds: int) -> dict[str, Any]:
    """Streams of one snapshot, and of two that are resident, in turn. Memory before and after the second one."""
    changed = folder / f"{model.name}-changed"
    write_changed(model.directory, changed)
    with Resident(model, folder) as server:
        url, bucket = f"http://127.0.0.1:{server.port}", server.log.with_suffix("") / "state" / "bucket"
        endpoint = server.endpoints()["midstream through the gateway"]
        burst = burst_of(server, endpoint, model, line)
        with SnapshotPublisher(url, str(bucket), work_dir=folder / f"{model.name}-work") as publisher:
            burst(400, (endpoint.model,))
            before = resident_mib(server)
            publisher.publish("first", model.directory)
            second = publisher.publish("second", changed)
        both = (f"{endpoint.model}@first", f"{endpoint.model}@second")
        runs: dict[str, list[float]] = {"one": [], "two": []}
        for number in range(rounds):
            runs["one"].append(burst(500 + number, both[1:])["tokens_per_s"])
            runs["two"].append(burst(600 + number, both)["tokens_per_s"])
        after = resident_mib(server)
    return {
        "checkpoint_mib": sum(file.stat().st_size for file in changed.glob("*.safetensors")) / 2**20,
        "delta_mib": second.bytes_sent / 2**20,
        "resident_mib_one": before,
        "resident_mib_two": after,
        "tokens_per_s": {which: statistics.median(made) for which, made in runs.items()},
        "tokens_per_s_ratio": statistics.median(
            two / one for one, two in zip(runs["one"], runs["two"], strict=True)
        ),
    }


@contextlib.contextmanager
def vllm_with(model: Model, folder: Path, adapters: list[Path]) -> Iterator[Server]:
    with VllmAdapters(model, folder) as server:
        for number, adapter in enumerate(adapters):
            ask(server.port, "/v1/load_lora_adapter", {"lora_name": f"p{number}", "lora_path": str(adapter)})
        yield server


def of_model(model: Model, folder: Path, options: argparse.Namespace, new: int) -> dict[str, Any]:
    line = Line(model.name, "decode", STREAMS, 32, new)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Midstream(model, folder))
        published = Published(server, model)
        before = resident_mib(server)
        sizes = [published.write(f"a{number}", number) for number in range(POLICIES)]
        loads = [published.load(f"a{number}", f"p{number}") for number in range(POLICIES)]
        endpoint = server.endpoints()["midstream through the gateway"]
        bursts = {"midstream": burst_of(server, endpoint, model, line)}
        bursts["midstream"](0, tuple(f"p{i}" for i in range(STREAMS)))
        after = resident_mib(server)
        if options.vllm and model.name not in NOT_IN_VLLM:
            adapters = [published.bucket / f"a{number}" for number in range(POLICIES)]
            other = stack.enter_context(vllm_with(model, folder, adapters))
            bursts["vllm"] = burst_of(other, other.endpoints()["vllm"], model, line)
            bursts["vllm"](0, tuple(f"p{i}" for i in range(STREAMS)))
        found = {
            "adapters_mib": sum(sizes) / 2**20,
            "resident_mib_more": after - before,
            "signal_to_served_s_median": statistics.median(loads),
            "throughput": throughput(bursts, options.rounds),
            "hot_loads": hot_loads(bursts["midstream"], published, options.rounds),
        }
    return {**found, "resident": resident(model, folder, line, options.rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny-moe", "dense-0.5b"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, nargs="+", default=[512, 48], help="new tokens, by model")
    parser.add_argument("--without-vllm", dest="vllm", action="store_false")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/policies.json and docs"
    )
    options = parser.parse_args()
    result = provenance(rank=RANK, streams=STREAMS, rounds=options.rounds, prompt=32, new=options.new)
    if options.vllm:
        result["versions"]["vllm environment"] = vllm_versions()
    result["models"] = {}
    with tempfile.TemporaryDirectory() as folder, without_autogroups():
        for model, new in zip(write_models(options.models, Path(folder)), options.new, strict=False):
            found = result["models"][model.name] = of_model(model, Path(folder), options, new)
            print(json.dumps({model.name: found}, indent=1), flush=True)
    if options.write:
        print(write_result("policies", result))
        write_part("policies", render(result))


if __name__ == "__main__":
    main()
