"""A bucket in memory, with obstore's calls as midstream uses them; slow, torn or wrong when the weather is bad."""

from __future__ import annotations

import asyncio
import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from obstore.exceptions import GenericError, PreconditionError


@dataclass
class Trouble:
    """What its calls meet: the share that fails, the share whose bytes are wrong, and the most that one takes."""

    fails: float = 0.0
    wrong: float = 0.0
    seconds: float = 0.02


@dataclass(frozen=True)
class Object:
    data: bytes
    etag: str
    at: float


class Bucket:
    """clock: seconds, for what comes from the server."""

    def __init__(self, rng: random.Random, clock: Callable[[], float]) -> None:
        self._rng, self.clock = rng, clock
        self.trouble = Trouble()
        #: By URL.
        self.objects: dict[str, Object] = {}
        self._versions = 0

    def put(self, url: str, data: bytes, now: float) -> None:
        self._versions += 1
        self.objects[url] = Object(data, f'"{self._versions}"', now)

    def open(self, url: str) -> Store:
        return Store(self, url.rstrip("/") + "/")

    async def answer(self) -> None:
        await asyncio.sleep(self._rng.random() * self.trouble.seconds)
        self.check()

    def check(self) -> None:
        """Raises GenericError when the bucket is out of order."""
        if self._rng.random() < self.trouble.fails:
            raise GenericError("Generic S3 error: the bucket is out of order")

    def delivered(self, data: bytes) -> bytes:
        if data and self._rng.random() < self.trouble.wrong:
            at = self._rng.randrange(len(data))
            return data[:at] + bytes((data[at] ^ 0x40,)) + data[at + 1 :]
        return data


class Store:
    """prefix: the URL of the directory."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix

    async def list_with_delimiter_async(self) -> dict[str, Any]:
        await self._bucket.answer()
        names = [
            url.removeprefix(self._prefix)
            for url in sorted(self._bucket.objects)
            if url.startswith(self._prefix)
        ]
        return {"objects": [self._meta(name) for name in names if "/" not in name]}

    async def head_async(self, name: str) -> dict[str, Any]:
        await self._bucket.answer()
        return self._meta(name)

    def head(self, name: str) -> dict[str, Any]:
        return self._meta(name)

    def put(self, name: str, data: Path | bytes, **_: Any) -> None:
        """The write is done, or its answer is lost, or nothing happens."""
        self._bucket.check()
        whole = data.read_bytes() if isinstance(data, Path) else bytes(data)
        self._bucket.put(self._prefix + name, whole, self._bucket.clock())
        self._bucket.check()

    async def get_async(self, name: str, *, options: dict[str, Any] | None = None) -> Any:
        await self._bucket.answer()
        there = self._object(name)
        options = options or {}
        if options.get("if_match") not in (None, there.etag):
            raise PreconditionError("the object has another entity tag")
        start, end = options.get("range") or (0, len(there.data))

        async def read() -> bytes:
            await self._bucket.answer()
            return self._bucket.delivered(there.data[start:end])

        return SimpleNamespace(meta=self._meta(name), bytes_async=read)

    async def get_range_async(self, name: str, *, start: int, end: int) -> bytes:
        await self._bucket.answer()
        return self._bucket.delivered(self._object(name).data[start:end])

    def _object(self, name: str) -> Object:
        found = self._bucket.objects.get(self._prefix + name)
        if found is None:
            raise FileNotFoundError(name)
        return found

    def _meta(self, name: str) -> dict[str, Any]:
        there = self._object(name)
        at = datetime.datetime.fromtimestamp(1_700_000_000 + there.at, datetime.UTC)
        return {"path": name, "size": len(there.data), "e_tag": there.etag, "last_modified": at}
