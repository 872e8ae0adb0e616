"""Weight swaps under running streams: what a stream notices of one, beside vLLM on the same files.

Owns: `make bench-swap`. Each round starts one engine at a time, alternating: midstream (`serve` with one embedded replica; a
full snapshot signalled, fetched, verified, staged, committed and checked under the streams) and vLLM (its own server:
pause keeping requests, `reload_weights` of the same directory, resume). Two models: 10 MB and 1 GB of bfloat16. With
--before, the other engine is midstream of another commit.

A step is the median time between two tokens of a stream while nothing is loaded. Reported per model and engine:
    engine_pause_ms        what the engine says about itself (midstream only)
    switch_steps           the wait of a stream at the switch, in steps: for midstream the time between the last token of
                           the old label and the first of the new one, for vLLM the longest time between two tokens that
                           touches pause..resume; median and worst over streams and swaps
    worst_wait_steps       the longest wait of any stream from the signal until ready
    signal_to_ready_s      from the signal (vLLM: the request to pause) until all is served by the new weights
    fetch_s stage_s check_s  parts of it (midstream only): copied from the bucket, loaded beside the streams, proved

    python benchmarks/swaps.py [--swaps 5] [--rounds 3] [--models 10MB 1GB] [--engines midstream vllm] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from dense_model import VOCABULARY, write_dense
from engine import vllm_versions
from hardware import commit_of, provenance, write_result
from loadgen import Load, Stream, events, request_bytes, take_priority
from servers import VLLM_PYTHON, Midstream, MidstreamBefore, Model, Server, Vllm

from midstream.client import SnapshotPublisher, snapshot_of
from midstream.models.tiny_moe import write_tiny_moe

PROMPT = 64
STREAMS = {"10MB": 16, "330MB": 4, "1GB": 4}
LAYERS = {"330MB": 2, "1GB": 24}
# Of each stream, before and after a swap: what a step takes when nothing is loaded.
QUIET_TOKENS = 60
HOST = "127.0.0.1"
# Tokens a stream would give; it is ended when enough is seen.
LONG = 3900


class VllmDevelopment(Vllm):
    """With the endpoints that its RL users swap weights by."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "VLLM_SERVER_DEV_MODE": "1"}


class Streams:
    """Running streams: what came is stored with its time while they run, and read once they were ended."""

    def __init__(self, url: str, served: str, model: Model, count: int, seed: int) -> None:
        rng = random.Random(seed)
        self._port = httpx.URL(url).port or 80
        load = Load(
            port=self._port,
            model=served,
            streams=count,
            prompt_tokens=PROMPT,
            new_tokens=LONG,
            vocabulary=model.vocabulary,
            seed=seed,
        )
        self._requests = [request_bytes(load, rng, PROMPT, LONG) for _ in range(count)]
        self._streams: list[Stream] = []
        # Of each stream: when each token came.
        self.times: list[list[float]] = []
        self.labels: list[list[str | None]] = []

    async def __aenter__(self) -> Streams:
        loop = asyncio.get_running_loop()
        for request in self._requests:
            stream = Stream(request, loop.create_future())
            await loop.create_connection(lambda s=stream: s, HOST, self._port)  # type: ignore[misc]
            self._streams.append(stream)
        for stream in self._streams:
            stream.send()
        await self.after(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.transport.abort()
        await asyncio.gather(*(stream.done for stream in self._streams))
        for stream in self._streams:
            self._read(stream)

    async def after(self, tokens: int) -> None:
        """Wait until each stream has brought something so many more times."""
        events = []
        for stream in self._streams:
            stream.wake = (len(stream.reads) + tokens, asyncio.Event())
            events.append(stream.wake[1])
        waiting = asyncio.gather(*(event.wait() for event in events))
        ended = [stream.done for stream in self._streams]
        await asyncio.wait((waiting, *ended), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for stream in self._streams:
            if stream.done.done():
                raise RuntimeError(f"a stream ended before the swap did: {stream.reads[-1:]!r}")

    def _read(self, stream: Stream) -> None:
        times: list[float] = []
        labels: list[str | None] = []
        for at, data in events(stream.times, stream.reads, whole=False):
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(f"a stream failed: {chunk['error']}")
            if chunk["choices"] and chunk["choices"][0]["finish_reason"] is None:
                times.append(at)
                labels.append(snapshot_of(chunk["model"]))
        self.times.append(times)
        self.labels.append(labels)

    def gaps(self, first: float, last: float) -> list[list[float]]:
        """Per stream: times between two tokens that touch first..last."""
        return [
            [b - a for a, b in itertools.pairwise(times) if b >= first and a <= last] for times in self.times
        ]

    def switch_gaps(self, identity: str) -> list[float]:
        """Per stream: from the last token before `identity` to its first."""
        found = []
        for times, labels in zip(self.times, self.labels, strict=True):
            at = labels.index(identity)
            found.append(times[at] - times[at - 1])
        return found


async def observed(
    url: str, served: str, model: Model, seed: int, swap: Any
) -> tuple[dict[str, list[float]], Any]:
    """One swap under streams of the model `served`. `swap()` does it and returns (identity or None, what it found)."""
    async with Streams(url, served, model, STREAMS[model.name], seed) as streams:
        began = time.perf_counter()
        await streams.after(QUIET_TOKENS)
        asked = time.perf_counter()
        identity, found = await asyncio.to_thread(swap)
        ready = time.perf_counter()
        await streams.after(QUIET_TOKENS)
    quiet = [gap for gaps in streams.gaps(began, asked) for gap in gaps if gap < asked - began]
    step = statistics.median(quiet)
    during = streams.gaps(asked, ready)
    switch = streams.switch_gaps(identity) if identity is not None else [max(gaps) for gaps in during]
    return {
        "step_ms": [step * 1e3],
        "switch_steps": [gap / step for gap in switch],
        "worst_wait_steps": [max(max(gaps) for gaps in during) / step],
        "signal_to_ready_s": [ready - asked],
    }, found


def midstream_swaps(
    server: Server, model: Model, directories: list[Path], swaps: int, seed: int
) -> list[dict[str, list[float]]]:
    url = f"http://127.0.0.1:{server.port}"
    bucket = server.log.with_suffix("") / "state" / "bucket"
    made = []
    with SnapshotPublisher(url, bucket.as_uri()) as publisher:
        for i in range(swaps):
            identity = f"step-{i}"
            publisher.write_full(identity, directories[(i + 1) % 2])

            def swap(identity: str = identity) -> tuple[str, dict[str, Any]]:
                publisher.snapshots.signal(identity)
                status = publisher.snapshots.wait_until_ready(identity, poll_s=0.02)
                assert status.replicas[0].last_swap is not None
                return identity, status.replicas[0].last_swap

            run, last_swap = asyncio.run(observed(url, model.directory.name, model, seed + i, swap))
            assert last_swap["snapshot"] == identity
            loading = {f"{name}_s": [last_swap[f"{name}_ms"] / 1e3] for name in ("fetch", "stage", "check")}
            made.append({**run, "engine_pause_ms": [last_swap["pause_ms"]], **loading})
            say(f"{model.name} {server.name} {identity}: {shown(made[-1])}")
    return made


def vllm_swaps(
    server: Server, model: Model, directories: list[Path], swaps: int, seed: int
) -> list[dict[str, list[float]]]:
    url = f"http://127.0.0.1:{server.port}"
    made = []
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        for i in range(swaps):
            directory = directories[(i + 1) % 2]

            def swap(directory: Path = directory) -> tuple[None, None]:
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
                http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
                http.post("/collective_rpc", json=reload).raise_for_status()
                http.post("/resume").raise_for_status()
                return None, None

            run, _ = asyncio.run(observed(url, model.name, model, seed + i, swap))
            made.append(run)
            say(f"{model.name} vllm swap {i}: {shown(run)}")
    return made


def shown(run: dict[str, list[float]]) -> str:
    return ", ".join(f"{key} {max(values):.2f}" for key, values in run.items())


def summary(runs: list[dict[str, list[float]]]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "swaps": len(runs),
        "streams_crossed": sum(len(r["switch_steps"]) for r in runs),
    }
    for key in runs[0]:
        values = [value for run in runs for value in run[key]]
        result |= {f"{key}_p50": round(statistics.median(values), 3), f"{key}_max": round(max(values), 3)}
    return result


def write_models(names: list[str], folder: Path, device: str) -> dict[str, tuple[Model, list[Path]]]:
    """Each with two checkpoints of other weights; the first is what is served at the start."""
    made = {}
    for name in names:
        directories = [folder / name / f"seed-{seed}" for seed in (0, 1)]
        for seed, directory in enumerate(directories):
            if directory.exists():
                # Of an earlier run.
                continue
            if name == "10MB":
                write_tiny_moe(directory, seed=seed, layers=11)
            else:
                directory.parent.mkdir(exist_ok=True, parents=True)
                write_dense(directory, seed=seed, layers=LAYERS[name])
        vocabulary = 256 if name == "10MB" else VOCABULARY - 1
        made[name] = Model(name, directories[0], vocabulary, 2, "0-1", 1, device), directories
    return made


def weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["10MB", "1GB"], choices=["10MB", "1GB"])
    parser.add_argument("--engines", nargs="+", default=["midstream", "vllm"], choices=["midstream", "vllm"])
    parser.add_argument("--device", default="cpu", help="of midstream's engine")
    parser.add_argument("--swaps", type=int, default=5, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/swaps.json")
    parser.add_argument(
        "--before",
        metavar="DIR",
        type=Path,
        help="a checkout of another commit, measured beside this one alone; --write: results/swaps-before.json",
    )
    options = parser.parse_args()
    if options.before is not None:
        MidstreamBefore.checkout = options.before.resolve()
        options.engines = [Midstream.name, MidstreamBefore.name]
    if "vllm" in options.engines and not VLLM_PYTHON.exists():
        parser.error(f"{VLLM_PYTHON} is missing; `make bench-swap` makes it")
    take_priority()
    # The thread that swaps must not keep the one that looks at the clock waiting.
    sys.setswitchinterval(0.0005)
    runs: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    kinds = {
        "midstream": (Midstream, midstream_swaps),
        "midstream-before": (MidstreamBefore, midstream_swaps),
        "vllm": (VllmDevelopment, vllm_swaps),
    }
    with tempfile.TemporaryDirectory(prefix="bench-swap-") as folder:
        models = write_models(options.models, Path(folder), options.device)
        for round_number, (name, (model, directories)) in itertools.product(
            range(options.rounds), models.items()
        ):
            for engine in options.engines:
                kind, swap_all = kinds[engine]
                logs = Path(folder) / f"round-{round_number}"
                logs.mkdir(exist_ok=True)
                with kind(model, logs) as server:
                    seed = 1000 * round_number
                    made = swap_all(server, model, directories, options.swaps, seed)
                runs.setdefault((name, engine), []).extend(made)
        sizes = {name: weight_bytes(directories[0]) for name, (_, directories) in models.items()}
    result = provenance(
        prompt_tokens=PROMPT,
        streams=STREAMS,
        swaps_a_round=options.swaps,
        rounds=options.rounds,
        bytes=sizes,
        device=options.device,
    )
    if options.before is not None:
        result["configuration"]["before"] = commit_of(options.before)
    if "vllm" in options.engines:
        result["versions"]["vllm environment"] = vllm_versions()
    result["lines"] = [
        {"model": name, "engine": engine, **summary(made)} for (name, engine), made in runs.items()
    ]
    if options.write:
        name = "swaps" if options.before is None else "swaps-before"
        say(f"wrote {write_result(name, result)}")
    print(json.dumps(result["lines"], indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
