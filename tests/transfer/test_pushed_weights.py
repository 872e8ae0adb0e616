"""From a trainer's broadcast to what a replica serves: a real receiver, a real cache and bucket, and an engine that is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gloo_trainer import gloo_trainer
from replica_fakes import FakeEngine, make_replica

from midstream.core.transfer import Begin, Check, Finish, Join, Keep, LeaveGroup, Receive, Received
from midstream.core.types import Desired
from midstream.replica.replica import Replica
from midstream.replica.swap.source import CachedSource
from midstream.snapshots.content import content_fingerprint, directory_content
from midstream.snapshots.layout import CONFIG_FILE, WEIGHTS_FILE, read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.transfer.process import GlooReceiver

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


def test_what_was_pushed_is_loaded_from_here_and_then_kept(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    base, newer = tiny_model(layers=1, hidden=64), tiny_model(layers=1, hidden=64, seed=1)
    bucket = tmp_path / "bucket"

    async def main() -> None:
        replica = replica_of(base, tmp_path)
        await replica.start()
        received = await pushed(replica, newer / WEIGHTS_FILE)
        # The bucket is not there yet.
        desired = Desired(
            snapshot="push-1",
            generation=1,
            url=f"file://{bucket}/push-1",
            fingerprint=content_fingerprint(received.content),
            content=received.content,
        )
        replica.desire(desired)
        async with asyncio.timeout(SOON_S):
            while replica.report().own.snapshot != "push-1":
                assert replica.own.driver.machine.error is None
                await replica.changed(1.0)
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

    asyncio.run(main())
