"""One vLLM server: a process that this one starts, or a running server that it attaches to.

Owns: its command line, and the check that it has what midstream needs.
Always holds: what servers/process.py says of every server.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Container
from pathlib import Path

import msgspec

from midstream.core.server_settings import VllmSettings
from midstream.engine.servers.process import OpenApi, ServerProcess
from midstream.engine.vllm.arguments import (
    NO_LORA,
    SCHEDULER_FLAG,
    TRANSFER_WORKER,
    WORKER,
    WORKER_DIR,
    WORKER_FLAG,
    adapter_places,
    by_priority,
    command_line,
    data_parallel,
    environment,
    given_flags,
    is_cpu_build,
)
from midstream.engine.vllm.server_info import NAMES_WEIGHTS, VllmServerInfo, missing_endpoints, missing_flags
from midstream.engine.vllm.server_info import PATH as INFO

#: /server_info looks at the whole environment.
INFO_S_MAX = 120.0
SEEDS = 2**31


class _Served(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Served]


class _Version(msgspec.Struct, frozen=True):
    version: str


class VllmServer(ServerProcess):
    """cores: that the server may use; () lets vLLM choose. served_name: the model's name in requests."""

    WHO, SECTION = "vLLM", "vllm"
    KEY = "VLLM_API_KEY"

    _settings: VllmSettings

    def __init__(
        self,
        model_dir: Path,
        settings: VllmSettings,
        *,
        url: str | None,
        served_name: str,
        cores: tuple[int, ...] = (),
        gpus: tuple[int, ...] = (),
        log: Path | None,
    ) -> None:
        super().__init__(model_dir, settings, url=url, gpus=gpus, log=log)
        self._cores = cores
        # An attached server that does not have this name gets its own first name here.
        self.served_name = served_name
        # It returns the experts that computed each token.
        self.returns_routes = False
        # Adapters that it computes in one step, and why it serves none; empty if it does.
        self.adapter_places, self.no_adapters = 0, NO_LORA
        # The class that its workers load.
        self.extension = ""
        # The class that its core makes, where it is not vLLM's own.
        self.scheduler = ""
        # It has several engines, of which one answers for all.
        self.data_parallel = False

    async def _spawn(self) -> None:
        port = self._take_port()
        args, seed = self._settings.args, secrets.randbelow(SEEDS)
        transfer = self._settings.weight_transfer
        command = command_line(self._python, self._model_dir, self.served_name, port, seed, args, transfer)
        said = dict(given_flags(command))
        self.extension, self.scheduler = said.get(WORKER_FLAG) or "", said.get(SCHEDULER_FLAG) or ""
        self.adapter_places = adapter_places(args)
        self.no_adapters = "" if self.adapter_places else NO_LORA
        self.on_cpu = is_cpu_build(self._python)
        self.by_priority, self.data_parallel = by_priority(args), data_parallel(args)
        own = self._settings.env
        env = environment(
            os.environ,
            own,
            self._python,
            self._cores,
            self._gpus,
            adapters=bool(self.adapter_places),
        )
        flags = {name for name, _ in given_flags(args)}
        self.returns_routes = "enable-return-routed-experts" in flags
        await self._run(command, env)

    async def _inspect(self) -> None:
        """Find out what the server is and has. Raises ServerFailed when it lacks something."""
        self.version = (await self._get("/version", _Version)).version
        hint = "was it started with --disable-fastapi-docs? It must not be"
        paths = (await self._get("/openapi.json", OpenApi, hint)).paths
        self.names_weights = NAMES_WEIGHTS in paths
        gaps = missing_endpoints(
            paths, attached=self._attached, transfer=bool(self._settings.weight_transfer)
        )
        if gaps:
            raise self._failed(f"the vLLM {self.version} at {self.url} has {gaps}")
        served = (await self._get("/v1/models", _Models)).data
        named = [model for model in served if model.id == self.served_name] or served
        if not named or named[0].max_model_len is None:
            raise self._failed(
                f"the vLLM server at {self.url} does not say which model it serves, or how long a context it has"
            )
        self.served_name, self.max_model_len = named[0].id, named[0].max_model_len
        if self._attached:
            await self._inspect_settings(paths)

    async def _inspect_settings(self, paths: Container[str]) -> None:
        """Check the flags of an attached server, and find out whether it returns routes."""
        info = await self._get(INFO, VllmServerInfo, timeout_s=INFO_S_MAX)
        config = info.vllm_config
        if missing := missing_flags(config):
            raise self._failed(f"the vLLM server at {self.url}: start it with {'; with '.join(missing)}")
        self.returns_routes = config.model_config.enable_return_routed_experts
        self.extension = config.parallel_config.worker_extension_cls
        self.on_cpu = config.device_config.device == "cpu"
        self.adapter_places, self.no_adapters = config.adapter_places, config.no_adapters(paths)
        self.by_priority, self.data_parallel = config.by_priority, config.data_parallel
        self.scheduler = config.scheduler

    def check_reload(self, *, experts: bool) -> None:
        """Raises ServerFailed when the server would compute wrongly with weights that are loaded in place."""
        if experts and self.on_cpu and self.extension not in (WORKER, TRANSFER_WORKER):
            raise self._failed(
                f"the vLLM server at {self.url} runs on a CPU, where vLLM leaves reloaded experts in a form that it cannot "
                f"compute with: start it with PYTHONPATH={WORKER_DIR} and --{WORKER_FLAG} {WORKER}"
            )

    def check_adapters(self, *, experts: bool) -> None:
        """Raises ServerFailed when the server cannot compute a model with experts, whatever it is asked for."""
        if experts and self.on_cpu:
            raise self._failed(
                "vLLM for CPUs cannot compute a model with experts when it runs with --enable-lora: start it without"
            )
