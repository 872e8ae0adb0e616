"""The settings of SGLang servers behind the replicas."""

from __future__ import annotations

import msgspec

from midstream.core.setting_types import Count, CountOrZero, Positive, VllmUrl


class SglangSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang servers behind the replicas, with engine = "sglang"."""

    # Interpreter of the environment that SGLang is installed in. None means this process's own.
    python: str | None = None
    # Arguments of each SGLang server. They follow those that midstream gives.
    args: tuple[str, ...] = ()
    # Environment variables of each SGLang server, beside this process's own.
    env: dict[str, str] = {}
    # Running servers to attach to instead of starting them, one per replica, in their order: http://HOST:PORT.
    urls: tuple[VllmUrl, ...] = ()
    # Of each replica that `midstream serve` starts on this machine, by its number; 0: each sees all.
    gpus: CountOrZero = 0
    # A server that does not answer by then is given up.
    load_s_max: Positive = 1800.0
    # If the scheduler neither samples nor answers for so long, the server hangs and is replaced. It answers between two steps.
    silence_s_max: Positive = 8.0
    # Requests inside a replica. A further one is a 429.
    max_waiting: Count = 4096
