"""A server whose replicas are real vLLM servers, its processes by what they are, and the models to compare it with."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import Server, descendants, serve
from transformers import AutoModelForCausalLM

from midstream.engine.vllm.protocol import NO_RANKS

# The environment of the version that is tested.
VENV = os.environ.get("MIDSTREAM_TEST_VLLM_VENV", ".venv-vllm")
PYTHON = Path(__file__).parents[2] / VENV / "bin" / "python"
REQUIRED = "MIDSTREAM_TEST_VLLM"
#: Of the server that most tests share.
REPLICAS = int(os.environ.get("MIDSTREAM_TEST_VLLM_REPLICAS", "2"))
CONTEXT = 2048
# Tokens that vLLM caches together on a CPU.
BLOCK = 128
DEADLINE_S = 240.0
POLL_S = 0.1

CONFIG = """
[vllm]
python = "{python}"
args = ["--enforce-eager", "--max-model-len", "{context}", "--dtype", "float32"{more}]
env = {{ VLLM_CPU_KVCACHE_SPACE = "1", {mark} = "1" }}
{settings}
"""


def installed() -> bool:
    return PYTHON.with_name("python").exists() and (PYTHON.parents[1] / ".installed").exists()


@dataclass
class Bed:
    server: Server
    checkpoint: Path
    # A variable in the environment of every process of vLLM.
    mark: str
    # Where keys are asked for.
    key: str = ""

    @property
    def model(self) -> str:
        return self.server.model

    @cached_property
    def reference(self) -> Any:
        """The model that is served at first, as transformers computes it."""
        return load(self.checkpoint)

    @cached_property
    def card(self) -> dict[str, Any]:
        """The engine's."""
        with self.http() as http:
            models = http.get("/v1/models").json()["data"]
        # Policies are listed, too.
        model = next(model for model in models if model["id"] == self.model)
        found: dict[str, Any] = model["midstream"]["engine"]
        return found

    @property
    def has_ranks(self) -> bool:
        return not without_ranks(self.card["why"])

    def http(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.server.url, timeout=DEADLINE_S, trust_env=False, headers=headers)

    def in_flight(self, replica: str) -> int:
        """How many requests the gateway has on it, streams whose ends have not come among them."""
        with self.http() as http:
            replicas = http.get("/health").json()["replicas"]
        return next((int(one["in_flight"]) for one in replicas if one["name"] == replica), 0)

    def replica_pid(self, replica: str) -> int:
        for pid in self.server.children():
            if replica.encode() in cmdline(pid).split(b"\0"):
                return pid
        raise AssertionError(f"{replica} does not run")

    def process_of(self, replica: str, what: str) -> int:
        """Below a replica's process, the one whose command line or title has `what`."""
        for pid in descendants(self.replica_pid(replica)):
            if what.encode() in cmdline(pid):
                return pid
        raise AssertionError(f"{replica} has no process {what}")

    def server_url(self, replica: str) -> str:
        """Of its vLLM server."""
        words = cmdline(self.process_of(replica, "api_server")).split(b"\0")
        return f"http://127.0.0.1:{int(words[words.index(b'--port') + 1])}"

    def family(self) -> dict[int, str]:
        """All processes below the server, each with the time it was started at, which makes it another if it differs."""
        return {pid: started_at(pid) for pid in self.server.children()}

    def strays(self) -> list[str]:
        """Processes of vLLM that this bed started and that are not below its server any more."""
        ours = {self.server.process.pid, *self.server.children(), os.getpid()}
        marks = (f"{self.mark}=".encode(), str(self.checkpoint).encode())
        return [
            f"{pid}: {cmdline(pid)!r}"
            for pid in pids()
            if pid not in ours and any(mark in cmdline(pid) + environ(pid) for mark in marks)
        ]


@contextlib.contextmanager
def vllm_bed(
    place: Path,
    checkpoint: Path,
    *args: str,
    replicas: int = 2,
    settings: str = "",
    tinker: bool = False,
    key: str = "",
) -> Iterator[Bed]:
    """args: more of them for vLLM. settings: more of them in its section, and further sections, and a key that they ask for.
    tinker: with its API."""
    mark = f"MIDSTREAM_TEST_{secrets.token_hex(6).upper()}"
    config = place / "midstream.toml"
    more = "".join(f", {json.dumps(arg)}" for arg in args)
    told = {"python": PYTHON, "context": CONTEXT, "mark": mark, "more": more, "settings": settings}
    config.write_text(CONFIG.format(**told))
    options = (
        "--engine",
        "vllm",
        "--replicas",
        str(replicas),
        "--config",
        str(config),
        "--model",
        str(checkpoint),
    )
    with serve(place / "state", *options, *([] if tinker else ["--no-tinker"])) as server:
        yield Bed(server, checkpoint, mark, key)


def without_ranks(why: Mapping[str, str]) -> bool:
    """Whether this version of vLLM cannot give both log-probabilities. Another reason is a fault. why: of a card."""
    return NO_RANKS in why.get("sampling_logprobs", "")


def skip_without_ranks(why: Mapping[str, str]) -> None:
    if without_ranks(why):
        pytest.skip(NO_RANKS)


def needs_staging(bed: Bed) -> None:
    """The newest version stages; an older one may say why it does not."""
    why = bed.card["why"].get("short_swap")
    if why is not None:
        assert VENV != ".venv-vllm", why
        pytest.skip(why)


def needs_provenance(why: Mapping[str, str]) -> None:
    """The newest version says which weights computed KV; an older one may say why it does not. why: of a card."""
    if (said := why.get("kv_provenance")) is not None:
        assert VENV != ".venv-vllm", said
        pytest.skip(said)


def until(holds: Callable[[], bool], what: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(POLL_S)


def load(checkpoint: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """The log-probability of each token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    picked = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return [float(value) for value in picked[:, 0]]


def pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    # It has ended, or is another user's.
    except OSError:
        return b""


def cmdline(pid: int) -> bytes:
    return _read(pid, "cmdline")


def environ(pid: int) -> bytes:
    return _read(pid, "environ")


def started_at(pid: int) -> str:
    """In ticks since the machine started; empty when there is no such process, or it is a zombie."""
    fields = _read(pid, "stat").rpartition(b") ")[2].split()
    return "" if not fields or fields[0] == b"Z" else fields[19].decode()
