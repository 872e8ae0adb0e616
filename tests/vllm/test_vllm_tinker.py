"""The unmodified Tinker SDK samples from a real vLLM server at any temperature. Its numbers are of what was drawn from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_bed import Bed, skip_without_ranks, vllm_bed

sys.path.append(str(Path(__file__).parents[1] / "tinker"))

from recompute import Recomputer
from resampling import drawn_from
from sdk_venvs import API_KEY, VERSIONS, run_sdk

from midstream.core.types import SamplingParams

ALIAS = "Qwen/Qwen3-8B-Base"
PROMPT = list(b"Count to ten: one, two, three,")
TOLERANCE = 1e-4
SETTINGS = f"""
[gateway]
api_keys = ["{API_KEY}"]
[tinker]
base_models = ["{ALIAS}"]
"""


@pytest.fixture(scope="module")
def tinker_bed(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Iterator[Bed]:
    place = tmp_path_factory.mktemp("vllm-tinker")
    with vllm_bed(place, checkpoint, replicas=1, settings=SETTINGS, tinker=True, key=API_KEY) as running:
        yield running


def differences(checkpoint: Path, sequences: list[dict[str, Any]], **sampling: Any) -> list[float]:
    recomputer, found = Recomputer({"base": checkpoint}), []
    for sequence in sequences:
        tokens, logprobs = sequence["tokens"], sequence["logprobs"]
        ids = [*PROMPT, *tokens[:-1]]
        logits = recomputer.passes(ids, ["base"] * len(ids)).logits.double().numpy()[len(PROMPT) - 1 :]
        for at, (row, token, logprob) in enumerate(zip(logits, tokens, logprobs, strict=True)):
            ways = drawn_from(row, SamplingParams(max_tokens=1, **sampling), PROMPT, tokens[:at])
            found.append(min(abs(way[token] - logprob) for way in ways))
    return found


def test_the_sdk_samples_at_temperature_0_7_with_filters(
    tinker_bed: Bed, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_ranks(tinker_bed.card["why"])
    script = Path(__file__).parents[1] / "tinker" / "sdk_sampling.py"
    given = {"url": tinker_bed.server.url, "api_key": API_KEY, "base_model": ALIAS, "prompt": PROMPT}
    given |= {"seed": 11, "max_tokens": 48, "stop_string": "q", "stop_token": 40}
    said = run_sdk(VERSIONS[0], script, given)
    kinds: dict[str, dict[str, Any]] = {
        "seeded": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        "seeded_again": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        "greedy": {"temperature": 0.0},
        "never_stops": {},
    }
    off = [
        x
        for name, params in kinds.items()
        for x in differences(checkpoint, said[name]["sequences"], **params)
    ]
    assert len(off) > 60
    assert max(off) <= TOLERANCE
    with capsys.disabled():
        print(f"\nTinker: {len(off)} tokens, at most {np.max(off):.1e} off")
