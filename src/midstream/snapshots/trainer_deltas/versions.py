"""Whether the directory of a trainer's version has a delta or a whole checkpoint, as the trainers' own readers tell.

Miles and slime: a delta is what declares `delta_encoding` in the metadata of its index. An ordinary checkpoint, in one file or
with an index, is a full version. SkyRL: a delta has a `manifest.json`, and neither a configuration nor an index.

Always holds: only the listing, and an index, are read.
"""

from __future__ import annotations

import asyncio

from midstream.core.errors import SnapshotError
from midstream.core.types import TrainerFormat
from midstream.snapshots.identity import public_url
from midstream.snapshots.layout import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_JSON_BYTES,
    WEIGHTS_FILE,
    parse_object,
)
from midstream.snapshots.store.listing import FINGERPRINT_S_MAX, check_inside, list_snapshot, read_beginning


async def holds_checkpoint(url: str, bucket: str, compression: TrainerFormat) -> bool:
    """Whether a whole checkpoint is at `url`. bucket: no link may lead out of it.

    Raises SnapshotMissing when no snapshot file is there, SnapshotCorrupt, SnapshotError when the store does not answer.
    """
    try:
        async with asyncio.timeout(FINGERPRINT_S_MAX):
            await asyncio.to_thread(check_inside, url, bucket)
            listing = await list_snapshot(url)
            names = {file.name for file in listing.files}
            if compression == "skyrl_delta":
                return not names.isdisjoint((CONFIG_FILE, INDEX_FILE))
            if INDEX_FILE not in names:
                # Shards alone are a version that is still being written, or has lost its index.
                return WEIGHTS_FILE in names
            data = await read_beginning(listing, INDEX_FILE, MAX_JSON_BYTES)
            index = await asyncio.to_thread(parse_object, INDEX_FILE, data)
    except TimeoutError:
        raise SnapshotError(f"{public_url(url)}: did not answer within {FINGERPRINT_S_MAX:g} s") from None
    metadata = index.get("metadata")
    return not (isinstance(metadata, dict) and "delta_encoding" in metadata)
