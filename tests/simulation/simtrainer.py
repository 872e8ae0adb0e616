"""The trainer of a simulated history: it uploads snapshots, whole, as deltas or torn, tells of files early, and signals them.

Always holds: what may be served is in `oracle.weights` before its signal is sent. The name of a snapshot that is torn for good
is not, nor that of one with a number that is not finite: an answer that has it is wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from simbucket import Bucket
from simclient import Answer, Broken, Oracle, Signal, Wrong, exchange
from simengine import weights_of

from midstream.snapshots.content import MANIFEST_FILE, combined, encode_manifest, parse_manifest
from midstream.snapshots.identity import WHOLE_SUFFIX

HOT_LOAD = "/hot_load/v1/models/hot_load"
LEDGER = "/v1/accounts/local/deployments/default/ledger"
#: Of one upload, in seconds.
UPLOAD_S = 0.05

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Weights:
    """What a trainer may publish. variants: whole checkpoints. deltas: by the numbers of parent and child.

    adapters: LoRA adapters of the base weights. adapter_deltas: as deltas.
    """

    variants: list[Files]
    deltas: dict[tuple[int, int], Files]
    adapters: list[Files] = field(default_factory=list)
    adapter_deltas: dict[tuple[int, int], Files] = field(default_factory=dict)


@dataclass
class Parent:
    """What a delta may be made against: the newest snapshot whose signal was acknowledged."""

    snapshot: str
    variant: int


def not_finite(files: Files) -> dict[str, bytes]:
    """The same snapshot, published as its trainer has it, but with a NaN for its last number. It is of float32."""
    (weights,) = [name for name in files if name.endswith(".safetensors")]
    bad = files[weights][:-4] + struct.pack("<f", math.nan)
    found = parse_manifest(files[MANIFEST_FILE])
    digest = combined([hashlib.sha256(bad).digest()])
    content = tuple(replace(file, digest=digest) if file.name == weights else file for file in found)
    return {**files, weights: bad, MANIFEST_FILE: encode_manifest(content)}


class Trainer:
    """url: of the bucket. say, count: for the history's log and its figures."""

    def __init__(
        self,
        port: int,
        bucket: Bucket,
        url: str,
        weights: Weights,
        oracle: Oracle,
        rng: random.Random,
        say: Callable[[str], None],
        count: Callable[[str], None],
    ) -> None:
        self._port, self._bucket, self._url = port, bucket, url
        self._weights, self._oracle, self._rng = weights, oracle, rng
        self._say, self._count = say, count
        self._named = 0
        #: Of its snapshots' names; and what each of its signals says.
        self.prefix = "s"
        self.body: dict[str, Any] = {}
        self._parent: Parent | None = None
        #: Snapshots that were signalled, the newest last; none of them torn for good.
        self.signalled: list[str] = []

    async def signal(self, value: dict[str, Any]) -> None:
        """value: number of the weights, KV policy, form, and whether the newest snapshot is signalled again."""
        policy = value["policy"]
        if value["again"] and self.signalled:
            await self._ask_for({"identity": self.signalled[-1]}, policy)
            return
        number = value["weights"]
        parent = self._parent
        delta = None if parent is None else self._weights.deltas.get((parent.variant, number))
        match value["form"]:
            case "delta" if delta is not None and parent is not None:
                await self._publish_delta(number, delta, parent, policy)
            case "torn":
                await self._publish_torn(number, policy)
            case "late":
                await self._publish_late(number, policy)
            case form:
                await self.publish_full(number, policy, hinted=form == "hinted")

    async def publish_full(self, number: int, policy: Any, *, hinted: bool = False) -> str | None:
        """Its name, once its signal is acknowledged; None when that was refused."""
        name = self._new_name(number)
        await self._upload(name, self._weights.variants[number], hinted=hinted)
        return name if await self._publish(name, number, policy) else None

    async def forget(self) -> bool:
        """Delete the ledger: the base weights serve again."""
        self._oracle.forget()
        self._parent = None
        for _ in range(20):
            try:
                answer = await exchange(self._port, "DELETE", LEDGER)
            except Broken as error:
                self._say(f"forget: {error}")
            else:
                self._say(f"forget: {answer.status}")
                if answer.status < 500:
                    self._count(f"forget: {answer.status}")
                    return answer.status == 200
            await asyncio.sleep(0.3)
        return False

    def check_rebases(self) -> None:
        """The whole files that replicas wrote beside a delta are those that the delta is for."""
        objects = self._bucket.objects
        for manifest in [url for url in objects if url.endswith(f"{WHOLE_SUFFIX}/{MANIFEST_FILE}")]:
            place = manifest.removesuffix(MANIFEST_FILE)
            name = place.removesuffix(f"{WHOLE_SUFFIX}/").rpartition("/")[2]
            files = ((url, there.data) for url, there in objects.items() if url.startswith(place))
            if weights_of(files) != self._oracle.weights[name]:
                raise Wrong(f"the whole files of {name} are others than it has")
            self._count("end: rebased")

    # -- how a snapshot is published

    async def _publish_delta(self, number: int, files: Files, parent: Parent, policy: Any) -> None:
        name = self._new_name(number)
        await self._upload(name, files)
        link = {"previous_snapshot_identity": parent.snapshot, "compression_format": "arc_v2"}
        if await self._publish(name, number, policy, incremental_snapshot_metadata=link):
            self._count("signal: delta")

    async def _publish_torn(self, number: int, policy: Any) -> None:
        """One of its files is missing, is cut, or has a wrong byte, and stays so. Or it is whole, and one number is NaN."""
        name, kind = self._next_name(), "torn"
        files = dict(self._weights.variants[number])
        torn = self._rng.choice(sorted(name for name in files if not name.endswith("config.json")))
        match self._rng.choice(("missing", "cut", "wrong")):
            case "missing" if torn.endswith(".safetensors"):
                del files[torn]
            case "cut":
                # A line's end at the end of a manifest says nothing.
                files[torn] = files[torn][: self._rng.randrange(len(files[torn].rstrip()))]
            case _:
                at = self._rng.randrange(len(files[torn]))
                if at % 4:
                    kind, files = "not finite", not_finite(files)
                else:
                    files[torn] = files[torn][:at] + bytes((files[torn][at] ^ 1,)) + files[torn][at + 1 :]
        await self._upload(name, files)
        taken = await self._ask_for({"identity": name}, policy)
        self._count(f"signal: {kind}, " + ("taken" if taken else "refused"))
        # What came before it can be no parent any more where the signal was taken.
        self._parent = None if taken else self._parent

    async def _publish_late(self, number: int, policy: Any) -> None:
        """The signal comes before the last file."""
        name = self._new_name(number)
        files = self._weights.variants[number]
        first = {file: data for file, data in files.items() if not file.endswith(".safetensors")}
        await self._upload(name, first)
        if not await self._ask_for({"identity": name}, policy, tries=1):
            self._count("signal: late, refused")
        await self._upload(name, files)
        await self._publish(name, number, policy)

    async def _publish(self, name: str, number: int, policy: Any, **more: Any) -> bool:
        self.signalled.append(name)
        taken = await self._ask_for({"identity": name, **more}, policy)
        self._parent = Parent(name, number) if taken else None
        return taken

    # -- the steps of it

    def _next_name(self) -> str:
        self._named += 1
        return f"{self.prefix}{self._named}"

    def _new_name(self, number: int) -> str:
        name = self._next_name()
        self._oracle.weights[name] = weights_of(self._weights.variants[number].items())
        return name

    async def _upload(self, name: str, files: Files, *, hinted: bool = False) -> None:
        clock = asyncio.get_running_loop().time
        for file, data in files.items():
            self._bucket.put(f"{self._url}/{name}/{file}", data, clock())
            await asyncio.sleep(self._rng.random() * UPLOAD_S)
            if hinted and file != MANIFEST_FILE:
                await self._hint(name, file)

    async def _hint(self, name: str, file: str) -> None:
        try:
            answer = await exchange(
                self._port, "POST", HOT_LOAD + "/hint", {"identity": name, "files": [file]}
            )
        except Broken as error:
            self._say(f"hint {name}/{file}: {error}")
        else:
            self._count(f"hint: {answer.status}")
            if answer.status not in (202, 503):
                raise Wrong(f"a hint for a file that is there: {answer}")

    async def _ask_for(self, body: dict[str, Any], policy: Any, tries: int = 20) -> bool:
        """Until it is acknowledged, or refused for good."""
        name = body["identity"]
        body = {**self.body, **body}
        self._oracle.signals_begin(name)
        if policy is not None:
            body = {**body, "reset_prompt_cache": policy}
        for _ in range(tries):
            try:
                answer = await exchange(self._port, "POST", HOT_LOAD, body)
            except Broken as error:
                self._lost(name)
                self._say(f"signal {name}: {error}")
            else:
                if answer.status == 200:
                    self._acknowledged(name, answer)
                    return True
                self._say(f"signal {name}: {answer.status} {answer.body[:200]!r}")
                if answer.status < 500 and answer.status not in (408, 425, 429):
                    return False
                # It may be recorded, and its answer lost.
                self._lost(name)
            await asyncio.sleep(0.3)
        return False

    def _lost(self, name: str) -> None:
        self._oracle.unsure.add(name)
        self._oracle.lost()

    def _acknowledged(self, name: str, answer: Answer) -> None:
        self._oracle.acknowledged(asyncio.get_running_loop().time())
        said = answer.json()
        self._say(f"signal {name} acknowledged: generation {said['generation']}")
        self._oracle.signals.append(
            Signal(said["generation"], name, said["reset_prompt_cache"], said["max_cache_age"])
        )
