"""One replica's end of a delta over a limited link, in a process of its own: the production code, without an engine.

Owns: a snapshot cache, which has the parent once it was asked for. Commands come as lines, and each is answered with a line of
JSON: seconds, CPU seconds, and the peak of the process's memory since it was last asked for.
Always holds: after `drop` the cache has nothing but the parent. A command that fails ends the process.

    parent    the whole files of the parent, over the link without a limit
    fetch     the files of the delta, over the limited link
    rebuild   the whole files, from the parent and the delta, with every checksum compared
    verify    names, shapes, dtypes, and that every number is finite
    bare      the rebuild alone, by the function that makes it, without cache and notes
    drop      what was made of the delta is removed

    python link_replica.py CACHE BASE LIMITED_PORT FREE_PORT
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

from limited_bucket import BUCKET, environment

from midstream.core.types import Desired, SnapshotFiles
from midstream.replica.swap.source import CachedSource
from midstream.snapshots.layout import read_spec
from midstream.snapshots.rebuild import rebuild
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.listing import list_snapshot

PARENT, CHILD = "parent", "delta"


class Replica:
    """limited, free: ports of the bucket. The stores read the environment when they are opened."""

    def __init__(self, cache: Path, base: Path, limited: int, free: int) -> None:
        self._cache = SnapshotCache(cache)
        self._source = CachedSource(ChainFetcher(self._cache), read_spec(base))
        self._limited, self._free = environment(limited), environment(free)
        self._chain: list[SnapshotFiles] = []
        self._path: Path | None = None

    async def look(self) -> None:
        os.environ.update(self._free)
        for name in (PARENT, CHILD):
            url = f"s3://{BUCKET}/{name}"
            found = (await list_snapshot(url)).fingerprint
            compression = "arc_v2" if name == CHILD else None
            self._chain.append(
                SnapshotFiles(snapshot=name, url=url, fingerprint=found, compression=compression)
            )

    async def parent(self) -> None:
        os.environ.update(self._free)
        await self._source.fetch(_desired(self._chain[:1]))
        await self._source.release([_desired(self._chain[:1])])

    async def fetch(self) -> None:
        os.environ.update(self._limited)
        found = await self._source.fetch(_desired(self._chain))
        assert found is None, "the child was in the cache already"

    async def rebuild(self) -> None:
        self._path = await self._source.rebuild(_desired(self._chain))

    async def verify(self) -> None:
        assert self._path is not None
        await self._source.verify(self._path, _desired(self._chain))

    async def bare(self) -> None:
        """After `fetch`, whose delta it reads."""
        out = self._cache.root.parent / f"{self._cache.root.name}-bare"
        parent, delta = self._cache.whole(self._chain[:1]), self._cache.delta(self._chain[-1])
        await asyncio.to_thread(rebuild, parent, delta, out, "arc_v2")

    async def drop(self) -> None:
        await self._source.release([_desired(self._chain[:1])])
        for path in (self._cache.whole(self._chain), self._cache.delta(self._chain[-1])):
            self._cache.drop(path)
        shutil.rmtree(self._cache.root.parent / f"{self._cache.root.name}-bare", ignore_errors=True)


def _desired(chain: list[SnapshotFiles]) -> Desired:
    own = chain[-1]
    return Desired(
        snapshot=own.snapshot,
        generation=len(chain),
        url=own.url,
        fingerprint=own.fingerprint,
        compression=own.compression,
        parents=tuple(chain[:-1]),
    )


def peak_bytes() -> int:
    """Of this process, mapped files among them, since this was asked last."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    return int(found[1]) * 1024 if found else 0


async def main(cache: str, base: str, limited: str, free: str) -> None:
    replica = Replica(Path(cache), Path(base), int(limited), int(free))
    await replica.look()
    print("ready", flush=True)
    # The reader of a pipe may block: nothing else runs meanwhile.
    for line in sys.stdin:
        peak_bytes()
        began, cpu = time.perf_counter(), time.process_time()
        await getattr(replica, line.strip())()
        took = {
            "wall_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
            "peak_bytes": peak_bytes(),
        }
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
