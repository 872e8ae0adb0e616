"""What encode.py and all rebuilds share: an output directory, threads over tensors, reads and writes by position.

Always holds: an output directory appears whole by one rename, or vanishes. `run` returns when no thread works any more. A file
of a rebuilt checkpoint has its parent's header.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from midstream.core.errors import SnapshotCorrupt, SnapshotError
from midstream.snapshots.adapter import ADAPTER_WEIGHTS_FILE, is_adapter
from midstream.snapshots.content import MANIFEST_FILE
from midstream.snapshots.layout import (
    INDEX_FILE,
    PICKLED,
    FileLayout,
    TensorSpec,
    read_checkpoint,
    read_file_layout,
)
from midstream.snapshots.messages import shown

#: Gets the bytes of weights done, and of all. Worker threads call it, one at a time.
Progress = Callable[[int, int], None]
Cancelled = Callable[[], bool]

#: The cache removes directories of this name after an interruption.
WORK_PREFIX = ".fetch-delta-"
#: A tensor of more than one part in so many of all bytes is begun before the others.
LARGE_PART = 16


class Making(Protocol):
    """Learns of a checkpoint while it is made or digested. Any thread may call it."""

    def begun(self, directory: Path) -> None:
        """The checkpoint is in `directory`. Everything but the tensors is there."""

    def made(self, tensor: str) -> None:
        """The tensor is in its file. If it was made, it has the delta's checksum, where that changed it, and its numbers are
        finite. A linked one is not digested yet."""

    def given_up(self) -> None:
        """The checkpoint was refused, perhaps before it was begun. If it is made again, this object hears nothing of that."""


class RebuildCancelled(SnapshotError):
    """`cancelled` returned true. Nothing was left behind."""


class Meter:
    """Counts bytes, and stops the work. Every thread calls it with every piece."""

    def __init__(self, total: int, cancelled: Cancelled | None, progress: Progress | None) -> None:
        self._total, self._cancelled, self._progress = total, cancelled, progress
        self._done = 0
        self._lock = threading.Lock()
        self.stopped = False

    def advance(self, count: int) -> None:
        if self.stopped or (self._cancelled is not None and self._cancelled()):
            self.stopped = True
            raise RebuildCancelled("it was cancelled")
        if self._progress is not None:
            with self._lock:
                self._done += count
                self._progress(self._done, self._total)


def run(tasks: Sequence[Callable[[], None]], threads: int | None, meter: Meter) -> None:
    """Run all tasks. Raises the first error; RebuildCancelled only if there is no other one."""
    errors: list[BaseException] = []
    # An interrupt of `submit` can lose a thread. So no task begins before all are submitted.
    all_submitted = threading.Event()

    def guarded(task: Callable[[], None]) -> None:
        all_submitted.wait()
        try:
            if not meter.stopped:
                task()
        except BaseException as error:  # noqa: BLE001 - raised again below
            meter.stopped = True
            errors.append(error)

    count = max(1, min(threads or _cores(), len(tasks)))
    pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="delta")
    try:
        futures = [pool.submit(guarded, task) for task in tasks]
        all_submitted.set()
        wait(futures)
    except BaseException:
        # An interrupt. The threads stop at their next piece.
        meter.stopped = True
        raise
    finally:
        all_submitted.set()
        pool.shutdown(wait=True)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, RebuildCancelled))


def run_in_order(
    tasks: Sequence[tuple[int, Callable[[Meter], None]]],
    threads: int | None,
    cancelled: Cancelled | None,
    progress: Progress | None,
) -> None:
    """Run all tasks, each with its bytes; the first one begins first. Raises as `run`."""
    meter = Meter(sum(size for size, _ in tasks), cancelled, progress)
    run([partial(task, meter) for _, task in tasks], threads, meter)


def by_layer(name: str, size: int, total: int) -> tuple[int, str]:
    """The key of a tensor in the order in which a model's tensors are made: large ones first, so that the threads end together,
    then layer by layer, as they are read."""
    return -size if size * LARGE_PART > total else 0, re.sub(r"\d+", lambda number: number[0].zfill(8), name)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def directory(out: Path) -> Iterator[Path]:
    """A directory to fill. It becomes `out`, or vanishes after an error."""
    if os.path.lexists(out):
        raise SnapshotError(f"{shown(out.name)}: exists already")
    work = out.parent / f"{WORK_PREFIX}{secrets.token_hex(8)}"
    with disk_errors(out.name):
        try:
            work.mkdir(parents=True)
            yield work
            os.rename(work, out)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def rebuilt_checkpoint(
    parent: Path,
    delta: Path,
    out: Path,
    layouts: Mapping[str, FileLayout],
    not_of_delta: Collection[str] = (),
    making: Making | None = None,
) -> Iterator[dict[str, int]]:
    """The new weights files, open, by name: each has its header, and room for its tensors. Filled, they become the checkpoint
    `out`, with the other files of parent and delta.

    layouts: of the parent's weights files. not_of_delta: names of files that say what is in the delta.
    """
    with directory(out) as work:
        copy_index(parent, work)
        copy_others(parent, work)
        copy_others(delta, work, not_of_delta)
        with contextlib.ExitStack() as stack:
            files = {
                file: _new_file(parent / file, layout, work / file, stack) for file, layout in layouts.items()
            }
            if making is not None:
                making.begun(work)
            yield files


def _new_file(source: Path, layout: FileLayout, path: Path, stack: contextlib.ExitStack) -> int:
    target = stack.enter_context(path.open("xb"))
    with source.open("rb") as file:
        target.write(file.read(layout.data_start))
    target.truncate(source.stat().st_size)
    return target.fileno()


@contextlib.contextmanager
def disk_errors(name: str) -> Iterator[None]:
    """Turns an OSError into a SnapshotError that names its file, or `name` if it has none."""
    try:
        yield
    except OSError as error:
        file = (
            os.path.basename(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else name
        )
        raise SnapshotError(f"{shown(file)}: {error.strerror or error}") from error


def copy_others(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy all files but weights, their index and a manifest: configuration, tokenizer, templates. Replaces files in `target`.

    A manifest says what is in its own directory, so that it would be wrong in another one.
    """
    for path in sorted(source.iterdir()):
        name = path.name
        weights = name in (INDEX_FILE, MANIFEST_FILE, *without) or name.endswith((".safetensors", *PICKLED))
        if not weights and not name.startswith(".") and path.is_file():
            shutil.copyfile(path, target / name)


def copy_index(source: Path, target: Path) -> None:
    if (source / INDEX_FILE).exists():
        shutil.copyfile(source / INDEX_FILE, target / INDEX_FILE)


def length(where: tuple[int, int]) -> int:
    return where[1] - where[0]


def read(file: int, into: memoryview, position: int) -> None:
    while into:
        count = os.preadv(file, [into], position)
        if count == 0:
            raise SnapshotCorrupt("a file became shorter while it was read")
        into, position = into[count:], position + count


def write(file: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(file, data, position)
        data, position = data[count:], position + count


class FileTensor:
    """A tensor in a safetensors file. `data` maps its bytes."""

    def __init__(self, path: Path, spec: TensorSpec, where: tuple[int, int]) -> None:
        self.dtype, self.shape = spec.dtype, spec.shape
        self._path, self._where = path, where

    def data(self) -> memoryview:
        begin, end = self._where
        if begin == end:
            return memoryview(b"")
        return np.memmap(self._path, np.uint8, "r", begin, (end - begin,)).data


def weights_files(directory: Path) -> dict[str, FileLayout]:
    """The weights files of a checkpoint, or of an adapter, by name. Raises the errors of read_checkpoint."""
    if is_adapter(directory):
        return {ADAPTER_WEIGHTS_FILE: read_file_layout(directory / ADAPTER_WEIGHTS_FILE)}
    return read_checkpoint(directory)[1]


def checkpoint_tensors(directory: Path) -> dict[str, FileTensor]:
    """The tensors of a checkpoint, or of an adapter, by name. Raises the errors of read_checkpoint."""
    return {
        name: FileTensor(directory / file, spec, layout.ranges[name])
        for file, layout in weights_files(directory).items()
        for name, spec in layout.tensors.items()
    }
