"""Settings: what they are, their defaults, and what they may be. No I/O; `core/settings.py` reads them from a file.

Always holds: a bound of one setting stands in its type. `Settings.__post_init__` checks only what several settings mean
together, and the keys. An error names the setting, the value and what was expected, and never shows a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from midstream.core.errors import ConfigError
from midstream.core.key_settings import KeySettings, key_checks
from midstream.core.logs import LogFormat
from midstream.core.server_settings import ServerSettings, SglangSettings, VllmSettings
from midstream.core.setting_types import (
    NAME_EXPECTED,
    NAME_PATTERN,
    SIZE_EXPECTED,
    SIZE_PATTERN,
    SIZE_UNITS,
    BaseModel,
    Count,
    CountOrZero,
    Name,
    NotNegative,
    Port,
    Positive,
    Seconds,
    Size,
    Weight,
)

EngineKind = Literal["embedded", "vllm", "sglang"]
Dtype = Literal["bfloat16", "float32"]
Kernels = Literal["auto", "native", "torch"]
SwapOrder = Literal["together", "one-by-one"]
Launcher = Literal["local", "ray"]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded engine. Sizes in tokens unless the name says otherwise."""

    # None means the checkpoint's own dtype.
    dtype: Dtype | None = None
    # As PyTorch names it, such as "cuda".
    device: str = "cpu"
    # Our compiled CPU kernels; native: these or no start; torch: never; auto: where they can.
    kernels: Kernels = "auto"
    # Of the KV cache: what is reused is whole blocks.
    block_size: Annotated[int, Meta(ge=2, description="must be at least 2")] = 16
    # Capacity of the paged KV cache, in tokens.
    kv_cache_tokens: int = 65536
    # The cache's size in bytes, such as "512MiB" or "4GiB". It wins over kv_cache_tokens.
    kv_cache_memory: Size | None = None
    # The size of a second tier, for what the cache evicts and may copy back, such as "8GiB". None: there is none.
    kv_offload_memory: Size | None = None
    # Where it is. A file has no name. It lies in state_dir, in the replica's folder of snapshots.
    kv_offload_to: Literal["memory", "disk"] = "memory"
    # Tokens computed in one step. Longer prompts are prefilled in chunks.
    max_batch_tokens: Count = 1024
    # Of these, prompt tokens in a step that also decodes: bounds the gap in streams.
    max_prefill_tokens: Count = 256
    # Sequences stepped together.
    max_running: Count = 128
    # Requests that may wait in the engine. A further one is a 429.
    max_waiting: Count = 4096
    # Keep the weights of a MoE model's routers with the routes, for return_router_weights: 4 bytes for each expert of a token's
    # route, in each slot of the KV cache.
    router_weights: bool = False
    # A process waits with everything imported, to be the next replica that is started again on this machine. It is made when no
    # replica has begun for so long, and takes about 320 MiB of memory. 0: there is none.
    spare_after_s: NotNegative = 60.0
    # Threads of one replica's engine. 0 shares the cores out among the replicas.
    threads: CountOrZero = 0
    # An engine that has not loaded its model by then is given up.
    load_s_max: Seconds = 600.0
    # An engine reports between steps, and is replaced if it does not report for so long.
    silence_s_max: Seconds = 60.0
    # An engine that neither reports nor computes for so long hangs, and is replaced. Linux only.
    hang_s_max: Seconds = 8.0


def parse_size(what: str, text: str) -> int:
    """Bytes of a size such as "512MiB". Raises ConfigError."""
    match = re.search(SIZE_PATTERN, text)
    if match is None:
        raise ConfigError(f"{what} {text!r}: {SIZE_EXPECTED}")
    return int(float(match[1]) * SIZE_UNITS[match[2]])


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The public port, and what gateways decide for all deployments."""

    # The address that the gateway listens on.
    host: str = "127.0.0.1"
    # 0: one that is free.
    port: Port = 8080
    # The body of one request; a larger one is a 413.
    max_body_bytes: Count = 64 * 2**20
    # The head of one request, its first line included; more is a 431.
    max_header_bytes: Count = 64 * 2**10
    # Request bodies that are still arriving at one gateway process, together. A further one is a 413 that says to retry.
    # None: 512 MiB, or four times max_body_bytes if that is more.
    max_unfinished_body_bytes: int | None = None
    # The same, per tenant; without API keys all are one. None: half of max_unfinished_body_bytes, or max_body_bytes if more.
    max_unfinished_body_bytes_per_tenant: int | None = None
    # Bytes/s that a body has to bring, counted over 30 s, or it is a 408. 0: one byte in 30 s.
    min_body_rate: CountOrZero = 1024
    # 0: no bound. Beyond it a tenant's idle connections are closed; when none is idle, the new one gets a 429.
    max_connections_per_tenant: CountOrZero = 0
    # Completions in flight. A further one is a 429. 0 means no bound.
    max_requests_per_tenant: CountOrZero = 0
    # Policies of one deployment.
    max_policies: Count = 10_000
    # The same limit, for policies that one tenant's keys made. 0: no bound.
    max_policies_per_tenant: CountOrZero = 0
    # A new session goes to no replica above (1 + load_bound) x mean in-flight requests.
    load_bound: Positive = 0.25
    # Placements that a gateway remembers. The least recently used one is forgotten first.
    max_sessions: Count = 1_000_000
    # Base URLs of replicas of the default deployment that others run.
    replicas: tuple[str, ...] = ()
    # HOST:PORT: there is one such replica at each address of the host.
    replicas_dns: str | None = None
    # Part of new work, by name (HOST:PORT of those that others run); else 1.
    replica_weights: dict[str, Weight] = {}
    # Hosts, or HOST:PORT, of replicas that may join through the API.
    allowed_replicas: tuple[str, ...] = ()
    # one-by-one: all replicas of a deployment prepare a snapshot, then switch to it one after another.
    swap_order: SwapOrder = "together"
    # A replica closes a session that has no turn for so long.
    session_idle_s: Positive = 3600.0
    # A request without a session goes where at least half of its prompt's bytes are known, and a new session where the last
    # one with its prompt went, load permitting.
    follow_prefixes: bool = True
    # To a replica. Beyond it the request goes to another one.
    connect_timeout_s: Positive = 5.0
    # A replica not heard of for so long gets no new requests, and its sessions are placed again.
    replica_silence_s: Positive = 3.0
    # A client's idle connection stays open for so long.
    keep_alive_s: Positive = 75.0
    # A file in PEM format; with it and its key the port speaks HTTPS only.
    tls_cert: str | None = None
    # The file of its private key.
    tls_key: str | None = None
    # Gateway processes that share the port.
    workers: Annotated[int, Meta(ge=1, le=64, description="must be 1 to 64")] = 1
    # A replaced process continues its requests for so long.
    restart_drain_s: Positive = 600.0
    # A key written as text may do everything; one written as a table, what its scopes say. Empty: everybody may do everything.
    api_keys: tuple[str | KeySettings, ...] = ()
    # A line for each control call: "log" (the server's log, whatever log.level is), "off", or the absolute path of a file.
    audit_log: Annotated[
        str, Meta(pattern=r"^(log|off|/.+)\Z", description="must be log, off or the absolute path of a file")
    ] = "log"
    # Fields of inference bodies that no API here knows; a deployment's own unknownFields wins.
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    # Incremental snapshots that may stand on one full snapshot.
    chain_max: Count = 64
    # From so many on one full snapshot, a replica writes the newest as a full one beside its delta, and later ones stand on
    # that. 0: never. At most half of chain_max.
    chain_rebase: CountOrZero = 32
    # Beside a deployment's own: where a signal may say that its snapshot lies (x-fireworks-hot-load-source-url).
    allowed_buckets: tuple[str, ...] = ()

    @property
    def rebase_after(self) -> int:
        """`chain_rebase` with its bound. 0: never."""
        return min(self.chain_rebase, max(1, self.chain_max // 2))

    @property
    def unfinished_body_bytes(self) -> tuple[int, int]:
        """Together, and of one tenant."""
        together = self.max_unfinished_body_bytes or max(512 * 2**20, 4 * self.max_body_bytes)
        return together, self.max_unfinished_body_bytes_per_tenant or max(self.max_body_bytes, together // 2)


class TinkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Tinker API, of the default deployment."""

    # Whether the server has it.
    enabled: bool = True
    # Further names that clients may call the served model.
    base_models: tuple[BaseModel, ...] = ()
    # What a client of a base model samples from. exact: the snapshot base; serving: whatever serves.
    base_model_clients: Literal["exact", "serving"] = "exact"
    # The dtype of the weights that are trained.
    trainer_dtype: Dtype = "float32"
    # The device of the trainer, as PyTorch names it.
    trainer_device: str = "cpu"
    # Threads of the trainer. 0 means as many as one replica's engine has.
    trainer_threads: CountOrZero = 0
    # Of a run's snapshots, one in so many is sent whole. The others are sent as deltas.
    full_every: Count = 20
    # Adapters of LoRA runs that are loaded at once. 0: runs are merged into whole snapshots, which serve one at a time.
    adapters_max: CountOrZero = 32


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where replicas run, with launcher = "ray"."""

    # Address of the cluster, as ray.init takes it. None means the cluster that this machine is part of.
    address: str | None = None
    # CPUs that each replica's actor reserves.
    cpus: NotNegative = 1.0
    # GPUs that it reserves.
    gpus: NotNegative = 0.0
    # Further resources, by name.
    resources: dict[str, NotNegative] = {}
    # One placement group per replica, of so many bundles of the above; more than one for an engine that spans nodes.
    bundles: Count = 1
    # How a placement group's bundles lie on nodes, as Ray has it.
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "STRICT_PACK"
    # The gateway is an actor too, instead of a child of `midstream serve`.
    gateway: bool = False
    # Number of gateways, each on a node of its own.
    gateways: Count = 1
    # What the actor of each gateway asks for, such as {"node:10.0.0.7" = 0.01}.
    gateway_resources: dict[str, NotNegative] = {}
    # Interpreter on the nodes, where it is not the one of the actors.
    python: str | None = None


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where OpenTelemetry spans go. The standard variables OTEL_* say the rest, such as the part that is sampled."""

    # Base URL of a collector that takes OTLP over HTTP. None means what OTEL_EXPORTER_OTLP_ENDPOINT says, if anything.
    endpoint: (
        Annotated[
            str,
            Meta(
                pattern=r"^https?://[^/\s@?#]+(/[^\s?#]*)?\Z",
                description="must be of the form http://HOST:PORT",
            ),
        ]
        | None
    ) = None


class DeploymentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default deployment. Others are made over the API."""

    # The last segment of its resource name.
    name: Name = "default"
    # A built-in name or a Hugging Face directory.
    model: str = "tiny-moe"
    # Replicas that this server starts, on this machine or where the launcher places them.
    replicas: int = 2
    # Where snapshots appear. None means file://<state-dir>/bucket.
    bucket: str | None = None
    # async: streams cross a swap. sync: a swap waits until they have ended, and new requests get a 425.
    transition: Literal["async", "sync"] = "async"


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each replica, whatever its engine is."""

    # The address that `midstream replica` listens on. Replicas of `midstream serve` choose their own.
    host: str = "127.0.0.1"
    # Of `midstream replica`. 0: one that is free.
    port: Port = 8080
    # The secret that replicas ask of their callers. None: a new one is made at each start.
    token: str | None = None
    # A file in PEM format; with it and its key `midstream replica` speaks HTTPS only, and gateways name it by https://.
    tls_cert: str | None = None
    # The file of its private key.
    tls_key: str | None = None
    # Of gateways: a file of the certificates that may sign those of replicas. None: those that the system trusts.
    tls_ca: str | None = None
    # What a replica's snapshots, deltas and policies may take on disk, e.g. "20GiB"; None: what is in use and a little more.
    snapshot_cache: Size | None = None
    # How long an async swap waits for requests pinned to the serving snapshot, and with vLLM for those of policies it ends.
    pin_drain_s: Annotated[float, Meta(ge=0, le=86400, description="must be 0 to 86400 seconds")] = 60.0
    # Snapshots that stay loaded in each replica, the serving one included, and each policy's. With 1, a swap waits for pins.
    resident_snapshots: Annotated[int, Meta(ge=1, le=64, description="must be 1 to 64")] = 1
    # What a replica's loaded full snapshots may take, counted as the sizes of their files; None: no bound for those in use.
    resident_memory: Size | None = None
    # Policies that each replica holds at once. Where a deployment has more, those in demand are loaded.
    resident_policies: Annotated[int, Meta(ge=1, le=4096, description="must be 1 to 4096")] = 256
    # The share of its KV cache that sessions may claim; more of them wait until others end. 0: no session waits.
    kv_budget: Annotated[float, Meta(ge=0, le=1, description="must be 0 to 1")] = 0.95
    # Sessions that may wait for it at each replica. A further one is a 429.
    kv_waiting_max: Annotated[int, Meta(ge=1, le=65536, description="must be 1 to 65536")] = 4096


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The durable state: deployments, signals, stage changes."""

    # URL of the database. None means an SQLite file in state_dir.
    database: str | None = None


class RecordsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records of sessions' turns, for trainers."""

    # Where they go, as of a deployment's bucket: file:///DIR, s3://BUCKET/PREFIX, gs:// or az://. None: none are kept.
    bucket: str | None = None
    # What waiting records of one replica may take on disk. Beyond it records are lost, and the gap is recorded.
    disk: Size = "1GiB"
    # So long a file of records that a response refers to stays in the bucket. None: until somebody removes it.
    files_keep_s: Positive | None = None
    # What these files of one deployment may take in the bucket. Beyond it requests that want one are refused.
    files_max: Size = "100GiB"
    # This share of the finished turns of sessions is computed again on a replica that is idle. 0: none.
    audit_share: Annotated[float, Meta(ge=0, le=1, description="must be 0 to 1")] = 0.0


class PushSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights that a trainer sends straight to the replicas."""

    # Trainer and replicas have so long to form their group.
    join_s: Positive = 60.0
    # From the start of an update, its tensors have to be here within this time.
    update_s: Positive = 600.0
    # From the call to finish, every replica has to serve the update within this time.
    finish_s: Positive = 600.0
    # The share of replicas that an update must reach. Those that it does not reach load it from the bucket.
    quorum: Annotated[float, Meta(gt=0, le=1, description="must be above 0 and at most 1")] = 1.0
    # Whether a replica writes the weights into the bucket, for replicas that restart or join.
    keep: bool = True


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log of every process."""

    # The least that is logged.
    level: Literal["debug", "info", "warning", "error"] = "info"
    # json: one object a line, for programs that read the log.
    format: LogFormat = "text"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # What computes in each replica: the sections [embedded], [vllm] and [sglang] are theirs.
    engine: EngineKind = "embedded"
    # Where replicas run: on this machine, or as actors on a Ray cluster, which [ray] describes.
    launcher: Launcher = "local"
    # What must outlive the server: ledger, bucket, caches, Tinker's files.
    state_dir: str = ".midstream"
    # The server's account, in every resource name.
    account: Name = "local"
    # Further models that can be deployed: name to Hugging Face directory.
    models: dict[str, str] = {}
    deployment: DeploymentSettings = DeploymentSettings()
    gateway: GatewaySettings = GatewaySettings()
    replica: ReplicaSettings = ReplicaSettings()
    ledger: LedgerSettings = LedgerSettings()
    records: RecordsSettings = RecordsSettings()
    push: PushSettings = PushSettings()
    log: LogSettings = LogSettings()
    embedded: EngineSettings = EngineSettings()
    tinker: TinkerSettings = TinkerSettings()
    vllm: VllmSettings = VllmSettings()
    sglang: SglangSettings = SglangSettings()
    ray: RaySettings = RaySettings()
    tracing: TracingSettings = TracingSettings()

    @property
    def server(self) -> ServerSettings | None:
        """Those of an engine that is a server."""
        return {"vllm": self.vllm, "sglang": self.sglang}.get(self.engine)

    def __post_init__(self) -> None:
        for holds, message in (*_own_checks(self), *key_checks(self.gateway.api_keys), *_ray_checks(self)):
            if not holds:
                raise ConfigError(message)


#: Of the engines that are servers.
SERVER_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def check_name(what: str, name: str) -> None:
    """Raises ConfigError unless `name` can be a segment of a resource name (no '/', no '@', nothing to escape)."""
    if not re.search(NAME_PATTERN, name):
        raise ConfigError(f"{what} {name!r}: {NAME_EXPECTED}")


def _own_checks(settings: Settings) -> Iterator[tuple[bool, str]]:
    gateway, embedded, vllm = settings.gateway, settings.embedded, settings.vllm
    elsewhere = gateway.replicas or gateway.replicas_dns or gateway.allowed_replicas
    yield (
        settings.deployment.replicas >= (0 if elsewhere else 1),
        f"deployment.replicas must be at least 1, or 0 where others run replicas, got {settings.deployment.replicas}",
    )
    yield (
        embedded.max_batch_tokens >= embedded.max_running,
        f"embedded.max_batch_tokens must be at least embedded.max_running ({embedded.max_running}), "
        f"or running sequences would starve, got {embedded.max_batch_tokens}",
    )
    yield (
        embedded.kv_cache_tokens >= 2 * embedded.block_size,
        f"embedded.kv_cache_tokens must hold at least two blocks of {embedded.block_size}, "
        f"got {embedded.kv_cache_tokens}",
    )
    yield (
        min(gateway.unfinished_body_bytes) >= gateway.max_body_bytes,
        "gateway.max_unfinished_body_bytes and its _per_tenant must be at least gateway.max_body_bytes "
        f"({gateway.max_body_bytes}), or no body of that size could come, got {gateway.unfinished_body_bytes}",
    )
    yield (
        (gateway.tls_cert is None) == (gateway.tls_key is None),
        "gateway.tls_cert and gateway.tls_key go together",
    )
    yield (
        (settings.replica.tls_cert is None) == (settings.replica.tls_key is None),
        "replica.tls_cert and replica.tls_key go together",
    )
    adapters, own = settings.tinker.adapters_max, gateway.max_policies_per_tenant
    yield (
        not (own and settings.tinker.enabled) or own >= adapters,
        f"gateway.max_policies_per_tenant must be 0 or at least tinker.adapters_max ({adapters}), or the front could not "
        f"load as many, got {own}",
    )
    yield (
        settings.engine == "embedded" or settings.replica.resident_snapshots == 1,
        f"replica.resident_snapshots above 1 needs engine = embedded: a {SERVER_NAMES.get(settings.engine)} server holds one "
        "set of weights",
    )
    urls = () if settings.server is None else settings.server.urls
    yield (
        not urls or len(urls) >= settings.deployment.replicas,
        f"{settings.engine}.urls names {len(urls)} servers for {settings.deployment.replicas} replicas",
    )
    yield (
        not vllm.urls or not vllm.weight_transfer,
        "vllm.weight_transfer and vllm.urls exclude each other: a server with uncertain weights has to be restarted",
    )


#: Ray's own resources, of which a node has enough for several gateways.
NODE_HAS_MORE = ("CPU", "GPU", "memory", "object_store_memory", "accelerator_type:")


def _of_a_server_on_ray(settings: Settings, kind: str) -> Iterator[tuple[bool, str]]:
    own: ServerSettings = getattr(settings, kind)
    yield (
        settings.launcher != "ray" or not own.gpus,
        f"{kind}.gpus is for replicas on one machine: set ray.gpus",
    )
    yield (
        settings.launcher != "ray" or not own.urls,
        f"{kind}.urls and launcher ray exclude each other: Ray says on which node a replica is, so none could be meant",
    )


def _ray_checks(settings: Settings) -> list[tuple[bool, str]]:
    ray = settings.ray
    placed = settings.launcher == "ray" and ray.gateway
    several = settings.launcher == "ray" and ray.gateways > 1
    kept = any(name.startswith("node:") for name in ray.gateway_resources)
    own = any(amount and not name.startswith(NODE_HAS_MORE) for name, amount in ray.gateway_resources.items())
    return [
        (
            any((ray.cpus, ray.gpus, *ray.resources.values())),
            "one of ray.cpus, ray.gpus and ray.resources must be above 0",
        ),
        *(check for kind in SERVER_NAMES for check in _of_a_server_on_ray(settings, kind)),
        (
            not (ray.address or "").startswith("ray://"),
            "ray.address must be HOST:PORT of a cluster that this machine is a node of, not a Ray client's ray:// address",
        ),
        (
            not placed or not settings.tinker.enabled,
            "ray.gateway and the Tinker API exclude each other: the front runs beside the gateway; give --no-tinker",
        ),
        (
            not placed or settings.ledger.database is not None or (kept and not several),
            "ray.gateway needs a database that every node reaches (--database postgresql://...), or gateway_resources that "
            'keep the gateway on one node, e.g. {"node:10.0.0.7" = 0.01}',
        ),
        (
            not several or ray.gateway,
            "ray.gateways above 1 needs ray.gateway = true: Ray places them on nodes of their own",
        ),
        (
            not several or (own and not kept),
            "ray.gateways above 1 needs ray.gateway_resources with one that a node has for one gateway only, "
            "e.g. {gateway = 1}: they listen at the same port, so each needs a node of its own",
        ),
    ]
