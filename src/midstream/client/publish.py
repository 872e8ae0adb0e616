"""Publishes snapshots: files into the bucket, a signal to the server, and waiting until the replicas serve them.

Always holds:
- A snapshot's directory appears in the bucket whole or not at all: it is written beside its place and renamed, so a
  trainer that dies leaves at most a hidden directory behind, and the signal follows the files.
- An existing snapshot is not replaced unless the caller says so, and no other one is touched in doing so.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import httpx

from midstream.client.errors import NotReadyInTime, PublishError, SnapshotFailed, Unanswered
from midstream.client.retry import Caller
from midstream.client.weights import Cast, save_hugging_face_model, write_weights
from midstream.errors import SnapshotError
from midstream.snapshots.identity import check_identity, file_url_path
from midstream.snapshots.layout import read_spec
from midstream.snapshots.store import is_snapshot_file

HOT_LOAD_PATH = "/hot_load/v1/models/hot_load"
SIGNAL_RETRY_S = 300.0
CONFIG_FILES = (
    "tokenizer*.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "config.json",
)

Weights = Mapping[str, Any] | str | PathLike[str]


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica's row in the server's answer."""

    snapshot: str | None  # what serves; None: unreachable
    ready: bool
    stage: str
    target: str | None
    name: str = "a replica"
    error: str | None = None
    last_swap: dict[str, Any] | None = None  # fetch_ms, verify_ms, stage_ms, pause_ms, streams_crossed
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Status:
    """All replicas, the least ready first."""

    replicas: tuple[ReplicaStatus, ...]

    def serves(self, identity: str) -> bool:
        """Whether every replica is ready on `identity`, and none is still to load other files of that name."""
        return bool(self.replicas) and all(
            r.ready and r.snapshot == identity and (r.target != identity or r.stage in ("done", "idle"))
            for r in self.replicas
        )

    def failed(self, identity: str) -> ReplicaStatus | None:
        """A replica that could not load `identity`, if any."""
        return next((r for r in self.replicas if r.stage == "error" and r.target == identity), None)


class SnapshotPublisher:
    """Use from one thread. Also a context manager."""

    def __init__(
        self,
        base_url: str,
        bucket: str,
        *,
        model: str | None = None,
        deployment: str | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 30.0,
        http: httpx.Client | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`base_url`: the server's, with or without /v1. `bucket`: a file:// URL or an absolute path."""
        root = base_url.rstrip("/").removesuffix("/v1").removesuffix("/inference")
        self._url = root + HOT_LOAD_PATH
        self._bucket = file_url_path(bucket) if "://" in bucket else Path(bucket)
        headers = {"fireworks-model": model, "fireworks-deployment": deployment}
        headers["authorization"] = f"Bearer {api_key}" if api_key else None
        self._http = http or httpx.Client(timeout=request_timeout_s)
        self._http.headers.update({name: value for name, value in headers.items() if value})
        self._sleep = sleep
        self._monotonic = monotonic
        self._caller = Caller(self._http, sleep=sleep, monotonic=monotonic)

    def __repr__(self) -> str:
        return f"<SnapshotPublisher {self._url} bucket={self._bucket}>"

    def __enter__(self) -> SnapshotPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def write_full(
        self,
        identity: str,
        weights: Weights | None = None,
        *,
        model: Any = None,
        config_dir: str | PathLike[str] | None = None,
        dtype: Cast | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write a full snapshot into the bucket; its directory when all of it is there.

        weights: checkpoint tensors by name (numpy arrays or torch tensors), or the directory of a checkpoint.
        model: instead of weights, a Hugging Face model.
        config_dir: where config.json and the tokenizer's files are taken from; for tensors there is no other source.
            With a model it wins over the model's own: give the served model's directory, and settings made for
            training do not fail the server's configuration check.
        dtype: cast floating-point tensors to this on the way to disk (not for a directory).

        Raises PublishError when the result is not a whole snapshot, when the identity is taken, and when it lies inside
        another snapshot or has others inside it.
        """
        check_identity(identity)
        if (weights is None) == (model is None):
            raise ValueError("give either weights or model")
        place = self._bucket / identity
        _check_place(self._bucket, identity, overwrite)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.parent / f".publish-{secrets.token_hex(8)}"
        temporary.mkdir()
        try:
            _write(temporary, weights, model, config_dir, dtype)
            read_spec(temporary)
            _move(temporary, place)
        except SnapshotError as error:
            raise PublishError(f"snapshot {identity!r} would not be whole: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return place

    def signal(
        self,
        identity: str,
        reset_prompt_cache: Literal["all", "new_session", "none"] | bool = "all",
        *,
        retry_s: float = SIGNAL_RETRY_S,
    ) -> dict[str, Any]:
        """Ask for `identity` to be served; safe to repeat. The server's answer. Raises SignalRefused."""
        body = {"identity": identity, "reset_prompt_cache": reset_prompt_cache}
        answer: dict[str, Any] = self._caller.call("POST", self._url, deadline_s=retry_s, json=body)
        return answer

    def status(self, *, retry_s: float = SIGNAL_RETRY_S) -> Status:
        """What every replica serves and loads. Raises SignalRefused."""
        answer = self._caller.call("GET", self._url, deadline_s=retry_s)
        try:
            return Status(tuple(_replica_status(row) for row in answer["replicas"]))
        except (KeyError, TypeError) as error:
            raise PublishError(f"{self._url}: answered something else than replicas: {answer!r}") from error

    def wait_until_ready(
        self,
        identity: str,
        timeout_s: float = 300.0,
        *,
        on_status: Callable[[Status], None] | None = None,
        poll_s: float = 0.1,
    ) -> Status:
        """Poll until every replica serves `identity`.

        Raises SnapshotFailed with the replica's message as soon as one could not load it, NotReadyInTime.
        """
        until = self._monotonic() + timeout_s
        late = f"snapshot {identity!r} is not known to be served everywhere after {timeout_s:g} s"
        status: Status | None = None
        while True:
            try:
                status = self.status(retry_s=max(0.0, until - self._monotonic()))
            except Unanswered as error:
                raise NotReadyInTime(f"{late}: {_describe(status)}; {error}") from error
            if on_status is not None:
                on_status(status)
            if failed := status.failed(identity):
                raise SnapshotFailed(identity, failed.name, failed.error or "it gave no reason")
            if status.serves(identity):
                return status
            if self._monotonic() + poll_s > until:
                raise NotReadyInTime(f"{late}: {_describe(status)}")
            self._sleep(poll_s)

    def publish(
        self,
        identity: str,
        weights: Weights | None = None,
        *,
        model: Any = None,
        config_dir: str | PathLike[str] | None = None,
        dtype: Cast | None = None,
        overwrite: bool = False,
        reset_prompt_cache: Literal["all", "new_session", "none"] | bool = "all",
        timeout_s: float = 300.0,
        on_status: Callable[[Status], None] | None = None,
    ) -> Status:
        """write_full, signal and wait_until_ready.

        Raises PublishError also when files were overwritten and the server goes on with those it had.
        """
        replaces = (self._bucket / identity).exists()
        self.write_full(
            identity, weights, model=model, config_dir=config_dir, dtype=dtype, overwrite=overwrite
        )
        answer = self.signal(identity, reset_prompt_cache, retry_s=min(timeout_s, SIGNAL_RETRY_S))
        # After a retry, "nothing changed" may be the answer to a signal that was taken the first time.
        if replaces and answer.get("changed") is False and self._caller.attempts == 1:
            raise PublishError(
                f"snapshot {identity!r} was overwritten, but the server goes on with the files it had"
            )
        return self.wait_until_ready(identity, timeout_s, on_status=on_status)


def _check_place(bucket: Path, identity: str, overwrite: bool) -> None:
    place = bucket / identity
    around = identity.rpartition("/")[0]
    while around:
        if any(is_snapshot_file(name) for name in _names(bucket / around)):
            raise PublishError(
                f"snapshot {identity!r} cannot be written: it lies inside the snapshot {around!r}"
            )
        around = around.rpartition("/")[0]
    names = [name for name in _names(place) if not name.startswith(".")]
    inside = [name for name in names if (place / name).is_dir()]
    if inside:
        raise PublishError(
            f"snapshot {identity!r} cannot be written: {f'{identity}/{inside[0]}'!r} lies inside it"
        )
    if (names or place.is_file()) and not overwrite:
        raise PublishError(f"snapshot {identity!r} is already in the bucket {bucket}")


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []


def _write(
    directory: Path,
    weights: Weights | None,
    model: Any,
    config_dir: str | PathLike[str] | None,
    dtype: Cast | None,
) -> None:
    """Weights first, then the files that make them a checkpoint."""
    if model is not None:
        save_hugging_face_model(directory, model, dtype)
    elif isinstance(weights, Mapping):
        if config_dir is None:
            raise ValueError("config_dir must be given with tensors: a snapshot has a config.json")
        write_weights(directory, weights, dtype)
    else:
        assert weights is not None
        if dtype is not None:
            raise ValueError("dtype cannot be given with a directory: its files are copied as they are")
        _copy(Path(weights), directory, ("*.safetensors", "model.safetensors.index.json"))
        config_dir = config_dir or weights
    if config_dir is not None:
        _copy(Path(config_dir), directory, CONFIG_FILES)


def _copy(source: Path, directory: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)


def _move(temporary: Path, place: Path) -> None:
    if place.exists():
        old = temporary.with_name(temporary.name + "-old")
        place.rename(old)
        temporary.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(place)


def _replica_status(row: dict[str, Any]) -> ReplicaStatus:
    own = row.get("midstream") or {}
    loading = row.get("loading_state") or {}
    return ReplicaStatus(
        snapshot=row["current_snapshot_identity"],
        ready=bool(row["readiness"]),
        stage=loading.get("stage", "idle"),
        target=loading.get("target_snapshot_identity"),
        name=own.get("replica", "a replica"),
        error=own.get("error"),
        last_swap=own.get("last_swap"),
        raw=row,
    )


def _describe(status: Status | None) -> str:
    if status is None:
        return "nothing was heard of the replicas"
    shown = [
        f"{r.name} is on {r.snapshot} ({r.stage}{': ' + r.error if r.error else ''})" for r in status.replicas
    ]
    return "; ".join(shown) or "there are no replicas"
