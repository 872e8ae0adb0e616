"""Fireworks' own delta package, measured in a process of its own: delta.py starts it and says what to run next.

Reads task names from standard input, one a line; answers each with a line of JSON, `{"wall_s", "cpu_s"}`. Its functions
take one file; the files of a checkpoint go one after the other, each in its thread pool (8 threads, its default).

    python delta_reference.py ROOT PACKAGES     # ROOT/parent, ROOT/child; ROOT/their-delta and ROOT/their-base are its own
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# FIREWORKS_DELTA_DECOMPRESS_THREADS, when it is not set.
THREADS = 8
FORMAT = "arc_v2"
ENCODE_FILES = "reference encode, files"
TASKS = (
    ENCODE_FILES,
    "reference encode, in memory",
    "reference rebuild, over its parent's file",
    "reference rebuild, in the mapped file",
    "reference rebuild, in memory",
)


class Reference:
    def __init__(self, root: Path) -> None:
        from fireworks_delta_compression import compression
        from safetensors.torch import load_file

        self.root, self.package = root, compression
        self.pool = ThreadPoolExecutor(THREADS)
        self.names = sorted(p.name for p in (root / "parent").glob("*.safetensors"))
        self.old = {name: load_file(root / "parent" / name) for name in self.names}
        self.new = {name: load_file(root / "child" / name) for name in self.names}
        self.base, self.delta = root / "their-base", root / "their-delta"
        self.delta.mkdir()
        self.result: Any = None

    def encode_files(self) -> None:
        for name in self.names:
            self.package.delta_compress_files_to_file(
                src=str(self.root / "parent" / name),
                dst=str(self.root / "child" / name),
                diff_file=str(self.delta / name),
                compression_format=FORMAT,
                executor=self.pool,
            )

    def encode_in_memory(self) -> None:
        self.result = [
            self.package.delta_compress_dicts(self.old[name], self.new[name], FORMAT, executor=self.pool)
            for name in self.names
        ]

    def over_source(self) -> None:
        for name in self.names:
            self.package.decompress_delta_into_source(
                str(self.delta / name), str(self.base / name), FORMAT, self.pool
            )

    def in_place(self) -> None:
        for name in self.names:
            self.package.delta_decompress_inplace(
                base_path=str(self.base / name),
                diff_path=str(self.delta / name),
                compression_format=FORMAT,
            )

    def in_memory(self) -> None:
        self.result = [
            self.package.delta_decompress_dict_from_file(
                src=self.old[name],
                diff_file=str(self.delta / name),
                compression_format=FORMAT,
                executor=self.pool,
            )
            for name in self.names
        ]

    def run(self, task: str) -> dict[str, float]:
        functions: list[Callable[[], None]] = [
            self.encode_files,
            self.encode_in_memory,
            self.over_source,
            self.in_place,
            self.in_memory,
        ]
        function = dict(zip(TASKS, functions, strict=True))[task]
        self.result = None
        # They change the file they are given.
        if function in (self.over_source, self.in_place):
            shutil.rmtree(self.base, ignore_errors=True)
            shutil.copytree(self.root / "parent", self.base)
        cpu, start = time.process_time(), time.perf_counter()
        function()
        return {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}


def main() -> None:
    # Torch, about a buffer that the package hands it read-only.
    warnings.simplefilter("ignore")
    sys.path.append(sys.argv[2])
    reference = Reference(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(reference.run(line.strip())), flush=True)


if __name__ == "__main__":
    main()
