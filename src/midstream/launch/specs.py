"""What a supervisor and its child processes say to each other: settings one way, answers the other.

Always holds: each message is one JSON line. After these, gateways and the supervisor exchange Wanted and Running
(fleet/desired_state.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from midstream.core.config import (
    EngineKind,
    EngineSettings,
    GatewaySettings,
    KeySettings,
    SwapOrder,
    TinkerSettings,
    TracingSettings,
    VllmSettings,
)
from midstream.core.logs import LogFormat


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A replica process.

    name: as responses and logs say it; empty means HOST:PORT. port: 0 for any free one. model: accounts/A/models/M.
    deployment: accounts/A/deployments/D. cache_bytes: the limit of cache_dir in bytes; None for the snapshots in use and one
    snapshot more. vllm_url: of a running server to attach to. cores, gpus: which ones vLLM uses, () for all.
    resident_bytes: what full snapshots may take, None for no bound. resident_policies: held at once. records: URL of the bucket
    of records, None for none. records_dir, records_bytes: where they wait, and how many bytes may.
    """

    name: str = ""
    host: str
    port: int
    model_dir: str
    model: str
    deployment: str
    cache_dir: str
    token: str
    engine: EngineSettings
    log_level: str
    log_format: LogFormat = "text"
    session_idle_s: float = 3600.0
    pin_drain_s: float = 60.0
    resident_snapshots: int = 1
    resident_bytes: int | None = None
    resident_policies: int = 256
    cache_bytes: int | None = None
    kind: EngineKind = "embedded"
    vllm: VllmSettings = VllmSettings()
    vllm_url: str | None = None
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    records: str | None = None
    records_dir: str = ""
    records_bytes: int = 2**30
    tracing: TracingSettings = TracingSettings()


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway process.

    model, deployment, replicas: of the default deployment, as the settings say. models: bare names of those that can be
    deployed. ledger: database URL. tinker_path: the Tinker front's socket, None without a front. takes_over: where the process
    that it replaces offers its listening sockets. shares_port: other gateways listen on the same port, which is not 0 then.
    """

    host: str
    port: int
    model: str
    deployment: str
    replicas: int
    models: tuple[str, ...]
    bucket: str
    transition: str
    swap_order: SwapOrder = "together"
    ledger: str
    token: str
    settings: GatewaySettings
    log_level: str
    log_format: LogFormat = "text"
    tinker_path: str | None = None
    takes_over: str | None = None
    shares_port: bool = False
    tracing: TracingSettings = TracingSettings()


class TinkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The Tinker front.

    path: of its socket. names: what clients may call the model, its own name first. deployment: accounts/A/deployments/D.
    threads: of the trainer. key: the server's own, which may publish to the deployment; None where keys are not in use.
    """

    path: str
    gateway_url: str
    names: tuple[str, ...]
    model_dir: str
    deployment: str
    bucket: str
    state_dir: str
    api_keys: tuple[str | KeySettings, ...]
    key: str | None = None
    threads: int
    settings: TinkerSettings
    log_level: str
    log_format: LogFormat = "text"


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """A child's answer to its settings.

    port: 0 where it listens on no port. error: why it could not start; it then ends. offer: where it offers its listening
    sockets to a successor. A successor answers as soon as it can read messages, and says Accepting later.
    """

    port: int = 0
    error: str | None = None
    offer: str | None = None


class Stalled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A child's event loop stood still by its own doing."""

    stalled_s: float


class Accepting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A successor accepts connections from now on."""

    accepting: Literal[True] = True
