"""The settings of gateway and replica processes, as the supervisor sends them.

Always holds: each is one JSON line. core/supervision.py has the messages that follow it. After these, gateways and the
supervisor exchange Wanted and Running (fleet/desired_state.py).
"""

from __future__ import annotations

from midstream.core.config import (
    EngineKind,
    EngineSettings,
    GatewaySettings,
    PushSettings,
    RecordsSettings,
    ReplicaSettings,
    TracingSettings,
)
from midstream.core.server_settings import SglangSettings, VllmSettings
from midstream.core.supervision import ChildSpec


class ReplicaSpec(ChildSpec, frozen=True, kw_only=True):
    """A replica process.

    name: as responses and logs say it; empty means HOST:PORT. port: 0 for any free one. model: accounts/A/models/M.
    deployment: accounts/A/deployments/D. settings: of every replica; host, port, token, tls_cert and tls_key are those given
    here. server_url: of a running vLLM or SGLang to attach to. cores, gpus: which ones it uses, () for all. records_dir: where
    records wait for their bucket. tls_cert, tls_key: with them it speaks HTTPS only.
    """

    host: str
    port: int
    model_dir: str
    model: str
    deployment: str
    cache_dir: str
    token: str
    engine: EngineSettings
    settings: ReplicaSettings = ReplicaSettings()
    session_idle_s: float = 3600.0
    kind: EngineKind = "embedded"
    vllm: VllmSettings = VllmSettings()
    sglang: SglangSettings = SglangSettings()
    server_url: str | None = None
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    records: RecordsSettings = RecordsSettings()
    records_dir: str = ""
    tls_cert: str | None = None
    tls_key: str | None = None
    tracing: TracingSettings = TracingSettings()


class GatewaySpec(ChildSpec, frozen=True, kw_only=True):
    """A gateway process.

    model, deployment, replicas: of the default deployment, as the settings say. models: bare names of those that can be
    deployed. ledger: database URL. tinker_path: the Tinker front's socket, None without a front. takes_over: where the process
    that it replaces offers its listening sockets. shares_port: other gateways listen on the same port, which is not 0 then.
    replica_ca: a file of the certificates that sign those of replicas.
    """

    host: str
    port: int
    model: str
    deployment: str
    replicas: int
    models: tuple[str, ...]
    bucket: str
    transition: str
    ledger: str
    token: str
    replica_ca: str | None = None
    settings: GatewaySettings
    push: PushSettings = PushSettings()
    tinker_path: str | None = None
    takes_over: str | None = None
    shares_port: bool = False
    tracing: TracingSettings = TracingSettings()
