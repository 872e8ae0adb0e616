"""What `make gpu-check` runs beside the tests that have parameters for a device.

MIDSTREAM_TEST_DEVICE says on which device: cuda, or cpu for a dry run. Without it and without a device all of this is skipped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("engine", "e2e", "tinker", "vllm")]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    asked = os.environ.get("MIDSTREAM_TEST_DEVICE")
    if asked != "cpu" and not torch.cuda.is_available():
        (pytest.fail if asked else pytest.skip)("no CUDA device")
    return asked or "cuda"


@pytest.fixture(scope="session")
def figure() -> Callable[..., None]:
    """figure(name=value, ...): numbers for the result of `make gpu-check`."""
    kept: dict[str, object] = {}

    def keep(**values: object) -> None:
        kept.update(values)
        if path := os.environ.get("MIDSTREAM_GPU_FIGURES"):
            Path(path).write_text(json.dumps(kept))

    return keep
