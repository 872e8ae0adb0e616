"""A replica's part where the engine's ranks take the weights: what is checked and written down, and when it is given up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replica_fakes import FakeSource
from safetensors.numpy import load_file, save_file
from torch.distributed import TCPStore

from midstream.core.errors import Conflict, InvalidRequest, ReplicaUnavailable
from midstream.core.transfer import (
    Alive,
    Begin,
    CheckInPlace,
    Drop,
    Finish,
    InitInfo,
    JoinInPlace,
    LeaveGroup,
    Received,
    ReceiveInPlace,
    TrainerSeen,
    TrainerState,
    UpdateInfo,
)
from midstream.core.types import Content
from midstream.engine.base import InPlaceWeights, Tee, Teed, TransferFailed, TransferRefused
from midstream.replica import transfer
from midstream.replica.transfer import Transfers
from midstream.snapshots import content
from midstream.snapshots.content import directory_content, part_digest, part_digests
from midstream.snapshots.layout import CONFIG_FILE, WEIGHTS_FILE, read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.local import made_finite
from midstream.transfer import in_place
from midstream.transfer.files import UpdateFiles
from midstream.transfer.in_place import InPlaceReceiver, tensors_of
from midstream.transfer.layout import ALIGNMENT

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.uint8)}
INFO = {"names": ["b", "a"], "dtype_names": ["uint8", "float32"], "shapes": [[4], [2, 3]], "more": 1}
OF = {"group": "g", "boot": "b", "within_s": 60.0}
UPDATE = {**OF, "update": 1}


class FakeWeights(InPlaceWeights):
    """Writes the tensors of TENSORS. fails: a step -> what it raises. blocked: a step that waits."""

    backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.blocked = ""
        self.goes_on = asyncio.Event()
        self.info: Any = None
        # Where the parts begin that it digests, and whether it sees finite numbers.
        self.digested: list[int] = []
        self.finite = True

    async def _step(self, name: str) -> None:
        self.calls.append(name)
        if name == self.blocked:
            await self.goes_on.wait()
        if name in self.fails:
            raise self.fails[name]

    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        self.info = init_info
        await self._step("join")

    def check_ready(self) -> None:
        if "ready" in self.fails:
            raise self.fails["ready"]

    async def hold(self, within_s: float) -> None:
        await self._step("hold")

    async def write(self, update_info: Any, tee: Tee, within_s: float) -> Teed:
        self.info = update_info
        with tee.path.open("r+b") as file:
            for name, (begin, end) in tee.places.items():
                data = TENSORS[name].tobytes()
                assert len(data) == end - begin
                file.seek(begin)
                file.write(data)
        await self._step("write")
        with tee.path.open("rb") as file:
            number, size = file.fileno(), tee.part_bytes
            return Teed({at: part_digest(number, at, at + size) for at in self.digested}, self.finite)

    async def finish(self, within_s: float) -> None:
        await self._step("finish")

    def written(self, file: Path) -> None:
        assert file.exists()
        self.calls.append("written")

    def give_up(self, reason: str) -> None:
        self.calls.append("give up")

    def give_up_unfinished(self, reason: str) -> None:
        self.calls.append("give up unfinished")

    def give_up_written(self, reason: str) -> None:
        self.calls.append("give up written")

    async def leave(self, within_s: float) -> None:
        await self._step("leave")


class Here:
    def __init__(self, path: Path) -> None:
        base = path / "base"
        base.mkdir()
        save_file(TENSORS, base / WEIGHTS_FILE)
        (base / CONFIG_FILE).write_text("{}")
        self.weights = FakeWeights()
        self.source = FakeSource()
        self.sleep: Callable[[], Coroutine[Any, Any, Any]] = asyncio.Event().wait
        self.cache = SnapshotCache(path / "cache")
        spec = read_spec(base)
        self.transfers = Transfers(self.source, lambda: "b", self._sleep)
        self.transfers.receivers = lambda: InPlaceReceiver(self.weights, spec, base, self.cache)

    async def _sleep(self, seconds: float) -> None:
        await self.sleep()

    async def join(self, **fields: Any) -> None:
        init = InitInfo(backend="nccl", fields={"rank_offset": 3, **fields})
        await self.transfers.answer(JoinInPlace(**OF, init=init))

    async def send(self, info: Any = INFO) -> None:
        sent = UpdateInfo(fields=info)
        await self.transfers.answer(CheckInPlace(**UPDATE, info=sent))
        await self.transfers.answer(ReceiveInPlace(**UPDATE, info=sent))

    async def whole(self) -> Any:
        await self.opened()
        await self.send()
        return await self.transfers.answer(Finish(**UPDATE))

    async def opened(self) -> None:
        await self.join()
        await self.transfers.answer(Begin(**UPDATE, live_s=60.0))

    @property
    def directories(self) -> list[Path]:
        return [one for one in self.cache.root.iterdir() if one.is_dir()]


async def test_the_file_has_what_the_engine_was_given(tmp_path: Path) -> None:
    here = Here(tmp_path)
    await here.opened()
    assert here.weights.info == {"rank_offset": 3}
    await here.send()
    assert here.weights.info == INFO
    received = await here.transfers.answer(Finish(**UPDATE))
    assert isinstance(received, Received)
    assert (received.received_bytes, here.weights.calls) == (
        28,
        ["join", "hold", "write", "finish", "written"],
    )
    [directory] = here.directories
    assert received.content == directory_content(directory, (CONFIG_FILE, WEIGHTS_FILE))
    found = load_file(directory / WEIGHTS_FILE)
    assert all(np.array_equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert here.source.calls == [f"received {directory}"]
    # The group's end leaves alone what was handed over; a drop does not.
    await here.transfers.answer(LeaveGroup(**OF))
    assert here.weights.calls[-2:] == ["give up unfinished", "leave"]
    await here.transfers.answer(Drop(**UPDATE))
    assert here.weights.calls[-1] == "give up written"
    await here.transfers.close()


async def test_no_part_is_read_again_that_the_engine_has_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (content, in_place):
        monkeypatch.setattr(module, "PART_BYTES", 8)
    read: list[int] = []

    def digests(file: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        read.extend(begin for begin, _ in ranges)
        return part_digests(file, ranges)

    here = Here(tmp_path)
    await here.opened()
    # The tensors have 28 bytes behind the room of the header. Another update before has left no digests.
    here.weights.digested = [ALIGNMENT + 8]
    await here.send()
    await here.transfers.answer(Drop(**UPDATE))
    await here.transfers.answer(Begin(**{**UPDATE, "update": 2}, live_s=60.0))
    here.weights.digested = [ALIGNMENT, ALIGNMENT + 16]
    sent = UpdateInfo(fields=INFO)
    await here.transfers.answer(ReceiveInPlace(**{**UPDATE, "update": 2}, info=sent))
    monkeypatch.setattr(content, "part_digests", digests)
    received = await here.transfers.answer(Finish(**{**UPDATE, "update": 2}))
    assert isinstance(received, Received)
    assert [at for at in read if at >= ALIGNMENT] == [ALIGNMENT + 8, ALIGNMENT + 24]
    # The directory that was dropped may be there still.
    directory = Path(here.source.calls[-1].removeprefix("received "))
    assert received.content == directory_content(directory, (CONFIG_FILE, WEIGHTS_FILE))
    await here.transfers.close()


@pytest.mark.parametrize("finite", [(True, True), (True, False), (False, True)])
async def test_numbers_are_looked_at_again_unless_the_engine_saw_that_all_are_finite(
    tmp_path: Path, finite: tuple[bool, bool]
) -> None:
    here = Here(tmp_path)
    await here.opened()
    for at, here.weights.finite in enumerate(finite):
        await here.send({field: values[at : at + 1] for field, values in INFO.items() if field != "more"})
    await here.transfers.answer(Finish(**UPDATE))
    [directory] = here.directories
    assert made_finite(directory) == all(finite)
    # The next update begins without what was seen of this one.
    here.weights.finite = True
    await here.transfers.answer(Begin(**{**UPDATE, "update": 2}, live_s=60.0))
    sent = UpdateInfo(fields=INFO)
    await here.transfers.answer(ReceiveInPlace(**{**UPDATE, "update": 2}, info=sent))
    await here.transfers.answer(Finish(**{**UPDATE, "update": 2}))
    [newer] = set(here.directories) - {directory}
    assert made_finite(newer)


async def test_the_file_is_digested_while_the_engine_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tmp_path)
    await here.opened()
    await here.send()
    here.weights.blocked = "finish"
    close = UpdateFiles.close

    async def closed(self: UpdateFiles, header: bytes, size: int, parts: Mapping[int, bytes]) -> Content:
        content = await close(self, header, size, parts)
        here.weights.goes_on.set()
        return content

    monkeypatch.setattr(UpdateFiles, "close", closed)
    received = await here.transfers.answer(Finish(**UPDATE))
    assert isinstance(received, Received)
    assert received.content
    assert here.weights.calls[-2:] == ["finish", "written"]
    await here.transfers.close()


async def test_a_file_that_cannot_be_completed_gives_the_engine_up_that_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tmp_path)
    await here.opened()
    await here.send()
    here.weights.blocked = "finish"

    async def full(self: UpdateFiles, header: bytes, size: int, parts: object) -> Content:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(UpdateFiles, "close", full)
    with pytest.raises(ReplicaUnavailable, match="No space left"):
        await here.transfers.answer(Finish(**UPDATE))
    assert "written" not in here.weights.calls
    assert "give up" in here.weights.calls
    await here.transfers.close()


async def test_an_engine_that_waits_for_another_name_holds_what_was_written(tmp_path: Path) -> None:
    here = Here(tmp_path)
    received = await here.whole()
    assert await here.transfers.answer(Finish(**UPDATE)) == received
    assert here.weights.calls == ["join", "hold", "write", "finish", "written"]
    await here.transfers.close()


@pytest.mark.parametrize(
    ("info", "param"),
    [
        ({**INFO, "names": ["b", "x"]}, "update_info.names"),
        ({**INFO, "shapes": [[4], [3, 2]]}, "update_info.shapes"),
        ({**INFO, "dtype_names": ["uint8", "float16"]}, "update_info.dtype_names"),
        ({**INFO, "names": 7}, "update_info"),
        ({"names": ["a"]}, "update_info.dtype_names"),
        ({**INFO, "num_updates_list": [1, 1]}, "update_info.num_updates_list"),
        ([INFO, {**INFO, "names": ["a", "b"]}], "update_info"),
    ],
)
async def test_tensors_that_do_not_fit_are_refused_by_name_before_the_engine_hears_of_them(
    tmp_path: Path, info: Any, param: str
) -> None:
    here = Here(tmp_path)
    await here.opened()
    with pytest.raises(InvalidRequest) as caught:
        await here.send(info)
    assert caught.value.param == param
    assert here.weights.calls == ["join"]
    with pytest.raises(InvalidRequest, match="were not sent"):
        await here.transfers.answer(Finish(**UPDATE))
    await here.transfers.close()


def test_what_is_said_to_every_rank_alike_is_one_update() -> None:
    assert tensors_of(UpdateInfo(fields=[INFO, {**INFO, "more": 2}])).names == ("b", "a")


async def test_an_update_that_is_dropped_gives_the_engine_up_and_leaves_no_file(tmp_path: Path) -> None:
    here = Here(tmp_path)
    await here.opened()
    await here.transfers.answer(Drop(**UPDATE))
    assert here.weights.calls[-1] == "give up"
    with pytest.raises(Conflict):
        await here.transfers.answer(Finish(**UPDATE))
    await here.transfers.close()
    await until_none(lambda: here.directories)


async def test_the_engine_computes_until_the_first_tensor_comes_and_stands_still_once(tmp_path: Path) -> None:
    here = Here(tmp_path)
    await here.opened()
    assert here.weights.calls == ["join"]
    for name in ("b", "a"):
        at = INFO["names"].index(name)
        await here.send({field: [INFO[field][at]] for field in ("names", "dtype_names", "shapes")})
    assert here.weights.calls == ["join", "hold", "write", "write"]
    await here.transfers.answer(Begin(**{**OF, "update": 2}, live_s=60.0))
    assert here.weights.calls[4:] == ["give up"]
    await here.transfers.close()


async def test_an_update_does_not_begin_over_one_that_is_not_over(tmp_path: Path) -> None:
    here = Here(tmp_path)
    await here.join()
    here.weights.fails["ready"] = TransferFailed("the weights of an update before are written")
    with pytest.raises(ReplicaUnavailable, match="an update before"):
        await here.transfers.answer(Begin(**UPDATE, live_s=60.0))
    assert here.directories == []
    await here.transfers.close()


@pytest.mark.parametrize("step", ["join", "hold", "write", "finish"])
async def test_a_step_that_fails_gives_the_engine_up(tmp_path: Path, step: str) -> None:
    here = Here(tmp_path)
    here.weights.fails[step] = TransferFailed("lost the trainer")
    with pytest.raises(ReplicaUnavailable, match="lost the trainer"):
        await here.whole()
    assert "give up unfinished" in here.weights.calls
    await here.transfers.close()
    await until_none(lambda: here.directories)


async def test_what_vllm_refuses_of_an_init_is_the_trainers(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.weights.fails["join"] = TransferRefused("no such field: x")
    with pytest.raises(InvalidRequest, match="no such field") as caught:
        await here.join()
    assert caught.value.param == "init_info"
    await here.transfers.close()


async def test_a_group_that_ends_while_the_engine_is_stopped_gives_it_up_once_it_stands(
    tmp_path: Path,
) -> None:
    here = Here(tmp_path)
    await here.opened()
    here.weights.blocked = "hold"
    sending = asyncio.create_task(here.send())
    while here.weights.calls[-1] != "hold":  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)
    here.transfers.end_group("the trainer left")
    here.weights.goes_on.set()
    with pytest.raises(ReplicaUnavailable):
        await sending
    assert here.weights.calls[-1] == "give up"
    assert "write" not in here.weights.calls
    await here.transfers.close()


async def test_a_part_that_ends_while_the_one_before_it_leaves_has_no_rank_join(tmp_path: Path) -> None:
    here = Here(tmp_path)
    await here.join()
    here.weights.blocked = "leave"
    init = InitInfo(backend="nccl", fields={})
    join = JoinInPlace(**{**OF, "group": "next"}, init=init)
    joining = asyncio.create_task(here.transfers.answer(join))
    while here.weights.calls[-1] != "leave":  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)
    leaving = asyncio.create_task(here.transfers.answer(LeaveGroup(**{**OF, "group": "next"})))
    await asyncio.sleep(0)
    here.weights.goes_on.set()
    with pytest.raises(Conflict, match="group next ended here: the group was left"):
        await joining
    await leaving
    assert here.weights.calls.count("join") == 1
    await here.transfers.close()


async def test_a_part_ends_with_the_server_of_its_ranks(tmp_path: Path) -> None:
    here = Here(tmp_path)
    await here.opened()
    here.weights.on_end("vLLM was restarted")
    await until_none(lambda: here.directories)
    await asyncio.sleep(0)
    with pytest.raises(ReplicaUnavailable, match="group g ended here: vLLM was restarted"):
        await here.send()
    assert "write" not in here.weights.calls
    await here.transfers.close()


async def test_a_trainer_is_looked_for_where_it_said_it_is(tmp_path: Path) -> None:
    here = Here(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as store:
        await here.join(master_address="127.0.0.1", master_port=store.getsockname()[1])
        assert await here.transfers.answer(Alive(**OF)) == TrainerSeen(TrainerState.ALIVE)
    assert await here.transfers.answer(Alive(**OF)) == TrainerSeen(TrainerState.GONE)
    await here.transfers.close()


async def test_what_is_silent_at_a_dead_trainers_port_does_not_keep_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "LOOK_WITHIN_S", 0.2)
    here = Here(tmp_path)
    looks: asyncio.Queue[None] = asyncio.Queue()
    here.sleep = looks.get
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = store.port
    await here.join(master_address="127.0.0.1", master_port=port)
    assert await here.transfers.answer(Alive(**OF)) == TrainerSeen(TrainerState.ALIVE)
    del store
    with socket.create_server(("127.0.0.1", port)):
        silent = await here.transfers.answer(Alive(**{**OF, "within_s": 0.2}))
        assert silent == TrainerSeen(TrainerState.UNKNOWN)
        for _ in range(transfer.UNANSWERED_LOOKS):
            looks.put_nowait(None)
        async with asyncio.timeout(60):
            while "give up unfinished" not in here.weights.calls:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.002)
    with pytest.raises(Conflict, match="group g ended here: its trainer does not answer"):
        await here.transfers.answer(Alive(**OF))
    await here.transfers.close()


async def until_none(found: Callable[[], list[Path]]) -> None:
    """Another thread removes them."""
    async with asyncio.timeout(120):
        while found():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.002)
