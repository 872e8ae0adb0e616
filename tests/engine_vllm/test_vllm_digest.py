"""The digest of vLLM's weights: what its workers read, and what the engine makes of their answers."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm
from vllm_helpers import asking, attached, begun, swap

from midstream.engine.base import StagingFailed
from midstream.engine.servers.control import ServerRefused
from midstream.engine.vllm import digest as module
from midstream.engine.vllm.arguments import WORKER_DIR
from midstream.http.call import CallFailed


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As in vLLM's environment."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.syspath_prepend(str(WORKER_DIR))
    yield importlib.import_module("midstream_vllm_digest")
    del sys.modules["midstream_vllm_digest"]


class Packed(torch.nn.Module):
    """As vLLM's linear layers on a CPU: what it computes with is no parameter. order: in which its kernel has the rows."""

    def __init__(self, weight: torch.Tensor, order: torch.Tensor, *, keep: bool | None = False) -> None:
        super().__init__()
        # As of a layer that has all inputs on each rank, or of others.
        for side, size in zip(("output", "input"), weight.shape, strict=True):
            setattr(self, f"{side}_size" if keep is None else f"{side}_size_per_partition", size)
        own = weight.clone() if keep else torch.empty(0, dtype=weight.dtype)
        self.weight = torch.nn.Parameter(own, requires_grad=False)
        self.packed, self.order = weight.clone()[order].numpy(), order
        self.called = 0

    def cpu_linear(self, x: torch.Tensor, _weight: torch.Tensor, bias: None) -> torch.Tensor:
        assert bias is None
        self.called += 1
        out = torch.empty(len(x), len(self.order), dtype=x.dtype)
        out[:, self.order] = x @ torch.from_numpy(self.packed).T
        return out


class Model(torch.nn.Module):
    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(7, 37, generator=generator)
        order = torch.arange(7).flip(0) if reverse else torch.arange(7)
        self.linear = Packed(weight, order)
        self.head = Packed(weight, order, keep=True)
        self.gate = Packed(weight[:2], torch.arange(2), keep=None)
        self.experts = torch.nn.Parameter(
            torch.randn(3, 5, generator=generator).bfloat16(), requires_grad=False
        )
        self.register_buffer("bias", torch.arange(5, dtype=torch.uint8), persistent=False)


def digest_of(extension: Any, model: torch.nn.Module, seconds: float = 1e9) -> tuple[str, str]:
    reading, found = extension.WeightsDigest(model), None
    while found is None:
        found = reading.go_on(seconds)
    assert reading.go_on(0.0) == found, "a rank that is done is asked again while others are not"
    return found["kind"], found["digest"]


def test_weights_that_no_parameter_has_are_read_whatever_their_order_is(extension: Any) -> None:
    expected = digest_of(extension, Model())
    # One piece at a time.
    assert digest_of(extension, Model(), seconds=0.0) == expected
    assert digest_of(extension, Model(reverse=True)) == expected
    torch.manual_seed(5)
    assert digest_of(extension, Model()) == expected


def bits(model: Model) -> list[torch.Tensor]:
    """All that it computes with, as bytes."""
    tensors = [torch.from_numpy(layer.packed) for layer in (model.linear, model.head, model.gate)]
    tensors += [model.head.weight, model.experts, model.get_buffer("bias")]
    return [tensor.detach().view(torch.uint8).reshape(-1) for tensor in tensors]


def test_every_bit_of_every_tensor_counts(extension: Any) -> None:
    kind, expected = digest_of(extension, Model())
    for tensor in range(len(bits(Model()))):
        for place in (0, -1):
            model = Model()
            bits(model)[tensor][place] ^= 1
            other_kind, other = digest_of(extension, model)
            assert (other_kind, other == expected) == (kind, False), (tensor, place)


def test_zeros_of_both_signs_and_numbers_below_the_normal_ones_are_equal(extension: Any) -> None:
    """Kernels differ in them, and the digests of replicas must not."""
    found = set()
    for number in (0.0, -0.0, 1e-40, -1e-44):
        model = Model()
        model.linear.packed[2, 3] = number
        found.add(digest_of(extension, model))
    assert len(found) == 1


def test_places_count_and_so_do_names_shapes_and_kinds(extension: Any) -> None:
    words = torch.arange(3 << 16, dtype=torch.int32)
    swapped, far = words.clone(), words.clone()
    swapped[:2] = torch.tensor([1, 0])
    far[[0, 1 << 16]] = far[[1 << 16, 0]]
    made = []
    for name, tensor in (("a", words), ("a", swapped), ("a", far), ("b", words), ("a", words.view(2, -1))):
        holder = torch.nn.Module()
        holder.register_buffer(name, tensor)
        made.append(digest_of(extension, holder))
    assert len({digest for _, digest in made}) == len(made)
    assert made[0][0] == made[1][0] == made[2][0]
    assert len({kind for kind, _ in made}) == 3


def test_other_cpus_and_versions_are_of_another_kind(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, digest = digest_of(extension, Model())
    changes: list[tuple[Any, str, Any]] = [
        (sys.modules["vllm"], "__version__", "0.33.0"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
        (torch.cpu, "_is_amx_tile_supported", lambda: "another"),
    ]
    for owner, name, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            other, same = digest_of(extension, Model())
        assert (other != kind, same) == (True, digest), name


def gives_digests(fake: FakeVllm) -> None:
    fake.both = True


async def test_equal_weights_have_equal_digests_and_no_others_have(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=gives_digests) as (engine, fake):
        assert engine._info().card.has("weights_digest")
        base = await engine.weights_digest()
        await swap(engine, tmp_path, 3)
        other = await engine.weights_digest()
        await swap(engine, tmp_path, 0)
        assert base == await engine.weights_digest() != other
        assert base is not None
        assert base.startswith("kind:")
        fake.ranks = 2
        assert await engine.weights_digest() != base


async def test_weights_that_are_replaced_while_they_are_read_have_none(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=gives_digests) as (engine, fake):
        fake.digest_pieces = 10**9
        reading = asyncio.create_task(engine.weights_digest())
        await fake.digested.wait()
        await swap(engine, tmp_path, 3)
        with pytest.raises(StagingFailed, match="replaced while they were read"):
            await reading


async def test_a_server_whose_own_weights_reload_to_another_digest_is_used_without(tmp_path: Path) -> None:
    def set_up(fake: FakeVllm) -> None:
        fake.both = fake.digests_loads = True

    async with attached(tmp_path, set_up=set_up) as (engine, _):
        assert "another digest" in engine._info().card.why["weights_digest"]
        assert await engine.weights_digest() is None


async def test_a_server_without_the_extension_says_how_to_get_a_digest(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, _):
        why = engine._info().card.why["weights_digest"]
        assert "--worker-extension-cls midstream_vllm_worker.Worker" in why
        assert await engine.weights_digest() is None


async def test_one_engine_of_several_does_not_say_what_all_hold(tmp_path: Path) -> None:
    def set_up(fake: FakeVllm) -> None:
        fake.both, fake.engines = True, 2

    async with attached(tmp_path, set_up=set_up) as (engine, _):
        assert "the first alone" in engine._info().card.why["weights_digest"]
        assert await engine.weights_digest() is None


class Workers:
    """A rank that answers one read, and no more where `fails` says how."""

    def __init__(self, fails: Exception | None) -> None:
        self.fails = fails
        self.reads = self.loads = 0

    async def ask_workers(self, _method: str, _asked: Any, _within_s: float, *, holds_up: bool) -> list[Any]:
        assert not holds_up, "a server that hangs would be noticed later"
        self.reads += 1
        if self.reads == 2 and self.fails is not None:
            raise self.fails
        return [{"kind": "k", "digest": "1", "bytes": 4}]

    async def reload(self) -> None:
        self.loads += 1


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (None, ""),
        (ServerRefused("it was half read"), "give no digest: it was half read"),
        (CallFailed("cut"), "give no digest: cut"),
    ],
)
def test_a_server_whose_second_read_fails_starts_without_digests(fails: Exception | None, why: str) -> None:
    workers = Workers(fails)
    found = asyncio.run(module.prove_digest(workers, "", workers.reload))  # type: ignore[arg-type]
    assert (why in found, bool(found)) == (True, bool(why))
    assert (workers.reads, workers.loads) == (2, 1)


def test_a_switch_lets_go_of_the_weights_that_were_read(extension: Any) -> None:
    spec = importlib.util.spec_from_file_location("a_worker", WORKER_DIR / "midstream_vllm_worker.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    model, worker = torch.nn.Module(), loaded.Worker()
    for name in ("a", "b"):
        model.register_buffer(name, torch.zeros(4))
    worker.get_model = lambda: model
    worker.midstream_staged = SimpleNamespace(look=lambda: None, switch=lambda: None)
    assert worker.midstream_digest(begin=True, seconds=0.0) is None
    old = weakref.ref(model.b)
    model.b = torch.ones(4)
    worker.midstream_weights("look")
    assert old() is not None
    worker.midstream_weights("switch")
    gc.collect()
    assert old() is None, "two sets of weights would lie in memory"
    assert worker.midstream_digest(begin=False, seconds=1e9) is None


async def test_the_weights_under_adapters_have_a_digest(tmp_path: Path) -> None:
    async with attached(tmp_path, places=2, set_up=gives_digests) as (engine, _):
        card = engine._info().card
        assert card.has("policies")
        assert card.has("weights_digest")
        assert await engine.weights_digest() == "kind:0"


async def test_steps_go_between_the_pieces_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(module, "COMPUTE_S", 1e-9)

    async with attached(tmp_path, set_up=gives_digests) as (engine, fake):
        wait: Callable[[float], Any] = asyncio.sleep

        async def noted(seconds: float) -> None:
            waits.append(seconds)
            await wait(0)

        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=noted))
        await engine.weights_digest()
        assert set(waits) == {1e-9}, "others may have requests there"
        engine._attached = False
        waits.clear()
        await engine.weights_digest()
        assert set(waits) == {0}
        await begun(engine, fake, asking())
        waits.clear()
        await engine.weights_digest()
        assert set(waits) == {1e-9}
