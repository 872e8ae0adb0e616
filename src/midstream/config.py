"""Settings: what they are, their defaults, and how a TOML file and command-line options combine. No I/O but reading the file.

Always holds: an option on the command line wins over the file, the file over the default; an unknown key in the file is
an error that names it.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from midstream.errors import ConfigError
from midstream.scopes import parse_grant

EngineKind = Literal["embedded", "vllm"]
Dtype = Literal["bfloat16", "float32"]
Kernels = Literal["auto", "native", "torch"]
DataPath = Literal["auto", "native", "python"]
SwapOrder = Literal["together", "one-by-one"]
Launcher = Literal["local", "ray"]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded engine. Sizes in tokens unless the name says otherwise."""

    dtype: Dtype | None = None  # None: the checkpoint's own
    device: str = "cpu"
    # Our compiled CPU kernels; native: these or no start; torch: never; auto: where they can.
    kernels: Kernels = "auto"
    block_size: int = 16
    kv_cache_tokens: int = 65536  # capacity of the paged KV cache
    kv_cache_memory: str | None = None  # its size instead, e.g. "512MiB" or "4GiB"; wins over kv_cache_tokens
    max_batch_tokens: int = 1024  # tokens computed in one step (chunked prefill above that)
    max_prefill_tokens: int = (
        256  # of these, prompt tokens beside decoding sequences: bounds the gap in their streams
    )
    max_running: int = 128  # sequences stepped together
    max_waiting: int = 4096  # requests queued before 429
    threads: int = 0  # that one replica's engine computes with; 0: the cores shared out among the replicas
    load_s_max: float = 600.0  # an engine that has not loaded its model by then is given up
    silence_s_max: float = 60.0  # an engine not heard of for so long (it reports between steps) is replaced


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(what: str, text: str) -> int:
    """Bytes of a size such as "512MiB". Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(KiB|MiB|GiB|kB|MB|GB)", text)
    if match is None:
        raise ConfigError(f"{what} {text!r}: expected a number and one of {', '.join(_UNITS)}")
    return int(float(match[1]) * _UNITS[match[2]])


class KeySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key that may not do everything."""

    key: str  # the key itself, or "sha256:" and the 64 hexadecimal digits of its SHA-256
    # Of midstream/scopes.py: sample, publish, observe, operate; on one deployment only as "sample:NAME".
    scopes: tuple[str, ...]
    tenant: str | None = None  # whose key it is; keys of one tenant share sessions, caches and Tinker models


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_body_bytes: int = 64 * 2**20
    max_header_bytes: int = 64 * 2**10
    # These bounds are each gateway process's own (workers); without API keys everybody is one tenant.
    # Request bodies that have begun to arrive and are not complete, together: beyond that a 413 that says to retry.
    # None: 512 MiB, or four times max_body_bytes if that is more; per tenant half of it.
    max_unfinished_body_bytes: int | None = None
    max_unfinished_body_bytes_per_tenant: int | None = None
    # Bytes/s that a body has to bring, counted over 30 s, or it is a 408. 0: one byte in 30 s.
    min_body_rate: int = 1024
    # 0: no bound. Beyond it a tenant's idle connections are closed; when none is idle, the new one gets a 429.
    max_connections_per_tenant: int = 0
    max_requests_per_tenant: int = 0  # completions in flight, else a 429; 0: no bound
    load_bound: float = (
        0.25  # a new session goes to no replica above (1 + load_bound) x mean in-flight requests
    )
    max_sessions: int = 1_000_000  # placements remembered; the least recently used goes first
    replicas: tuple[str, ...] = ()  # base URLs of replicas of the default deployment that others run
    replicas_dns: str | None = None  # HOST:PORT: one such replica at each address of the host
    replica_weights: dict[
        str, float
    ] = {}  # part of new work, by name (HOST:PORT of those that others run); else 1
    allowed_replicas: tuple[str, ...] = ()  # hosts, or HOST:PORT, whose replicas may join through the API
    session_idle_s: float = 3600.0  # a session without a turn for so long is closed by its replica
    # A request without a session goes where at least half of its prompt's bytes are known, load permitting.
    follow_prefixes: bool = True
    connect_timeout_s: float = 5.0
    # A replica not heard of for so long gets no new requests, and its sessions are placed anew.
    replica_silence_s: float = 3.0
    keep_alive_s: float = 75.0
    # Through what requests pass. native: compiled connections or no start; python: uvloop's; auto: compiled where they can be.
    data_path: DataPath = "auto"
    # Files in PEM format, both or neither; with them the port speaks HTTPS only, and requests pass through Python.
    tls_cert: str | None = None
    tls_key: str | None = None
    workers: int = 1  # processes that share the port
    restart_drain_s: float = 600.0  # how long a replaced process goes on with the requests it has
    # A key written as text may do everything; one written as a table, what its scopes say. Empty: everybody may do everything.
    api_keys: tuple[str | KeySettings, ...] = ()
    chain_max: int = 64  # incremental snapshots on one full snapshot
    # Beside a deployment's own: where a signal may say that its snapshot lies (x-fireworks-hot-load-source-url).
    allowed_buckets: tuple[str, ...] = ()

    @property
    def unfinished_body_bytes(self) -> tuple[int, int]:
        """Together, and of one tenant."""
        together = self.max_unfinished_body_bytes or max(512 * 2**20, 4 * self.max_body_bytes)
        return together, self.max_unfinished_body_bytes_per_tenant or max(self.max_body_bytes, together // 2)


class TinkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Tinker API, of the default deployment."""

    enabled: bool = True
    base_models: tuple[str, ...] = ()  # further names that clients may call the served model
    # What a client of a base model samples from. exact: the snapshot base; serving: whatever serves.
    base_model_clients: Literal["exact", "serving"] = "exact"
    trainer_dtype: Dtype = "float32"  # of the weights that are trained
    trainer_device: str = "cpu"
    trainer_threads: int = 0  # that the trainer computes with; 0: as many as one replica's engine
    full_every: int = 20  # every so many snapshots of a run are sent whole, the others as what changed


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM servers behind the replicas, with engine = "vllm"."""

    python: str | None = None  # interpreter of the environment that vLLM is installed in; None: this one
    args: tuple[str, ...] = ()  # for each vLLM server, behind those that midstream gives
    env: dict[str, str] = {}  # for each vLLM server, beside this process's own environment
    # Running servers to attach to instead of starting them, one per replica, in their order: http://HOST:PORT.
    urls: tuple[str, ...] = ()
    gpus: int = (
        0  # of each replica that `midstream serve` starts on this machine, by its number; 0: each sees all
    )
    load_s_max: float = 1800.0  # a server that does not answer by then is given up
    silence_s_max: float = 60.0  # one that does not answer /health for so long is replaced
    max_waiting: int = 4096  # requests inside a replica before 429


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where replicas run, with launcher = "ray"."""

    address: str | None = None  # of the cluster, as ray.init takes it; None: the one this machine is part of
    cpus: float = 1.0  # that each replica's actor reserves
    gpus: float = 0.0
    resources: dict[str, float] = {}  # further ones, by name
    # One placement group per replica, of so many bundles of the above; more than one for an engine that spans nodes.
    bundles: int = 1
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "STRICT_PACK"
    gateway: bool = False  # the gateway is an actor too, instead of a child of `midstream serve`
    gateways: int = 1  # so many, on nodes of their own
    gateway_resources: dict[str, float] = {}  # what the actor of each asks for, e.g. {"node:10.0.0.7" = 0.01}
    python: str | None = None  # interpreter on the nodes, where it is not the one of the actors


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = "tiny-moe"  # a built-in name or a Hugging Face directory
    models: dict[str, str] = {}  # further ones that can be deployed: name to Hugging Face directory
    replicas: int = 2
    engine: EngineKind = "embedded"
    launcher: Launcher = "local"
    host: str = "127.0.0.1"
    port: int = 8080
    bucket: str | None = None  # None: file://<state-dir>/bucket
    # What a replica's snapshots may take on disk, e.g. "20GiB"; None: what is in use and one snapshot more.
    snapshot_cache: str | None = None
    transition: Literal["async", "sync"] = "async"
    # one-by-one: all replicas prepare a snapshot, then switch to it one after another.
    swap_order: SwapOrder = "together"
    pin_drain_s: float = 60.0  # an async swap waits so long for requests that are pinned to what serves
    database: str | None = None  # URL of the ledger's; None: an SQLite file in state_dir
    state_dir: str = ".midstream"
    account: str = "local"
    deployment: str = "default"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    replica_token: str | None = None  # what replicas ask of whoever calls them; None: made up at each start
    embedded: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    tinker: TinkerSettings = TinkerSettings()
    vllm: VllmSettings = VllmSettings()
    ray: RaySettings = RaySettings()


#: option -> the setting, by the section it is in
SECTION_OPTIONS = {
    "embedded": {"kv_cache_memory": "kv_cache_memory"},
    "gateway": {
        "gateway_workers": "workers",
        "tls_cert": "tls_cert",
        "tls_key": "tls_key",
        "replica_url": "replicas",
        "replicas_dns": "replicas_dns",
    },
    "vllm": {"vllm_args": "args", "vllm_python": "python", "vllm_url": "urls"},
    "ray": {"ray_address": "address"},
}


def load_settings(file: str | None, overrides: dict[str, Any]) -> Settings:
    """Settings from `file` (TOML) with `overrides` (None = not given) on top. Raises ConfigError.

    overrides: top-level names, no_tinker, and those of SECTION_OPTIONS; vllm_args in one string, as a shell reads it.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(Path(file).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config {file}: cannot be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--config {file}: not valid TOML: {error}") from error
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        if "vllm_args" in given:
            given["vllm_args"] = shlex.split(given["vllm_args"])
    except ValueError as error:
        raise ConfigError(f"--vllm-args {given['vllm_args']!r}: {error}") from error
    if given.pop("no_tinker", False):
        values["tinker"] = {**values.get("tinker", {}), "enabled": False}
    for section, options in SECTION_OPTIONS.items():
        ours = {name: given.pop(option) for option, name in options.items() if option in given}
        if ours:
            values[section] = {**values.get(section, {}), **ours}
    values.update(given)
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error
    return _checked(settings)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(what: str, name: str) -> None:
    """Raises ConfigError unless `name` can be a segment of a resource name (no '/', no '@', nothing to escape)."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} {name!r}: expected letters, digits, '.', '_' and '-', at most 128")


def _checked(settings: Settings) -> Settings:
    if settings.embedded.kv_cache_memory is not None:
        parse_size("embedded.kv_cache_memory", settings.embedded.kv_cache_memory)
    if settings.snapshot_cache is not None:
        parse_size("snapshot_cache", settings.snapshot_cache)
    check_name("account", settings.account)
    check_name("deployment", settings.deployment)
    gateway = settings.gateway
    checks = [
        *_key_checks(gateway.api_keys),
        *(
            (0 < getattr(gateway, name) < math.inf, f"gateway.{name} must be above 0 and finite")
            for name in (
                "max_body_bytes",
                "max_header_bytes",
                "max_sessions",
                "session_idle_s",
                "connect_timeout_s",
                "replica_silence_s",
                "keep_alive_s",
                "restart_drain_s",
                "chain_max",
                "load_bound",
            )
        ),
        (
            settings.replicas
            >= (0 if gateway.replicas or gateway.replicas_dns or gateway.allowed_replicas else 1),
            f"replicas must be at least 1, or 0 where others run replicas, got {settings.replicas}",
        ),
        (
            all(0 < weight <= 1e6 for weight in gateway.replica_weights.values()),
            "gateway.replica_weights must be above 0 and at most 1e6",
        ),
        (0 <= settings.pin_drain_s <= 86400, "pin_drain_s must be 0 to 86400 seconds"),
        (0 <= settings.port <= 65535, f"port must be 0 to 65535, got {settings.port}"),
        (settings.engine in get_args(EngineKind), f"engine must be embedded or vllm, got {settings.engine}"),
        (settings.embedded.threads >= 0, "embedded.threads must be at least 0"),
        (settings.embedded.block_size >= 2, "embedded.block_size must be at least 2"),
        *(
            (
                1 <= getattr(settings.embedded, name) < math.inf,
                f"embedded.{name} must be at least 1 and finite",
            )
            for name in (
                "max_batch_tokens",
                "max_prefill_tokens",
                "max_running",
                "max_waiting",
                "load_s_max",
                "silence_s_max",
            )
        ),
        (
            settings.embedded.max_batch_tokens >= settings.embedded.max_running,
            "embedded.max_batch_tokens must be at least embedded.max_running, or running sequences would starve",
        ),
        (
            settings.embedded.kv_cache_tokens >= 2 * settings.embedded.block_size,
            "embedded.kv_cache_tokens must hold at least two blocks",
        ),
        (
            min(gateway.unfinished_body_bytes) >= gateway.max_body_bytes,
            "gateway.max_unfinished_body_bytes and its _per_tenant must be at least gateway.max_body_bytes, or no body "
            "of that size could come",
        ),
        *(
            (0 <= getattr(gateway, name) < math.inf, f"gateway.{name} must be at least 0 and finite")
            for name in ("min_body_rate", "max_connections_per_tenant", "max_requests_per_tenant")
        ),
        (
            (gateway.tls_cert is None) == (gateway.tls_key is None),
            "gateway.tls_cert and gateway.tls_key go together",
        ),
        (
            gateway.tls_cert is None or gateway.data_path != "native",
            "gateway.data_path native and gateway.tls_cert exclude each other",
        ),
        (
            all(1 <= len(name) <= 1024 and name.strip() == name for name in settings.tinker.base_models),
            "tinker.base_models must hold names of 1 to 1024 characters, without blanks around them",
        ),
        *(
            (
                0 < getattr(settings.vllm, name) < math.inf,
                f"vllm.{name} must be above 0 and finite",
            )
            for name in ("load_s_max", "silence_s_max", "max_waiting")
        ),
        (settings.vllm.gpus >= 0, "vllm.gpus must be at least 0"),
        (
            all(re.fullmatch(r"http://[^/\s]+:[0-9]+", url) for url in settings.vllm.urls),
            "vllm.urls must be of the form http://HOST:PORT",
        ),
        (
            settings.engine != "vllm"
            or not settings.vllm.urls
            or len(settings.vllm.urls) >= settings.replicas,
            f"vllm.urls names {len(settings.vllm.urls)} servers for {settings.replicas} replicas",
        ),
        (settings.tinker.trainer_threads >= 0, "tinker.trainer_threads must be at least 0"),
        (settings.tinker.full_every >= 1, "tinker.full_every must be at least 1"),
        *_ray_checks(settings),
        (1 <= gateway.workers <= 64, f"gateway.workers must be 1 to 64, got {gateway.workers}"),
    ]
    for holds, message in checks:
        if not holds:
            raise ConfigError(f"configuration: {message}")
    return settings


_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


def key_digest(text: str) -> bytes:
    """The SHA-256 of a key that is written as itself or as its digest."""
    match = _DIGEST.fullmatch(text)
    return bytes.fromhex(match[1]) if match else hashlib.sha256(text.encode()).digest()


def _key_checks(keys: tuple[str | KeySettings, ...]) -> list[tuple[bool, str]]:
    """Never with a key in a message. Raises ConfigError on a scope that is none."""
    texts = [entry if isinstance(entry, str) else entry.key for entry in keys]
    checks = [
        (all(key.strip() == key != "" for key in texts), "gateway.api_keys must not hold an empty key"),
        (
            all(_DIGEST.fullmatch(key) for key in texts if key.startswith("sha256:")),
            "gateway.api_keys: sha256: is followed by the 64 hexadecimal digits of a key's SHA-256",
        ),
        (len(set(map(key_digest, texts))) == len(texts), "gateway.api_keys holds a key twice"),
    ]
    for number, entry in enumerate(keys, 1):
        if isinstance(entry, str):
            continue
        checks.append((bool(entry.scopes), f"gateway.api_keys: number {number} has no scopes"))
        if entry.tenant is not None:
            check_name("gateway.api_keys: tenant", entry.tenant)
        try:
            parse_grant(entry.scopes)
        except ConfigError as error:
            raise ConfigError(f"configuration: gateway.api_keys: number {number}: {error}") from error
    return checks


#: Ray's own resources, of which a node has enough for several gateways.
NODE_HAS_MORE = ("CPU", "GPU", "memory", "object_store_memory", "accelerator_type:")


def _ray_checks(settings: Settings) -> list[tuple[bool, str]]:
    ray = settings.ray
    amounts = {"ray.cpus": ray.cpus, "ray.gpus": ray.gpus}
    amounts |= {f"ray.resources.{name}": amount for name, amount in ray.resources.items()}
    gateway = {f"ray.gateway_resources.{name}": amount for name, amount in ray.gateway_resources.items()}
    placed = settings.launcher == "ray" and ray.gateway
    several = settings.launcher == "ray" and ray.gateways > 1
    kept = any(name.startswith("node:") for name in ray.gateway_resources)
    own = any(amount and not name.startswith(NODE_HAS_MORE) for name, amount in ray.gateway_resources.items())
    return [
        *(
            (0 <= amount < math.inf, f"{name} must be at least 0 and finite")
            for name, amount in (amounts | gateway).items()
        ),
        (any(amounts.values()), "one of ray.cpus, ray.gpus and ray.resources must be above 0"),
        (
            settings.launcher != "ray" or settings.vllm.gpus == 0,
            "vllm.gpus is for replicas on one machine: set ray.gpus",
        ),
        (
            settings.launcher != "ray" or not settings.vllm.urls,
            "vllm.urls and launcher ray exclude each other: Ray says on which node a replica is, so none could be meant",
        ),
        (ray.bundles >= 1, f"ray.bundles must be at least 1, got {ray.bundles}"),
        (
            not (ray.address or "").startswith("ray://"),
            "ray.address must be HOST:PORT of a cluster that this machine is a node of, not a Ray client's ray:// address",
        ),
        (
            not placed or not settings.tinker.enabled,
            "ray.gateway and the Tinker API exclude each other: the front runs beside the gateway; give --no-tinker",
        ),
        (
            not placed or settings.database is not None or (kept and not several),
            "ray.gateway needs a database that every node reaches (--database postgresql://...), or gateway_resources that "
            'keep the gateway on one node, e.g. {"node:10.0.0.7" = 0.01}',
        ),
        (ray.gateways >= 1, f"ray.gateways must be at least 1, got {ray.gateways}"),
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


def model_resource(settings: Settings, model_name: str) -> str:
    return f"accounts/{settings.account}/models/{model_name}"


def deployment_resource(settings: Settings) -> str:
    return f"accounts/{settings.account}/deployments/{settings.deployment}"
