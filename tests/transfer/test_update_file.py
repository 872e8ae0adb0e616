"""The file that a receiver fills: where it lies, its bytes, and the digest that is made of what lies in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.core.types import SnapshotFiles
from midstream.snapshots import content
from midstream.snapshots.store.cache import SnapshotCache
from midstream.transfer import protocol, receiver
from midstream.transfer.files import UpdateFiles
from midstream.transfer.receiver import UpdateFile
from midstream_kernels import build, prebuilt

PART = 64


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.integers(1, 3 * PART),
    sizes=st.lists(st.integers(1, 3 * PART), max_size=12),
    room=st.integers(0, 2 * PART),
    beside=st.booleans(),
)
def test_whatever_the_pieces_are_the_file_and_its_digest_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: int, sizes: list[int], room: int, beside: bool
) -> None:
    for module in (content, receiver):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(header + sum(sizes) + room))
    sent = torch.arange(sum(sizes), dtype=torch.int64).remainder(251).to(torch.uint8)
    file, at = UpdateFile(path, beside=beside), 0
    for size in sizes:
        file.write(sent[at : at + size].numpy().data, header + at)
        at += size
    digest, _ = file.close(b"h" * header, header + at)
    assert path.read_bytes() == b"h" * header + bytes(sent.numpy())
    assert digest == content.file_content(path).digest


#: As torch and safetensors name them.
DTYPES = [
    (torch.float64, "F64"),
    (torch.float32, "F32"),
    (torch.bfloat16, "BF16"),
    (torch.float16, "F16"),
    (torch.float8_e5m2, "F8_E5M2"),
    (torch.float8_e4m3fn, "F8_E4M3"),
]


@pytest.fixture
def compiled() -> None:
    """As behind the start of an engine."""
    build.load(build.SOURCE)
    if prebuilt.features() and "sha_ni" not in prebuilt.features():
        pytest.skip("the processor has no instructions for SHA-256")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("dtype", "name"), DTYPES)
@pytest.mark.parametrize("place", [0, 200, 511, None])
def test_numbers_count_as_finite_only_where_all_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled: None,
    dtype: torch.dtype,
    name: str,
    place: int | None,
    beside: bool,
) -> None:
    for module in (content, receiver):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    numbers = torch.linspace(-3.0, 3.0, 512)
    if place is not None:
        numbers[place] = float("nan")
    data = numbers.to(dtype).view(torch.uint8).numpy()
    described = {"t": {"dtype": name, "shape": [512], "data_offsets": [0, len(data)]}}
    header = json.dumps(described).encode().ljust(248)
    header = len(header).to_bytes(8, "little") + header
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(len(header) + len(data)))
    file = UpdateFile(path, beside=beside)
    file.write(data.data, len(header))
    _, finite = file.close(header, len(header) + len(data))
    # The second look is for what the words of the file do not show.
    assert finite == (place is None and name in {"F32", "BF16", "F16"})


def test_a_piece_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    file = UpdateFile(path, beside=False)
    with pytest.raises(OSError, match="Invalid argument"):
        file.write(memoryview(bytes(10)), -5)
    file.forget()


class FakeGloo:
    """Broadcasts whose bytes are there from the start, as they may be while the one before is not read yet."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened
        self._count = 0

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> SimpleNamespace:
        self._count += 1
        name = f"piece {self._count}"
        self._happened.append(f"{name} may come")
        tensors[0].fill_(self._count)
        return SimpleNamespace(wait=lambda: self._happened.append(f"{name} came"))


def test_the_next_piece_may_come_before_one_is_written_and_overwrites_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(22))
    happened: list[str] = []
    member = receiver.GroupMember()
    member._group = FakeGloo(happened)
    member.carry_out(protocol.OpenFile(1, str(path)))
    member.carry_out(protocol.ReceiveRanges(2, [(2, 22)], 8, 60.0))
    assert path.read_bytes() == b"\0" * 2 + b"\1" * 8 + b"\2" * 8 + b"\3" * 4
    assert happened == [
        "piece 1 may come",
        "piece 2 may come",
        "piece 1 came",
        "piece 3 may come",
        "piece 2 came",
        "piece 3 came",
    ]
    member.carry_out(protocol.ForgetFile(3))


@pytest.mark.skipif(sys.platform != "linux", reason="the system grants leases on Linux")
async def test_an_update_lies_in_the_file_of_a_snapshot_that_left(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    cache = SnapshotCache(tmp_path / "cache")

    files = UpdateFiles(tmp_path / "config.json", cache)
    await files.make(10)
    await files.remove()
    left = cache.whole([SnapshotFiles(snapshot="v1", url="file:///b/v1", fingerprint="f")])
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"x" * 200)
    inode = (left / "model.safetensors").stat().st_ino
    cache.drop(left)
    await files.make(100)
    found = files.weights.stat()
    assert (found.st_ino, found.st_size) == (inode, 100)
    await files.close(b"header", 90, {})
    assert files.weights.read_bytes() == b"header" + b"x" * 84
    await files.remove()
    assert [path.name for path in cache.root.iterdir()] == [".boot"]
