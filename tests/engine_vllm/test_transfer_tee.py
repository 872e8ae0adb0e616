"""What the worker extension sees of the tensors that a backend of vLLM loads, on each rank, without vLLM."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from midstream.engine.vllm.arguments import WORKER_DIR
from midstream.engine.vllm.in_place import _unlike
from midstream.snapshots.content import PART_BYTES

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
    ) -> dict[str, Any]:
        self._methods.midstream_open_tee(self, str(path), places, part_bytes)
        self.weight_transfer_engine.model.load_weights(iter(tensors.items()))
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
    assert seen == [
        {"first": first, "missing": [], "digests": digests, "parts": {}} for first in (True, False)
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
    assert seen == {"first": True, "missing": ["b"], "digests": {}, "parts": {}}
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


def test_digests_hold_few_bytes_in_memory(extension: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with fused experts, sixteen tensors per rank were more than a host may have."""
    monkeypatch.setattr(extension, "WAITING_BYTES_MAX", 10)
    go, waits, most = threading.Event(), list[int](), list[int]()
    digester = extension._Digester(4)

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
