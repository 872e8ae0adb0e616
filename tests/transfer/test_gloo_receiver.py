"""The receiver process with a real trainer: a group of torch.distributed over gloo."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_trainer import GlooTrainer, gloo_trainer
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiers import variant
from torch.distributed import TCPStore

from midstream.core.errors import InvalidRequest, ReplicaUnavailable
from midstream.core.transfer import Received, Rendezvous, TrainerState
from midstream.http.ipc import frame
from midstream.models.tiny_moe import write_tiny_moe
from midstream.replica.transfer import LOOK_WITHIN_S
from midstream.snapshots.content import PART_BYTES, directory_content
from midstream.snapshots.layout import CONFIG_FILE, WEIGHTS_FILE, read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.verify import check_compatible
from midstream.transfer import process
from midstream.transfer import protocol as m
from midstream.transfer.process import GlooReceiver
from midstream.transfer.protocol import JoinGroup
from midstream.transfer.receiver import GroupMember, _attempted

pytestmark = pytest.mark.slow

#: Of whatever has to come. Nothing waits for it to pass.
SOON_S = 60.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several parts of a digest, in a file with tensors of two types."""
    directory = tmp_path_factory.mktemp("base") / "model"
    write_tiny_moe(directory, layers=1, hidden=64, experts=4)
    tensors = load_file(directory / WEIGHTS_FILE)
    tensors["model.wide.weight"] = torch.arange(PART_BYTES // 4 + 5, dtype=torch.float32)
    tensors["model.odd.weight"] = torch.arange(7, dtype=torch.uint8)
    tensors["model.empty.weight"] = torch.zeros(0, 3)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> SnapshotCache:
    return SnapshotCache(tmp_path / "cache")


def receiver_of(base: Path, cache: SnapshotCache) -> GlooReceiver:
    return GlooReceiver(read_spec(base), base, cache)


async def joined(trainer: GlooTrainer, *receivers: GlooReceiver) -> None:
    joins = [
        receiver.join(replace(trainer.rendezvous, rank_offset=rank), SOON_S)
        for rank, receiver in enumerate(receivers, 1)
    ]
    await asyncio.gather(*joins)
    await trainer.reports("joined")


async def pushed(trainer: GlooTrainer, calls: list[list[str]], *receivers: GlooReceiver) -> list[Received]:
    """A whole update, in several calls."""
    await asyncio.gather(*(receiver.begin(SOON_S) for receiver in receivers))
    for names in calls:
        sent = trainer.sent(names)
        for receiver in receivers:
            receiver.check(sent)
        trainer.send(names)
        await asyncio.gather(*(receiver.receive(sent, SOON_S) for receiver in receivers))
        await trainer.reports("sent")
    for receiver in receivers:
        receiver.check_complete()
    return await asyncio.gather(*(receiver.finish(SOON_S) for receiver in receivers))


def gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def left_in(cache: SnapshotCache) -> list[Path]:
    return [path for path in cache.root.iterdir() if path.is_dir()]


@pytest.mark.parametrize("packed", [True, variant(False)])
async def test_what_comes_is_a_checkpoint_of_the_same_tensors(
    base: Path, cache: SnapshotCache, packed: bool
) -> None:
    async def body() -> None:
        async with gloo_trainer(base / WEIGHTS_FILE, packed=packed, piece_bytes=3 * 2**20 + 1) as trainer:
            receiver = receiver_of(base, cache)
            await joined(trainer, receiver)
            names = list(reversed(trainer.names))
            inodes: list[int] = []
            # A second update of the same group, in another order.
            for calls in ([names[:3], names[3:4], names[4:]], [trainer.names]):
                (received,) = await pushed(trainer, calls, receiver)
                directory = receiver.hand_over()
                check(directory, received)
                inodes.append((directory / WEIGHTS_FILE).stat().st_ino)
                if calls[0] != trainer.names:
                    # The next update writes over this file.
                    cache.drop(directory)
            assert len(set(inodes)) == 1
            receiver.end("the test is over")
            await receiver.ended()
            assert gone(receiver.pid)
            # What was handed over is not the receiver's any more.
            assert len(left_in(cache)) == 1

    def check(directory: Path, received: Received) -> None:
        assert received.content == directory_content(directory, [CONFIG_FILE, WEIGHTS_FILE])
        assert sorted(path.name for path in directory.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
        check_compatible(read_spec(base), read_spec(directory))
        found, expected = load_file(directory / WEIGHTS_FILE), load_file(base / WEIGHTS_FILE)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert received.received_bytes == sum(tensor.nbytes for tensor in expected.values())

    await body()


async def test_two_receivers_of_one_group_make_equal_files(base: Path, cache: SnapshotCache) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE, receivers=2) as trainer:
        receivers = [receiver_of(base, cache) for _ in range(2)]
        await joined(trainer, *receivers)
        one, other = await pushed(trainer, [trainer.names], *receivers)
        assert one == other
        for receiver in receivers:
            receiver.end("the test is over")
            await receiver.ended()
        assert left_in(cache) == []


async def test_a_trainer_that_dies_in_a_broadcast_is_reported_at_once(
    base: Path, cache: SnapshotCache
) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE, piece_bytes=2**20) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        await receiver.begin(SOON_S)
        assert await receiver.trainer_state(SOON_S) is TrainerState.ALIVE
        trainer.send(trainer.names, stop_after=3)
        receiving = asyncio.create_task(receiver.receive(trainer.sent(trainer.names), 10 * SOON_S))
        await trainer.reports("stopped")
        # Its store answers while a broadcast waits, and while a step of it holds the interpreter.
        assert await receiver.trainer_state(SOON_S) is TrainerState.ALIVE
        await trainer.die()
        address = f"127.0.0.1:{trainer.rendezvous.master_port}"
        with pytest.raises(ReplicaUnavailable, match=f"lost the trainer at {address}"):
            await asyncio.wait_for(receiving, SOON_S)
        assert "lost the trainer" in await receiver.ended()
        assert await receiver.trainer_state(SOON_S) is TrainerState.GONE
        assert gone(receiver.pid)
        assert left_in(cache) == []


@pytest.mark.variant
async def test_a_trainer_that_died_between_two_calls_is_not_alive(base: Path, cache: SnapshotCache) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        await trainer.die()
        assert await receiver.trainer_state(SOON_S) is TrainerState.GONE
        await receiver.begin(SOON_S)
        with pytest.raises(ReplicaUnavailable, match="lost the trainer"):
            await receiver.receive(trainer.sent(trainer.names), SOON_S)
        await receiver.ended()


@pytest.mark.variant
async def test_the_store_of_another_trainer_at_the_same_port_is_not_its_trainer(
    base: Path, cache: SnapshotCache
) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        assert await receiver.trainer_state(SOON_S) is TrainerState.ALIVE
        await trainer.die()
        port = trainer.rendezvous.master_port
        # It was started again under another name of the same machine.
        store = TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
        assert await receiver.trainer_state(SOON_S) is TrainerState.GONE
        del store
        receiver.end("done")
        await receiver.ended()


@pytest.mark.variant
async def test_what_is_silent_at_a_dead_trainers_port_is_not_known_to_be_the_trainer(
    base: Path, cache: SnapshotCache
) -> None:
    async def answer_as_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with gloo_trainer(base / WEIGHTS_FILE) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        # A trainer that stands still is as silent. The next look finds it.
        trainer.process.send_signal(signal.SIGSTOP)
        assert await receiver.trainer_state(LOOK_WITHIN_S) is TrainerState.UNKNOWN
        trainer.process.send_signal(signal.SIGCONT)
        assert await receiver.trainer_state(SOON_S) is TrainerState.ALIVE
        await trainer.die()
        here = "127.0.0.1", trainer.rendezvous.master_port
        with socket.create_server(here):
            for _ in range(2):
                assert await receiver.trainer_state(LOOK_WITHIN_S) is TrainerState.UNKNOWN
        server = await asyncio.start_server(answer_as_http, *here)
        assert await receiver.trainer_state(SOON_S) is TrainerState.GONE
        server.close()
        receiver.end("done")
        await receiver.ended()


async def test_a_receiver_that_stands_still_is_killed_before_the_deadline(
    base: Path, cache: SnapshotCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PING_S", 0.05)
    # A healthy one may be without a core for a while, before it is stopped.
    monkeypatch.setattr(process, "SILENT_S", 3.0)

    async with gloo_trainer(base / WEIGHTS_FILE) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        await receiver.begin(SOON_S)
        trainer.send(trainer.names, stop_after=0)
        await trainer.reports("stopped")
        receiving = asyncio.create_task(receiver.receive(trainer.sent(trainer.names), 10 * SOON_S))
        assert receiver.pid is not None
        os.kill(receiver.pid, signal.SIGSTOP)
        with pytest.raises(ReplicaUnavailable, match=r"has not answered for 3 s"):
            await asyncio.wait_for(receiving, SOON_S)
        await asyncio.wait_for(receiver.ended(), SOON_S)
        assert gone(receiver.pid)


async def test_a_receiver_that_waits_in_a_broadcast_answers_meanwhile(
    base: Path, cache: SnapshotCache
) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        await receiver.begin(SOON_S)
        trainer.send(trainer.names, stop_after=0)
        await trainer.reports("stopped")
        receiving = asyncio.create_task(receiver.receive(trainer.sent(trainer.names), 10 * SOON_S))
        for _ in range(3):
            # The order to receive was begun first, so it is sent first.
            answer = receiver._answer(receiver._living(), m.Ping)
            assert (await asyncio.wait_for(answer, SOON_S)).error is None
        assert not receiving.done()
        receiver.end("done")
        with pytest.raises(ReplicaUnavailable):
            await receiving
        await receiver.ended()


async def test_a_receiver_that_misses_a_deadline_is_killed(base: Path, cache: SnapshotCache) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE, piece_bytes=2**20) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        await receiver.begin(SOON_S)
        # Nothing of this call comes: a broadcast without its receiver would not end.
        trainer.send(trainer.names, stop_after=0)
        await trainer.reports("stopped")
        with pytest.raises(ReplicaUnavailable, match=r"did not get \d+ tensors within 0\.2 s"):
            await receiver.receive(trainer.sent(trainer.names), 0.2)
        await receiver.ended()
        assert gone(receiver.pid)
        assert left_in(cache) == []


async def test_a_group_that_is_not_complete_ends_at_the_deadline(base: Path, cache: SnapshotCache) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE, receivers=2) as trainer:
        receiver = receiver_of(base, cache)
        with pytest.raises(ReplicaUnavailable, match="did not form its group of 3 within 1 s"):
            await receiver.join(trainer.rendezvous, 1.0)
        await receiver.ended()
        assert gone(receiver.pid)


async def test_a_receiver_that_ends_by_itself_says_why(base: Path, cache: SnapshotCache) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE, piece_bytes=2**20) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        await receiver.begin(SOON_S)
        trainer.send(trainer.names, stop_after=1)
        receiving = asyncio.create_task(receiver.receive(trainer.sent(trainer.names), SOON_S))
        await trainer.reports("stopped")
        assert receiver.pid is not None
        os.kill(receiver.pid, 9)
        with pytest.raises(ReplicaUnavailable, match="the receiver process ended by SIGKILL"):
            await receiving
        assert await receiver.ended() == "the receiver process ended by SIGKILL"
        assert left_in(cache) == []
        # Its part may ask before it hears of the end.
        with pytest.raises(ReplicaUnavailable, match="ended by SIGKILL"):
            await receiver.finish(SOON_S)
        with pytest.raises(ReplicaUnavailable, match="ended by SIGKILL"):
            await receiver.begin(SOON_S)


async def test_an_update_that_is_dropped_leaves_nothing_and_the_next_one_is_whole(
    base: Path, cache: SnapshotCache
) -> None:
    async with gloo_trainer(base / WEIGHTS_FILE) as trainer:
        receiver = receiver_of(base, cache)
        await joined(trainer, receiver)
        await receiver.begin(SOON_S)
        first = trainer.names[:2]
        trainer.send(first)
        await receiver.receive(trainer.sent(first), SOON_S)
        await trainer.reports("sent")
        with pytest.raises(InvalidRequest, match="tensors were not sent"):
            receiver.check_complete()
        receiver.drop()
        (received,) = await pushed(trainer, [trainer.names], receiver)
        directory = receiver.hand_over()
        assert received.content == directory_content(directory, [CONFIG_FILE, WEIGHTS_FILE])
        receiver.end("the test is over")
        await receiver.ended()


@pytest.mark.variant
async def test_no_room_is_found_before_a_byte_comes(base: Path, tmp_path: Path) -> None:
    small = SnapshotCache(tmp_path / "cache", 2**20)
    async with gloo_trainer(base / WEIGHTS_FILE) as trainer:
        receiver = receiver_of(base, small)
        await joined(trainer, receiver)
        with pytest.raises(
            ReplicaUnavailable, match=r"no room for the update: .* larger replica\.snapshot_cache"
        ):
            await receiver.begin(SOON_S)
        receiver.end("the test is over")
        await receiver.ended()
        assert left_in(small) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank_offset", 0), ("rank_offset", 2), ("master_port", 0), ("packed_buffer_size_bytes", 0)],
)
async def test_an_impossible_rendezvous_is_refused_before_a_process_starts(
    base: Path, cache: SnapshotCache, field: str, value: int
) -> None:
    receiver = receiver_of(base, cache)
    sound = Rendezvous(master_address="127.0.0.1", master_port=1, world_size=2)
    with pytest.raises(InvalidRequest) as refused:
        await receiver.join(replace(sound, **{field: value}), SOON_S)
    assert refused.value.param == f"init_info.{field}"
    assert receiver.pid is None


def test_the_process_ends_with_its_replica() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "midstream.core.child", "midstream.transfer.receiver"]
        process = subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    # It waits for a store that nobody opens.
    order = m.JoinGroup(1, "127.0.0.1", 1, 2, 1, "midstream/", SOON_S)
    ours.sendall(frame(order))
    ours.close()
    assert process.wait(SOON_S) == 0


def test_an_error_does_not_tell_the_key_of_the_group(caplog: pytest.LogCaptureFixture) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    join = JoinGroup(1, "127.0.0.1", store.port, 2, 1, "midstream/only-members-know-it", timeout_s=3.0)
    with caplog.at_level(logging.DEBUG):
        answer = _attempted(GroupMember(), join)
    assert answer.error is not None
    assert "KEY/0/0" in answer.error, "torch names the keys that it waited for"
    assert "only-members-know-it" not in answer.error + caplog.text
