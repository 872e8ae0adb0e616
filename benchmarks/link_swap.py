"""Deltas of 2 % of 1 GB to a live server with one embedded replica, over a limited link: the whole way, and its memory.

Owns: the second part of `make bench-push`. The replica's bucket is behind a link of 100 MB/s (limited_bucket.py), with a
server of S3's protocol over the directory into which the trainer publishes. So the trainer's own upload is a copy on this
machine, and not measured. Files are not announced early (`hints=False`): all bytes come over the link after the signal.
Nobody asks the server anything. Trainer, gateway, replica and engine share the cores.

Every other round has the copy made beside the training (`optimizer=()`). Reported in medians over the rounds:
    blocked_s                      how long the trainer waits in `begin`; copy_s: a bare copy of the same tensors, made before
    beside_blocked_s               the same with `optimizer=()`; until_copied_s: from then until the weights may change
    served_s                       from the signal until the replica serves it
    fetch_s rebuild_s verify_s stage_s check_s   parts of that, as the replica reports them
    bound_s                        the delta's bytes over the link, and rebuild_s; ratio: served_s to it
    fetched_ratio                  the same without staging and check: until whole and verified files are there
    replica_peak engine_peak       memory of the process during the swap, mapped files included, in bytes
    engine_own                     the most of the engine's memory that is its own, without mapped files; read every 5 ms
    engine_at_start                the same when the server had started: runtime, KV and one model
    models                         engine_own over engine_at_start, in models, and the one that is in it

    python link_swap.py [--rounds 5] [--before DIR] [--write]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hardware import provenance, source_of, write_result
from limited_bucket import BUCKET, environment, limited_bucket
from links import LINK_BYTES_PER_S
from safetensors.torch import load_file
from servers import Midstream, Model, family
from swaps import say, write_models

from midstream.client import SnapshotPublisher

State = dict[str, torch.Tensor]
SAMPLE_S = 0.005
PARTS = ("fetch", "rebuild", "verify", "stage", "check")


class LinkedMidstream(Midstream):
    """Its bucket is at the other end of the link of `port_of_link`. checkout: another commit of it; None: this one."""

    port_of_link = 0
    checkout: Path | None = None

    def command(self) -> list[str]:
        return [*super().command(), "--bucket", f"s3://{BUCKET}"]

    def environment(self) -> dict[str, str]:
        own = {} if self.checkout is None else source_of(self.checkout)
        return {**environment(self.port_of_link), **own}


class Memory:
    """Of the replica's process and its engine's, which is the largest of the server."""

    def __init__(self, server: int) -> None:
        self.engine = max(family(server), key=lambda pid: _kb(pid, "VmRSS"))
        stat = Path(f"/proc/{self.engine}/stat").read_text().rpartition(") ")[2].split()
        self.replica = int(stat[1])
        self.at_start = _kb(self.engine, "RssAnon") * 1024
        self._own = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._sample)

    def begin(self) -> None:
        """Peaks count from here."""
        for pid in (self.replica, self.engine):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._own = 0
        self._over.clear()
        self._watch = threading.Thread(target=self._sample)
        self._watch.start()

    def peaks(self, model_bytes: int) -> dict[str, float]:
        """Since `begin`."""
        self._over.set()
        self._watch.join()
        replica, engine = (_kb(pid, "VmHWM") * 1024 for pid in (self.replica, self.engine))
        return {
            "replica_peak": replica,
            "engine_peak": engine,
            "engine_own": self._own,
            "engine_at_start": self.at_start,
            "models": 1 + (self._own - self.at_start) / model_bytes,
        }

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._own = max(self._own, _kb(self.engine, "RssAnon") * 1024)


def _kb(pid: int, key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


def moved(state: State, generator: torch.Generator) -> None:
    """2 % of the values are another number, as near as there is one."""
    for tensor in state.values():
        bits = tensor.view(torch.int16)
        picked = torch.rand(bits.shape, generator=generator) < 0.02
        # Not from zero: below it is a NaN.
        bits[picked & (bits & 0x7FFF > 0)] ^= 1


def copied_s(state: State, room: State) -> float:
    began = time.perf_counter()
    for name, tensor in state.items():
        room[name].copy_(tensor)
    return time.perf_counter() - began


def round_of(
    publisher: SnapshotPublisher, memory: Memory, name: str, state: State, how: Mapping[str, Any]
) -> dict[str, float]:
    memory.begin()
    began = time.perf_counter()
    publication = publisher.begin(name, state, **how)
    blocked_s = time.perf_counter() - began
    publication.wait_copied()
    copied_s = time.perf_counter() - began - blocked_s
    done = publication.wait()
    swap = done.replicas[0].last_swap or {}
    parts = {f"{part}_s": swap[f"{part}_ms"] / 1e3 for part in PARTS}
    bound_s = done.bytes_sent / LINK_BYTES_PER_S + parts["rebuild_s"]
    whole_s = parts["fetch_s"] + parts["rebuild_s"] + parts["verify_s"]
    beside = {"beside_blocked_s": blocked_s, "until_copied_s": copied_s}
    return {
        **(beside if "optimizer" in how else {"blocked_s": blocked_s}),
        "encode_s": done.encode_s,
        "served_s": done.load_s,
        **parts,
        "bound_s": bound_s,
        "ratio": done.load_s / bound_s,
        "fetched_ratio": whole_s / bound_s,
        "bytes_sent": done.bytes_sent,
        **memory.peaks(sum(tensor.nbytes for tensor in state.values())),
    }


def measured(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    model, directories = write_models([name], folder, "cpu")[name]
    model = Model(model.name, model.directory, model.vocabulary, 2, model.vllm_cores, 1)
    bucket = folder / "bucket"
    bucket.mkdir()
    state = {key: tensor.clone() for key, tensor in load_file(directories[0] / "model.safetensors").items()}
    room = {key: torch.ones_like(tensor) for key, tensor in state.items()}
    how = {"config_dir": model.directory}
    generator = torch.Generator().manual_seed(0)
    found = []
    with limited_bucket(bucket, 1, LINK_BYTES_PER_S) as (port, _):
        LinkedMidstream.port_of_link = port
        with (
            LinkedMidstream(model, folder) as server,
            SnapshotPublisher(f"http://127.0.0.1:{server.port}", bucket.as_uri(), hints=False) as publisher,
        ):
            # The first is full, and the second warms what deltas need.
            memory = Memory(server.pid)
            publisher.begin("step-0", state, **how).wait()
            for number in range(1, 2 * rounds + 2):
                moved(state, generator)
                copy_s = copied_s(state, room)
                copying = {"optimizer": ()} if number % 2 else {}
                took = {
                    "copy_s": copy_s,
                    **round_of(publisher, memory, f"step-{number}", state, how | copying),
                }
                say(f"{name}: {', '.join(f'{key} {value:.3f}' for key, value in took.items())}")
                if number > 1:
                    found.append(took)
    size = sum(tensor.nbytes for tensor in state.values())
    return {"model": name, "bytes": size, **medians(found)}


def medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: round(statistics.median(one[key] for one in found if key in one), 4) for key in keys}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="1GB", choices=["10MB", "1GB"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--before", type=Path, help="another checkout, which is measured first and not written"
    )
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/link-swap.json")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for checkout in (options.before, None) if options.before else (None,):
        LinkedMidstream.checkout = checkout
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-link-swap-") as folder:
            found = measured(options.model, options.rounds, Path(folder))
        say(f"{checkout or 'this checkout'}: {json.dumps(found)}")
    result = provenance(link_bytes_per_s=LINK_BYTES_PER_S, changed=0.02, rounds=options.rounds)
    result["lines"] = [found]
    if options.write:
        say(f"wrote {write_result('link-swap', result)}")
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
