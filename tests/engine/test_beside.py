"""Loading and freeing beside the steps: packed from the files as transformers would read them, given back when unwanted."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import transformers
from engine_helpers import needs_compiler, request, run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.errors import SnapshotNotFinite
from midstream.core.types import EngineStats, SwapTiming
from midstream.engine.base import StagingFailed
from midstream.engine.embedded import loading
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded.background import NICENESS, Background
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.engine import _PolicySlot
from midstream.engine.embedded.loading import LoadedModel, load_beside, load_model
from midstream.engine.embedded.loop import CALM_STEPS, EngineLoop
from midstream.engine.embedded.model_runner import dispose
from midstream.engine.embedded.modules import UnsupportedModel
from midstream.engine.embedded.stager import DROPPED, Stager
from midstream.engine.embedded.weights_digest import digest
from midstream_kernels import checkpoint
from midstream_kernels.decoder import CpuDecoder

SETTINGS = EngineSettings(kv_cache_tokens=256, threads=1)
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2Config": {"tie_word_embeddings": True},
    "LlamaConfig": {"head_dim": 32, "attention_bias": True},
    "MistralConfig": {"sliding_window": 5, "head_dim": 32},
    "Qwen3Config": {"head_dim": 32},
    "MixtralConfig": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 32},
    "Qwen3MoeConfig": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "head_dim": 32,
    },
}


def write(directory: Path, family: str, seed: int, dtype: torch.dtype, **save: Any) -> Path:
    config = getattr(transformers, family)(
        **{
            "vocab_size": 131,
            "hidden_size": 128,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **FAMILIES[family],
        }
    )
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype) * 0.05)
    module.save_pretrained(directory, **save)
    return directory


def with_experts_merged(directory: Path) -> None:
    """As trainers write them that save the module's own parameters."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tensors = {name: value.contiguous().clone() for name, value in module.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")


def refuse_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("read by transformers")

    monkeypatch.setattr(loading, "_read", read)


def weights_of(model: LoadedModel) -> str:
    return digest(list(model.decoder.weights()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_packed_from_the_files_are_those_that_transformers_reads(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler("native")
    serving = load_model(write(tmp_path / "first", family, 0, dtype), SETTINGS)
    second = write(tmp_path / "second", family, 1, dtype, max_shard_size="100KB")
    assert len(list(second.glob("*.safetensors"))) > 1
    expected = load_model(second, SETTINGS)
    assert isinstance(expected.decoder, CpuDecoder)
    refuse_transformers(monkeypatch)
    beside = load_beside(serving, second, SETTINGS)
    assert weights_of(beside) == weights_of(expected) != weights_of(serving)
    assert beside.shapes == expected.shapes
    assert beside.generation_config.to_dict() == expected.generation_config.to_dict()


def test_the_module_is_built_again_only_for_another_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler("native")
    serving = load_model(write(tmp_path / "first", "Qwen2Config", 0, torch.bfloat16), SETTINGS)
    later = [write(tmp_path / f"later-{seed}", "Qwen2Config", seed, torch.bfloat16) for seed in (1, 2, 3)]
    config = json.loads((later[2] / "config.json").read_text())
    (later[2] / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    expected = [load_model(directory, SETTINGS) for directory in later]
    refuse_transformers(monkeypatch)
    built: list[Any] = []

    class Counted(checkpoint.Skeleton):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            built.append(self)

    monkeypatch.setattr(checkpoint, "Skeleton", Counted)
    for directory, wanted, count in zip(later, expected, (1, 1, 2), strict=True):
        loaded = load_beside(serving, directory, SETTINGS)
        assert weights_of(loaded) == weights_of(wanted)
        assert loaded.config.rms_norm_eps == wanted.config.rms_norm_eps
        assert len(built) == count
        # No file of a snapshot stays mapped, and no weights stay.
        assert all(parameter.is_meta for parameter in built[-1].module.parameters())
        serving = loaded


@pytest.mark.parametrize("family", ["MixtralConfig", "Qwen3MoeConfig"])
def test_experts_saved_as_one_tensor_are_packed_from_the_files_too(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler("native")
    serving = load_model(write(tmp_path / "first", family, 0, torch.bfloat16), SETTINGS)
    second = write(tmp_path / "second", family, 1, torch.bfloat16)
    expected = weights_of(load_model(second, SETTINGS))
    with_experts_merged(second)
    refuse_transformers(monkeypatch)
    assert weights_of(load_beside(serving, second, SETTINGS)) == expected


def test_files_that_need_more_than_packing_are_read_by_transformers(tmp_path: Path) -> None:
    needs_compiler("native")
    serving = load_model(write(tmp_path / "first", "Qwen2Config", 0, torch.bfloat16), SETTINGS)
    second = write(tmp_path / "second", "Qwen2Config", 1, torch.bfloat16)
    expected = weights_of(load_model(second, SETTINGS))
    tensors = load_file(second / "model.safetensors")
    for change in (
        {name: value.float() for name, value in tensors.items()},
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    ):
        save_file(change, second / "model.safetensors", metadata={"format": "pt"})
        assert weights_of(load_beside(serving, second, SETTINGS)) == expected


def test_files_of_another_model_or_not_whole_are_refused(tmp_path: Path) -> None:
    needs_compiler("native")
    serving = load_model(write(tmp_path / "first", "Qwen3Config", 0, torch.bfloat16), SETTINGS)
    other = write(tmp_path / "other", "LlamaConfig", 1, torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="not those of the serving model"):
        load_beside(serving, other, SETTINGS)
    second = write(tmp_path / "second", "Qwen3Config", 1, torch.bfloat16)
    file = second / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"model\.safetensors"):
        load_beside(serving, second, SETTINGS)
    tensors = load_file(tmp_path / "first" / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SnapshotNotFinite, match="not finite"):
        load_beside(serving, second, SETTINGS)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's memory from /proc")
def test_memory_of_dropped_weights_is_the_next_models_and_given_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler("native")
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8
    )
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = 2 * module.num_parameters()
    module.save_pretrained(tmp_path)
    core = EngineCore(tmp_path, SETTINGS)
    before = digest(core.weights())
    core.set_staged(core.stage(tmp_path))
    staged = anonymous_bytes()
    core.set_staged(None)
    dispose(core.take_retired())
    decoder = core.store.serving.model.decoder
    assert isinstance(decoder, CpuDecoder)
    for kept in [kept for of_size in decoder.spare._kept.values() for kept in of_size]:
        kept.fill_(-1)
    core.set_staged(core.stage(tmp_path))
    assert anonymous_bytes() - staged < 0.1 * size
    # What lay there before does not show.
    core.commit("again")
    assert digest(core.weights()) == before
    dispose(core.take_retired())
    kept_bytes = anonymous_bytes()
    core.store.serving.model.tidy()
    assert kept_bytes - anonymous_bytes() < 0.1 * size
    monkeypatch.setattr(loading, "SPARE_S", 0.0)
    core.store.serving.model.tidy()
    assert kept_bytes - anonymous_bytes() > 0.9 * size


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_what_is_dropped_while_it_loads_is_answered_and_its_model_handed_over() -> None:
    jobs: list[Callable[[], None]] = []
    unwanted: list[Any] = []
    stager = Stager(lambda path: path, jobs.append, unwanted.append, None)  # type: ignore[arg-type, return-value]
    first, second = m.StageSnapshot(1, "a", "/a"), m.StageSnapshot(2, "b", "/b")
    assert stager.submit(first) == stager.submit(second) == []
    assert stager.drop("") == [(second, DROPPED)]
    jobs.pop()()
    assert stager.take() == [(first, DROPPED)]
    assert unwanted == [Path("/a")]
    assert not stager.busy
    stager.submit(second)
    jobs.pop()()
    assert stager.take() == [(second, Path("/b"))]


class Steps:
    """A core that always has a step to do, and a channel; what happens is in `log`."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.busy = True
        self.store = SimpleNamespace(drop=None, retired=[])

    def stage(self, directory: Path) -> Any:
        return None

    def stage_ahead(self, growing: object) -> Any:
        return None

    def commit(self, snapshot: str, *_: object) -> SwapTiming:
        self.log.append("commit")
        self.store.retired.append("old")
        return SwapTiming(snapshot=snapshot, pause_ms=0.0, streams_crossed=1)

    def prepare_grammar(self, grammar: str) -> None:
        raise AssertionError("no request has a grammar")

    def take_retired(self) -> list[Any]:
        retired, self.store.retired = self.store.retired, []
        return list(retired)

    def weights(self, policy: str) -> list[Any]:
        return ["weights"]

    def step(self) -> list[Any]:
        self.log.append("step")
        return []

    def stats(self) -> EngineStats:
        return EngineStats()

    def send(self, reply: object) -> None:
        if isinstance(reply, m.CallDone):
            self.log.append("done")


def test_after_a_switch_some_steps_run_before_anything_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Steps()
    worker = EngineLoop(core, core)  # type: ignore[arg-type]
    monkeypatch.setattr(worker._background, "submit", lambda job: core.log.append("job"))
    worker._staged = {"": "new"}
    worker._handle(m.Commit(1, "new"))
    worker._handle(m.DigestWeights(2))
    for _ in range(CALM_STEPS + 1):
        worker._begin_jobs()
        worker._step()
    assert core.log == ["commit", "step", "done", *["step"] * (CALM_STEPS - 1), "job", "job", "step"]
    worker._staged = {"": "newer"}
    worker._handle(m.Commit(3, "newer"))
    # Nobody waits for a step.
    core.busy = False
    worker._begin_jobs()
    assert core.log[-2:] == ["commit", "job"]


def test_jobs_run_in_order_one_failing_costs_itself_and_steps_go_first() -> None:
    done: list[object] = []
    ended = threading.Event()
    background = Background()

    def priority() -> None:
        done.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def fail() -> None:
        raise ValueError

    before = os.getpriority(os.PRIO_PROCESS, 0)
    for job in (priority, fail, lambda: done.append("last"), ended.set):
        background.submit(job)
    assert ended.wait(60)
    lowered = min(before + NICENESS, 19) if sys.platform == "linux" else before
    assert done == [lowered, "last"]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_an_urgent_request_is_the_replicas_own_and_no_users_tokens(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), SETTINGS)
    asked = request("canary", range(1, 9), max_tokens=0, echo=8)
    run(core, [msgspec.structs.replace(asked, urgent=True)])
    assert (core.stats().prompt_tokens, core.stats().cached_prompt_tokens) == (0, 0)
    run(core, [request("user", range(1, 9), max_tokens=2)])
    assert (core.stats().prompt_tokens, core.stats().generated_tokens) == (8, 2)


async def test_what_was_announced_for_a_commit_that_is_refused_holds_for_no_later_one() -> None:
    """Labels of other snapshots would change with it."""
    made: list[m.Command] = []

    async def call(build: Callable[[int], m.Command]) -> m.CallDone:
        made.append(build(len(made) + 1))
        if len(made) == 1:
            raise StagingFailed("it is not the staged snapshot")
        return m.CallDone(len(made), timing=SwapTiming(snapshot="s3", pause_ms=0.0))

    slot = _PolicySlot("p", call, made.append)
    slot.announce("its files", [("s2", "s2@1")])
    with pytest.raises(StagingFailed):
        await slot.commit("s2")
    await slot.commit("s3")
    assert made == [m.Commit(1, "s2", "p", "its files", (("s2", "s2@1"),)), m.Commit(2, "s3", "p")]
