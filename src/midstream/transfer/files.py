"""The files of one update on their way into the snapshot cache.

Owns: a temporary directory in the cache's root, with the served model's configuration and a file for the weights.
Always holds: room is taken when the directory is made. The directory is removed, unless it was handed over. The weights are
written over the file of a snapshot that left the cache, if there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from midstream.core.errors import ReplicaUnavailable, SnapshotError
from midstream.core.types import Content, FileContent
from midstream.snapshots.content import file_content
from midstream.snapshots.layout import CONFIG_FILE, WEIGHTS_FILE
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.local import note_finite, reserve, temporary_directory
from midstream.snapshots.tasks import finished


class UpdateFiles:
    """config: the served model's configuration. cache: has room for updates."""

    def __init__(self, config: Path, cache: SnapshotCache) -> None:
        self._config = config
        self._cache = cache
        self._directory: Path | None = None

    def __repr__(self) -> str:
        return f"<UpdateFiles {self._directory}>"

    @property
    def weights(self) -> Path:
        assert self._directory is not None
        return self._directory / WEIGHTS_FILE

    async def config_content(self) -> FileContent:
        """Of the configuration beside the weights. Raises OSError."""
        return await finished(file_content, self.weights.with_name(CONFIG_FILE))

    async def note_finite(self) -> None:
        """All numbers of the weights were seen to be finite. Where that cannot be noted, they are looked at again."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                await finished(note_finite, self._directory)

    async def make(self, size: int) -> None:
        """Raises ReplicaUnavailable when there is no room."""
        directory = temporary_directory(self._cache.root)
        try:
            await finished(self._make, directory, size)
        except BaseException as error:
            self._cache.wrote(self)
            await finished(shutil.rmtree, directory, True)
            if isinstance(error, SnapshotError | OSError):
                raise ReplicaUnavailable(f"there is no room for the update: {error}") from error
            raise
        self._directory = directory

    def _make(self, directory: Path, size: int) -> None:
        directory.mkdir()
        shutil.copyfile(self._config, directory / CONFIG_FILE)
        # In a file that was in use before, memory need not be found for each page.
        spare = self._cache.take_spare(directory / WEIGHTS_FILE)
        with (directory / WEIGHTS_FILE).open("r+b" if spare else "wb") as file:
            # A full disk is found here, before the trainer sends.
            self._cache.make_room(
                size,
                (),
                "weights that a trainer sends",
                user=self,
                reserve=lambda: _reserve(file.fileno(), size),
            )
            file.truncate(size)

    async def close(self, header: bytes, size: int, parts: Mapping[int, bytes]) -> Content:
        """Complete the weights, and digest what there is. parts: digests of whole parts behind the header. Raises OSError."""
        return await self.config_content(), await finished(self._close, header, size, parts)

    def _close(self, header: bytes, size: int, parts: Mapping[int, bytes]) -> FileContent:
        with self.weights.open("r+b") as file:
            file.write(header)
            file.truncate(size)
        # The room of the header is in no part that was whole before.
        return file_content(self.weights, known=parts)

    def hand_over(self) -> Path:
        directory = self._forgotten()
        assert directory is not None
        return directory

    def drop(self) -> None:
        """Returns at once; another thread removes them."""
        directory = self._forgotten()
        if directory is not None:
            asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, directory, True)

    async def remove(self) -> None:
        """As `drop`. Returns when they are gone."""
        directory = self._forgotten()
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _forgotten(self) -> Path | None:
        directory, self._directory = self._directory, None
        self._cache.wrote(self)
        return directory


def _reserve(file: int, size: int) -> None:
    try:
        reserve(file, size)
    except OSError as error:
        raise SnapshotError(error.strerror or str(error)) from error
