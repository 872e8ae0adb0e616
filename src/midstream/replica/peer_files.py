"""Gives other replicas the files of a pushed snapshot that this one has.

Always holds: what is given is a file of a snapshot that the cache knows by its content. The path of the request only selects
among those. Whatever fails after the head breaks the connection off, so no reader takes the file for whole. A file that was
opened is closed, also when the client left before it was open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from urllib.parse import unquote

from midstream.core.errors import InvalidRequest, MidstreamError, NotFound, SnapshotCorrupt
from midstream.core.transfer import FILES_PATH
from midstream.core.types import FileContent
from midstream.http.http1 import ClientConnection
from midstream.http.message import Request
from midstream.replica.exchange import TaskExchange, line_of
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.peers import etag
from midstream.snapshots.tasks import finished

log = logging.getLogger(__name__)

FILES_PREFIX = f"{FILES_PATH}/".encode()
PIECE_BYTES = 2**20
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")


class PeerFileExchange(TaskExchange):
    """HEAD or GET of one file; GET of a range of it, too."""

    def __init__(self, request: Request, client: ClientConnection, chains: ChainFetcher) -> None:
        super().__init__(request, client)
        self._chains = chains

    async def _answer(self) -> None:
        path = self._request.target.partition(b"?")[0][len(FILES_PREFIX) :].decode("latin-1")
        fingerprint, _, name = path.partition("/")
        with contextlib.ExitStack() as stack:
            # The names are compared with those that the snapshot has.
            found = await finished(self._open, stack, unquote(fingerprint), unquote(name))
            if found is None:
                raise NotFound("no snapshot with this file and this content is here")
            await self._give(*found)

    def _open(
        self, stack: contextlib.ExitStack, fingerprint: str, name: str
    ) -> tuple[int, FileContent] | None:
        """The stack closes the file: `finished` drops this result when it is cancelled."""
        found = self._chains.open_held(fingerprint, name)
        if found is not None:
            stack.callback(os.close, found[0])
        return found

    def _fail(self, error: MidstreamError) -> None:
        if not self._started:
            super()._fail(error)
            return
        # The client counts bytes: those of an event would be taken for the file's.
        log.error("%s: %s", line_of(self._request), error)
        self._client.reset()

    async def _give(self, opened: int, file: FileContent) -> None:
        asked = self._request.first.get(b"range")
        begin, end = (0, file.size) if asked is None else _range(asked.decode("latin-1"), file.size)
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(end - begin),
            "accept-ranges": "bytes",
            "etag": etag(file),
        }
        if asked is not None:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{file.size}"
        self._head(200 if asked is None else 206, headers, b"")
        while begin < end and self._request.method != b"HEAD":
            try:
                piece = await finished(_read, opened, begin, min(end, begin + PIECE_BYTES))
            except (OSError, SnapshotCorrupt) as error:
                self.cut(str(error))
                # Nothing is written any more.
                await asyncio.sleep(0)
                return
            self._client.write(piece)
            begin += len(piece)
            if not self.writable:
                await self.drained()


def _range(asked: str, size: int) -> tuple[int, int]:
    """Begin and end, in bytes. Raises InvalidRequest."""
    found = _RANGE.fullmatch(asked.strip())
    begin, last = (int(found[1]), int(found[2])) if found else (0, -1)
    if not begin <= last or begin >= size:
        raise InvalidRequest(f"Range: {asked}: of a file of {size} bytes, one range is given")
    return begin, min(last + 1, size)


def _read(opened: int, begin: int, end: int) -> bytes:
    """Raises OSError, SnapshotCorrupt."""
    piece = os.pread(opened, end - begin, begin)
    if not piece:
        raise SnapshotCorrupt("a file became shorter while it was read")
    return piece
