#!/usr/bin/env python3
"""Lets PyTorch's CUDA build run on a CPU without CUDA's libraries, for versions of vLLM that take such a PyTorch.

    python requirements/without_cuda.py ENVIRONMENT

The package index has PyTorch 2.11 for CUDA alone, and CUDA's libraries take 3.5 GB. The build needs them when it is loaded, and
calls none where there is no GPU. So one library stands for all of them. Each of its functions ends the process.
Does nothing with a PyTorch for CPUs. Needs a C compiler and `nm`. The CUDA runtime itself and CUPTI are real; they are small.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

#: Libraries that are only looked for by name, and the functions of theirs that PyTorch binds.
STOOD_FOR = re.compile(
    r"lib(cublas|cublasLt|cudnn|cufft|cufile|curand|cusolver|cusparse|cusparseLt|nccl|nvshmem_host)"
    r"\.so\.\d+"
)
FUNCTIONS = re.compile(r"(cublas|cudnn|cufft|cuFile|curand|cusolver|cusparse|nccl|nvshmem)\w+")
LIBRARY = "libnocuda.so"


def words(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def stand_in(lib: Path) -> list[str]:
    """lib: PyTorch's own. The names of the libraries that are stood for."""
    own = sorted(str(path) for path in lib.glob("*.so"))
    needed = {
        word for path in own for word in re.findall(r"\[(.+?)\]", " ".join(words("readelf", "-dW", path)))
    }
    names = sorted(name for name in needed if STOOD_FOR.fullmatch(name))
    if not names:
        return []
    undefined = {tuple(word.partition("@")[::2]) for word in words("nm", "-D", "--undefined-only", *own)}
    functions = sorted((name, version) for name, version in undefined if FUNCTIONS.fullmatch(name))
    versions = {version: [n for n, of in functions if of == version] for _, version in functions if version}
    with tempfile.TemporaryDirectory() as place:
        source, script = Path(place, "none.c"), Path(place, "versions")
        source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name, _ in functions))
        script.write_text(
            "".join(f"{of} {{ global: {'; '.join(named)}; }};\n" for of, named in versions.items())
        )
        made = ["-o", str(lib / LIBRARY), str(source), f"-Wl,--version-script={script}"]
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-fno-builtin", *made], check=True)
    for name in names:
        link = lib / name
        link.unlink(missing_ok=True)
        link.symlink_to(LIBRARY)
    return names


if __name__ == "__main__":
    [torch] = Path(sys.argv[1]).glob("lib/python3*/site-packages/torch/lib")
    if stood_for := stand_in(torch):
        print(f"setup: one empty library stands for {', '.join(stood_for)}", flush=True)
