"""From a trainer's broadcast to what a replica serves: a real receiver, a real cache and bucket, and an engine that is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gloo_trainer import gloo_trainer
from replica_fakes import FakeEngine, make_replica
from safetensors.torch import load_file, save_file

from midstream.core.transfer import Begin, Check, Finish, Join, Keep, LeaveGroup, Receive, Received
from midstream.core.types import Desired
from midstream.replica.replica import Replica
from midstream.replica.swap import source as source_module
from midstream.replica.swap.source import CachedSource
from midstream.snapshots.content import content_fingerprint, directory_content
from midstream.snapshots.layout import CONFIG_FILE, WEIGHTS_FILE, read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.transfer.process import GlooReceiver
from midstream_kernels import build, prebuilt

pytestmark = pytest.mark.slow

SOON_S = 60.0


def replica_of(base: Path, directory: Path) -> Replica:
    cache = SnapshotCache(directory / "cache")
    spec = read_spec(base)
    source: Any = CachedSource(ChainFetcher(cache, threads=1), spec)
    (directory / "texts").mkdir()
    replica = make_replica(directory / "texts", FakeEngine(), source)
    replica.transfers.receivers = lambda: GlooReceiver(spec, base, cache)
    return replica


async def pushed(replica: Replica, file: Path) -> Received:
    """A whole update by a group of its own, which is left behind it."""
    named = {"group": "g", "boot": replica.boot, "within_s": SOON_S}
    answer = replica.transfers.answer
    async with gloo_trainer(file) as trainer:
        await answer(Join(rendezvous=trainer.rendezvous, **named))
        sent = trainer.sent(trainer.names)
        await answer(Begin(update=1, live_s=10 * SOON_S, **named))
        await answer(Check(update=1, sent=sent, **named))
        trainer.send(trainer.names)
        await answer(Receive(update=1, sent=sent, **named))
        received = await answer(Finish(update=1, **named))
        await answer(LeaveGroup(**named))
    assert isinstance(received, Received)
    return received


def desired_of(received: Received, bucket: Path) -> Desired:
    """The bucket is not there yet."""
    return Desired(
        snapshot="push-1",
        generation=1,
        url=f"file://{bucket}/push-1",
        fingerprint=content_fingerprint(received.content),
        content=received.content,
    )


async def serves_push(replica: Replica) -> None:
    async with asyncio.timeout(SOON_S):
        while replica.report().own.snapshot != "push-1":
            assert replica.own.driver.machine.error is None
            await replica.changed(1.0)


async def test_what_was_pushed_is_loaded_from_here_and_then_kept(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    base, newer = tiny_model(layers=1, hidden=64), tiny_model(layers=1, hidden=64, seed=1)
    bucket = tmp_path / "bucket"

    replica = replica_of(base, tmp_path)
    await replica.start()
    received = await pushed(replica, newer / WEIGHTS_FILE)
    replica.desire(desired_of(received, bucket))
    await serves_push(replica)
    bucket.mkdir()
    kept = Keep(
        group="g",
        boot="",
        within_s=SOON_S,
        snapshot="push-1",
        bucket=f"file://{bucket}",
        content=received.content,
    )
    await replica.transfers.answer(kept)
    assert directory_content(bucket / "push-1", [CONFIG_FILE, WEIGHTS_FILE]) == received.content
    await replica.close()


@pytest.fixture
def compiled() -> None:
    """As behind the start of an engine."""
    build.load(build.SOURCE)
    if prebuilt.features() and "sha_ni" not in prebuilt.features():
        pytest.skip("the processor has no instructions for SHA-256")


def spoilt(weights: Path, directory: Path, number: float) -> tuple[Path, str]:
    """The same weights, but for the last number of one tensor; and what names it."""
    tensors = load_file(weights)
    name = sorted(name for name, tensor in tensors.items() if tensor.dim() == 2)[-1]
    tensors[name].view(-1)[-1] = number
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS_FILE)
    index = [size - 1 for size in tensors[name].shape]
    return (
        directory / WEIGHTS_FILE,
        f"tensor {name} is {'NaN' if number != number else '-infinity'} at index {index}",
    )


@pytest.mark.parametrize(
    ("dtype", "number"), [("float32", float("nan")), ("bfloat16", float("-inf")), ("float16", float("nan"))]
)
async def test_a_pushed_number_that_is_not_finite_is_named_and_never_serves(
    tmp_path: Path, tiny_model: Callable[..., Path], compiled: None, dtype: str, number: float
) -> None:
    base = tiny_model(layers=1, hidden=64, dtype=dtype)
    file, named = spoilt(base / WEIGHTS_FILE, tmp_path / "bad", number)

    replica = replica_of(base, tmp_path)
    await replica.start()
    received = await pushed(replica, file)
    replica.desire(desired_of(received, tmp_path / "bucket"))
    machine = replica.own.driver.machine
    async with asyncio.timeout(SOON_S):
        while machine.error is None:
            await replica.changed(1.0)
    assert machine.error.startswith(named)
    assert replica.report().own.snapshot != "push-1"
    await replica.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_pushed_numbers_are_seen_as_they_are_digested_and_not_read_again(
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    compiled: None,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    base, newer = (tiny_model(layers=1, hidden=64, dtype=dtype, seed=seed) for seed in (0, 1))
    read: list[Path] = []
    monkeypatch.setattr(source_module, "check_finite", lambda path, *_, **__: read.append(path))

    replica = replica_of(base, tmp_path)
    await replica.start()
    received = await pushed(replica, newer / WEIGHTS_FILE)
    replica.desire(desired_of(received, tmp_path / "bucket"))
    await serves_push(replica)
    assert read == []
    # The files lay in the cache meanwhile.
    source = replica.own.driver._files.source
    desired = desired_of(received, tmp_path / "bucket")
    path = await source.fetch(desired)
    assert path is not None
    await source.verify(path, desired)
    assert read == [path]
    await replica.close()
