"""One publication: full or delta, files, signal, wait. The order of the steps, and when the parent is remembered.

Always holds: the promises of publish.py.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from midstream.client.bucket import Bucket
from midstream.client.calls import RETRY_S, CallAnswer
from midstream.client.checkpoint import Source, write_companions
from midstream.client.copying import Copying
from midstream.client.errors import PublishError, SignalRefused, SnapshotFailed, Unanswered
from midstream.client.names import check_names
from midstream.client.parent import Parent, WorkDirectory
from midstream.client.snapshot_calls import Compression, ResetPromptCache, SnapshotCalls
from midstream.client.status import ReplicaStatus, Status
from midstream.client.weights import TensorCopy, write_weights
from midstream.core.errors import SnapshotError, SnapshotNotFinite
from midstream.core.types import PolicyFate
from midstream.snapshots.adapter import check_adapter_files, is_adapter
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.arc2.files import weights_files
from midstream.snapshots.finite import check_finite
from midstream.snapshots.layout import CheckpointSpec, TensorSpec, read_checkpoint
from midstream.snapshots.tied import check_tied, ties_head

Kind = Literal["full", "delta"]
PublishedKind = Literal["full", "delta", "push"]
Phase = Literal["writing", "encoding", "uploading", "loading"]


@dataclass(frozen=True)
class Published:
    """The result of a publication. Sizes in bytes, times in seconds.

    kind: "full", "delta" or "push". previous: the snapshot that a delta stands on. why: the reason for this kind. bytes_sent:
    of the files in the bucket; of the tensors, for a push. bytes_whole: of the whole checkpoint. write_s: to take the weights.
    encode_s: to make the delta. upload_s: to put the files into the bucket; for a push, until the receivers had the tensors.
    load_s: from the signal until every replica served it. status: the last answer.
    """

    identity: str
    kind: PublishedKind
    previous: str | None
    why: str
    bytes_sent: int
    bytes_whole: int
    write_s: float
    encode_s: float
    upload_s: float
    load_s: float
    status: Status = field(repr=False)

    @property
    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """As they were when the last of them was ready."""
        return self.status.replicas


class Publication:
    """A publication in the background, as SnapshotPublisher.begin returns it. identity: of its snapshot."""

    # Any: a Copying, which is no business of those who read the signature.
    def __init__(self, identity: str, future: Future[Published], copying: Any = None) -> None:
        self.identity = identity
        self._future = future
        self._copying: Copying | None = copying

    def __repr__(self) -> str:
        return f"<Publication {self.identity!r} {'done' if self.done() else 'running'}>"

    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Published:
        """Raises the errors of SnapshotPublisher.publish, and TimeoutError when it is not done after `timeout_s`."""
        error = self._future.exception(timeout_s)
        if error is not None and self._copying is not None:
            self._copying.claim_error()
        return self._future.result()

    def wait_copied(self, timeout_s: float | None = None) -> None:
        """Return when the weights may change: at once, unless the publication was given an `optimizer`.

        Raises what the copy raised, and TimeoutError when it is not whole after `timeout_s`.
        """
        if self._copying is not None:
            self._copying.wait(timeout_s)


@dataclass(frozen=True)
class Job:
    """A snapshot to publish, and how; see publish.How."""

    identity: str
    kind: Kind | None = None
    overwrite: bool = False
    reset_prompt_cache: ResetPromptCache = "all"
    extra_fields_ignore: Sequence[str] = ()
    policies: PolicyFate | None = None
    timeout_s: float = 300.0
    on_status: Callable[[Status], None] | None = None
    on_phase: Callable[[Phase], None] | None = None

    def tell(self, phase: Phase) -> None:
        """Calls `on_phase`, if the caller gave one."""
        if self.on_phase is not None:
            self.on_phase(phase)


def why_full(job: Job, parent: Parent | None, full_every: int) -> str | None:
    """Why this snapshot must be a full one; None when a delta may do. Pure; the server and the bucket are not asked."""
    if job.kind == "full":
        return "asked for"
    if parent is None:
        return "there is no snapshot to make a delta against"
    if parent.identity == job.identity:
        return "it replaces its own parent"
    if job.kind is None and parent.deltas + 1 >= full_every:
        return f"every {full_every} snapshots" if full_every > 1 else "no deltas wanted"
    return None


class _Questions:
    """The time that one job's status and signals may take together. Uploads between them do not count.

    Raises Unanswered once the time is used up.
    """

    def __init__(self, job: Job, monotonic: Callable[[], float]) -> None:
        self._job = job
        self._left_s = min(job.timeout_s, RETRY_S)
        self._monotonic = monotonic

    @contextlib.contextmanager
    def one(self) -> Iterator[float]:
        """Around one question. Gives its deadline, in seconds."""
        if self._left_s < 0:
            late = f"was not signalled within {self._job.timeout_s:g} s"
            raise Unanswered(f"snapshot {self._job.identity!r} {late}: the server answers slowly", None)
        began = self._monotonic()
        try:
            yield self._left_s
        finally:
            if self._left_s:
                self._left_s -= self._monotonic() - began


class ToBucket:
    """Publishes files, one snapshot at a time. work: its own to close. policy: of the deployment."""

    def __init__(
        self,
        snapshots: SnapshotCalls,
        bucket: Bucket,
        work: WorkDirectory,
        policy: str | None,
        *,
        full_every: int,
        compression: Compression,
        hints: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshots = snapshots
        self._bucket = bucket
        self._work = work
        self._of_policy = policy is not None
        self._full_every = full_every
        self._compression: Compression = compression
        self._hints = hints and policy is None
        self._monotonic = monotonic
        self._memory = TensorCopy()

    def __repr__(self) -> str:
        return f"bucket={self._bucket}"

    def close(self) -> None:
        """Gives up the work directory."""
        self._work.close()
        self._memory.forget()

    def take(
        self, job: Job, source: Source, *, copy: bool = True, copying: Copying | None = None
    ) -> Callable[[], Published]:
        """Takes the weights. Returns the rest of the publication. copy: tensors are copied in memory, and written with the
        rest; everything else is written at once. copying: the copy is a part of the rest. Raises PublishError, ValueError."""
        if copying is None or not self._bucket.remote:
            # Else the upload does it. The trainer waits for no network.
            self._bucket.check(job.identity, job.overwrite)
        job.tell("writing")
        staged = self._work.new_directory()

        def taken() -> _Taken:
            started = self._monotonic()
            served = source.served
            tensors = source.copied(self._memory, beside=copying is not None) if copy else None
            if tensors is None:
                source.write(staged)
                self._check_whole(job.identity, staged, served)
            else:
                write_companions(staged, source.config_dir)
            return _Taken(tensors, served, self._monotonic() - started)

        def held() -> _Taken:
            with self._staging(job, staged):
                return taken() if copying is None else copying.run(taken)

        if copying is not None:
            return lambda: self._run_taken(job, staged, held())
        now = held()
        return lambda: self._run_taken(job, staged, now)

    def _run_taken(self, job: Job, staged: Path, taken: _Taken) -> Published:
        """As `run`, where `staged` may lack the weights. Raises ValueError, too."""
        started = self._monotonic()
        if taken.tensors is not None:
            with self._staging(job, staged):
                write_weights(staged, taken.tensors, None)
                self._check_whole(job.identity, staged, taken.served)
        return self.run(job, staged, taken.took_s + self._monotonic() - started)

    @contextlib.contextmanager
    def _staging(self, job: Job, staged: Path) -> Iterator[None]:
        """Whoever fails to fill `staged` leaves nothing of it. Raises PublishError for the disk."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(staged, ignore_errors=True)
            if isinstance(error, OSError):
                raise PublishError(f"snapshot {job.identity!r} cannot be copied: {error}") from error
            raise

    def write_full(self, identity: str, source: Source, *, overwrite: bool) -> Path | None:
        """Writes a full snapshot, without a signal; see SnapshotPublisher.write_full."""

        def fill(directory: Path) -> None:
            source.write(directory)
            self._check_whole(identity, directory, source.served)

        return self._bucket.write(identity, fill, overwrite=overwrite)

    def _check_whole(self, identity: str, directory: Path, served: CheckpointSpec | None) -> None:
        check_whole(identity, directory, served, of_policy=self._of_policy)

    def run(self, job: Job, staged: Path, write_s: float) -> Published:
        """Publishes one snapshot. Raises PublishError.

        staged: the whole checkpoint, in the work directory. Afterwards it is the parent of the next delta, or removed.
        write_s: how long it took to write, in seconds.
        """
        delta = staged.with_name(staged.name + "-delta")
        try:
            return self._run(job, staged, delta, write_s)
        except PublishError:
            # Before OSError, which NotReadyInTime is too.
            raise
        except OSError as error:
            # Of the work directory.
            raise PublishError(f"snapshot {job.identity!r} cannot be prepared: {error}") from error
        finally:
            shutil.rmtree(delta, ignore_errors=True)
            parent = self._work.parent
            if parent is None or parent.directory != staged:
                shutil.rmtree(staged, ignore_errors=True)

    def _run(self, job: Job, staged: Path, delta: Path, write_s: float) -> Published:
        started = self._monotonic()
        whole_bytes = size_bytes(staged)
        asking = _Questions(job, self._monotonic)
        parent, why = self._parent_of(job, staged, delta, asking)
        encoded = self._monotonic()
        sent = self._send(job, staged, delta, (parent, why), asking)
        uploaded = self._monotonic()
        sent_bytes = size_bytes(delta if sent.parent is not None else staged)
        deltas = sent.parent.deltas + 1 if sent.parent is not None else 0
        self._work.keep(staged, job.identity, sent.generation, deltas)
        job.tell("loading")
        try:
            status = self._snapshots.wait_until_ready(job.identity, job.timeout_s, on_status=job.on_status)
        except SnapshotFailed:
            self._work.forget()
            raise
        return Published(
            identity=job.identity,
            kind="full" if sent.parent is None else "delta",
            previous=None if sent.parent is None else sent.parent.identity,
            why=sent.why,
            bytes_sent=sent_bytes,
            bytes_whole=whole_bytes,
            write_s=write_s,
            encode_s=encoded - started,
            upload_s=uploaded - encoded,
            load_s=self._monotonic() - uploaded,
            status=status,
        )

    def _parent_of(
        self, job: Job, staged: Path, delta: Path, asking: _Questions
    ) -> tuple[Parent | None, str]:
        """The snapshot that a delta stands on, and why. The delta is written then. None for a full snapshot."""
        parent = self._work.parent
        why = why_full(job, parent, self._full_every)
        if why is None and self._bucket.exists(job.identity):
            why = "it replaces another snapshot of that name"
        if why is None:
            assert parent is not None
            why = self._why_not_on(parent, staged, asking)
            if why is None:
                why = self._encode(parent, job, staged, delta)
            if why is None:
                return parent, f"stands on {parent.identity!r}"
        if job.kind == "delta":
            raise PublishError(f"snapshot {job.identity!r} cannot be a delta: {why}")
        return None, why

    def _why_not_on(self, parent: Parent, staged: Path, asking: _Questions) -> str | None:
        """Why no delta can stand on `parent`; None when one can."""
        with asking.one() as left_s:
            status = self._snapshots.status(retry_s=left_s)
        if not status.stands_on(parent.identity, parent.generation):
            return f"the server does not stand on {parent.identity!r}"
        try:
            before = _tensors(parent.directory)
        except SnapshotError as error:
            return f"the parent that was kept is not whole any more: {error}"
        if before != _tensors(staged):
            return "names, shapes, dtypes or files of its tensors are not its parent's"
        return None

    def _encode(self, parent: Parent, job: Job, staged: Path, delta: Path) -> str | None:
        """Write `delta`. Returns why it is of no use, else None."""
        job.tell("encoding")
        try:
            encode_delta(parent.directory, staged, delta, self._compression)
        except SnapshotError as error:
            return str(error)
        if job.kind is None and size_bytes(delta) >= size_bytes(staged):
            return "a delta would not be smaller"
        return None

    def _send(
        self, job: Job, staged: Path, delta: Path, chosen: tuple[Parent | None, str], asking: _Questions
    ) -> _Sent:
        """Upload and signal. A delta the server refuses is sent again as a full snapshot, unless a delta was asked for."""
        parent, why = chosen
        if parent is not None:
            self._upload(job, delta, parent.identity, overwrite=False)
            try:
                return _Sent(parent, why, _generation(self._signal(job, parent.identity, asking)))
            except Unanswered:
                raise
            except SignalRefused as refused:
                if job.kind == "delta":
                    raise
                why = f"the server refused a delta: {refused}"
        replaces = self._bucket.exists(job.identity)
        self._upload(job, staged, None, overwrite=job.overwrite or parent is not None)
        answer = self._signal(job, None, asking)
        # After a retry, "nothing changed" may be the answer to a signal that was taken the first time.
        if replaces and answer.attempts == 1 and _unchanged(answer):
            raise PublishError(
                f"snapshot {job.identity!r} was overwritten, but the server keeps the files it had"
            )
        return _Sent(None, why, _generation(answer))

    def _upload(self, job: Job, directory: Path, previous: str | None, *, overwrite: bool) -> None:
        job.tell("uploading")
        hinting = self._hints

        def landed(name: str) -> None:
            nonlocal hinting
            hinting = hinting and self._snapshots.hint(job.identity, [name], previous, self._compression)

        self._bucket.put(job.identity, directory, overwrite=overwrite, on_file=landed)

    def _signal(self, job: Job, previous: str | None, asking: _Questions) -> CallAnswer:
        with asking.one() as left_s:
            return self._snapshots.signal(
                job.identity,
                job.reset_prompt_cache,
                previous=previous,
                compression=self._compression,
                extra_fields_ignore=job.extra_fields_ignore,
                policies=job.policies,
                retry_s=left_s,
                overwrite=job.overwrite,
                # A full snapshot needs no waiting.
                wait_for_rebase=job.kind == "delta",
            )


class _Taken(NamedTuple):
    """Weights in memory; None: they are in files. served: as Source.served, before. took_s: what that took."""

    tensors: Mapping[str, Any] | None
    served: CheckpointSpec | None
    took_s: float


class _Sent(NamedTuple):
    """A signal that the server took. parent: the snapshot that a delta stands on; None for a full one."""

    parent: Parent | None
    why: str
    generation: int | None


def _tensors(directory: Path) -> dict[str, TensorSpec]:
    files = weights_files(directory)
    return {name: spec for layout in files.values() for name, spec in layout.tensors.items()}


def size_bytes(directory: Path) -> int:
    """The sizes of the files directly inside `directory`, added."""
    return sum(file.stat().st_size for file in directory.iterdir())


def check_whole(
    identity: str, directory: Path, served: CheckpointSpec | None = None, *, of_policy: bool = False
) -> None:
    """Raise PublishError unless `directory` is a whole checkpoint, or a whole adapter, of finite numbers.

    served: the checkpoint with the tensors that it has to have; None if it is not known.
    """
    if not directory.is_dir():
        raise PublishError(f"snapshot {identity!r}: {directory} is not a directory")
    try:
        if of_policy:
            check_adapter_files(directory)
            files = weights_files(directory)
        else:
            spec, files = read_checkpoint(directory)
            check_names(spec, served)
            if ties_head(spec.config, spec.tensors):
                check_tied(directory, spec)
        check_finite(directory, files)
    except ValueError as error:
        raise PublishError(f"snapshot {identity!r} would not load: {error}") from error
    except SnapshotNotFinite as error:
        raise PublishError(f"snapshot {identity!r} is not published: {error}") from error
    except SnapshotError as error:
        if not of_policy and is_adapter(directory):
            raise PublishError(
                f"snapshot {identity!r} is an adapter: name the policy that it is for"
            ) from error
        raise PublishError(f"snapshot {identity!r} would not be whole: {error}") from error


def _unchanged(answer: CallAnswer) -> bool:
    return isinstance(answer.body, dict) and answer.body.get("changed") is False


def _generation(answer: CallAnswer) -> int | None:
    found = answer.body.get("generation") if isinstance(answer.body, dict) else None
    return found if isinstance(found, int) else None
