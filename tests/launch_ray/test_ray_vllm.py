"""vLLM replicas on a Ray cluster: served from two nodes, hot-loaded, one node lost under streams. Part of `make test-vllm`."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from raycluster import Nodes, RayServer, serving, until

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
ASKED = "MIDSTREAM_TEST_VLLM"
CONFIG = """
[ray]
resources = {{slot = 1}}
[vllm]
python = "{python}"
args = ["--enforce-eager", "--max-model-len", "2048", "--dtype", "float32"]
env = {{ VLLM_CPU_KVCACHE_SPACE = "1" }}
"""
LOADED_S = 600.0
TOKENS = 1500
STREAMS = 8

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(ASKED not in os.environ or not PYTHON.exists(), reason="run `make test-ray-vllm`"),
]


class Reader(threading.Thread):
    """Streams of one session, one after the other until `lost` is set, so that one is under way then on any machine.

    said: what the last stream was. under_way: set when some of the first one has come.
    """

    def __init__(self, server: RayServer, model: str, number: int, lost: threading.Event) -> None:
        super().__init__()
        self.lost = lost
        self.url = f"{server.url}/v1/completions"
        self.body: dict[str, Any] = {"model": model, "prompt": "Once", "stream": True, "max_tokens": TOKENS}
        self.body |= {"ignore_eos": True, "seed": number, "return_token_ids": True}
        self.session = f"reader {number}"
        self.under_way = threading.Event()
        self.replica = ""
        self.said = ""

    def run(self) -> None:
        try:
            self._read()
            while self.whole and not self.struck and not self.lost.is_set():
                self._read()
        finally:
            self.under_way.set()

    def _read(self) -> None:
        headers = {"x-session-id": self.session}
        self.said = ""
        # Behind an error event the connection is cut.
        cut = contextlib.suppress(httpx.RemoteProtocolError)
        asked: dict[str, Any] = {"json": self.body, "headers": headers, "timeout": 300.0, "trust_env": False}
        with cut, httpx.stream("POST", self.url, **asked) as answer:
            self.replica = answer.headers.get("x-midstream-replica", "")
            for text in answer.iter_text():
                self.said += text
                if self.said.count("data: ") > 3:
                    self.under_way.set()

    @property
    def whole(self) -> bool:
        return "data: [DONE]" in self.said and '"error"' not in self.said

    @property
    def struck(self) -> bool:
        return '"resumed"' in self.said or '"error"' in self.said


def test_vllm_replicas_on_two_nodes_and_one_of_them_lost(
    nodes: Nodes, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model().name
    arguments = ("--engine", "vllm", "--model", str(tiny_model()), "--replicas", "2", "--no-tinker")
    with serving(tmp_path, nodes, *arguments, config=CONFIG.format(python=PYTHON)) as server:
        assert len(set(server.places.values())) == 2
        shutil.copytree(tiny_model(seed=3), server.state_dir / "bucket" / "step-1")
        loaded = server.http.post(f"{server.url}/hot_load/v1/models/hot_load", json={"identity": "step-1"})
        loaded.raise_for_status()
        until(lambda: serve(server, "step-1"), server.state, LOADED_S)
        gone = threading.Event()
        readers = [Reader(server, model, number, gone) for number in range(STREAMS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            assert reader.under_way.wait(300.0)
        lost = nodes.node_of("replica-0")
        assert lost is not None
        nodes.lose(lost)
        gone.set()
        for reader in readers:
            reader.join(300.0)
        assert {reader.replica for reader in readers} == {"replica-0", "replica-1"}
        for reader in readers:
            if reader.replica == "replica-1":
                assert reader.whole, reader.said[-500:]
            else:
                assert reader.whole or '"error"' in reader.said, "none ends short without saying so"
        assert any(reader.struck for reader in readers), "streams were under way when the node was lost"
        until(lambda: serve(server, "step-1"), server.state, LOADED_S)
        assert nodes.node_of("replica-0") not in (None, lost)
    nodes.add(lost, slots=1)


def serve(server: RayServer, snapshot: str, replicas: int = 2) -> bool:
    """All replicas do."""
    rows = server.health()["replicas"]
    return len(rows) == replicas and all(row["usable"] and row["snapshot"] == snapshot for row in rows)
