"""What a running vLLM server says about itself: its endpoints, and `/server_info` where midstream did not choose its flags.

Owns: which endpoints a server must have, which settings of vLLM are read, and the flags that an attached server must have been
started with.
Always holds: a flag counts as given if this version of vLLM does not report its setting. All that are missing are named at
once.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import (
    BY_PRIORITY,
    LORA_VARIABLE,
    MAX_LOGPROBS,
    NO_LORA,
    SALTED,
    STRUCTURED,
    UNSALTED,
    unsalted,
)

PATH = "/server_info?config_format=json"
LOAD_ADAPTER = "/v1/load_lora_adapter"
#: By it the weights get a name. vLLM 0.26 lacks it, and 0.28 has it.
NAMES_WEIGHTS = "/update_weight_version"
_DEV_MODE = "the environment variable VLLM_SERVER_DEV_MODE=1"
#: The endpoints that every server must have, and the flag or variable that gives it each.
ENDPOINTS = {
    protocol.PATH: "--enable-scale-out",
    "/pause": _DEV_MODE,
    "/resume": _DEV_MODE,
    "/is_paused": _DEV_MODE,
    "/collective_rpc": _DEV_MODE,
}
#: An update from a trainer is between these.
TRANSFER_ENDPOINTS = ("/start_weight_update", "/finish_weight_update")


def missing_endpoints(paths: Container[str], *, attached: bool, transfer: bool) -> str:
    """What is not among the server's endpoints, and what to do; empty if nothing is missing.

    transfer: trainers write weights into the server.
    """
    # One endpoint per flag.
    missing = {flag: path for path, flag in reversed(ENDPOINTS.items()) if path not in paths}
    gaps = [f"no {path}: start it with {flag}" for flag, path in missing.items()]
    if attached and NAMES_WEIGHTS not in paths:
        unseen = f"no {NAMES_WEIGHTS}, so a restart by others would not be seen"
        gaps.append(f"{unseen}: let midstream start it, or take a newer vLLM (0.28 has it)")
    if transfer and any(path not in paths for path in TRANSFER_ENDPOINTS):
        gaps.append(f"no {TRANSFER_ENDPOINTS[0]}, which vllm.weight_transfer needs (vLLM 0.23 has it)")
    return "; ".join(gaps)


class ModelConfig(msgspec.Struct, frozen=True):
    """None: the version of vLLM does not report it."""

    logprobs_mode: str | None = None
    max_logprobs: int | None = None
    seed: int | None = None
    enable_return_routed_experts: bool = False


class DeviceConfig(msgspec.Struct, frozen=True):
    device: Any = None


class VllmLoraConfig(msgspec.Struct, frozen=True):
    max_loras: int = 0
    target_modules: list[str] | None = None


class ParallelConfig(msgspec.Struct, frozen=True):
    worker_extension_cls: str = ""
    data_parallel_size: int = 1
    api_processes: int = msgspec.field(default=1, name="_api_process_count")


class StructuredConfig(msgspec.Struct, frozen=True):
    backend: str | None = None


class SchedulerConfig(msgspec.Struct, frozen=True):
    policy: str = ""
    scheduler_cls: Any = None


class Config(msgspec.Struct, frozen=True):
    model_config: ModelConfig = ModelConfig()
    device_config: DeviceConfig = DeviceConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    lora_config: VllmLoraConfig | None = None
    structured_outputs_config: StructuredConfig = StructuredConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    kv_transfer_config: Any = None

    @property
    def by_priority(self) -> bool:
        """True if requests may have priorities. Otherwise vLLM refuses them."""
        return self.scheduler_config.policy == BY_PRIORITY

    @property
    def data_parallel(self) -> bool:
        return self.parallel_config.data_parallel_size > 1

    @property
    def scheduler(self) -> str:
        """The class that makes it; "" where that is vLLM's own, or steps aside, or does not know a check by its priority."""
        alone = not self.data_parallel and self.kv_transfer_config is None
        return str(self.scheduler_config.scheduler_cls or "") if alone and self.by_priority else ""

    @property
    def adapter_places(self) -> int:
        """Adapters in one step."""
        return 0 if self.lora_config is None else self.lora_config.max_loras

    def no_adapters(self, paths: Container[str]) -> str:
        """Why the server serves no adapters; empty if it does. paths: its endpoints."""
        if self.lora_config is None or not self.adapter_places:
            return NO_LORA
        if self.lora_config.target_modules:
            return "vLLM runs with --lora-target-modules"
        return "" if LOAD_ADAPTER in paths else f"vLLM runs without {LORA_VARIABLE}=True"


class VllmServerInfo(msgspec.Struct, frozen=True):
    vllm_config: Config = Config()


def missing_flags(config: Config) -> list[str]:
    """The flags that an attached server has to be started with and was not, each with its reason."""
    model, backend = config.model_config, config.structured_outputs_config.backend
    wanted = {
        "--logprobs-mode raw_logprobs, as midstream reports raw log-probabilities": model.logprobs_mode
        in (None, "raw_logprobs"),
        f"--max-logprobs {MAX_LOGPROBS}, for 20 alternatives": model.max_logprobs in (None, -1)
        or (model.max_logprobs or 0) >= MAX_LOGPROBS,
        "--seed with a number of its own, as servers of one seed draw the same tokens": model.seed != 0,
        f"--structured-outputs-config '{STRUCTURED}', for grammars": backend in (None, "guidance"),
        "--api-server-count 1, as it is unknown with more which tokens came before a switch": (
            config.parallel_config.api_processes == 1
        ),
        f"no KV connector but {' or '.join(SALTED)}, as of another one {UNSALTED}": (
            not unsalted(str(config.kv_transfer_config))
        ),
    }
    return [flag for flag, there in wanted.items() if not there]
