"""Publishes snapshots: files into the bucket, a signal to the server, and waiting until the replicas serve them. Or, by push,
the tensors straight to the replicas.

Always holds, for files:
- Files are in the bucket before the signal that names them. The parent of the next delta is remembered only after the server
  took the signal. So a trainer may die at any step, and the next publisher continues by itself.
- A delta is sent only when the server says that it stands on exactly the snapshot kept here. In doubt a full one is sent.
- After a snapshot failed to load, the next one is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

import httpx

from midstream.client.bucket import Bucket, open_bucket
from midstream.client.checkpoint import Source, Weights
from midstream.client.copying import Copying
from midstream.client.parent import WorkDirectory
from midstream.client.publication import (
    Job,
    Kind,
    Phase,
    Publication,
    Published,
    ToBucket,
)
from midstream.client.pushing import Pushing
from midstream.client.server import ServerClient
from midstream.client.snapshot_calls import Compression, ResetPromptCache
from midstream.client.status import Status
from midstream.client.weights import Cast
from midstream.core.types import PolicyFate
from midstream.snapshots.identity import check_identity

Way = Literal["files", "push"]
#: The arguments in How that are those of checkpoint.Source.
SOURCE = ("model", "config_dir", "dtype", "adapter")
#: Those of How that a push has no use for, and why.
OF_FILES = {
    "config_dir": "a push sends tensors alone, and replicas keep the configuration that they serve",
    "adapter": "adapters are published as files",
    "kind": "a push sends all tensors",
    "overwrite": "a push replaces no files; give the weights another name",
    "extra_fields_ignore": "a push sends no config.json",
}


class How(TypedDict, total=False):
    """Arguments of `publish` and `begin`. model, config_dir, dtype and adapter say where the weights are.

    model: instead of weights, a Hugging Face model; with weights, these are its state dict, as FSDP or DeepSpeed gather it.
    config_dir: the directory of config.json and the tokenizer's files; must be given with tensors. With a model it wins over
    the model's own. dtype: floating-point tensors are cast to this on the way to disk; not for a directory. adapter: instead of
    weights, a PEFT model, of which the active adapter is taken; for a policy.
    kind: None means a delta when the server can load it and it is smaller, else full. "delta" is a PublishError if it cannot
    be. overwrite: a snapshot of this name in the bucket is replaced, and the name means the new files for the server too.
    reset_prompt_cache: "all" (default), "new_session", "none", a bool, or {"max_age": k}. extra_fields_ignore: top-level fields
    of config.json that may differ from the served model's. policies: "keep", "rebase", "end" or "refuse": what becomes of the
    deployment's policies; without it they keep their base, or a server that cannot do that refuses. timeout_s: of the signal
    with what it asks before, and again of the wait, in seconds (300).
    on_status: called with each answer while waiting. on_phase: called as each phase begins.
    optimizer: for `begin`, a torch.optim.Optimizer or several, all that change the weights: the copy is made while the next
    step computes, and `optimizer.step()` waits for it. With () call Publication.wait_copied() before the weights change.

    A push takes neither config_dir, adapter, kind, overwrite, extra_fields_ignore nor {"max_age": k}. There,
    timeout_s is the time until all is sent, and again until it is served.
    """

    model: Any
    config_dir: str | PathLike[str] | None
    dtype: Cast | None
    adapter: Any
    kind: Kind | None
    overwrite: bool
    reset_prompt_cache: ResetPromptCache
    extra_fields_ignore: Sequence[str]
    policies: PolicyFate | None
    timeout_s: float
    on_status: Callable[[Status], None] | None
    on_phase: Callable[[Phase], None] | None
    optimizer: Any


class SnapshotPublisher:
    """Writes snapshots into a bucket and signals them, or pushes them. Use from one thread. Also a context manager.

    base_url: the server's, with or without /v1.
    to: "files", or "push": the tensors go straight to the replicas, which need to reach this machine. It takes no bucket,
        work_dir, policy nor adapter. What is below for deltas and files does not concern it.
    bucket: file:///DIR, an absolute path, s3://, gs:// or az:// (credentials: the usual environment variables). None: the one
        that the deployment reads, which the server is asked for. A file:// one has to be the same directory on both machines.
    full_every: a full snapshot comes after so many snapshots, the others are deltas; 1 means always full.
    work_dir: the directory of the last published checkpoint, which deltas need. With one that outlives the trainer, a restarted
        trainer continues with deltas. None: a temporary directory.
    model, deployment: which deployment, where the server has several. api_key: a key with the scope `publish`.
    compression: of deltas. request_timeout_s: of one request, in seconds. http, sleep, monotonic: for tests.
    hints: notify the server of each file as it arrives in the bucket, so that replicas fetch it early.
    address, port: of this machine, where the receivers of a push find the trainer; port 0 takes a free one.
    policy: publish adapters to this policy of the deployment. Weights are then the directory of an adapter, as
        PEFT writes it, or a PEFT model: its active adapter is taken. adapter: such a model, for calls that give no weights.

    snapshots: the single calls, to what it publishes to: signal, status, and waiting until replicas serve.
    """

    def __init__(
        self,
        base_url: str,
        bucket: str | None = None,
        *,
        to: Way = "files",
        model: str | None = None,
        deployment: str | None = None,
        api_key: str | None = None,
        full_every: int = 20,
        compression: Compression = "arc_v2",
        work_dir: str | PathLike[str] | None = None,
        hints: bool = True,
        policy: str | None = None,
        adapter: Any = None,
        address: str = "127.0.0.1",
        port: int = 0,
        request_timeout_s: float = 30.0,
        http: httpx.Client | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if full_every < 1:
            raise ValueError(f"full_every must be at least 1, got {full_every}")
        check_way(to, bucket=bucket, work_dir=work_dir, policy=policy, adapter=adapter)
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
        self._way: ToBucket | Pushing
        if to == "push":
            self._way = Pushing(self.server, address=address, port=port, monotonic=monotonic)
        else:
            opened = open_bucket(self.server.deployments.own_bucket() if bucket is None else bucket)
            self._way = ToBucket(
                self.snapshots,
                opened,
                _work_directory(work_dir, self.server.root, deployment, opened, policy),
                policy,
                full_every=full_every,
                compression=compression,
                hints=hints,
                monotonic=monotonic,
            )
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[Published] | None = None
        self._copying: Copying | None = None

    def __repr__(self) -> str:
        return f"<SnapshotPublisher {self.server.root} {self._way}>"

    def __enter__(self) -> SnapshotPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a publication in the background. Call it between two steps of the optimizers that one was given."""
        if self._thread is not None:
            self._thread.shutdown()
        self._release()
        self._way.close()
        self.server.close()

    def publish(self, identity: str, weights: Weights | None = None, **how: Unpack[How]) -> Published:
        """Write, signal and wait until every replica serves it.

        identity: the name of the snapshot. weights: tensors by name (torch or numpy), under the checkpoint's names or those of
        the model's state_dict(), or the directory of a checkpoint. None takes those of `model` or `adapter`. how: see `How`.

        Raises SignalRefused, SnapshotFailed, and NotReadyInTime. Raises PublishError when the result is not a whole snapshot,
        when the identity is taken, when the bucket or a disk fails, and when files were overwritten but the server kept the old
        ones. Raises PushFailed when pushed weights do not arrive. Raises ValueError and SnapshotRefused for arguments that
        cannot work, and for tensors under other names.
        """
        if how.get("optimizer") is not None:
            raise ValueError("optimizer: is for begin; publish returns when the weights are served")
        return self._take(identity, weights, how, copy=False)()

    def begin(self, identity: str, weights: Weights | None = None, **how: Unpack[How]) -> Publication:
        """Like `publish`, but returns when it has a copy of the weights. The rest runs in a thread beside the training.

        The copy of torch tensors by name is in memory, of which it keeps as much as they take. All else is written to work_dir.
        Waits for the publication before. Only that one's own `wait` raises its failure. The callbacks run in the thread.

        With `optimizer` it returns before the copy, which the thread makes, also of a model with a config_dir. Until it is
        whole, nothing but these optimizers may change the weights, the model or config_dir. A change that is seen all the same
        is a PublishError that names the tensor: one that torch counts (`Tensor._version`), or one of the numbers that are
        compared. What fails in the copy is raised by the next `step()`, once, and by the Publication.
        """
        rest = self._take(identity, weights, how, copy=True)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "publisher")
        self._running = self._thread.submit(rest)
        if self._copying is not None:
            self._copying.follow(self._running)
        return Publication(identity, self._running, self._copying)

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
        another snapshot or has others inside it. Raises ValueError for a publisher that pushes.
        """
        check_identity(identity)
        if isinstance(self._way, Pushing):
            raise ValueError("write_full: this publisher pushes and has no bucket")
        source = self._source(weights, model=model, config_dir=config_dir, dtype=dtype, adapter=adapter)
        return self._way.write_full(identity, source, overwrite=overwrite)

    def _source(self, weights: Weights | None, **given: Any) -> Source:
        if weights is None and given.get("adapter") is None:
            given["adapter"] = self._adapter
        return Source(
            weights, **given, of_policy=self._policy is not None, to_push=isinstance(self._way, Pushing)
        )

    def _take(
        self, identity: str, weights: Weights | None, how: How, *, copy: bool
    ) -> Callable[[], Published]:
        """Take the weights, once the publication before has ended. Returns the rest of the work."""
        check_identity(identity)
        if isinstance(self._way, Pushing):
            check_how(how)
        optimizer = how.pop("optimizer", None)
        options = {name: value for name, value in how.items() if name not in SOURCE}
        source = self._source(weights, **{name: value for name, value in how.items() if name in SOURCE})
        job = Job(identity, **options)  # type: ignore[arg-type]
        if self._running is not None:
            # Its failure is for the caller that waits for it.
            self._running.exception()
        self._release()
        if optimizer is None:
            return self._way.take(job, source, copy=copy)
        self._copying = copying = Copying(source.lent(), optimizer)
        try:
            return self._way.take(job, replace(source, weights=copying.tensors), copy=True, copying=copying)
        except BaseException:
            # A trainer that goes on without it keeps neither hooks nor tensors.
            self._release()
            copying.forget()
            raise

    def _release(self) -> None:
        """Leave the optimizers of the publication before."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.release()


def _work_directory(
    place: str | PathLike[str] | None, root: str, deployment: str | None, bucket: Bucket, policy: str | None
) -> WorkDirectory:
    """For the snapshots of one target: a server's deployment, a bucket and a policy."""
    target = f"{root} {deployment or ''} {bucket}{'' if policy is None else f' {policy}'}"
    return WorkDirectory(Path(place) if place is not None else None, target)


def check_way(to: str, **of_files: object) -> None:
    """Raise ValueError unless a publisher may be made so. of_files: its arguments that are for files alone."""
    if of_files["adapter"] is not None and of_files["policy"] is None:
        raise ValueError("adapter: is for a policy; give its name as policy")
    if to not in ("files", "push"):
        raise ValueError(f"to must be 'files' or 'push', got {to!r}")
    given = [name for name, value in of_files.items() if value is not None]
    if to == "push" and given:
        raise ValueError(f"{given[0]}: is for files; a push takes tensors of the deployment, and no bucket")


def check_how(how: How) -> None:
    """Raise ValueError for an argument that a push has no use for."""
    for name, why in OF_FILES.items():
        if how.get(name):
            raise ValueError(f"{name}: {why}")
