"""Snapshots that rows publish: variants of the served checkpoint, put into the bucket and signalled.

Always holds: identities begin with a random prefix, so that no other snapshot is touched. A variant is uploaded once and
signalled again by its name, unless a new name is asked for. `leave` ends on weights equal to the checkpoint's. From one signal
on, the served snapshot is unknown until every replica is ready on it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from midstream.client.bucket import open_bucket
from midstream.client.snapshot_calls import delta_metadata
from midstream.client.status import Status, read_status
from midstream.core.wires import HOT_LOAD_PATH
from midstream.snapshots.arc2.encode import encode_delta
from midstream_conformance.answers import Json
from midstream_conformance.endpoint import Endpoint, refusal
from midstream_conformance.outcome import Failed
from midstream_conformance.variants import Variant, write_variant

POLL_S = 0.02
SOURCE_URL_HEADER = "x-fireworks-hot-load-source-url"
# The signal does not mention a policy.
UNSAID = "unsaid"
# Stages of a replica that loads nothing.
AT_REST = ("idle", "done", "error")


class Snapshots:
    def __init__(
        self, endpoint: Endpoint, bucket: str, checkpoint: Path, prefix: str, ready_s: float
    ) -> None:
        """ready_s: how long a snapshot may take to load. Raises ConfigError when `bucket` is none."""
        self._endpoint = endpoint
        self._bucket = open_bucket(bucket)
        self._checkpoint = checkpoint
        self.prefix = prefix
        self._ready_s = ready_s
        self._count = 0
        self._known: dict[Variant, str] = {}
        # The variant of every identity that was put here.
        self.variants: dict[str, Variant] = {}
        # The identity that every replica serves. None: unknown.
        self.serving: str | None = None
        # Whether a snapshot of this run ever served.
        self.loaded = False

    @property
    def checkpoint(self) -> Path:
        """The directory that all variants are made of."""
        return self._checkpoint

    def name(self) -> str:
        self._count += 1
        return f"{self.prefix}-{self._count}"

    async def serve(self, variant: Variant, policy: Any = "all", *, fresh: bool = False) -> str:
        """Until every replica serves `variant`; its identity. fresh: under a new one. Raises Failed."""
        identity = await self.ready(variant, fresh=fresh)
        await self.signal(identity, policy)
        await self.wait(identity)
        return identity

    async def update(self, variant: Variant, send: Callable[[str, str], Awaitable[str]]) -> str:
        """`serve` by a call that is answered when every replica serves; the identity, as `send(identity, url)` gives it."""
        identity = await self.ready(variant, fresh=True)
        self.serving = None
        name = await send(identity, self.url_of(identity))
        if not _settled(status := await self.status(), name):
            raise Failed(f"the call was answered before every replica served {name}: {status}")
        self.variants[name] = variant
        self.serving, self.loaded = name, True
        return name

    async def hold(self, variant: Variant) -> str:
        """As `serve`, but without a switch where `variant` serves already."""
        if self.serving is not None and self.variants.get(self.serving) == variant:
            return self.serving
        return await self.serve(variant)

    async def any(self) -> str:
        """A snapshot of ours that serves; its identity."""
        return self.serving or await self.serve("same")

    def other(self) -> Variant:
        """Of `same` and `head`, one that does not serve now."""
        return "head" if self.variants.get(self.serving or "") == "same" else "same"

    async def ready(self, variant: Variant, *, fresh: bool = False) -> str:
        """The identity under which `variant` lies in the bucket, where it is not what serves now."""
        known = self._known.get(variant)
        if known is None or fresh or known == self.serving:
            known = await self.put(lambda directory: write_variant(self._checkpoint, variant, directory))
            self._known[variant] = known
            self.variants[known] = variant
        return known

    async def put(self, fill: Callable[[Path], None]) -> str:
        """Files that `fill` writes, under a new identity; nothing is signalled."""
        identity = self.name()
        await asyncio.to_thread(self._bucket.write, identity, fill, overwrite=False)
        return identity

    async def put_changed(self, change: Callable[[Path], None]) -> str:
        """The checkpoint's own files after `change`, under a new identity."""

        def fill(directory: Path) -> None:
            write_variant(self._checkpoint, "same", directory)
            change(directory)

        return await self.put(fill)

    def url_of(self, identity: str) -> str:
        """Where the files of `identity` lie."""
        return f"{self._bucket.url.rstrip('/')}/{identity}"

    async def post_from(self, identity: str, url: str) -> httpx.Response:
        """A signal that says where the files lie."""
        return await self._send({"identity": identity}, {SOURCE_URL_HEADER: url})

    async def put_delta(
        self, parent: Variant, child: Variant, spoil: Callable[[Path], None] | None = None
    ) -> str:
        """What turns `parent` into `child`, under a new identity; `spoil` may change its directory first."""

        def fill(directory: Path) -> None:
            with tempfile.TemporaryDirectory(prefix="midstream-conformance-") as work:
                old, new, out = (Path(work) / name for name in ("parent", "child", "delta"))
                for place, variant in ((old, parent), (new, child)):
                    place.mkdir()
                    write_variant(self._checkpoint, variant, place)
                encode_delta(old, new, out, "arc_v2")
                for file in out.iterdir():
                    (directory / file.name).write_bytes(file.read_bytes())
            if spoil is not None:
                spoil(directory)

        return await self.put(fill)

    async def post(
        self, identity: str, policy: Any = "all", *, previous: str | None = None, **more: Any
    ) -> httpx.Response:
        """A signal; the response, whatever it is."""
        body: Json = {"identity": identity, **more}
        if policy != UNSAID:
            body["reset_prompt_cache"] = policy
        if previous is not None:
            body["incremental_snapshot_metadata"] = delta_metadata(previous, "arc_v2")
        return await self._send(body, {})

    async def _send(self, body: Json, headers: Mapping[str, str]) -> httpx.Response:
        before = self.serving
        if body["identity"] != before:
            self.serving = None
        response = await self._endpoint.request("POST", HOT_LOAD_PATH, body, headers)
        # A refused signal has changed nothing.
        if response.is_client_error:
            self.serving = before
        return response

    async def signal(self, identity: str, policy: Any = "all", *, previous: str | None = None) -> None:
        """Raises Failed when it is refused."""
        response = await self.post(identity, policy, previous=previous)
        if not response.is_success:
            raise Failed(f"the signal for {identity} was refused: {refusal(response)}")

    async def status(self) -> Status:
        response = await self._endpoint.request("GET", HOT_LOAD_PATH)
        if response.status_code != 200:
            raise Failed(f"GET {HOT_LOAD_PATH}: {refusal(response)}")
        try:
            return read_status(response.json())
        except ValueError as error:
            raise Failed(f"GET {HOT_LOAD_PATH}: not a list of replicas: {response.text[:200]}") from error

    async def wait(self, identity: str) -> None:
        """Until every replica is ready on `identity`. Raises Failed when one fails on it, and after `ready_s`."""
        status = await self._until(lambda now: _settled(now, identity) or now.failed(identity) is not None)
        if failed := status.failed(identity):
            raise Failed(f"{failed.name} could not load {identity}: {failed.error}")
        if not _settled(status, identity):
            raise Failed(f"{identity} was not ready after {self._ready_s:g} s: {status}")
        self.serving, self.loaded = identity, True

    async def wait_failed(self, identity: str) -> str:
        """Until a replica has failed on `identity` and none still loads; its message. Raises Failed when it serves instead."""

        def ended(now: Status) -> bool:
            return now.failed(identity) is not None and all(r.stage in AT_REST for r in now.replicas)

        status = await self._until(lambda now: now.serves(identity) or ended(now))
        failed = status.failed(identity)
        if failed is None:
            raise Failed(f"{identity} should have failed: {status}")
        if not ended(status):
            raise Failed(f"replicas still load after {self._ready_s:g} s: {status}")
        return failed.error or ""

    async def _until(self, holds: Callable[[Status], bool]) -> Status:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._ready_s
        while True:
            status = await self.status()
            if holds(status) or loop.time() >= end:
                return status
            await asyncio.sleep(POLL_S)

    async def leave(self) -> str | None:
        """Serve the checkpoint's own weights; their identity, None when nothing of ours ever served. Raises Failed."""
        if not self.loaded:
            return None
        serving = self.serving or ""
        if self.variants.get(serving) == "same" and _settled(await self.status(), serving):
            return serving
        return await self.serve("same")


def _settled(status: Status, identity: str) -> bool:
    """Whether every replica serves `identity`, and none is on its way to anything else."""
    away = (r.target not in (None, identity) and r.stage not in AT_REST for r in status.replicas)
    return status.serves(identity) and not any(away)
