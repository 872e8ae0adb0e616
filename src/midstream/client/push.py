"""The trainer's end of a push: its group with the receivers of the replicas, and the pieces that it broadcasts.

Always holds:
- The group and the bytes are those that core/transfer.py describes. The trainer is rank 0.
- No wait is endless. A call of the server that fails ends the broadcast beside it, and a broadcast that fails ends the group.
- The key of a group stands in no message, log or repr.

PyTorch is imported when a group is formed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import msgspec

from midstream.client.errors import PublishError, PushFailed
from midstream.core.retry import Deadline
from midstream.core.transfer import STORE_PREFIX, Rendezvous

__all__ = ["PIECE_BYTES", "Deadline", "Rendezvous", "TrainerGroup", "pieces"]

#: Of a piece, unless another size is asked for. Those of 16 MiB were as fast as a bare broadcast: a larger one is copied while
#: less of it is under way, and more of a smaller one is the time between pieces.
PIECE_BYTES = 16 * 2**20

#: Under way at a time: the next one waits at the receivers when one has landed.
PIECES_FLYING = 2

logger = logging.getLogger(__name__)

#: After a broadcast failed, the server has so long to say why, in seconds.
REASON_S = 30.0
#: Gloo's own timeout is what was left of the deadline, and may end so long before it.
GLOO_EARLY_S = 0.1
_KEY_BYTES = 16
_REASON_CHARS_MAX = 300

_T = TypeVar("_T")


class _Flying(NamedTuple):
    """A piece that is being broadcast. landed: has a result when the work ended, well or not."""

    work: Any
    landed: Future[None]


class TrainerGroup:
    """Rank 0 of a group, and the store where the others find it. Use from one thread.

    A group that failed is closed. Closing it ends the broadcasts of the receivers.
    """

    def __init__(self, rendezvous: Rendezvous, store: Any) -> None:
        self._rendezvous = rendezvous
        self._store = store
        self._gloo: Any = None
        #: The pieces under way. They keep the connections of the group open.
        self._flying: deque[_Flying] = deque()

    def __repr__(self) -> str:
        asked = self._rendezvous
        place = f"{asked.master_address}:{asked.master_port}"
        return f"<TrainerGroup {place}, {asked.world_size} ranks{', closed' if self.closed else ''}>"

    @classmethod
    def form(
        cls, asked: Rendezvous, init: Callable[[dict[str, Any]], object], deadline: Deadline
    ) -> TrainerGroup:
        """The group, once all receivers are in it.

        asked: with port 0 a free one is chosen, and with key "" a random one. init: makes the receivers join; it gets the
        rendezvous as JSON, and is called once, in a thread. Its error is raised as it is. Raises PublishError when no port
        can be opened, and PushFailed when the group does not form in time.
        """
        store, port = _open_store(asked, deadline)
        key = asked.key or secrets.token_hex(_KEY_BYTES)
        rendezvous = msgspec.structs.replace(asked, master_port=port, key=key)
        group = cls(rendezvous, store)
        del store
        joined = _beside(lambda: init(msgspec.to_builtins(rendezvous)), "push-init")
        formed = _beside(lambda: _rank_0(rendezvous, deadline), "push-group")
        try:
            wait((joined, formed), max(0.0, deadline.left_s), FIRST_EXCEPTION)
            if formed.done() and formed.exception() is not None:
                # The receivers stop waiting, and the server hears of it.
                group.close()
                wait((joined,), REASON_S)
            if joined.done():
                joined.result()
            if not formed.done() or (formed.exception() is None and not joined.done()):
                raise PushFailed(f"the receivers were not in the group after {deadline.total_s:g} s")
            group._take(formed)
        except BaseException:
            group.close()
            raise
        logger.info("%s formed", group)
        return group

    @property
    def closed(self) -> bool:
        """Whether the group has ended, for good."""
        return self._store is None

    def send(self, parts: Iterable[Any], call: Callable[[], _T], deadline: Deadline) -> _T:
        """Broadcast `parts` while `call` runs in a thread. Returns what that returned.

        parts: torch tensors of uint8 with one dimension, on any device; made in this thread. call: asks the server to receive
        them. Its error is raised, also where the broadcast failed first. Raises PushFailed when a receiver is lost and the
        server does not say why, and past the deadline. After any error the group is closed.
        """
        called = _beside(call, "push-update")
        try:
            cut = pieces(parts, self._rendezvous.packed_buffer_size_bytes, packed=self._rendezvous.packed)
            for piece in cut:
                self._land(called, deadline, PIECES_FLYING - 1)
                self._flying.append(self._start(piece, deadline))
            self._land(called, deadline, 0)
            if not wait((called,), max(0.0, deadline.left_s)).done:
                raise self._late(deadline)
            return called.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group and end its store. May be called twice."""
        gloo, self._gloo = self._gloo, None
        flying, self._flying = self._flying, deque()
        self._store = None
        if works := [one.work for one in flying if not one.landed.done()]:
            # No call ends them before their timeout, and the group waits for them.
            held = [gloo, *works]
            threading.Thread(target=_drop, args=(held,), name="push-end", daemon=True).start()

    def _start(self, piece: Any, deadline: Deadline) -> _Flying:
        options = _torch_distributed().BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = _seconds(deadline)
        work = self._gloo.broadcast([piece], options)
        landed: Future[None] = Future()
        work.get_future().add_done_callback(lambda _: landed.set_result(None))
        return _Flying(work, landed)

    def _land(self, called: Future[Any], deadline: Deadline, most: int) -> None:
        """Returns when at most so many pieces are under way. Raises the call's error as soon as there is one."""
        while True:
            if called.done():
                # It may end well before the last piece has landed.
                called.result()
            self._check_landed(called, deadline)
            if len(self._flying) <= most:
                return
            # Of those that have landed, the first one only: it may have done so since the look at them.
            watched = [
                piece.landed for at, piece in enumerate(self._flying) if not (at and piece.landed.done())
            ]
            watched += [] if called.done() else [called]
            if not wait(watched, max(0.0, deadline.left_s), FIRST_COMPLETED).done:
                raise self._late(deadline)

    def _check_landed(self, called: Future[Any], deadline: Deadline) -> None:
        """Forget the first pieces, if they have landed. A later one that lands before them still counts as under way, since the
        memory of pieces is used again in their order. Raises for any that failed."""
        landed = [piece.landed.done() for piece in self._flying]
        # No other name for the work: it would keep the connections of the group open.
        ended = [self._problem(self._flying[at].work.wait) for at, done in enumerate(landed) if done]
        for _ in takewhile(bool, landed):
            self._flying.popleft()
        problem = next((each for each in ended if each is not None), None)
        if problem is None:
            return
        late = deadline.left_s < GLOO_EARLY_S
        # The receivers that are left stop waiting, and the server hears of it.
        self.close()
        wait((called,), REASON_S)
        if called.done():
            called.result()
        if late:
            raise self._late(deadline)
        raise PushFailed(f"a receiver was lost while weights were sent: {problem}")

    def _late(self, deadline: Deadline) -> PushFailed:
        return PushFailed(f"the weights were not received everywhere after {deadline.total_s:g} s")

    def _take(self, formed: Future[Any]) -> None:
        """Broadcast through the group that was formed from now on. Raises PushFailed."""
        problem = self._problem(formed.result)
        if problem is not None:
            raise PushFailed(f"the group with the receivers did not form: {problem}")
        self._gloo = formed.result()

    def _problem(self, ended: Callable[[], object]) -> str | None:
        """Why `ended`, work of torch, failed: the first line of its words, without the key that they may have."""
        try:
            ended()
        except RuntimeError as error:
            text = str(error).partition("\n")[0].replace(self._rendezvous.key, "KEY")
            return text[:_REASON_CHARS_MAX]
        return None


def pieces(parts: Iterable[Any], piece_bytes: int, *, packed: bool = True) -> Iterator[Any]:
    """The broadcasts of one update, as torch tensors of uint8 in the memory of this machine.

    parts: as TrainerGroup.send takes them. A piece that lies inside one part of this machine is a view of it. Others are
    copied to buffers in turn. A piece may change once PIECES_FLYING others behind it came and the next one is asked for.
    """
    if not packed:
        yield from (part.cpu() for part in parts if part.numel())
        return
    buffers: list[Any] = []
    filled = 0
    for part in parts:
        at, size = 0, part.numel()
        while at < size:
            if not filled and size - at >= piece_bytes and part.device.type == "cpu":
                yield part[at : at + piece_bytes]
                at += piece_bytes
                continue
            if not buffers:
                buffers = _buffers(piece_bytes)
            take = min(piece_bytes - filled, size - at)
            _copy(buffers[0][filled : filled + take], part[at : at + take])
            at, filled = at + take, filled + take
            if filled == piece_bytes:
                yield buffers[0]
                buffers.append(buffers.pop(0))
                filled = 0
    if filled:
        yield buffers[0][:filled]


def _copy(place: Any, part: Any) -> None:
    """As numpy copies, with one thread. Torch takes all cores, of which gloo needs one at the same time."""
    if part.device.type == "cpu":
        place.numpy()[:] = part.numpy()
    else:
        place.copy_(part)


def _buffers(size: int) -> list[Any]:
    """Of the pieces under way, and of the one that is filled beside them."""
    import torch

    return [torch.empty(size, dtype=torch.uint8) for _ in range(PIECES_FLYING + 1)]


def _open_store(asked: Rendezvous, deadline: Deadline) -> tuple[Any, int]:
    """The store, and its port. It listens at the address of the rendezvous alone. Raises PublishError."""
    place = f"{asked.master_address}:{asked.master_port}"
    try:
        family, _, _, _, at = socket.getaddrinfo(
            asked.master_address, asked.master_port, type=socket.SOCK_STREAM
        )[0]
        listening = socket.create_server(at[:2], family=family, backlog=asked.world_size + 16)
    except OSError as error:
        raise PublishError(
            f"no port can be opened at {place}: {error}; address must be one of this machine, which replicas reach"
        ) from error
    port = listening.getsockname()[1]
    store = _torch_distributed().TCPStore(
        asked.master_address,
        port,
        asked.world_size,
        is_master=True,
        timeout=_seconds(deadline),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port


def _rank_0(rendezvous: Rendezvous, deadline: Deadline) -> Any:
    """The process group, once all ranks are there. It has a connection to the store of its own, which breaks with the store."""
    distributed = _torch_distributed()
    timeout, address = _seconds(deadline), rendezvous.master_address
    store = distributed.TCPStore(
        address,
        rendezvous.master_port,
        rendezvous.world_size,
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
    prefix = distributed.PrefixStore(f"{STORE_PREFIX}/{rendezvous.key}", store)
    return gloo(prefix, 0, rendezvous.world_size, options)


def _torch_distributed() -> Any:
    """Any: it does not export in its types what it has."""
    import torch.distributed

    return torch.distributed


def _seconds(deadline: Deadline) -> timedelta:
    # A timeout of nothing means none at all.
    return timedelta(seconds=max(deadline.left_s, 0.1))


def _beside(work: Callable[[], _T], name: str) -> Future[_T]:
    """Runs `work` in a thread. Unlike a pool's, the thread does not keep the process alive."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the result
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _drop(held: list[Any]) -> None:
    with contextlib.suppress(RuntimeError):
        held[-1].wait()
    held.clear()
