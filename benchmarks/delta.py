"""Deltas: rebuild with its checks, and encode, beside Fireworks' own package and beside what they are made of.

Owns: `make bench-delta`. 200 MB of bfloat16 in the shape of a small decoder, 2 % of the values moved by one unit in the last
place; once in one file, once in four. Each round does everything once, in another order; a figure is the median of the rounds.
Files lie in memory (--directory, /dev/shm), so no disk is measured, but every byte is read from a file and written to one.

    rebuild   midstream: parent + delta -> a whole new directory, every checksum compared, the parent untouched
              reference: `decompress_delta_into_source` (over its parent's file), `delta_decompress_inplace` (in the mapped
              file, one thread) and `delta_decompress_dict_from_file` (parent and result in memory, no file written)
    verify    midstream: the same checks, nothing written
    encode    midstream: two directories -> a delta directory
              reference: `delta_compress_files_to_file`, and `delta_compress_dicts` (all in memory)
    alone     memcpy, XOR, Adler-32, zstd, reading the parent's files and writing new ones, over the same 200 MB, on one core

The reference (delta_reference.py, a process of its own) has its thread pool on wherever it takes one; midstream has one
thread per core.

    python benchmarks/delta.py [--rounds 5] [--megabytes 200] [--write]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from delta_reference import TASKS, THREADS
from delta_table import write_table
from hardware import provenance, write_result
from safetensors.numpy import save_file

from midstream.snapshots.arc2.blob import PIECE_BYTES, BlobEncoder, PageBuffer, adler32, decoded
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.arc2.files import read, write
from midstream.snapshots.rebuild import rebuild, verify

REFERENCE = Path(__file__).parents[1] / ".venv-fireworks" / "reference"
LAYOUTS = {"one file": 1, "four files": 4}
Task = Callable[[], None]


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """A decoder's tensors, bfloat16, of about that size: an embedding of a sixth, and layers."""
    hidden = 1024
    embedding = max(1, megabytes * 10**6 // 12 // hidden)
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (embedding, hidden)}
    layer = {
        "q": (hidden, hidden),
        "k": (hidden // 4, hidden),
        "v": (hidden // 4, hidden),
        "o": (hidden, hidden),
        "gate": (2816, hidden),
        "up": (2816, hidden),
        "down": (hidden, 2816),
        "norm": (hidden,),
    }
    size, number = 2 * embedding * hidden, 0
    while size < megabytes * 10**6:
        for name, shape in layer.items():
            result[f"model.layers.{number}.{name}.weight"] = shape
            size += 2 * int(np.prod(shape))
        number += 1
    return result


def write_pair(root: Path, megabytes: int, files: int) -> None:
    """`root`/parent and `root`/child, checkpoints in so many files."""
    rng = np.random.default_rng(0)
    old: list[dict[str, np.ndarray]] = [{} for _ in range(files)]
    new: list[dict[str, np.ndarray]] = [{} for _ in range(files)]
    weight_map = {}
    for name, shape in shapes(megabytes).items():
        values = (rng.standard_normal(shape, dtype=np.float32) * 0.02).view(np.uint32)
        bits = (values >> 16).astype(np.uint16)
        moved = bits.copy()
        picked = rng.random(shape, dtype=np.float32) < 0.02
        steps = rng.choice(np.array([1, 2**16 - 1], np.uint16), picked.sum())
        # Below zero is a NaN.
        steps[(bits[picked] & 0x7FFF) == 0] = 1
        moved[picked] += steps
        smallest = min(range(files), key=lambda i: sum(a.nbytes for a in old[i].values()))
        old[smallest][name], new[smallest][name] = bits, moved
        weight_map[name] = f"model-{smallest + 1:05d}-of-{files:05d}.safetensors"
    for side, parts in (("parent", old), ("child", new)):
        (root / side).mkdir(parents=True)
        (root / side / "config.json").write_text("{}")
        if files == 1:
            write_bfloat16(parts[0], root / side / "model.safetensors")
            continue
        for number, part in enumerate(parts, 1):
            write_bfloat16(part, root / side / f"model-{number:05d}-of-{files:05d}.safetensors")
        index = json.dumps({"weight_map": weight_map})
        (root / side / "model.safetensors.index.json").write_text(index)


def write_bfloat16(tensors: dict[str, np.ndarray], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b'"U16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def same_weights(one: Path, other: Path) -> None:
    for path in one.glob("*.safetensors"):
        theirs = other / path.name
        assert read_tensors(path) == read_tensors(theirs), f"{path.name} is not the child"


def read_tensors(path: Path) -> dict[str, bytes]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    ends = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: raw[start + begin : start + end] for name, (begin, end) in ends.items()}


class Ours:
    def __init__(self, root: Path) -> None:
        self.root = root

    def tasks(self) -> dict[str, Task]:
        parent, child, delta, out = (self.root / n for n in ("parent", "child", "delta", "out"))
        return {
            "midstream encode": lambda: void(encode_delta(parent, child, delta)),
            "midstream rebuild": lambda: rebuild(parent, delta, out, "arc_v2"),
            "midstream rebuild of the reference's delta": lambda: rebuild(
                parent, self.root / "their-delta", out, "arc_v2"
            ),
            "midstream rebuild, one thread": lambda: rebuild(parent, delta, out, "arc_v2", threads=1),
            "midstream encode, one thread": lambda: void(encode_delta(parent, child, delta, threads=1)),
            "midstream verify": lambda: verify(parent, delta, "arc_v2"),
        }

    def before(self, name: str) -> None:
        if "encode" in name:
            shutil.rmtree(self.root / "delta", ignore_errors=True)
        shutil.rmtree(self.root / "out", ignore_errors=True)

    def after(self, name: str) -> None:
        if "rebuild" in name:
            same_weights(self.root / "child", self.root / "out")
            shutil.rmtree(self.root / "out")


class Reference:
    """The process that runs Fireworks' package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = [
            sys.executable,
            str(Path(__file__).with_name("delta_reference.py")),
            str(root),
            str(REFERENCE),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times = {"wall_s": 0.0, "cpu_s": 0.0}

    def tasks(self) -> dict[str, Task]:
        return {name: partial(self.run, name) for name in TASKS}

    def run(self, name: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(name, file=self.process.stdin, flush=True)
        self.times = json.loads(self.process.stdout.readline())

    def before(self, name: str) -> None:
        pass

    def after(self, name: str) -> None:
        if "file" in name and "rebuild" in name:
            same_weights(self.root / "child", self.root / "their-base")

    def close(self) -> None:
        self.process.communicate()


class Alone:
    """What rebuilding and encoding are made of, over the concatenated tensors, on one core."""

    def __init__(self, root: Path) -> None:
        self.files = sorted((root / "parent").glob("*.safetensors"))
        self.written = root / "written"
        self.pages = PageBuffer()
        self.old, self.new = (
            np.frombuffer(
                b"".join(b"".join(read_tensors(p).values()) for p in sorted(d.glob("*.safetensors"))),
                np.uint8,
            )
            for d in (root / "parent", root / "child")
        )
        self.out = np.zeros_like(self.old)
        self.difference = (self.old ^ self.new).data
        self.blob = zstandard.ZstdCompressor(level=3).compress(self.difference)

    def tasks(self) -> dict[str, Task]:
        size = len(self.difference)
        return {
            "memcpy": lambda: np.copyto(self.out, self.new),
            "XOR": lambda: void(np.bitwise_xor(self.old, self.new, out=self.out)),
            "files read, in pieces": self.read,
            "new files written, in pieces": self.write,
            "Adler-32, zlib": lambda: void(zlib.adler32(self.new.data)),
            "Adler-32, zlib-ng": lambda: void(adler32(self.new.data, 1)),
            "zstd decode, whole": lambda: void(zstandard.ZstdDecompressor().decompress(self.blob)),
            "zstd decode, in pieces": lambda: void(
                sum(len(p) for p in decoded("arc_v2", memoryview(self.blob), size))
            ),
            "zstd encode, level 3": lambda: void(zstandard.ZstdCompressor(level=3).compress(self.difference)),
            "zstd encode, as midstream does": self.encode,
        }

    def read(self) -> None:
        for path in self.files:
            with path.open("rb") as file:
                for room, position in self.pieces(path):
                    read(file.fileno(), room, position)

    def write(self) -> None:
        self.written.mkdir()
        for path in self.files:
            with (self.written / path.name).open("xb") as file:
                for room, position in self.pieces(path):
                    write(file.fileno(), room, position)

    def pieces(self, path: Path) -> Iterator[tuple[memoryview, int]]:
        """Memory of a piece, and where it is in the file."""
        size = path.stat().st_size
        for position in range(0, size, PIECE_BYTES):
            yield self.pages.at(position, min(PIECE_BYTES, size - position)), position

    def encode(self) -> None:
        """XOR with zeros and Adler-32 included."""
        encoder = BlobEncoder("arc_v2", len(self.difference))
        scratch = memoryview(bytearray(PIECE_BYTES))
        for start in range(0, len(self.difference), PIECE_BYTES):
            piece = self.difference[start : start + PIECE_BYTES]
            scratch[: len(piece)] = bytes(len(piece))
            encoder.add(scratch[: len(piece)], piece)
        encoder.finish()

    def before(self, name: str) -> None:
        pass

    def after(self, name: str) -> None:
        shutil.rmtree(self.written, ignore_errors=True)


def void(_: Any) -> None:
    return None


def busy_s() -> float:
    """CPU time of the whole machine since it started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq = (int(f) for f in fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measured(subject: Ours | Reference | Alone, name: str, task: Task, gigabytes: float) -> dict[str, float]:
    """`others`: cores that other processes used meanwhile."""
    subject.before(name)
    cpu, busy, start = time.process_time(), busy_s(), time.perf_counter()
    task()
    elapsed, own = time.perf_counter() - start, time.process_time() - cpu
    used = busy_s() - busy
    wall = elapsed
    # Its own clock: what it prepares is not counted.
    if isinstance(subject, Reference):
        wall, own = subject.times["wall_s"], subject.times["cpu_s"]
    others = max(0.0, used - own) / elapsed
    subject.after(name)
    return {"gb_per_s": gigabytes / wall, "cpu_s_per_gb": own / gigabytes, "others": others}


def rounds(root: Path, count: int) -> dict[str, Any]:
    """All tasks `count` times; medians, and the sizes of the deltas."""
    subjects: list[Any] = [Ours(root), Reference(root), Alone(root)]
    total = sum(len(t) for p in (root / "parent").glob("*.safetensors") for t in read_tensors(p).values())
    tasks = [(s, name, task) for s in subjects for name, task in s.tasks().items()]
    # Once unmeasured: files and imports that later ones need.
    for subject, name, task in tasks:
        if "encode" in name:
            subject.before(name)
            task()
    samples: dict[str, list[dict[str, float]]] = {name: [] for _, name, _ in tasks}
    order = random.Random(0)
    for number in range(count):
        for subject, name, task in order.sample(tasks, len(tasks)):
            samples[name].append(measured(subject, name, task, total / 1e9))
        print(f"round {number + 1} of {count}", file=sys.stderr, flush=True)
    subjects[1].close()
    rows = {
        name: {key: statistics.median(s[key] for s in taken) for key in taken[0]}
        for name, taken in samples.items()
    }
    deltas = {"midstream": root / "delta", "reference": root / "their-delta"}
    sizes = {name: sum(p.stat().st_size for p in d.glob("*.safetensors")) for name, d in deltas.items()}
    return {"bytes": total, "delta_bytes": sizes, "rounds": count, "rows": rows}


PEAK = """
import re, sys
from pathlib import Path
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.rebuild import rebuild
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
root, what = Path(sys.argv[1]), sys.argv[2]
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS")
if what == "rebuild":
    rebuild(root / "parent", root / "delta", root / "out", "arc_v2")
else:
    encode_delta(root / "parent", root / "child", root / "out")
print((status("VmHWM") - before) * 1024)
"""


def peak_bytes(root: Path, what: str) -> int:
    """What a fresh process needs on top of its imports, mapped files included."""
    command = [sys.executable, "-c", PEAK, str(root), what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(root / "out")
    return int(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--write", action="store_true", help="keep the result and render docs/benchmarks.md")
    options = parser.parse_args()
    result = provenance(megabytes=options.megabytes, changed=0.02, reference_threads=THREADS)
    result["layouts"] = {}
    for layout, files in LAYOUTS.items():
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="delta-") as name:
            root = Path(name)
            write_pair(root, options.megabytes, files)
            measures = rounds(root, options.rounds)
            measures["peak_bytes"] = {what: peak_bytes(root, what) for what in ("rebuild", "encode")}
            result["layouts"][layout] = measures
    for package in ("zstandard", "zlib-ng", "numpy"):
        result["versions"][package] = importlib.metadata.version(package)
    packages = list(
        importlib.metadata.distributions(name="fireworks-delta-compression", path=[str(REFERENCE)])
    )
    result["versions"]["fireworks-delta-compression"] = packages[0].version
    print(json.dumps(result, indent=2))
    if options.write:
        write_result("delta", result)
        write_table(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
