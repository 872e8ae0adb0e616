"""What the worker extension sees of the tensors that a backend of vLLM loads, on each rank, without vLLM."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from midstream.engine.vllm.arguments import WORKER_DIR
from midstream.engine.vllm.in_place import _unlike
from midstream.snapshots.content import PART_BYTES
from midstream.snapshots.finite import all_finite

TENSORS = {"a": torch.arange(6, dtype=torch.float32), "b": torch.arange(4, dtype=torch.bfloat16)}
PLACES = {"a": [8, 32], "b": [0, 8]}


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    factory = ModuleType("factory")
    factory.WeightTransferEngineFactory = SimpleNamespace(register_engine=lambda *_: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", factory)
    monkeypatch.setitem(sys.modules, "midstream_vllm_worker", SimpleNamespace(Worker=object))
    file = WORKER_DIR / "midstream_vllm_transfer.py"
    spec = importlib.util.spec_from_file_location("transfer_extension", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rank:
    """A worker whose model uses the tensors in `uses` alone."""

    def __init__(self, extension: ModuleType, rank: int, ranks: int, uses: Iterable[str] = TENSORS) -> None:
        self.rank = rank
        self.parallel_config = SimpleNamespace(world_size=ranks, data_parallel_index=0, data_parallel_size=1)
        self.weight_transfer_engine = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
        self.loaded: list[str] = []
        self._uses, self._methods = set(uses), extension.TransferWorker

    def uses(self, names: Iterable[str]) -> None:
        self._uses = set(names)

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, _ in weights:
            if name in self._uses:
                self.loaded.append(name)
            if set(self.loaded) == self._uses:
                break

    def take(
        self,
        path: Path,
        tensors: dict[str, Any],
        places: dict[str, list[int]] = PLACES,
        part_bytes: int = PART_BYTES,
        sent: Iterator[tuple[str, Any]] | None = None,
    ) -> dict[str, Any]:
        self._methods.midstream_open_tee(self, str(path), places, part_bytes)
        self.weight_transfer_engine.model.load_weights(sent or iter(tensors.items()))
        seen: dict[str, Any] = self._methods.midstream_close_tee(self)
        return seen


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_the_first_rank_writes_the_file_and_every_rank_says_what_it_was_given(
    tmp_path: Path, extension: ModuleType
) -> None:
    file = tmp_path / "file"
    file.touch()
    # The second one has no use for the tensor that comes last.
    ranks = [Rank(extension, 0, 2), Rank(extension, 1, 2, uses=["a"])]
    seen = [rank.take(file if rank.rank == 0 else tmp_path / "none", TENSORS) for rank in ranks]
    assert file.read_bytes() == raw(TENSORS["b"]) + raw(TENSORS["a"])
    digests = {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in TENSORS.items()}
    # The second one has no file, whose numbers it could look at.
    assert seen == [
        {"first": first, "missing": [], "digests": digests, "parts": {}, "finite": first}
        for first in (True, False)
    ]
    assert _unlike(seen) is None
    # What is loaded otherwise passes as it is.
    ranks[0].weight_transfer_engine.model.load_weights(iter({"other": TENSORS["a"]}.items()))


def test_a_rank_that_was_given_another_byte_is_named_with_the_tensor(
    tmp_path: Path, extension: ModuleType
) -> None:
    file = tmp_path / "file"
    file.touch()
    torn = {**TENSORS, "b": TENSORS["b"] + 1}
    seen = [Rank(extension, number, 3).take(file, torn if number == 2 else TENSORS) for number in range(3)]
    assert _unlike(seen) == "in different ways: rank 2 was given other bytes of b than the first one"


def test_a_server_of_one_rank_digests_nothing_a_second_time(tmp_path: Path, extension: ModuleType) -> None:
    file = tmp_path / "file"
    file.touch()
    seen = Rank(extension, 0, 1).take(file, {"a": TENSORS["a"]})
    assert seen == {"first": True, "missing": ["b"], "digests": {}, "parts": {}, "finite": True}
    assert _unlike([seen]) == "in a way that cannot be seen: b"


@pytest.mark.parametrize("gap", [False, True])
def test_the_first_rank_digests_the_parts_of_the_file_that_are_whole(
    tmp_path: Path, extension: ModuleType, *, gap: bool
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4))
    tensors = {name: torch.arange(at, at + 10, dtype=torch.uint8) for at, name in enumerate("abc")}
    # The first byte that comes is the fifth: parts 1 to 3 of 8 bytes are whole, unless the second tensor leaves bytes out.
    places = {"a": [4, 14], "b": [14, 24], "c": [24, 34]}
    if gap:
        places |= {"b": [15, 25], "c": [25, 35]}
    seen = Rank(extension, 0, 1).take(file, tensors, places, 8)
    data = file.read_bytes()
    whole = [] if gap else [8, 16, 24]
    assert seen["parts"] == {str(at): hashlib.sha256(data[at : at + 8]).hexdigest() for at in whole}
    assert seen["missing"] == []


DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F64": torch.float64,
    "I16": torch.int16,
    "U8": torch.uint8,
}


@pytest.mark.parametrize("name", DTYPES)
def test_what_the_first_rank_says_of_finite_numbers_is_what_a_reader_of_the_file_says(
    extension: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "_LOOK_BYTES", 64)
    dtype = DTYPES[name]
    rng = torch.Generator().manual_seed(7)
    bits = torch.randint(0, 256, (dtype.itemsize * 100,), dtype=torch.uint8, generator=rng)
    finite = torch.linspace(-3.0, 3.0, 100).to(dtype)
    wrong = [float("nan"), float("inf"), float("-inf")] if dtype.is_floating_point else []
    spoilt = []
    for number in wrong:
        for place in (0, 50, 99):
            one = finite.clone()
            one[place] = number
            spoilt.append(one)
    seen = [extension._is_finite(one) for one in (finite, bits.view(dtype), *spoilt)]
    read = [all_finite(name, one.view(torch.uint8).numpy()) for one in (finite, bits.view(dtype), *spoilt)]
    # A dtype that it does not know is left to the reader.
    assert seen == (read if dtype is not torch.float64 else [False] * len(read))


def test_a_number_that_is_not_finite_is_seen_in_any_tensor(tmp_path: Path, extension: ModuleType) -> None:
    file = tmp_path / "file"
    file.touch()
    for name, tensor in TENSORS.items():
        bad = tensor.clone()
        bad[-1] = float("nan")
        assert not Rank(extension, 0, 1).take(file, {**TENSORS, name: bad})["finite"]
    assert Rank(extension, 0, 1).take(file, TENSORS)["finite"]


@pytest.mark.parametrize("own", [False, True])
def test_what_a_backend_writes_into_memory_that_it_uses_again_does_not_come_into_the_file(
    tmp_path: Path, extension: ModuleType, *, own: bool
) -> None:
    """own: the backend says that it gives each tensor memory of its own."""
    file = tmp_path / "file"
    file.touch()
    rank = Rank(extension, 0, 1)
    rank.weight_transfer_engine.own_memory = own
    memory = torch.empty(8, dtype=torch.uint8)

    def sent() -> Iterator[tuple[str, torch.Tensor]]:
        for number, name in enumerate("abc"):
            target = torch.empty(8, dtype=torch.uint8) if own else memory
            yield name, target.fill_(number + 1)

    places = {name: [at * 8, at * 8 + 8] for at, name in enumerate("abc")}
    rank.uses(places)
    seen = rank.take(file, dict.fromkeys(places), places, 8, sent())
    assert file.read_bytes() == bytes([1] * 8 + [2] * 8 + [3] * 8)
    data = [bytes([number] * 8) for number in (1, 2, 3)]
    assert seen["parts"] == {str(at * 8): hashlib.sha256(one).hexdigest() for at, one in enumerate(data)}


def test_tensors_that_are_written_in_any_order_make_whole_parts(
    tmp_path: Path, extension: ModuleType
) -> None:
    file = tmp_path / "file"
    file.touch()
    threads = extension._Threads(1)
    tee = extension._TeeFile(str(file), 8, threads)
    data = bytes(range(40))
    tee.begin(4)
    # Without bytes, between the first two.
    for begin, end in ((20, 40), (12, 12), (4, 12), (12, 20)):
        tee.begin(begin)
        tee.write(memoryview(data)[begin:end], begin)
    digests = tee.digests()
    threads.close()
    tee.close()
    assert file.read_bytes()[4:] == data[4:]
    assert digests == {str(at): hashlib.sha256(data[at : at + 8]).hexdigest() for at in (8, 16, 24, 32)}


def test_a_tensor_that_cannot_be_written_fails_the_update(tmp_path: Path, extension: ModuleType) -> None:
    file = tmp_path / "file"
    file.touch()
    rank = Rank(extension, 0, 1)
    rank.weight_transfer_engine.own_memory = True
    with pytest.raises(OSError, match="No space left"):
        rank.take(Path("/dev/full"), TENSORS)
    assert rank.take(file, TENSORS)["missing"] == []


def test_digests_hold_few_bytes_in_memory(extension: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with fused experts, sixteen tensors per rank were more than a host may have."""
    monkeypatch.setattr(extension, "WAITING_BYTES_MAX", 10)
    go, waits, most = threading.Event(), list[int](), list[int]()
    digester = extension._Threads(4)

    class Room(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(digester._waiting)
            go.set()
            return super().wait(timeout)

    def slow(number: int) -> str:
        went = go.wait(60)
        most.append(digester._waiting)
        return f"{number} {went}"

    digester._moved = Room()
    futures = [digester.submit(size, slow, number) for number, size in enumerate((4, 6, 1, 11))]
    # The last one is larger than all that may wait, and waits alone.
    assert [future.result() for future in futures] == [f"{number} True" for number in range(4)]
    assert waits[0] == 10
    assert max(most[:-1]) <= 10
    assert most[-1] == 11
    digester.close()
