"""A publication by push: the tensors, the group, the four calls, and waiting until replicas serve.

Always holds:
- A call is repeated only while no byte of the update may have moved.
- The tensors are sent in one update. The group stays for the next publication, and is formed again when the server asks for it,
  once in a publication.
- After `take` with a copy, the caller's tensors are not read, unless the copy is part of the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from midstream.client.checkpoint import Source
from midstream.client.copying import Copying
from midstream.client.errors import PublishError, PushFailed, SignalRefused, SnapshotFailed, Unanswered
from midstream.client.publication import Job, Published
from midstream.client.push import PIECE_BYTES, Rendezvous, TrainerGroup
from midstream.client.server import ServerClient
from midstream.client.snapshot_calls import ResetPromptCache
from midstream.client.status import Status
from midstream.client.weights import Cast, SnapshotTensor, TensorCopy
from midstream.core.http_answer import HttpAnswer
from midstream.core.retry import Deadline
from midstream.core.transfer import SentTensors

#: The words of a 409 after which a new group is of use.
INIT_AGAIN = "init again"
#: Of the call that ends a group, in seconds. It only saves the server a look.
SHUTDOWN_S = 5.0
CONFLICT = 409


class _WorldSize(msgspec.Struct):
    world_size: int


class _Refused(Exception):
    """The answer to a call that is not done."""

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Tensors:
    """The tensors of one publication: what the server hears of them, and their bytes."""

    def __init__(self, state: Mapping[str, Any], cast: Cast | None) -> None:
        self._tensors = [SnapshotTensor(name, value, cast) for name, value in state.items()]
        self.size = sum(tensor.size for tensor in self._tensors)
        self.sent = SentTensors(
            names=tuple(tensor.name for tensor in self._tensors),
            dtype_names=tuple(tensor.dtype_name for tensor in self._tensors),
            shapes=tuple(tensor.shape for tensor in self._tensors),
        )
        self._copy: Any = None

    def copy(self, memory: TensorCopy) -> None:
        """Copy them, and let go of the tensors."""
        self._copy = memory.take(self._tensors)
        self._tensors.clear()

    def parts(self) -> Iterator[Any]:
        """Their bytes, as TrainerGroup.send takes them."""
        if self._copy is not None:
            yield self._copy
            return
        for tensor in self._tensors:
            yield tensor.flat()


class Pushing:
    """Publishes by push, one publication at a time. address, port: where the trainer's end listens; port 0 is a free one."""

    def __init__(
        self,
        server: ServerClient,
        *,
        address: str,
        port: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caller = server.caller
        self._root = server.root
        self._snapshots = server.snapshots
        self._address = address
        self._port = port
        self._monotonic = monotonic
        self._group: TrainerGroup | None = None
        self._memory = TensorCopy()

    def __repr__(self) -> str:
        return f"push={self._group or 'no group'}"

    def take(
        self, job: Job, source: Source, *, copy: bool, copying: Copying | None = None
    ) -> Callable[[], Published]:
        """The rest of a publication. copy: of the tensors, made at once, or with `copying` as part of the rest; else they are
        read while they are sent.

        Raises ValueError for a dtype that no snapshot can hold, and for options that no push has.
        """
        policy = cache_policy(job.reset_prompt_cache)
        job.tell("writing")

        def taken() -> tuple[Tensors, float]:
            started = self._monotonic()
            tensors = Tensors(source.tensors(), source.dtype)
            if copy:
                tensors.copy(self._memory)
            return tensors, self._monotonic() - started

        if copying is not None:
            return lambda: self._run(job, policy, *copying.run(taken))
        now = taken()
        return lambda: self._run(job, policy, *now)

    def close(self) -> None:
        """End the group, and say so to the server."""
        group, self._group = self._group, None
        if group is not None and not group.closed:
            try:
                self._caller.once("POST", self._url("shutdown_weight_transfer_engine"), deadline_s=SHUTDOWN_S)
            except Unanswered:
                # The server notices by itself that the store is gone.
                pass
            finally:
                group.close()
        self._memory.forget()

    def _run(self, job: Job, policy: str, tensors: Tensors, copy_s: float) -> Published:
        started = self._monotonic()
        job.tell("uploading")
        deadline = self._caller.deadline(job.timeout_s)
        group = self._started(deadline, job)
        self._send(group, tensors, deadline)
        sent = self._monotonic()
        job.tell("loading")
        status = self._finish(job, policy)
        return Published(
            identity=job.identity,
            kind="push",
            previous=None,
            why="pushed",
            bytes_sent=tensors.size,
            bytes_whole=tensors.size,
            write_s=copy_s,
            encode_s=0.0,
            upload_s=sent - started,
            load_s=self._monotonic() - sent,
            status=status,
        )

    def _started(self, deadline: Deadline, job: Job) -> TrainerGroup:
        """The group, with an update begun. It is formed again, once, when the server asks for it."""
        url, body = self._url("start_weight_update"), _said(job) or None
        again = False
        while True:
            try:
                group = self._formed(deadline)
                self._caller.repeat(f"POST {url}", deadline, lambda: self._post(url, deadline, body))
                return group
            except SignalRefused as refused:
                formed, self._group = self._group, None
                if formed is not None:
                    formed.close()
                # The server knows a group of ours no more, or it has other replicas than it had.
                asks = refused.status == CONFLICT and (formed is not None or INIT_AGAIN in str(refused))
                if again or not asks:
                    raise
                again = True

    def _formed(self, deadline: Deadline) -> TrainerGroup:
        if self._group is None or self._group.closed:
            url = self._url("init_weight_transfer_engine")
            self._caller.repeat(f"POST {url}", deadline, lambda: self._form(url, deadline))
        assert self._group is not None
        return self._group

    def _form(self, url: str, deadline: Deadline) -> HttpAnswer:
        """The answer to one call that makes the receivers join. The group is there when it is done."""
        size_url = self._url("get_world_size")
        left_s = max(deadline.left_s, 0.001)
        receivers = self._caller.read(size_url, _WorldSize, "a world size", deadline_s=left_s).world_size
        asked = Rendezvous(
            master_address=self._address,
            master_port=self._port,
            world_size=1 + receivers,
            packed_buffer_size_bytes=PIECE_BYTES,
        )
        answers: list[HttpAnswer] = []

        def init(rendezvous: dict[str, Any]) -> None:
            answer = self._post(url, deadline, {"init_info": rendezvous})
            answers.append(answer)
            if answer.outcome != "done":
                raise _Refused(answer)

        try:
            self._group = TrainerGroup.form(asked, init, deadline)
        except _Refused as refused:
            return refused.answer
        return answers[0]

    def _send(self, group: TrainerGroup, tensors: Tensors, deadline: Deadline) -> None:
        url = self._url("update_weights")
        body = {"update_info": msgspec.to_builtins(tensors.sent)}

        def update() -> None:
            answer = self._post(url, deadline, body)
            if answer.outcome == "refused":
                raise SignalRefused(f"POST {url}: {answer.status} {answer.problem}", answer.status)
            if answer.outcome != "done":
                raise PushFailed(f"POST {url}: {answer.status} {answer.problem}")

        try:
            group.send(tensors.parts(), update, deadline)
        except Unanswered as error:
            # No signal was taken: the bytes are in no update that is finished.
            raise PushFailed(str(error)) from error

    def _finish(self, job: Job, policy: str) -> Status:
        """Asks the server to serve what was sent, once, and waits until it does. Raises PublishError."""
        url = self._url(f"finish_weight_update?reset_prompt_cache={policy}")
        deadline = self._caller.deadline(job.timeout_s)
        problem: PublishError | None = None
        try:
            answer = self._post(url, deadline, {"weight_version": job.identity, **_said(job)})
            message = f"POST {url}: {answer.status} {answer.problem}"
            if answer.outcome == "refused":
                problem = SignalRefused(message, answer.status)
            elif answer.outcome != "done":
                problem = Unanswered(message, answer.status)
        except Unanswered as error:
            problem = error
        if problem is not None:
            self._look(job.identity, problem, deadline)
        left_s = max(deadline.left_s, 0.001)
        return self._snapshots.wait_until_ready(job.identity, left_s, on_status=job.on_status)

    def _look(self, identity: str, problem: PublishError, deadline: Deadline) -> None:
        """Raises `problem`, or what the replicas say of it. Returns when they load the snapshot all the same."""
        if self._group is not None:
            self._group.close()
        try:
            status = self._snapshots.status(retry_s=max(deadline.left_s, 0.001))
        except PublishError:
            raise problem from None
        if failed := status.failed(identity):
            raise SnapshotFailed(identity, failed.name, failed.error or "it gave no reason") from problem
        known = any(identity in (replica.snapshot, replica.target) for replica in status.replicas)
        if not known or not isinstance(problem, Unanswered):
            raise problem

    def _post(self, url: str, deadline: Deadline, body: Any = None) -> HttpAnswer:
        left_s = max(deadline.left_s, 0.001)
        return self._caller.once("POST", url, deadline_s=left_s, json=body, slow=True)

    def _url(self, name: str) -> str:
        return f"{self._root}/{name}"


def _said(job: Job) -> dict[str, str]:
    """What the calls say of policies. Servers of older versions know no such field."""
    return {} if job.policies is None else {"policies": job.policies}


def cache_policy(asked: ResetPromptCache) -> str:
    """As the query of the last call has it. Raises ValueError."""
    if isinstance(asked, bool):
        return "all" if asked else "none"
    if isinstance(asked, Mapping):
        raise ValueError(
            "reset_prompt_cache: a push takes 'all', 'new_session', 'none' or a bool, not max_age"
        )
    return asked
