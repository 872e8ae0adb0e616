"""Policies in a vLLM server: LoRA adapters, each loaded under a name that is never used twice.

Owns: of each policy the version that serves and the one that is to; the files of each version; the count of versions that
requests may run under.
Always holds:
- New requests of a version name what no version before it was named. So they find no KV of another adapter.
- The base may be switched under all versions. Then each begins an epoch, and its labels name both.
- A request ends under the name that it began with. The adapter of that name changes in a pause alone, with its epoch.
- Requests run under no more versions than vLLM computes in one step (--max-loras), so none waits for another one's adapter.
- The files of a version stay until no request runs under it: vLLM may read them again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.core.errors import SnapshotError
from midstream.core.types import SwapTiming
from midstream.engine.base import Slot, StagingFailed
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.labels import AdapterEpochs, Epochs
from midstream.engine.servers.requests import ServedWeights
from midstream.engine.vllm.swap import Control
from midstream.http.call import CallFailed
from midstream.snapshots.adapter import ADAPTER_FILES, AdapterSpec, read_adapter
from midstream.snapshots.layout import CheckpointSpec
from midstream.snapshots.messages import shown
from midstream.snapshots.store.cache import POLICIES
from midstream.snapshots.tasks import finished

logger = logging.getLogger(__name__)

#: In the replica's cache directory. The snapshot cache leaves it alone, and removes it when a replica begins.
FOLDER = f"{POLICIES}-vllm"


@dataclass(eq=False)
class Version:
    """One snapshot of one policy. requests: that run under it. over: it serves no more requests that come.

    named: vLLM may know its name. loading: vLLM may be reading its files.
    """

    policy: str
    snapshot: str
    weights: ServedWeights
    files: Path
    epochs: AdapterEpochs
    named: bool = False
    loading: bool = False
    loaded: bool = False
    requests: int = 0
    over: bool = False


@dataclass(frozen=True)
class Proven:
    """kinds: the maps that vLLM was seen to adapt, as `kind_of` names them. places: adapters in one step."""

    base: CheckpointSpec
    kinds: Collection[str]
    places: int


@dataclass(frozen=True)
class Crossing:
    """The adapter of a policy takes the place of those that its requests run under.

    weights: the names of these. load: in a pause. back: loads what they had, if vLLM refuses the new one. moved: vLLM has it.
    """

    policy: str
    weights: Collection[ServedWeights]
    load: Callable[[], Awaitable[None]]
    back: Callable[[], Awaitable[None]]
    moved: Callable[[], None]


#: Makes it, and says how long nothing was computed, in ms, and how many choices crossed. Raises StagingFailed, EngineDied.
Cross = Callable[[Crossing], Awaitable[tuple[float, int]]]


class Adapters:
    """The adapters of one boot. base: what they stand on. background: runs tasks that no caller awaits.

    unheld: returns when no trainer holds the server. cross: None where requests keep the adapter that they began with.
    check_alive: takes a reason for doubt, and raises EngineDied if the server is gone.
    """

    def __init__(
        self,
        control: Control,
        proven: Proven,
        folder: Path,
        base: Epochs,
        check_alive: Callable[[str], Awaitable[None]],
        background: Callable[[Coroutine[Any, Any, None]], None],
        unheld: Callable[[], Awaitable[None]],
        cross: Cross | None = None,
    ) -> None:
        self._cross = cross
        self._control = control
        self.proven = proven
        self._folder = folder
        self._base = base
        self._check_alive = check_alive
        self._background, self._unheld = background, unheld
        self._serving: dict[str, Version] = {}
        self._coming: dict[str, Version] = {}
        # Those that requests may run under, or soon will.
        self._placed: set[Version] = set()
        self._moved = asyncio.Event()
        self._numbers = itertools.count(1)
        # An attached server may know names of another boot.
        self._boot = secrets.token_hex(4)

    def __repr__(self) -> str:
        return f"Adapters({len(self._serving)} serve, {len(self._placed)} of {self.proven.places} places)"

    def begin(self, policy: str) -> Version | None:
        """The version for a request that begins, until `end`. None: the policy serves nothing."""
        version = self._serving.get(policy)
        if version is not None:
            version.requests += 1
        return version

    def end(self, version: Version) -> None:
        version.requests -= 1
        self._free_if_unused(version)

    async def stage(self, policy: str, snapshot: str, directory: Path) -> None:
        """Like Slot.stage. The caller ends it with the boot."""
        self.drop_staged(policy)
        others, places = ({*self._serving} | {*self._coming}) - {policy}, self.proven.places
        if len(others) >= places - 1:
            raise StagingFailed(
                f"vLLM computes {places} adapters in a step (--max-loras). That is room for {places - 1} policies and a swap "
                "of one of them; start it with more"
            )
        new = self._new(policy, snapshot)
        self._coming[policy] = new
        try:
            await asyncio.to_thread(self._check, directory)
            await self._place(new)
            new.loading = True
            await self._load(new, directory)
        except BaseException:
            # This includes cancellation.
            new.loading = False
            self._give_up(new)
            raise
        new.loading = False

    def drop_staged(self, policy: str) -> None:
        if (version := self._coming.get(policy)) is not None:
            self._give_up(version)

    async def commit(
        self, policy: str, snapshot: str, files: str = "", overwritten: Collection[str] = ()
    ) -> SwapTiming:
        """files: what its files are. overwritten: names that mean other adapters by it."""
        new = self._staged(policy, snapshot)
        pause_ms, crossed = 0.0, 0
        running = self._running(policy, new)
        if running and self._cross is not None:
            with self._kept(running):
                pause_ms, crossed = await self._cross(self._crossing(running, new, overwritten))
            new = self._staged(policy, snapshot)
        del self._coming[policy]
        if new.epochs.snapshot == snapshot:
            # Else its base counts, too.
            new.epochs.announced(files)
        old = self._serving.get(policy)
        self._serving[policy] = new
        if old is not None:
            self._retire(old)
        # Where nothing crossed, nothing stood still: vLLM read the adapter when it was staged.
        return SwapTiming(snapshot=snapshot, pause_ms=pause_ms, streams_crossed=crossed)

    def _running(self, policy: str, new: Version) -> list[Version]:
        """What requests of the policy run under, or may before `new` serves; empty if none runs."""
        # Those that crossed before still run under the names that they began with.
        running = [v for v in self._placed if v.policy == policy and v is not new and v.requests]
        serving = self._serving.get(policy)
        return [*running, serving] if running and serving is not None and serving not in running else running

    @contextmanager
    def _kept(self, versions: Sequence[Version]) -> Iterator[None]:
        """Within, vLLM has them and their files, also if their last requests end."""
        for version in versions:
            version.requests += 1
        try:
            yield
        finally:
            for version in versions:
                self.end(version)

    def _staged(self, policy: str, snapshot: str) -> Version:
        """Raises StagingFailed."""
        new = self._coming.get(policy)
        if new is None or new.snapshot != snapshot or not new.loaded:
            raise StagingFailed(f"snapshot {snapshot!r} is not staged")
        return new

    def _crossing(self, running: Sequence[Version], new: Version, overwritten: Collection[str]) -> Crossing:
        async def load() -> None:
            for version in running:
                try:
                    # vLLM may read the files of a name again, so they lie where they lay.
                    await finished(_exchange, version.files, new.files)
                except OSError as error:
                    raise ServerRefused(f"the adapter's files cannot be read: {error}") from error
                await self._control.load_adapter(version.weights.name, version.files, in_place=True)

        async def back() -> None:
            for version in running:
                try:
                    other = await finished(_put_back, version.files)
                except OSError as error:
                    raise CallFailed(f"the files of an adapter before are gone: {error}") from error
                if other:
                    await self._control.load_adapter(version.weights.name, version.files, in_place=True)

        def moved() -> None:
            for version in running:
                version.epochs.overwrite(adapters=overwritten)
                version.epochs.moved(new.snapshot)
                # At once, as the next swap puts others there.
                shutil.rmtree(_before(version.files), ignore_errors=True)
            # So its KV is not taken for that of a later epoch.
            new.epochs.moved()

        return Crossing(new.policy, [version.weights for version in running], load, back, moved)

    def end_policy(self, policy: str) -> None:
        self.drop_staged(policy)
        if (version := self._serving.pop(policy, None)) is not None:
            self._retire(version)

    def _new(self, policy: str, snapshot: str) -> Version:
        name = name_of(policy, f"{next(self._numbers)}.{self._boot}")
        epochs = AdapterEpochs(snapshot, self._base)
        return Version(policy, snapshot, ServedWeights(name, epochs), self._folder / name, epochs)

    def rebased(self, overwritten: Collection[str] = ()) -> None:
        """The base has begun an epoch, which all of its requests cross. overwritten: names that mean other weights by it."""
        for version in {*self._placed, *self._coming.values(), *self._serving.values()}:
            version.epochs.overwrite(bases=overwritten)
            version.epochs.moved()

    def _check(self, directory: Path) -> None:
        """Raises StagingFailed for what vLLM would take and then leave out."""
        try:
            spec = read_adapter(directory, self.proven.base)
        except SnapshotError as error:
            raise StagingFailed(str(error)) from error
        check_kinds(spec, self.proven.kinds)

    async def _place(self, new: Version) -> None:
        """Wait until a further version may run."""
        # It may have been dropped while its files were read.
        self._check_wanted(new)
        while len(self._placed) >= self.proven.places:
            logger.info(
                "%s waits: requests run under %d adapters (--max-loras)", new.weights.name, len(self._placed)
            )
            moved = self._moved
            await moved.wait()
            self._check_wanted(new)
        self._placed.add(new)

    async def _load(self, new: Version, directory: Path) -> None:
        # While a trainer writes, vLLM has no whole model, and its calls wait for tensors.
        await self._unheld()
        self._check_wanted(new)
        try:
            await finished(_link, directory, new.files)
        except OSError as error:
            raise StagingFailed(f"the adapter's files cannot be read: {error}") from error
        try:
            new.named = True
            await self._control.load_adapter(new.weights.name, new.files)
            new.loaded = True
        except (CallFailed, ServerRefused) as error:
            reason = f"vLLM did not load the adapter: {error}"
            await self._check_alive(reason)
            raise StagingFailed(reason) from error
        self._check_wanted(new)

    def _check_wanted(self, new: Version) -> None:
        if new.over:
            raise StagingFailed(f"snapshot {new.snapshot!r} was given up while it was staged")

    def _give_up(self, version: Version) -> None:
        if self._coming.get(version.policy) is version:
            del self._coming[version.policy]
        self._retire(version)

    def _retire(self, version: Version) -> None:
        version.over = True
        self._free_if_unused(version)
        self._move()

    def _free_if_unused(self, version: Version) -> None:
        unused = version.requests == 0 and not version.loading
        if version.over and unused and version in self._placed:
            self._placed.discard(version)
            self._move()
            self._background(self._unload(version))

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _unload(self, version: Version) -> None:
        try:
            if version.named:
                await self._control.unload_adapter(version.weights.name)
        except (CallFailed, ServerRefused) as error:
            # If vLLM has it still, that costs a line in a table: it is never asked for again.
            logger.info("%s was not unloaded: %s", version.weights.name, error)
        finally:
            await finished(shutil.rmtree, version.files, True)


class AdapterSlot(Slot):
    """stage: of Adapters, ended with the boot. adapters: of the boot that runs; raises EngineDied when none does.

    computing: the engine's `until_computing`.
    """

    def __init__(
        self,
        policy: str,
        adapters: Callable[[], Adapters],
        while_alive: Callable[[Coroutine[Any, Any, None]], Awaitable[None]],
        computing: Callable[[], Awaitable[None]],
    ) -> None:
        self._policy = policy
        self._computing = computing
        self._adapters = adapters
        self._while_alive = while_alive
        # Of the boot in which something was staged.
        self._staged_in: Adapters | None = None
        self._announced: tuple[str, Collection[str]] = "", ()

    async def stage(self, snapshot: str, directory: Path) -> None:
        self._staged_in = adapters = self._adapters()
        await self._while_alive(adapters.stage(self._policy, snapshot, directory))

    def drop_staged(self) -> None:
        if self._staged_in is not None:
            self._staged_in.drop_staged(self._policy)

    async def until_computing(self) -> None:
        await self._computing()

    def announce(self, files: str, overwritten: Sequence[tuple[str, str]]) -> None:
        self._announced = files, tuple(name for name, _ in overwritten)

    async def commit(self, snapshot: str) -> SwapTiming:
        announced, self._announced = self._announced, ("", ())
        return await self._adapters().commit(self._policy, snapshot, *announced)


def name_of(policy: str, version: str) -> str:
    """At the server, whose scheduler reads the policy from it."""
    return f"{policy}@{version}"


def kind_of(module: str) -> str:
    """The path without the numbers of layers: model.layers.*.self_attn.q_proj."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", module)


def adaptable(base: CheckpointSpec) -> dict[str, str]:
    """The first linear map of the base's layers that may be adapted here, by kind.

    Experts are left out, since vLLM has several formats for their adapters, and some of its builds drop them silently. So is
    the output layer: vLLM does not apply its adapter to log-probabilities of prompts.
    """
    found: dict[str, str] = {}
    for name, spec in base.tensors.items():
        module = name.removesuffix(".weight")
        kind = kind_of(module)
        if module != name and len(spec.shape) == 2 and "*" in kind and ".experts." not in name:
            found.setdefault(kind, module)
    return found


def check_kinds(spec: AdapterSpec, kinds: Collection[str]) -> None:
    """Raises StagingFailed, which names the first map that is not proven."""
    for module, found in spec.maps.items():
        if found.experts or kind_of(module) not in kinds:
            raise StagingFailed(f"{shown(module)}: this vLLM was not seen to apply an adapter there")
    if spec.copies:
        raise StagingFailed(f"tensor {shown(next(iter(spec.copies)))}: vLLM takes no tensors of the base")


def _before(files: Path) -> Path:
    """Where the files lie that others have taken the place of."""
    return files.with_name(f"{files.name}.before")


def _exchange(files: Path, new: Path) -> None:
    """Raises OSError."""
    shutil.rmtree(_before(files), ignore_errors=True)
    files.rename(_before(files))
    _link(new, files)


def _put_back(files: Path) -> bool:
    """Whether there were others in their place. Raises OSError."""
    if not _before(files).exists():
        return False
    shutil.rmtree(files, ignore_errors=True)
    _before(files).rename(files)
    return True


def _link(source: Path, target: Path) -> None:
    """The files of an adapter under a second path. They stay when the first is removed. Raises OSError."""
    target.mkdir(parents=True)
    for name in ADAPTER_FILES:
        file = (source / name).resolve()
        try:
            os.link(file, target / name)
        except OSError:
            # Another file system, or one without links.
            shutil.copyfile(file, target / name)
