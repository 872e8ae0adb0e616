"""The settings of engines that are servers behind the replicas."""

from __future__ import annotations

import msgspec

from midstream.core.setting_types import Backend, Count, CountOrZero, Positive, VllmUrl


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every such server has."""

    # Interpreter of the environment that the engine is installed in. None means this process's own.
    python: str | None = None
    # Arguments of each server. They follow those that midstream gives.
    args: tuple[str, ...] = ()
    # Environment variables of each server, beside this process's own.
    env: dict[str, str] = {}
    # Running servers to attach to instead of starting them, one per replica, in their order: http://HOST:PORT.
    urls: tuple[VllmUrl, ...] = ()
    # Of each replica that `midstream serve` starts on this machine, by its number; 0: each sees all.
    gpus: CountOrZero = 0
    # A server that does not answer by then is given up.
    load_s_max: Positive = 1800.0
    # If the engine neither samples nor answers for so long, the server hangs and is replaced. It answers between two steps.
    silence_s_max: Positive = 8.0
    # Requests inside a replica. A further one is a 429.
    max_waiting: Count = 4096


class VllmSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM servers behind the replicas, with engine = "vllm"."""

    # Backend of vLLM's own weight transfer, such as nccl, by which trainers write weights into the servers. gloo is midstream's
    # own, for CPUs. Without a backend, a receiver beside each server takes them.
    weight_transfer: Backend = ""
    # Workers load a snapshot beside the weights that serve, where memory is free for both. The pause of a swap is short then.
    stage_weights: bool = True


class SglangSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang servers behind the replicas, with engine = "sglang"."""
