"""A model that is packed while its files are made: the same weights, nothing computed early, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import needs_compiler
from safetensors.torch import load_file, save_file
from test_beside import SETTINGS, refuse_transformers, weights_of, write

from midstream.core.errors import SnapshotIncompatible, SnapshotNotFinite
from midstream.engine.embedded import loading, stager
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded.growing_files import GrowingFiles, GrowingFilesEnded
from midstream.engine.embedded.loading import LoadedModel, load_ahead, load_beside, load_model
from midstream.engine.embedded.modules import UnsupportedModel
from midstream.engine.embedded.stager import DROPPED, SUPERSEDED, Stager
from midstream.snapshots.layout import read_checkpoint, read_spec
from midstream_kernels import Spare, decoder
from midstream_kernels.decoder import CpuDecoder
from midstream_kernels.memory import big

WAIT_S = 60


class Making:
    """Makes a copy of a checkpoint tensor by tensor. directory: where it is made."""

    def __init__(self, source: Path, directory: Path) -> None:
        self.source, self.directory = source, directory
        self._files = read_checkpoint(source)[1]
        shutil.copytree(source, directory)
        for file, layout in self._files.items():
            with (directory / file).open("r+b") as opened:
                # As a rebuild leaves room for its tensors, but with numbers that no check would pass.
                size = opened.seek(0, 2) - layout.data_start
                opened.seek(layout.data_start)
                opened.write(b"\xff" * size)

    def tensors(self) -> Iterator[str]:
        """Makes one after the other, and gives their names."""
        for file, layout in self._files.items():
            data = (self.source / file).read_bytes()
            for name, (begin, end) in layout.ranges.items():
                with (self.directory / file).open("r+b") as opened:
                    opened.seek(begin)
                    opened.write(data[begin:end])
                yield name

    def moved(self, to: Path) -> Path:
        return self.directory.rename(to)


class Told(GrowingFiles):
    """waits: is set when tensors of this prefix are waited for."""

    def __init__(self, making: Making, prefix: str) -> None:
        super().__init__(making.directory)
        self._prefix = prefix
        self.waits = threading.Event()

    def wait_for(self, tensors: Collection[str]) -> None:
        if any(name.startswith(self._prefix) for name in tensors):
            self.waits.set()
        super().wait_for(tensors)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """By family, two checkpoints of several files each."""
    root = tmp_path_factory.mktemp("ahead")
    return {
        family: [
            write(root / f"{family}-{seed}", family, seed, torch.bfloat16, max_shard_size="100KB")
            for seed in (0, 1)
        ]
        for family in ("Qwen2Config", "LlamaConfig", "Qwen3MoeConfig")
    }


@pytest.fixture(autouse=True)
def _compiler() -> None:
    needs_compiler("native")


@pytest.mark.parametrize("family", ["Qwen2Config", "LlamaConfig", "Qwen3MoeConfig"])
def test_weights_packed_while_they_are_made_are_those_of_the_whole_files(
    tmp_path: Path,
    family: str,
    checkpoints: dict[str, list[Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = checkpoints[family]
    serving = load_model(first, SETTINGS)
    expected = load_beside(serving, second, SETTINGS)
    refuse_transformers(monkeypatch)
    making = Making(second, tmp_path / "made")
    growing = Told(making, "model.embed_tokens.")
    computed: list[str] = []
    probe = loading.probe

    def probed(model: LoadedModel, adapter: Any = None) -> None:
        computed.append("canary")
        probe(model, adapter)

    monkeypatch.setattr(loading, "probe", probed)
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(load_ahead, serving, growing, SETTINGS)
        assert growing.waits.wait(WAIT_S)
        for name in making.tensors():
            growing.made([name])
        # All tensors are there, and their files are not proved.
        assert computed == []
        assert growing.complete(making.moved(tmp_path / "whole"))
        model = loaded.result(WAIT_S)
    assert computed == ["canary"]
    assert weights_of(model) == weights_of(expected) != weights_of(serving)
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_a_tensor_that_is_not_there_yet_is_not_read(
    tmp_path: Path, checkpoints: dict[str, list[Path]]
) -> None:
    """Its bytes are all ones until it is made, so the digest would show that it was read before."""
    first, second = checkpoints["LlamaConfig"]
    serving = load_model(first, SETTINGS)
    making = Making(second, tmp_path / "made")
    growing = Told(making, "model.layers.1.")
    made = []
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(load_ahead, serving, growing, SETTINGS)
        for name in making.tensors():
            if "layers.1." not in name:
                growing.made([name])
            made.append(name)
        assert growing.waits.wait(WAIT_S)
        assert not loaded.done()
        growing.made(made)
        assert growing.complete(making.moved(tmp_path / "whole"))
        assert weights_of(loaded.result(WAIT_S)) == weights_of(load_beside(serving, second, SETTINGS))


def test_what_is_dropped_in_the_middle_leaves_no_file_mapped_and_its_memory_to_the_next(
    tmp_path: Path, checkpoints: dict[str, list[Path]]
) -> None:
    first, second = checkpoints["Qwen2Config"]
    serving = load_model(first, SETTINGS)
    assert isinstance(serving.decoder, CpuDecoder)
    load_beside(serving, second, SETTINGS).release()
    spare = repr(serving.decoder.spare)
    assert spare != "<Spare 0 pieces>"
    making = Making(second, tmp_path / "made")
    growing = Told(making, "model.layers.0.")
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(load_ahead, serving, growing, SETTINGS)
        for name in making.tensors():
            if "layers." not in name:
                growing.made([name])
        assert growing.waits.wait(WAIT_S)
        # The output layer took its part of the memory, and lies packed in it.
        assert str(making.directory) in Path("/proc/self/maps").read_text()
        assert repr(serving.decoder.spare) != spare
        growing.drop()
        assert isinstance(loaded.exception(WAIT_S), GrowingFilesEnded)
        del loaded
    gc.collect()
    assert str(making.directory) not in Path("/proc/self/maps").read_text()
    assert repr(serving.decoder.spare) == spare
    assert not growing.complete(making.directory)
    assert weights_of(load_beside(serving, second, SETTINGS)) == weights_of(load_model(second, SETTINGS))


def test_a_load_that_gets_no_threads_says_so_and_leaves_the_kept_memory(
    checkpoints: dict[str, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = checkpoints["Qwen2Config"]
    serving = load_model(first, SETTINGS)
    assert isinstance(serving.decoder, CpuDecoder)
    load_beside(serving, second, SETTINGS).release()
    spare = repr(serving.decoder.spare)

    def refused(threads: int) -> Any:
        raise OSError("no more threads")

    monkeypatch.setattr(decoder, "Gang", refused)
    with pytest.raises(OSError, match="no more threads"):
        load_beside(serving, second, SETTINGS)
    assert repr(serving.decoder.spare) == spare


def test_memory_of_a_load_that_failed_is_kept_unless_another_model_left_its_own() -> None:
    spare = Spare()
    spare.keep([big(1024), big(2048)])
    spare.put_back([spare.take(1024)])
    assert repr(spare) == "<Spare 2 pieces>"
    taken = [spare.take(1024), spare.take(4096)]
    spare.keep([big(1024), big(2048)])
    spare.put_back(taken)
    assert repr(spare) == "<Spare 2 pieces>"
    # Of a first load, there was nothing yet.
    spare.give_back()
    spare.put_back([big(1024)])
    assert repr(spare) == "<Spare 1 pieces>"


def test_files_are_whole_when_they_are_proved_and_not_when_all_tensors_are_there(
    checkpoints: dict[str, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = GrowingFiles(checkpoints["LlamaConfig"][0])
    growing.made(read_spec(growing.directory).tensors)
    over: list[bool] = []
    monkeypatch.setattr(growing._changed, "wait_for", lambda holds: over.append(holds()))
    growing.whole()
    assert growing.complete(growing.directory)
    growing.whole()
    assert over == [False, True]


def test_other_files_than_those_that_were_read_are_not_taken_for_them(
    tmp_path: Path, checkpoints: dict[str, list[Path]]
) -> None:
    second = checkpoints["LlamaConfig"][1]
    growing = GrowingFiles(Making(second, tmp_path / "made").directory)
    assert not growing.complete(shutil.copytree(tmp_path / "made", tmp_path / "copy"))
    assert not growing.complete(tmp_path / "nowhere")
    (tmp_path / "made" / "config.json").write_bytes((second / "config.json").read_bytes())
    assert growing.complete((tmp_path / "made").rename(tmp_path / "whole"))


def open_files(directory: Path) -> set[str]:
    """Names of the files in `directory` that this process has open, removed ones, too."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        # The directory's own descriptor is gone by now.
        with contextlib.suppress(OSError):
            found.add(os.readlink(descriptor).removesuffix(" (deleted)"))
    return {Path(path).name for path in found if path.startswith(f"{directory}/")}


def test_files_made_again_in_place_of_removed_ones_are_others(
    tmp_path: Path, checkpoints: dict[str, list[Path]]
) -> None:
    second, made = checkpoints["LlamaConfig"][1], tmp_path / "made"
    weights = {path.name for path in second.glob("*.safetensors")}
    growing = GrowingFiles(Making(second, made).directory)
    shutil.rmtree(made)
    # The system gives the number of an open inode to no other file.
    assert open_files(made) == {"config.json", *weights}
    shutil.copytree(second, made)
    assert not growing.complete(made)
    growing.drop()
    assert open_files(made) == set()


def test_proved_files_are_not_held_open(tmp_path: Path, checkpoints: dict[str, list[Path]]) -> None:
    growing = GrowingFiles(Making(checkpoints["LlamaConfig"][1], tmp_path / "made").directory)
    assert growing.complete(growing.directory)
    assert open_files(tmp_path / "made") == set()


def test_no_file_stays_open_when_one_of_them_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        GrowingFiles(tmp_path)
    assert open_files(tmp_path) == set()


def test_files_that_are_not_packed_where_they_lie_are_refused_ahead(
    tmp_path: Path, checkpoints: dict[str, list[Path]]
) -> None:
    serving = load_model(checkpoints["LlamaConfig"][0], SETTINGS)
    half = write(tmp_path / "half", "LlamaConfig", 1, torch.float16)
    growing = GrowingFiles(half)
    with pytest.raises(UnsupportedModel, match="where they lie"):
        load_ahead(serving, growing, SETTINGS)
    growing.drop()


@pytest.mark.parametrize(("value", "error"), [(float("nan"), SnapshotNotFinite), (0.0, SnapshotIncompatible)])
def test_the_canary_refuses_what_was_packed_ahead(
    tmp_path: Path, checkpoints: dict[str, list[Path]], value: float, error: type[Exception]
) -> None:
    first, second = checkpoints["Qwen2Config"]
    bad = shutil.copytree(second, tmp_path / "bad")
    for file in bad.glob("*.safetensors"):
        tensors = {name: tensor.fill_(value) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    serving = load_model(first, SETTINGS)
    growing = GrowingFiles(bad)
    assert growing.complete(bad)
    with pytest.raises(error):
        load_ahead(serving, growing, SETTINGS)


class Loads:
    """A stager whose loads are run by hand: `beside` those of whole files, `ahead` those of files that are being made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        self.jobs: list[Callable[[], None]] = []
        self.ahead: list[Callable[[], None]] = []
        self.unwanted: list[Any] = []
        self.started: list[GrowingFiles] = []
        monkeypatch.setattr(stager, "Background", lambda name: self)
        self.stager = Stager(
            lambda path: f"whole {path.name}",  # type: ignore[arg-type, return-value]
            self.jobs.append,
            self.unwanted.append,
            self._load_ahead,
        )

    def submit(self, job: Callable[[], None]) -> None:
        self.ahead.append(job)

    def _load_ahead(self, growing: GrowingFiles) -> Any:
        self.started.append(growing)
        return Model(growing.whole())

    def begin(self, snapshot: str = "v1") -> None:
        self.stager.begin(m.StageAhead(snapshot, str(self.directory)))

    def work(self) -> None:
        """All jobs, and what they hand on. None of them waits for ever."""
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()

    def _work(self) -> None:
        while self.jobs or self.ahead:
            (self.jobs or self.ahead).pop(0)()


class Model:
    def __init__(self, directory: Path) -> None:
        self.directory = directory


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loads:
    return Loads(monkeypatch, tmp_path / "made")


def staged(loads: Loads, call: int = 1, snapshot: str = "v1") -> m.StageSnapshot:
    return m.StageSnapshot(call, snapshot, str(loads.directory))


def test_a_request_takes_over_the_load_of_its_files(loads: Loads) -> None:
    loads.begin()
    assert (loads.stager.busy, loads.stager.awaited) == (True, False)
    request = staged(loads)
    assert loads.stager.submit(request) == []
    assert loads.stager.awaited
    loads.work()
    [(answered, model)] = loads.stager.take()
    assert answered == request
    assert isinstance(model, Model)
    assert model.directory == loads.directory
    assert (loads.unwanted, loads.stager.busy) == ([], False)


def test_a_request_for_another_snapshot_is_loaded_as_any_other(loads: Loads) -> None:
    loads.begin("v0")
    request = staged(loads)
    assert loads.stager.submit(request) == []
    loads.work()
    # The load ahead has ended, and the request's own begins.
    assert loads.stager.take() == []
    loads.work()
    assert loads.stager.take() == [(request, "whole made")]


def test_a_load_that_failed_ahead_is_done_again_with_the_whole_files(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(growing: GrowingFiles) -> Any:
        raise UnsupportedModel("it is read whole")

    monkeypatch.setattr(loads.stager, "_load_ahead", fails)
    loads.begin()
    loads.work()
    # Once it is known that it failed, and before.
    assert loads.stager.take() == []
    assert not loads.stager.busy
    first = staged(loads)
    loads.stager.submit(first)
    loads.work()
    assert loads.stager.take() == [(first, "whole made")]
    loads.begin()
    loads.work()
    second = staged(loads, 2)
    loads.stager.submit(second)
    assert loads.stager.take() == []
    loads.work()
    assert loads.stager.take() == [(second, "whole made")]


def test_a_drop_ends_the_load_ahead_and_answers_the_request_that_took_it(loads: Loads) -> None:
    loads.begin()
    assert loads.stager.drop("") == []
    loads.work()
    assert loads.stager.take() == []
    loads.begin()
    request = staged(loads)
    loads.stager.submit(request)
    loads.stager.drop("")
    loads.work()
    assert loads.stager.take() == [(request, DROPPED)]
    # It was whole when it was dropped, so there was a model.
    assert len(loads.unwanted) == 1
    assert not loads.stager.busy


def test_a_newer_snapshot_ends_the_load_ahead_of_an_older_one(loads: Loads) -> None:
    loads.begin("v1")
    loads.begin("v2")
    assert loads.stager.submit(staged(loads, 1, "v2")) == []
    loads.work()
    assert loads.stager.take() == []
    loads.work()
    assert loads.stager.take() == [(staged(loads, 1, "v2"), "whole made")]


def test_a_newer_request_overtakes_one_that_took_over_a_load(loads: Loads) -> None:
    loads.begin()
    first, second = staged(loads), staged(loads, 2, "v2")
    loads.stager.submit(first)
    loads.stager.submit(second)
    loads.work()
    assert loads.stager.take() == [(first, SUPERSEDED)]
    loads.work()
    assert loads.stager.take() == [(second, "whole made")]
    assert len(loads.unwanted) == 1


def test_a_request_for_files_made_again_is_not_given_those_that_were_removed(loads: Loads) -> None:
    loads.begin()
    config = loads.directory / "config.json"
    config.unlink()
    config.write_text("{}")
    request = staged(loads)
    loads.stager.submit(request)
    loads.work()
    assert loads.stager.take() == []
    loads.work()
    assert loads.stager.take() == [(request, "whole made")]


def test_a_load_ahead_that_failed_holds_no_file_open(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(growing: GrowingFiles) -> Any:
        raise UnsupportedModel("it is read whole")

    monkeypatch.setattr(loads.stager, "_load_ahead", fails)
    loads.begin()
    assert open_files(loads.directory) == {"config.json"}
    loads.work()
    assert open_files(loads.directory) == set()


def test_other_policies_do_not_wait_for_a_load_ahead_that_nobody_has_asked_for(loads: Loads) -> None:
    loads.begin()
    other = m.StageSnapshot(1, "a1", str(loads.directory), policy="other")
    assert loads.stager.submit(other) == []
    assert loads.stager.awaited
    # Its files are never whole.
    loads.work()
    assert loads.stager.take() == []
    loads.work()
    assert loads.stager.take() == [(other, "whole made")]
    # The files were proved meanwhile.
    request = staged(loads, 2)
    loads.stager.submit(request)
    loads.work()
    assert loads.stager.take() == [(request, "whole made")]


def test_other_policies_wait_for_a_load_ahead_that_its_request_took(loads: Loads) -> None:
    loads.begin()
    request, other = staged(loads), m.StageSnapshot(2, "a1", str(loads.directory), policy="other")
    loads.stager.submit(request)
    loads.stager.submit(other)
    loads.work()
    [(answered, model)] = loads.stager.take()
    assert answered == request
    assert isinstance(model, Model)
    loads.work()
    assert loads.stager.take() == [(other, "whole made")]
