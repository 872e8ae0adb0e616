"""Publishes snapshots: files into the bucket, a signal to the server, and waiting until the replicas serve them.

Always holds:
- Files are in the bucket before the signal that names them. The parent of the next delta is remembered only after the server
  took the signal. So a trainer may die at any step, and the next publisher continues by itself.
- A delta is sent only when the server says that it stands on the very snapshot kept here. In doubt a full one is sent.
- After a snapshot failed to load, the next one is full.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

import httpx

from midstream.client.bucket import open_bucket
from midstream.client.checkpoint import Source, Weights
from midstream.client.errors import PublishError
from midstream.client.names import served_spec
from midstream.client.parent import WorkDirectory
from midstream.client.publication import (
    Job,
    Kind,
    Phase,
    Publication,
    Published,
    Publishing,
    check_whole,
)
from midstream.client.server import ServerClient
from midstream.client.snapshot_calls import Compression, ResetPromptCache
from midstream.client.status import Status
from midstream.client.weights import Cast
from midstream.snapshots.identity import check_identity

#: The arguments in How that are those of checkpoint.Source.
SOURCE = ("model", "config_dir", "dtype", "adapter")


class How(TypedDict, total=False):
    """Arguments of `publish` and `begin`. model, config_dir, dtype and adapter say where the weights are.

    model: instead of weights, a Hugging Face model; with weights, these are its state dict, as FSDP or DeepSpeed gather it.
    config_dir: the directory of config.json and the tokenizer's files; must be given with tensors. With a model it wins over
    the model's own. dtype: floating-point tensors are cast to this on the way to disk; not for a directory. adapter: instead of
    weights, a PEFT model, of which the active adapter is taken; for a policy.
    kind: None means a delta when the server can load it and it is smaller, else full. "delta" is a PublishError if it cannot
    be. overwrite: a snapshot of this name in the bucket is replaced, and the name means the new files for the server too.
    reset_prompt_cache: "all" (default), "new_session", "none", a bool, or {"max_age": k}. extra_fields_ignore: top-level fields
    of config.json that may differ from the served model's. timeout_s: of the signal with what it asks before,
    and again of the wait, in seconds (300).
    on_status: called with each answer while waiting. on_phase: called as each phase begins.
    """

    model: Any
    config_dir: str | PathLike[str] | None
    dtype: Cast | None
    adapter: Any
    kind: Kind | None
    overwrite: bool
    reset_prompt_cache: ResetPromptCache
    extra_fields_ignore: Sequence[str]
    timeout_s: float
    on_status: Callable[[Status], None] | None
    on_phase: Callable[[Phase], None] | None


class SnapshotPublisher:
    """Writes snapshots into a bucket and signals them. Use from one thread. Also a context manager.

    base_url: the server's, with or without /v1.
    bucket: file:///DIR, an absolute path, s3://, gs:// or az:// (credentials: the usual environment variables). None: the one
        that the deployment reads, which the server is asked for. A file:// one has to be the same directory on both machines.
    full_every: a full snapshot comes after so many snapshots, the others are deltas; 1 means always full.
    work_dir: the directory of the last published checkpoint, which deltas need. With one that outlives the trainer, a restarted
        trainer continues with deltas. None: a temporary directory.
    model, deployment: which deployment, where the server has several. api_key: a key with the scope `publish`.
    compression: of deltas. request_timeout_s: of one request, in seconds. http, sleep, monotonic: for tests.
    hints: notify the server of each file as it arrives in the bucket, so that replicas fetch it early.
    policy: publish adapters to this policy of the deployment. Weights are then the directory of an adapter, as
        PEFT writes it, or a PEFT model: its active adapter is taken. adapter: such a model, for calls that give no weights.

    snapshots: the single calls, to what it publishes to: signal, status, and waiting until replicas serve.
    """

    def __init__(
        self,
        base_url: str,
        bucket: str | None = None,
        *,
        model: str | None = None,
        deployment: str | None = None,
        api_key: str | None = None,
        full_every: int = 20,
        compression: Compression = "arc_v2",
        work_dir: str | PathLike[str] | None = None,
        hints: bool = True,
        policy: str | None = None,
        adapter: Any = None,
        request_timeout_s: float = 30.0,
        http: httpx.Client | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if full_every < 1:
            raise ValueError(f"full_every must be at least 1, got {full_every}")
        if adapter is not None and policy is None:
            raise ValueError("adapter: is for a policy; give its name as policy")
        self._policy = policy
        self._adapter = adapter
        self.server = ServerClient(
            base_url,
            model=model,
            deployment=deployment,
            api_key=api_key,
            request_timeout_s=request_timeout_s,
            http=http,
            sleep=sleep,
            monotonic=monotonic,
        )
        self.snapshots = self.server.snapshots if policy is None else self.server.policy(policy)
        self._bucket = open_bucket(self.server.deployments.own_bucket() if bucket is None else bucket)
        target = (
            f"{self.server.root} {deployment or ''} {self._bucket}{'' if policy is None else f' {policy}'}"
        )
        self._work = WorkDirectory(Path(work_dir) if work_dir is not None else None, target)
        self._publishing = Publishing(
            self.snapshots,
            self._bucket,
            self._work,
            full_every=full_every,
            compression=compression,
            hints=hints and policy is None,
            monotonic=monotonic,
        )
        self._monotonic = monotonic
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[Published] | None = None

    def __repr__(self) -> str:
        return f"<SnapshotPublisher {self.server.root} bucket={self._bucket}>"

    def __enter__(self) -> SnapshotPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a publication in the background."""
        if self._thread is not None:
            self._thread.shutdown()
        self.server.close()
        self._work.close()

    def publish(self, identity: str, weights: Weights | None = None, **how: Unpack[How]) -> Published:
        """Write, signal and wait until every replica serves it.

        identity: the name of the snapshot. weights: tensors by name (torch or numpy), under the checkpoint's names or those of
        the model's state_dict(), or the directory of a checkpoint. None takes those of `model` or `adapter`. how: see `How`.

        Raises SignalRefused, SnapshotFailed, and NotReadyInTime. Raises PublishError when the result is not a whole snapshot,
        when the identity is taken, when the bucket or a disk fails, and when files were overwritten but the server kept the old
        ones. Raises ValueError and SnapshotRefused for arguments that cannot work, and for tensors under other names.
        """
        return self._take(identity, weights, how)()

    def begin(self, identity: str, weights: Weights | None = None, **how: Unpack[How]) -> Publication:
        """Like `publish`, but returns when it has a copy of the weights. The rest runs in a thread beside the training.

        Waits for the publication before. Only that one's own `wait` raises its failure. The callbacks run in the thread.
        """
        rest = self._take(identity, weights, how)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "publisher")
        self._running = self._thread.submit(rest)
        return Publication(identity, self._running)

    def write_full(
        self,
        identity: str,
        weights: Weights | None = None,
        *,
        model: Any = None,
        config_dir: str | PathLike[str] | None = None,
        dtype: Cast | None = None,
        adapter: Any = None,
        overwrite: bool = False,
    ) -> Path | None:
        """Write a full snapshot into the bucket, without a signal. Returns its directory in a local bucket, else None.

        identity, weights: as `publish` takes them, and the others as `How` has them.

        Raises PublishError when the result is not a whole snapshot, when the identity is taken, and when it lies inside
        another snapshot or has others inside it.
        """
        check_identity(identity)
        source = self._source(weights, model=model, config_dir=config_dir, dtype=dtype, adapter=adapter)

        def fill(directory: Path) -> None:
            source.write(directory)
            self._check_whole(identity, directory, source)

        return self._bucket.write(identity, fill, overwrite=overwrite)

    def _source(self, weights: Weights | None, **given: Any) -> Source:
        if weights is None and given.get("adapter") is None:
            given["adapter"] = self._adapter
        return Source(weights, **given, of_policy=self._policy is not None)

    def _check_whole(self, identity: str, directory: Path, source: Source) -> None:
        given = source.config_dir
        served = None if given is None else served_spec(Path(given))
        check_whole(identity, directory, served, of_policy=self._policy is not None)

    def _take(self, identity: str, weights: Weights | None, how: How) -> Callable[[], Published]:
        """Copy the weights, once the publication before has ended. Returns the rest of the work."""
        check_identity(identity)
        options = {name: value for name, value in how.items() if name not in SOURCE}
        source = self._source(weights, **{name: value for name, value in how.items() if name in SOURCE})
        job = Job(identity, **options)  # type: ignore[arg-type]
        if self._running is not None:
            # Its failure is for the caller that waits for it.
            self._running.exception()
        self._bucket.check(identity, job.overwrite)
        started = self._monotonic()
        job.tell("writing")
        staged = self._work.new_directory()
        try:
            source.write(staged)
            self._check_whole(identity, staged, source)
        except BaseException as error:
            shutil.rmtree(staged, ignore_errors=True)
            if isinstance(error, OSError):
                raise PublishError(f"snapshot {identity!r} cannot be copied: {error}") from error
            raise
        took_s = self._monotonic() - started
        return lambda: self._publishing.run(job, staged, took_s)
