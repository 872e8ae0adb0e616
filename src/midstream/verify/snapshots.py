"""The snapshots that records name, as whole files on this machine: fetched from the bucket, proved, rebuilt from deltas.

Owns: the directory that they are fetched into.
Always holds: a snapshot's files are what its manifest says, where it has one. No identity and no link leads out of the bucket.
A delta stands on the parent that its checksums prove. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from midstream.core.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotIncompatible,
    SnapshotMissing,
    SnapshotRefused,
)
from midstream.core.types import BASE_SNAPSHOT, CompressionFormat, Content
from midstream.snapshots.adapter import is_adapter
from midstream.snapshots.content import directory_content
from midstream.snapshots.identity import WHOLE_SUFFIX, check_identity, snapshot_url
from midstream.snapshots.layout import INDEX_FILE, SKYRL_MANIFEST, read_file_layout, read_json, snapshot_files
from midstream.snapshots.messages import shown
from midstream.snapshots.rebuild import rebuild
from midstream.snapshots.store.fetch import fetch_listed
from midstream.snapshots.store.listing import check_inside, list_snapshot, read_manifest
from midstream.snapshots.trainer_deltas.records import Lineage

#: Links of a chain of deltas. Servers have no longer ones than 64 links, and each is some calls deep.
CHAIN_MAX = 128
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

#: Hears what is being done.
Said = Callable[[str], None]


class BucketSnapshots:
    """scratch: an empty directory. base: the checkpoint that the deployment began with, if it is known.

    parents: of deltas, where the user names them. known: identities that may be parents of others, in the order of their use.
    """

    def __init__(
        self,
        bucket: str,
        scratch: Path,
        *,
        base: Path | None = None,
        parents: Mapping[str, str] | None = None,
        known: Sequence[str] = (),
        said: Said = lambda _: None,
    ) -> None:
        self._bucket, self._scratch, self._said = bucket, scratch, said
        self._parents, self._known = dict(parents or {}), list(known)
        self._base = base
        self._whole: dict[str, Path] = {}
        self._own: dict[str, Path] = {}
        self._refused: dict[str, SnapshotError] = {}
        self._rebuilding: list[str] = []
        #: Delta and parent, of rebuilds that failed.
        self._misfits: dict[tuple[str, str], SnapshotError] = {}
        #: Deltas that were refused while others were being rebuilt. They may stand on one of those.
        self._early: set[str] = set()
        #: Of each snapshot that was used, what the bucket has.
        self.contents: dict[str, Content] = {}
        #: Of a delta, what it stands on.
        self.stands_on: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"BucketSnapshots({sorted(self._whole)}, refused={sorted(self._refused)})"

    def whole(self, snapshot: str) -> Path:
        """Its whole files. Raises SnapshotError, the same one each time."""
        if snapshot in self._refused:
            raise self._refused[snapshot]
        if snapshot not in self._whole:
            try:
                self._whole[snapshot] = self._make(snapshot)
            except SnapshotError as error:
                self._refused[snapshot] = error
                if not self._rebuilding:
                    self._forget_early()
                raise
            self._forget_early()
        return self._whole[snapshot]

    def _forget_early(self) -> None:
        for name in self._early:
            self._refused.pop(name, None)
        self._early.clear()

    def refused(self, snapshot: str) -> SnapshotError | None:
        """Why it cannot be used."""
        try:
            self.whole(snapshot)
        except SnapshotError as error:
            return error
        return None

    def is_adapter(self, snapshot: str) -> bool:
        return is_adapter(self.whole(snapshot))

    def _make(self, snapshot: str) -> Path:
        if snapshot == BASE_SNAPSHOT and self._base is not None:
            names = snapshot_files(path.name for path in self._base.iterdir())
            self.contents[snapshot] = directory_content(self._base, names)
            return self._base
        if snapshot == BASE_SNAPSHOT:
            raise SnapshotMissing("base: name the checkpoint that the deployment began with: --base DIR")
        own = self._fetched(snapshot)
        compression = delta_format(own)
        return own if compression is None else self._rebuilt(snapshot, own, compression)

    def _fetched(self, snapshot: str) -> Path:
        """What its directory in the bucket has."""
        if snapshot not in self._own:
            self._said(f"fetching {shown(snapshot)}")
            dest = self._scratch / hashlib.sha256(snapshot.encode()).hexdigest()[:32]
            asyncio.run(self._fetch(snapshot, dest))
            names = snapshot_files(path.name for path in dest.iterdir())
            self.contents[snapshot] = directory_content(dest, names)
            self._own[snapshot] = dest
        return self._own[snapshot]

    async def _fetch(self, snapshot: str, dest: Path) -> None:
        try:
            check_identity(snapshot)
        except SnapshotRefused as error:
            raise SnapshotMissing(str(error)) from error
        url = snapshot_url(self._bucket, snapshot)
        await asyncio.to_thread(check_inside, url, self._bucket)
        listing = await list_snapshot(url)
        await fetch_listed(listing, dest, content=await read_manifest(listing))

    def _rebuilt(self, snapshot: str, delta: Path, compression: CompressionFormat) -> Path:
        if snapshot in self._rebuilding or len(self._rebuilding) > CHAIN_MAX:
            raise SnapshotIncompatible(f"{shown(snapshot)}: its parents stand on it, or are too many")
        if not snapshot.endswith(WHOLE_SUFFIX) and self.refused(snapshot + WHOLE_SUFFIX) is None:
            return self.whole(snapshot + WHOLE_SUFFIX)
        self._rebuilding.append(snapshot)
        try:
            known = -1
            # What was refused before others became whole may stand on one of them.
            while known < len(self._whole):
                known = len(self._whole)
                for parent in self._candidates(snapshot):
                    if (snapshot, parent) in self._misfits or self.refused(parent) is not None:
                        continue
                    out = self._on(parent, snapshot, delta, compression)
                    if out is not None:
                        return out
        finally:
            self._rebuilding.pop()
        if self._rebuilding:
            self._early.add(snapshot)
        refused = [error for (delta_of, _), error in self._misfits.items() if delta_of == snapshot]
        why = f" ({refused[-1]})" if refused else ""
        raise SnapshotMissing(
            f"{shown(snapshot)}: is a delta, and stands on none of the snapshots known here; name its parent: "
            f"--parent {shown(snapshot)}=IDENTITY{why}"
        )

    def _on(self, parent: str, snapshot: str, delta: Path, compression: CompressionFormat) -> Path | None:
        """The snapshot's whole files; None if it does not stand on `parent`."""
        self._said(f"rebuilding {shown(snapshot)} on {shown(parent)}")
        out = self._scratch / f"{delta.name}-whole"
        try:
            lineage = Lineage(parent.rpartition("/")[2], snapshot.rpartition("/")[2])
            rebuild(self.whole(parent), delta, out, compression, lineage=lineage)
        except (SnapshotCorrupt, SnapshotIncompatible, SnapshotMissing) as error:
            shutil.rmtree(out, ignore_errors=True)
            self._misfits[snapshot, parent] = error
            return None
        self.stands_on[snapshot] = parent
        return out

    def _candidates(self, snapshot: str) -> Iterator[str]:
        """What a delta may stand on, the likeliest first: what served before it."""
        if snapshot in self._parents:
            yield self._parents[snapshot]
            return
        at = self._known.index(snapshot) if snapshot in self._known else len(self._known)
        before, after = self._known[:at][::-1], self._known[at + 1 :]
        yield from (one for one in (*before, *after) if one not in (*self._rebuilding, BASE_SNAPSHOT))


def delta_format(directory: Path) -> CompressionFormat | None:
    """The format of the delta in it; None if these are whole files. Raises SnapshotError."""
    if (directory / SKYRL_MANIFEST).exists() and not (directory / INDEX_FILE).exists():
        return "skyrl_delta"
    if (directory / INDEX_FILE).exists():
        metadata = read_json(directory, INDEX_FILE).get("metadata")
        if isinstance(metadata, dict) and "delta_encoding" in metadata:
            return "miles_delta"
    for path in sorted(directory.glob("*.safetensors")):
        layout = read_file_layout(path, gaps=True)
        blobs = [spec for spec in layout.tensors.values() if spec.dtype == "U8" and len(spec.shape) == 1]
        if len(blobs) < len(layout.tensors) or not set(layout.tensors) <= set(layout.metadata):
            return None
        for begin, end in layout.ranges.values():
            if end > begin:
                with path.open("rb") as file:
                    file.seek(begin)
                    return "arc_v2" if file.read(len(ZSTD_MAGIC)) == ZSTD_MAGIC else "arc_v1"
    return None
