"""How many Python functions the embedded engine calls for one step of decoding: 1 stream, and 16 at once.

    python benchmarks/engine_calls.py [--functions]

The number is the same on every machine that can build the kernels. An EngineCore runs tiny-moe here, with fixed requests as a
rollout sends them. Counted are the functions of midstream and of its kernels, in steps in which every stream gets a token.
Prints JSON. --functions: also how often each of them was called per step.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType
from typing import Any

from calls import Calls, profiled
from hardware import provenance

import midstream
import midstream_kernels

PACKAGES = tuple(str(Path(package.__file__).parent) + os.sep for package in (midstream, midstream_kernels))
STREAMS = (1, 16)
PROMPT, WARM, COUNTED = 24, 8, 32


def count(directory: Path, streams: int) -> Counter[CodeType]:
    """The calls of `COUNTED` steps."""
    from midstream.core.config import EngineSettings
    from midstream.core.types import GenerateRequest, SamplingParams
    from midstream.engine.embedded.core import EngineCore

    core = EngineCore(directory, EngineSettings(kernels="native", threads=1, kv_cache_tokens=4096))
    for number in range(streams):
        request = GenerateRequest(
            request_id=str(number),
            prompt=tuple(range(number, number + PROMPT)),
            sampling=SamplingParams(max_tokens=WARM + COUNTED + 2, seed=number),
            want_routes=True,
        )
        assert core.add(request) == []
    calls = Calls()
    with profiled(calls):
        for step in range(WARM + COUNTED):
            calls.counting = step >= WARM
            assert len(core.step()) == streams
    return calls.by_code


def result(by_code: Counter[CodeType], *, functions: bool) -> dict[str, Any]:
    """Per step."""
    found = Counter[str]()
    for code, number in by_code.items():
        package = next((p for p in PACKAGES if code.co_filename.startswith(p)), None)
        if package is not None:
            name = Path(package).name + os.sep + code.co_filename.removeprefix(package)
            found[f"{name}:{code.co_qualname}"] += number
    told: dict[str, Any] = {"of midstream": round(found.total() / COUNTED, 2)}
    if functions:
        told["functions"] = {name: round(number / COUNTED, 2) for name, number in found.most_common()}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", action="store_true", help="also each function")
    options = parser.parse_args()
    from midstream.models.tiny_moe import write_tiny_moe

    found = {}
    with tempfile.TemporaryDirectory(prefix="engine-calls-") as folder:
        directory = Path(folder) / "tiny-moe"
        write_tiny_moe(directory)
        for streams in STREAMS:
            name = "1 stream" if streams == 1 else f"{streams} streams"
            found[name] = result(count(directory, streams), functions=options.functions)
    print(json.dumps({**provenance(steps=COUNTED), "per step": found}, indent=1))


if __name__ == "__main__":
    main()
