"""vLLM as midstream needs it, midstream in front of it, and vllm-router in front of it: started, asked, ended.

Always holds: a server that was started is gone, with every process under it, when its `with` block is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.routers import VllmRouter, folder_for
from gateway.tools import tree
from loadgen import GENERATE
from servers import CONTEXT, TOKEN, VLLM_PYTHON, Endpoint, Midstream, Model, Vllm, family

from midstream.engine.vllm.arguments import MODULE, command_line, environment

DIRECT, DIRECT_IDS = "vLLM /v1/completions", f"vLLM {GENERATE}"
ROUTER, REPLICA, OURS = "vllm-router", "midstream's replica alone", "midstream"
# Of the model, in a vLLM that midstream starts.
INNER_NAME = "midstream"


class SharedVllm(Vllm):
    """One vLLM with the flags that midstream gives, asked by everybody."""

    def __init__(self, model: Model, folder: Path, *, eager: bool = False) -> None:
        super().__init__(model, folder)
        self._eager = eager

    def command(self) -> list[str]:
        args = ["--max-model-len", str(CONTEXT), "--disable-log-stats", *["--enforce-eager"] * self._eager]
        served = self.model.name
        # Midstream refuses a server with the seed that all servers have.
        return command_line(str(VLLM_PYTHON), self.model.directory, served, self.port, 1, args)

    def environment(self) -> dict[str, str]:
        return environment({}, super().environment(), str(VLLM_PYTHON))

    def endpoints(self) -> dict[str, Endpoint]:
        # As midstream asks.
        ids = {"logprobs": 0, "detokenize": False}
        return {
            DIRECT: Endpoint(self.port, self.model.name, {}, {"logprobs": 0}),
            DIRECT_IDS: Endpoint(self.port, self.model.name, {}, ids, GENERATE),
        }

    def configuration(self) -> dict[str, Any]:
        command = self.command()
        return {
            **super().configuration(),
            "flags": command[command.index("--generation-config") :],
            "kv_gib": self.model.kv_gib,
        }


class OverVllm(Midstream):
    """`midstream serve --engine vllm`: attached to `urls`, or with vLLM servers of its own."""

    def __init__(
        self,
        model: Model,
        folder: Path,
        *,
        replicas: int = 1,
        urls: tuple[str, ...] = (),
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        super().__init__(model, folder)
        self._replicas, self._urls, self._args, self._env = replicas, urls, args, env or {}

    @property
    def state(self) -> Path:
        return self.log.with_suffix("") / "state"

    def command(self) -> list[str]:
        folder = self.log.with_suffix("")
        folder.mkdir()
        config = folder / "midstream.toml"
        env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self._env.items())
        config.write_text(
            f'[replica]\ntoken = "{TOKEN}"\n[vllm]\npython = {json.dumps(str(VLLM_PYTHON))}\n'
            f"args = {json.dumps(self._args)}\nurls = {json.dumps(self._urls)}\nenv = {{ {env} }}\n"
        )
        return [
            *(sys.executable, "-m", "midstream.cli", "serve", "--model", str(self.model.directory)),
            *("--engine", "vllm", "--replicas", str(self._replicas), "--port", str(self.port)),
            *("--config", str(config), "--state-dir", str(self.state), "--log-level", "warning"),
        ]

    def endpoints(self) -> dict[str, Endpoint]:
        model, asked = self.model.directory.name, {"logprobs": True}
        replica = int(re.findall(r'url="http://127\.0\.0\.1:(\d+)"', self._metrics())[0])
        return {
            REPLICA: Endpoint(replica, model, {"x-midstream-token": TOKEN}, asked),
            OURS: Endpoint(self.port, model, {}, asked),
        }

    def vllm_ports(self) -> list[int]:
        """Where the vLLM servers listen that it started."""
        assert self._process is not None
        found = []
        for pid in family(self._process.pid):
            # It ended meanwhile.
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if MODULE in words:
                    found.append(int(words[words.index("--port") + 1]))
        return sorted(found)

    def kv_bytes_per_token(self) -> int:
        raise NotImplementedError("vLLM's log says it")

    def configuration(self) -> dict[str, Any]:
        env = {name: value for name, value in self._env.items() if not value.startswith("/")}
        attached = {"attached": True} if self._urls else {"args": list(self._args), "env": env}
        return {"replicas": self._replicas, **attached}


class FreeRouter(VllmRouter):
    """On all cores: here nothing has a core of its own."""

    def pin(self, core: int) -> None:
        for pid in tree(self.pid):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))


@contextlib.contextmanager
def started_router(vllm: Vllm, folder: Path) -> Iterator[FreeRouter]:
    """In front of one vLLM. Raises RouterFailed."""
    urls = [f"http://127.0.0.1:{vllm.port}"]
    router = FreeRouter(folder_for(f"router-{vllm.model.name}", folder), urls, min(os.sched_getaffinity(0)))
    body = json.dumps({"model": vllm.model.name, "prompt": [1], "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"
    router.start(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    try:
        yield router
    finally:
        router.stop()
