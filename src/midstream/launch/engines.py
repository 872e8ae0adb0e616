"""The engine of a replica: the fields of its settings that choose it, and the engine made from them.

Always holds: replicas of one machine do not share cores or GPUs, as long as there are enough.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from midstream.core import extras
from midstream.core.config import SERVER_NAMES, Settings, parse_size
from midstream.core.errors import ConfigError
from midstream.core.server_settings import ServerSettings
from midstream.engine.base import Engine
from midstream.http.ipc import StartedChild
from midstream.launch.specs import ReplicaSpec
from midstream.replica.pins import Residency
from midstream.snapshots.identity import parse_bucket
from midstream.snapshots.store.bucket import check_settings

#: Names the processor level of the embedded engine's kernels. An engine refuses one that its machine cannot run.
KERNELS_LEVEL = "MIDSTREAM_KERNELS_LEVEL"


def usable_cores() -> list[int]:
    """The numbers of this machine's cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def number_of(replica: str) -> int:
    """The number in a replica's name, counted from 0."""
    found = re.search(r"(\d+)$", replica)
    return int(found[1]) if found else 0


def engine_fields(settings: Settings, number: int, replicas: int, *, alone: bool = False) -> dict[str, Any]:
    """Fields of the ReplicaSpec of replica `number`, of so many on this machine. alone: it need not share this machine's cores.

    Raises ConfigError.
    """
    kind, own = settings.engine, settings.server
    if own is None:
        return {"kind": kind}
    if own.urls and number >= len(own.urls):
        raise ConfigError(f"{kind}.urls names {len(own.urls)} servers: there is none for replica {number}")
    if len({url.rstrip("/") for url in own.urls}) < len(own.urls):
        raise ConfigError(
            f"{kind}.urls names a server twice: two replicas would switch its weights under each other"
        )
    cores, each = usable_cores(), own.gpus
    share = max(1, len(cores) // max(1, replicas))
    first = number * share % len(cores)
    return {
        "kind": kind,
        kind: own,
        "server_url": own.urls[number] if own.urls else None,
        "cores": () if alone else tuple(cores[first : first + share]),
        "gpus": tuple(range(number * each, (number + 1) * each)),
    }


def records_root(settings: Settings) -> Path:
    """Where records wait for the bucket: a directory for each replica."""
    return Path(settings.state_dir).absolute() / "records"


def records_fields(settings: Settings, name: str) -> dict[str, Any]:
    """Fields of the ReplicaSpec of the replica of that name. Raises ConfigError."""
    fields: dict[str, Any] = {"records": settings.records}
    if settings.records.bucket is None:
        return fields
    state = Path(settings.state_dir).absolute()
    try:
        check_settings(settings.records.bucket)
        place = parse_bucket(settings.records.bucket)
    except ConfigError as error:
        raise ConfigError(f"--records: {error}") from error
    if place.kind == "file" and Path(place.path).resolve() == state.resolve():
        raise ConfigError(
            f"--records: {place.path} is the state directory, where records wait for the bucket: name another directory"
        )
    return fields | {"records_dir": str(records_root(settings) / name)}


def check_installed(settings: Settings) -> None:
    """Raises ConfigError where replicas are to run on this machine and what they need is not installed, or not possible."""
    if settings.launcher != "local" or not settings.deployment.replicas:
        return
    needs = extras.EMBEDDED if settings.engine == "embedded" else extras.REPLICA
    if hint := extras.advice(extras.missing(needs)):
        raise ConfigError(f"the {settings.engine} engine {hint}")
    if settings.engine == "embedded" and os.environ.get(KERNELS_LEVEL):
        # It imports torch, which this process can do without otherwise.
        from midstream.engine.embedded.loading import check_kernels

        check_kernels()
    kind, own = settings.engine, settings.server
    if own is not None and not own.urls and not _has(kind, own):
        raise ConfigError(
            f"--engine {kind}: {SERVER_NAMES[kind]} is not installed for {own.python or sys.executable}: pip install {kind} "
            f"there, or name the interpreter of an environment that has it (--{kind}-python FILE), or a running server "
            f"(--{kind}-url URL)"
        )


def _has(package: str, settings: ServerSettings) -> bool:
    """True if the interpreter for the servers can import the package. Raises ConfigError when it cannot be run."""
    python = settings.python or sys.executable
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    try:
        done = subprocess.run(
            [python, "-c", code],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **settings.env},
        )
    except OSError as error:
        raise ConfigError(f"--{package}-python {python}: cannot be run: {error.strerror or error}") from error
    return done.returncode == 0


def make_engine(spec: ReplicaSpec, begun: StartedChild | None = None) -> Engine:
    """begun: see EmbeddedEngine."""
    model_dir = Path(spec.model_dir)
    if spec.kind == "vllm":
        from midstream.engine.vllm.engine import VllmEngine

        return VllmEngine(
            model_dir, spec.vllm, Path(spec.cache_dir), url=spec.server_url, cores=spec.cores, gpus=spec.gpus
        )
    if spec.kind == "sglang":
        from midstream.engine.sglang.engine import SglangEngine

        return SglangEngine(model_dir, spec.sglang, Path(spec.cache_dir), url=spec.server_url, gpus=spec.gpus)
    from midstream.engine.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(model_dir, spec.engine, Path(spec.cache_dir), begun)


def replica_fields(settings: Settings, name: str) -> dict[str, Any]:
    """Fields of any ReplicaSpec. name: the directory of its snapshots and records. Raises ConfigError."""
    return {
        "cache_dir": str(Path(settings.state_dir).absolute() / "snapshots" / name),
        "settings": settings.replica,
        "session_idle_s": settings.gateway.session_idle_s,
        "log_level": settings.log.level,
        "log_format": settings.log.format,
        "tracing": settings.tracing,
        **records_fields(settings, name),
    }


def residency(spec: ReplicaSpec) -> Residency:
    """Every full snapshot counts as the files of the model."""
    number, memory = spec.settings.resident_snapshots, spec.settings.resident_memory
    if memory is None:
        return Residency(number)
    size = sum(file.stat().st_size for file in Path(spec.model_dir).glob("*.safetensors"))
    return Residency(number, max(1, parse_size("replica.resident_memory", memory) // max(1, size)))


def requests_max(spec: ReplicaSpec) -> int:
    """How many choices may be inside a replica or wait at its gate."""
    if spec.kind == "vllm":
        return spec.vllm.max_waiting
    if spec.kind == "sglang":
        return spec.sglang.max_waiting
    return spec.engine.max_running + spec.engine.max_waiting
