"""A benchmark leaves no server behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from servers import Endpoint, Model, Server, ServerFailed, alive, family

pytestmark = pytest.mark.variant
PARENT = """
import subprocess, sys, time
program = "import time; print('child', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
time.sleep(600)
"""


class Stubborn(Server):
    """A process whose child lives in a session of its own and does not end with it."""

    name = "stubborn"
    grace_s = 0.0
    program = PARENT

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program]

    def ready(self) -> bool:
        return "child" in self.text()

    def endpoints(self) -> dict[str, Endpoint]:
        return {}

    def kv_bytes_per_token(self) -> int:
        return 0

    def configuration(self) -> dict[str, Any]:
        return {}


class Broken(Stubborn):
    name = "broken"
    program = "raise SystemExit('no such model')"


def model(folder: Path) -> Model:
    return Model("m", folder, vocabulary=1, threads=1, vllm_cores="auto", kv_gib=1)


def test_every_process_under_a_server_is_gone_when_its_block_is_left_by_an_error(tmp_path: Path) -> None:
    server = Stubborn(model(tmp_path), tmp_path)
    under: dict[int, str] = {}

    def measure() -> None:
        with server:
            assert server._process is not None
            under.update(family(server._process.pid))
            raise RuntimeError("a failed measurement")

    with pytest.raises(RuntimeError, match="a failed measurement"):
        measure()
    assert len(under) == 2
    assert alive(under) == []


def test_a_server_that_ends_while_starting_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no such model"), Broken(model(tmp_path), tmp_path):
        pass
