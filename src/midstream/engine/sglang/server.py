"""One SGLang server: a process that this one starts, or a running server that it attaches to.

Owns: its start, and the check that it has what midstream needs.
Always holds: what servers/process.py says of every server. A server that lacks a flag, an endpoint or a field is not used.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midstream.core.server_settings import SglangSettings
from midstream.engine.servers.process import NAME, OpenApi, ServerProcess
from midstream.engine.sglang.arguments import by_priority, command_line, environment, missing

SEEDS = 2**31
#: Endpoints without which a server is not used.
ENDPOINTS = (
    "/generate",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/flush_cache",
    "/abort_request",
    "/model_info",
)


class SglangServer(ServerProcess):
    WHO, SECTION = "SGLang", "sglang"
    KEY = "SGLANG_API_KEY"
    # /health may compute a token, and would then fail in a pause.
    LIVES = "/model_info"

    def __init__(
        self,
        model_dir: Path,
        settings: SglangSettings,
        *,
        url: str | None,
        gpus: tuple[int, ...] = (),
        log: Path | None,
    ) -> None:
        super().__init__(model_dir, settings, url=url, gpus=gpus, log=log)
        # What an attached server's /health says of a pause that its last user left is no matter: that ends first.
        self.SERVES = "/health" if url is None else self.LIVES
        # Requests find cached KV at all, in pieces of so many tokens.
        self.caches, self.page = True, 1
        # It was started with --enable-return-routed-experts.
        self.returns_routes = False
        # What decides how it holds weights.
        self.kind = ""
        # Tokens that its KV cache has room for.
        self.kv_tokens = 0

    async def _spawn(self) -> None:
        port, seed = self._take_port(), secrets.randbelow(SEEDS)
        command = command_line(self._python, self._model_dir, NAME, port, seed, self._settings.args)
        await self._run(command, environment(os.environ, self._settings.env, self._gpus))

    async def _inspect(self) -> None:
        paths = (await self._get("/openapi.json", OpenApi)).paths
        if gaps := [path for path in ENDPOINTS if path not in paths]:
            raise self._failed(
                f"the SGLang server at {self.url} has no {', '.join(gaps)}: a newer version has"
            )
        info: Mapping[str, Any] = await self._get("/server_info", dict[str, Any])
        if lacks := missing(info):
            raise self._failed(f"the SGLang server at {self.url}: start it with {'; with '.join(lacks)}")
        sizes = [info.get(name) for name in ("max_req_input_len", "max_total_num_tokens", "page_size")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise self._failed(
                f"the SGLang server at {self.url} does not say how long a prompt may be: {sizes}"
            )
        # It refuses prompts of so many tokens, and ends what is a little longer with its answer.
        self.max_model_len, self.kv_tokens, self.page = (int(size or 0) for size in sizes)
        self.version = str(info.get("version", ""))
        self.on_cpu = info.get("device") == "cpu"
        self.caches = not info.get("disable_radix_cache")
        self.by_priority = by_priority(info)
        self.returns_routes = bool(info.get("enable_return_routed_experts"))
        held = ("dtype", "quantization", "tp_size", "ep_size")
        self.kind = "-".join(["sglang", self.version, *(str(info.get(name)) for name in held)])
