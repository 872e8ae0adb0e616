"""How fast `midstream verify` computes, beside the engine's own prefill of as many positions.

Both run tiny-moe in one process with the same threads, in turns. The engine computes prompts and one token of each. The
verifier computes turns of as many positions, of which the last ones are sampled tokens that are scored, through its whole way:
jobs, passes, comparison.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.embedded.core import EngineCore
from midstream.models.tiny_moe import write_tiny_moe
from midstream.verify.claims import gather
from midstream.verify.paged import PagedComputer
from midstream.verify.verifier import Verifier

VOCAB = 250


def prompts_of(count: int, size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(size)] for _ in range(count)]


def prefill(core: EngineCore, prompts: list[list[int]], name: str) -> float:
    """Positions per second."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=1, temperature=1.0)
        core.add(GenerateRequest(request_id=f"{name}-{number}", prompt=tuple(prompt), sampling=sampling))
    began = time.perf_counter()
    while not core.idle:
        core.step()
    return sum(map(len, prompts)) / (time.perf_counter() - began)


def record_of(number: int, ids: list[int], sampled: int) -> dict[str, Any]:
    """A turn with numbers that are nobody's: only the time of computing them counts."""
    label = [{"snapshot": "base", "start": 0, "end": sampled}]
    kv = [{"snapshot": "base", "start": 0, "end": len(ids) - 1}]
    turn = {
        "turn": 1,
        "parent": 0,
        "model": "m",
        "added": ids[:-sampled],
        "token_ids": ids[-sampled:],
        "loss_mask": [],
        "finish_reason": "length",
        "created": float(number),
        "logprobs": [-1.0] * sampled,
        "sampling_logprobs": None,
        "routing_matrix": None,
        "routing_matrix_dtype": None,
        "routing_matrix_shape": None,
        "snapshots": label,
        "kv_snapshots": kv,
    }
    about = {"n": number, "replica": "r", "boot": "b", "kind": "turn", "segment": "s", "line": number}
    return {**about, "deployment": "d", "tenant": "", "session": str(number), "tree": number, "turn": turn}


def verified(computer: PagedComputer, conversations: list[list[int]], sampled: int) -> float:
    records = [record_of(number, ids, sampled) for number, ids in enumerate(conversations, start=1)]
    # Any number is within this tolerance, so no cause is looked for.
    verifier = Verifier(computer, lambda _: None, lambda _: False, tolerance=1e6)
    began = time.perf_counter()
    report = verifier.verify(gather(records, []).trees)
    seconds = time.perf_counter() - began
    assert report.clean
    return report.positions / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="the verifier's speed beside the engine's prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--sampled", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        write_tiny_moe(model, seed=0, dtype="float32")
        settings = EngineSettings(threads=options.threads, kv_cache_tokens=65536)
        core = EngineCore(model, settings)
        computer = PagedComputer(lambda _: model, "base", settings)
        rows = []
        for number in range(options.rounds + 1):
            given = prompts_of(options.conversations, options.positions, number)
            rows.append((prefill(core, given, str(number)), verified(computer, given, options.sampled)))
    # The first round warms up.
    engine, verifier = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    result = {
        "what": {
            name: getattr(options, name) for name in ("conversations", "positions", "sampled", "threads")
        },
        "engine_prefill_positions_per_s": round(engine),
        "verify_positions_per_s": round(verifier),
        "ratio": round(verifier / engine, 3),
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
