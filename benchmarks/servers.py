"""The servers that are compared: how each is started, asked and ended.

Always holds: a server that was started is gone, with every process under it, when its `with` block is left, however it is
left; and it ends when this process dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hardware import commit_of, source_of

HERE = Path(__file__).parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
PR_SET_PDEATHSIG = 1
READY = re.compile(r"midstream ready on http://127\.0\.0\.1:(\d+)")
TOKEN = "bench-engine"
#: The name of `[replica] token` in checkouts from before decision 0094.
FLAT_TOKEN = "replica_token"
TICKS = os.sysconf("SC_CLK_TCK")
CONTEXT = 4096
BLOCK = 16
VECTORS = ("native", "avx2")
#: A process with these does not use AVX-512, on a machine that has it. vLLM asks torch, so it needs the folder, too.
AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "MIDSTREAM_KERNELS_LEVEL": "x86-64-v3",
}
AVX2_FOLDER = HERE / "avx2_only"


@dataclass(frozen=True)
class Model:
    name: str
    directory: Path
    # Prompts draw ids below this.
    vocabulary: int
    # For engines that are told; vLLM binds its own.
    threads: int
    # VLLM_CPU_OMP_THREADS_BIND.
    vllm_cores: str
    # The same KV budget for every engine.
    kv_gib: int
    # Of midstream's engine.
    device: str = "cpu"


@dataclass(frozen=True)
class Endpoint:
    """Where one column of the table is measured."""

    port: int
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    path: str = "/v1/completions"


class ServerFailed(Exception):
    """The server did not come up; the message ends with its log."""


class Server(ABC):
    """A server process and what is under it."""

    name: str
    # For processes under it to follow it.
    grace_s = 5.0
    #: One of VECTORS, for every server.
    vectors = "native"

    def __init__(self, model: Model, folder: Path) -> None:
        self.model = model
        self.port = free_port()
        self.log = folder / f"{self.name}-{model.name}.log"
        self.startup_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str]:
        return {}

    @abstractmethod
    def ready(self) -> bool: ...

    @abstractmethod
    def endpoints(self) -> dict[str, Endpoint]: ...

    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """From what the server itself says about the cache it made of `kv_gib`."""

    @abstractmethod
    def configuration(self) -> dict[str, Any]: ...

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Server:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **self.environment()}
        if self.vectors == "avx2":
            environment |= AVX2_ONLY
        started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            while not self.ready():
                if self._process.poll() is not None:
                    raise ServerFailed(f"{self.name} ended while starting:\n{self.tail()}")
                if time.monotonic() - started > 600:
                    raise ServerFailed(f"{self.name} was not ready after 600 s:\n{self.tail()}")
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        process = self._process
        if process is None:
            return
        under = family(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        await_end(under, self.grace_s)
        for pid in alive(under):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await_end(under, 10.0)
        process.wait()
        self._process = None

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        assert self._process is not None
        return sum(cpu_ticks(pid) for pid in family(self._process.pid)) / TICKS

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.text().splitlines()[-25:])


class Midstream(Server):
    """One replica behind a gateway; asked at the replica itself and through the gateway."""

    name = "midstream"

    def token_setting(self) -> str:
        """The lines of the configuration that give the replica its token."""
        return f'[replica]\ntoken = "{TOKEN}"\n'

    def spare_setting(self) -> str:
        """No spare replica process, whose imports would be measured, too."""
        return "spare_after_s = 0\n"

    def command(self) -> list[str]:
        state = self.log.with_suffix("")
        state.mkdir()
        config = state / "midstream.toml"
        config.write_text(
            f"{self.token_setting()}[embedded]\nthreads = {self.model.threads}\nblock_size = {BLOCK}\n"
            f'device = "{self.model.device}"\n{self.spare_setting()}'
        )
        return [
            *(sys.executable, "-m", "midstream.cli", "serve", "--model", str(self.model.directory)),
            *("--port", str(self.port), "--replicas", "1", "--log-level", "warning", "--config", str(config)),
            *("--state-dir", str(state / "state"), "--kv-cache-memory", f"{self.model.kv_gib}GiB"),
        ]

    def ready(self) -> bool:
        return READY.search(self.text()) is not None

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def endpoints(self) -> dict[str, Endpoint]:
        found = re.search(r'url="http://127\.0\.0\.1:(\d+)"', self._metrics())
        assert found, "the metrics name no replica"
        headers, model = {"x-midstream-token": TOKEN}, self.model.directory.name
        replica = int(found[1])
        routes = {"logprobs": True, "include_routing_matrix": True}
        return {
            "midstream": Endpoint(replica, model, headers, {"logprobs": True}),
            "midstream through the gateway": Endpoint(self.port, model, {}, {"logprobs": True}),
            "midstream with routes": Endpoint(replica, model, headers, routes),
        }

    def kv_bytes_per_token(self) -> int:
        found = re.search(
            r"^midstream_replica_kv_blocks_capacity\S* (\S+)$", self._metrics(), flags=re.MULTILINE
        )
        assert found, "the metrics do not say how many blocks there are"
        return round(self.model.kv_gib * 2**30 / (float(found[1]) * BLOCK))

    def configuration(self) -> dict[str, Any]:
        return {"threads": self.model.threads, "replicas": 1, "device": self.model.device}


class MidstreamBefore(Midstream):
    """Another commit of it, beside this one: what a change costs."""

    name = "midstream-before"
    checkout: Path | None = None

    def environment(self) -> dict[str, str]:
        return source_of(self.checkout)

    def token_setting(self) -> str:
        """In the form that the checkout's settings have. Before decision 0094 they had no sections for components."""
        return f'{FLAT_TOKEN} = "{TOKEN}"\n' if self._has(FLAT_TOKEN) else super().token_setting()

    def spare_setting(self) -> str:
        """Nothing before decision 0167, where there is no such process."""
        return super().spare_setting() if self._has("spare_after_s") else ""

    def _has(self, setting: str) -> bool:
        assert self.checkout is not None
        settings = (self.checkout / "src" / "midstream" / "core" / "config.py").read_text()
        return f" {setting}:" in settings

    def endpoints(self) -> dict[str, Endpoint]:
        return {f"{column}, before": endpoint for column, endpoint in super().endpoints().items()}

    def configuration(self) -> dict[str, Any]:
        return {**super().configuration(), "commit": commit_of(self.checkout)}


class Vllm(Server):
    """vLLM's own OpenAI server, compiled, with the OpenMP library it asks for."""

    name = "vllm"

    def command(self) -> list[str]:
        return [
            *(
                str(VLLM_PYTHON),
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(self.model.directory),
            ),
            *("--served-model-name", self.model.name, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", str(CONTEXT), "--generation-config", "vllm", "--disable-uvicorn-access-log"),
            *("--disable-log-stats", "--no-enable-prefix-caching"),
        ]

    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(VLLM_PYTHON.parents[1] / "lib" / "libiomp5.so"),
            "VLLM_CPU_KVCACHE_SPACE": str(self.model.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": self.model.vllm_cores,
            "VLLM_CACHE_ROOT": str(self.log.with_suffix(".cache")),
            "VLLM_NO_USAGE_STATS": "1",
            **({"PYTHONPATH": str(AVX2_FOLDER)} if self.vectors == "avx2" else {}),
        }

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10):
                return True
        except OSError:
            return False

    def endpoints(self) -> dict[str, Endpoint]:
        return {"vllm": Endpoint(self.port, self.model.name, {}, {"logprobs": 0})}

    def kv_bytes_per_token(self) -> int:
        found = re.search(r"KV cache size: ([0-9,]+) tokens", self.text())
        assert found, "vLLM did not say how many tokens its cache holds"
        return round(self.model.kv_gib * 2**30 / int(found[1].replace(",", "")))

    def configuration(self) -> dict[str, Any]:
        return {
            "flags": self.command()[self.command().index("--max-model-len") :],
            "VLLM_CPU_OMP_THREADS_BIND": self.model.vllm_cores,
            "LD_PRELOAD": "libiomp5.so",
        }


class Transformers(Server):
    """transformers' continuous batching behind transformers_server.py."""

    name = "transformers"

    def command(self) -> list[str]:
        kv_bytes = self.model.kv_gib * 2**30
        script = str(HERE / "transformers_server.py")
        return [
            *(sys.executable, script, str(self.model.directory)),
            *(str(self.port), str(kv_bytes), str(self.model.threads)),
        ]

    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.model.threads)}

    def ready(self) -> bool:
        # Its last line.
        return "ready " in self.text()

    def endpoints(self) -> dict[str, Endpoint]:
        return {"transformers": Endpoint(self.port, self.model.name)}

    def kv_bytes_per_token(self) -> int:
        found = re.search(r"ready (\d+) blocks of (\d+) in (\d+) bytes", self.text())
        assert found
        return round(int(found[3]) / (int(found[1]) * int(found[2])))

    def configuration(self) -> dict[str, Any]:
        return {"threads": self.model.threads, "max_batch_tokens": 2048, "compile": False}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command's name; None when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def started_at(pid: int) -> str | None:
    stat = _stat(pid)
    return None if stat is None or stat[0] == "Z" else stat[19]


def cpu_ticks(pid: int) -> int:
    stat = _stat(pid)
    return 0 if stat is None else int(stat[11]) + int(stat[12])


def alive(processes: dict[int, str]) -> list[int]:
    """Those of `processes` (start times by id) that still are, and not others of the same id."""
    return [pid for pid, started in processes.items() if started_at(pid) == started]


def await_end(processes: dict[int, str], seconds: float) -> None:
    """Until none of them is left, or for so long."""
    deadline = time.monotonic() + seconds
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def family(root: int) -> dict[int, str]:
    """Start times of `root` and of every process under it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if (started := started_at(pid)) is not None:
            found[pid] = started
        waiting += children.get(pid, [])
    return found
