"""What a signal calls the files of a directory."""

from __future__ import annotations

from midstream.snapshots.store.listing import find_snapshot


async def snapshot_fingerprint(url: str) -> str:
    return (await find_snapshot(url)).fingerprint
