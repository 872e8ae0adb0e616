"""What the worker extension stages inside a vLLM worker, with stand-ins for the modules of vLLM that it calls."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from midstream.engine.vllm.arguments import WORKER_DIR
from midstream.engine.vllm.worker_extension import midstream_vllm_plan as plans

LOADER = "vllm.model_executor.model_loader"
VOCAB, WIDTH = 6, 4
CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


class Packing:
    """As vLLM's methods on a CPU: what computes is packed, and the parameter is emptied."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.compute = lambda x: x @ packed.T
        if not self.keeps:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Layer(nn.Module):
    def __init__(self, rows: int, method: Packing | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, WIDTH), requires_grad=False)
        self.quant_method = method
        self.register_buffer("table", torch.arange(100_000), persistent=False)
        self.loads = 0

    def load(self, parameter: Any, tensor: torch.Tensor) -> None:
        self.loads += 1
        parameter.copy_(tensor)


class Model(nn.Module):
    """embed and head share their parameter. The instance's own loader is that of the model that serves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Layer(VOCAB, Packing(keeps=True))
        self.proj = Layer(WIDTH, Packing(keeps=False))
        self.norm = Layer(1)
        self.head = Layer(VOCAB, Packing(keeps=True))
        self.head.weight = self.embed.weight
        self.says_what_it_loaded = True
        # What the load waits for after a tensor.
        self.wait: dict[str, threading.Event] = {}

    def load_weights(self, weights: Any) -> set[str] | None:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", torch.Tensor.copy_)(parameter, tensor)
            loaded.add(name)
            self.wait.get(name, _SET).wait()
        return loaded if self.says_what_it_loaded else None

    def compute(self) -> torch.Tensor:
        hidden = self.embed.weight * self.norm.weight
        proj, head = self.proj.compute, self.head.compute
        result: torch.Tensor = head(hidden + proj(hidden))
        return result


_SET = threading.Event()
_SET.set()


def numbered(seed: int) -> Weights:
    shapes = {"embed.weight": (VOCAB, WIDTH), "norm.weight": (1, WIDTH), "proj.weight": (WIDTH, WIDTH)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def process(model: nn.Module, _config: Any = None, _device: Any = None) -> None:
    for module in model.modules():
        if isinstance(module, Layer) and module.quant_method is not None:
            module.quant_method.process_weights_after_loading(module)


def track(model: nn.Module, loaded: set[str]) -> None:
    """As vLLM's, it passes over modules with weights that vLLM processes."""
    for prefix, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None:
            loaded |= {f"{prefix}.{name}" for name, _ in module.named_parameters()}
    if missing := {name for name, _ in model.named_parameters()} - loaded:
        raise ValueError(f"not initialized: {missing}")


class Vllm:
    """The stand-ins. files: the weights of each directory."""

    def __init__(self) -> None:
        self.files: dict[str, Weights] = {"own": numbered(0), "other": numbered(1)}
        self.recorded: dict[int, Any] = {}
        self.model = Model()
        for module in self.model.modules():
            self._record(module)
        self.model.load_weights(self.files["own"].items())
        process(self.model)
        self.model.__dict__["load_weights"] = self.model.load_weights

    def add(self, module: nn.Module, name: str, parameter: Any) -> None:
        """As if the module had had it from the beginning."""
        setattr(module, name, parameter)
        self.recorded[id(module)].restore_metadata[0][name] = self.to_meta(parameter)

    def derives(self, name: str, derive: Any) -> Any:
        """The method of proj has what it derives from the weight. Returns the method of what serves."""

        class Deriving(Packing):
            def process_weights_after_loading(self, layer: Any) -> None:
                setattr(self, name, derive(layer.weight))
                super().process_weights_after_loading(layer)

        method = self.model.proj.quant_method = Deriving(keeps=False)
        setattr(method, name, derive(self.files["own"]["proj.weight"]))
        return method

    def worker(self) -> Any:
        config = SimpleNamespace(
            lora_config=None,
            parallel_config=SimpleNamespace(enable_eplb=False),
            model_config=SimpleNamespace(
                dtype=torch.float32, model="own", revision="main", quantization=None
            ),
            load_config=SimpleNamespace(load_format="auto"),
        )
        runner = SimpleNamespace(get_model=lambda: self.model, vllm_config=config)
        return SimpleNamespace(model_runner=runner, device=CPU, parallel_config=SimpleNamespace(world_size=1))

    def expected(self, name: str) -> torch.Tensor:
        """What a server computes that was started with these files."""
        model = Model()
        model.load_weights(self.files[name].items())
        process(model)
        return model.compute()

    def _record(self, module: nn.Module) -> None:
        forms = {name: self.to_meta(p) for name, p in module._parameters.items() if p is not None}
        self.recorded[id(module)] = SimpleNamespace(restore_metadata=(forms, {}), restore_device=CPU)

    @staticmethod
    def to_meta(tensor: Any) -> Any:
        form = tensor.data.to("meta")
        form.__class__, form.__dict__ = tensor.__class__, copy.copy(tensor.__dict__)
        return form

    @staticmethod
    def materialize(form: Any) -> Any:
        made = torch.empty_strided(form.size(), form.stride(), dtype=form.dtype)
        made.__class__, made.__dict__ = form.__class__, copy.copy(form.__dict__)
        return made

    def modules(self) -> dict[str, dict[str, Any]]:
        files = SimpleNamespace(
            get_all_weights=lambda config, _: iter(self.files[config.model].items()),
            track_weights_loading=track,
        )
        return {
            LOADER: {"get_model_loader": lambda _: files},
            f"{LOADER}.utils": {"process_weights_after_loading": process},
            f"{LOADER}.reload.layerwise": {"get_layerwise_info": lambda layer: self.recorded[id(layer)]},
            f"{LOADER}.reload.meta": {
                "SKIP_TENSORS": {"bias"},
                "to_meta_tensor": self.to_meta,
                "materialize_meta_tensor": self.materialize,
            },
            f"{LOADER}.reload.sanitize": {"restore_layer_refs": lambda tensor, _: tensor},
            "vllm.config": {"set_current_vllm_config": contextlib.nullcontext},
        }


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    made = Vllm()
    for name in ("vllm", "vllm.model_executor", f"{LOADER}.reload"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in made.modules().items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "midstream_vllm_plan", plans)
    name = "loaded_staged"
    spec = importlib.util.spec_from_file_location(name, WORKER_DIR / "midstream_vllm_staged.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The tests' own threads and priorities stay as they are.
    module._stand_back = lambda: None
    return module


@pytest.fixture
def staged(module: Any, vllm: Vllm) -> Iterator[Any]:
    made = module.WeightStage(vllm.worker())
    yield made
    made._thread.shutdown()


def finished(staged: Any) -> None:
    """Everything that the thread was given is done."""
    staged._thread.submit(lambda: None).result(20)


def stage(staged: Any, number: int, name: str, **more: Any) -> dict[str, Any]:
    assert staged.stage(number, name, **more) == ""
    finished(staged)
    look: dict[str, Any] = staged.look(number)
    return look


def test_staged_weights_serve_after_the_switch_and_not_before(staged: Any, vllm: Vllm) -> None:
    before = vllm.model.compute()
    assert torch.equal(before, vllm.expected("own"))
    assert stage(staged, 1, "other") == {
        "phase": "staged",
        "why": "",
        "kinds": ["embed", "head", "norm", "proj"],
    }
    assert torch.equal(vllm.model.compute(), before)
    staged.switch(1)
    assert torch.equal(vllm.model.compute(), vllm.expected("other"))
    assert vllm.model.head.weight is vllm.model.embed.weight
    staged.drop(1)
    finished(staged)
    assert torch.equal(vllm.model.compute(), vllm.expected("other"))
    stage(staged, 2, "own")
    staged.switch(2)
    assert torch.equal(vllm.model.compute(), before)


def test_each_kind_of_module_changes_the_numbers_when_it_is_switched(staged: Any, vllm: Vllm) -> None:
    look = stage(staged, 1, "own", moved=True)
    seen = [vllm.model.compute()]
    for kind in look["kinds"]:
        staged.switch(1, [kind])
        seen.append(vllm.model.compute())
        assert not torch.equal(seen[-1], seen[-2]), kind
    assert torch.isfinite(seen[-1]).all()


def test_parameters_keep_their_identity_and_modules_their_tables(
    staged: Any, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, table = vllm.model.embed.weight, vllm.model.embed.table
    monkeypatch.setattr(plans, "SMALL", 0)
    stage(staged, 1, "other")
    staged.switch(1)
    assert vllm.model.embed.weight is embed
    assert vllm.model.embed.table is table
    assert torch.equal(embed, vllm.files["other"]["embed.weight"])


@pytest.mark.parametrize("how", ["a buffer", "an attribute"])
def test_a_parameter_whose_memory_others_share_is_copied(
    staged: Any, vllm: Vllm, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    view = vllm.model.embed.weight.data[0]
    if how == "a buffer":
        vllm.model.embed.register_buffer("first_row", view, persistent=False)
    else:
        vllm.model.embed.first_row = view
    monkeypatch.setattr(plans, "SMALL", 0)
    stage(staged, 1, "other")
    staged.switch(1)
    assert torch.equal(view, vllm.files["other"]["embed.weight"][0])


def test_weights_that_cannot_be_loaded_change_nothing(staged: Any, vllm: Vllm) -> None:
    before = vllm.model.compute()
    vllm.files["bad"] = {**vllm.files["other"], "proj.weight": torch.zeros(3, 3)}
    look = stage(staged, 1, "bad")
    assert look["phase"] == "failed"
    assert "size" in look["why"]
    with pytest.raises(RuntimeError, match="not staged"):
        staged.switch(1)
    assert torch.equal(vllm.model.compute(), before)


def test_what_vllm_does_not_find_in_a_checkpoint_fails_the_staging(staged: Any, vllm: Vllm) -> None:
    vllm.files["bad"] = {k: v for k, v in vllm.files["other"].items() if k != "norm.weight"}
    look = {"phase": "failed", "why": "ValueError: not initialized: {'norm.weight'}", "kinds": []}
    assert stage(staged, 1, "bad") == look


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_parameter_that_no_checkpoint_has_is_not_made_of_memory_as_it_was_found(
    staged: Any, vllm: Vllm, quantization: str | None
) -> None:
    """vLLM's own check passes over it, as a start has given it a number."""
    staged._worker.model_runner.vllm_config.model_config.quantization = quantization
    vllm.add(vllm.model.proj, "k_scale", nn.Parameter(torch.tensor(-1.0), requires_grad=False))
    look = {"phase": "refused", "why": "proj.k_scale comes from no checkpoint", "kinds": []}
    assert stage(staged, 1, "other") == look
    assert torch.equal(vllm.model.proj.get_parameter("k_scale"), torch.tensor(-1.0))


def test_what_vllm_derives_for_a_method_is_switched_with_the_weights(staged: Any, vllm: Vllm) -> None:
    method = vllm.derives("scale", lambda weight: weight.detach().abs().max().reshape(1))
    before = method.scale
    stage(staged, 1, "other")
    assert torch.equal(before, vllm.files["own"]["proj.weight"].abs().max().reshape(1))
    staged.switch(1)
    assert method.scale is before
    assert torch.equal(before, vllm.files["other"]["proj.weight"].abs().max().reshape(1))


@pytest.mark.parametrize(
    "derived", [lambda weight: [float(weight[0, 0])], lambda weight: float(weight[0, 0])]
)
def test_what_vllm_derives_and_no_switch_brings_is_not_staged(staged: Any, vllm: Vllm, derived: Any) -> None:
    vllm.derives("scale", derived)
    look = stage(staged, 1, "other")
    assert look["phase"] == "refused"
    assert "proj.quant_method.scale" in look["why"]


def test_a_tensor_of_a_method_that_others_look_at_is_not_staged(staged: Any, vllm: Vllm) -> None:
    method = vllm.derives("scale", lambda weight: weight.detach().clone())
    vllm.model.proj.seen = method.scale[0]
    assert "others look at" in stage(staged, 1, "other")["why"]


def test_no_object_that_a_graph_may_know_is_replaced_on_a_device(module: Any, vllm: Vllm) -> None:
    live, twin = vllm.model.proj, copy.copy(vllm.model.proj)
    began = dict(twin.__dict__)
    for value, fits in ((2.5, True), ([2.5], False), (torch.ones(1), False)):
        live.__dict__["derived"], twin.__dict__["derived"] = 1.5, value
        plan = module.plans.planned
        pairs, had = {".proj": (live, twin)}, {id(twin): began}
        if fits:
            (switched,) = [do for _, do in plan(pairs, had, on_cpu=False)][-1:]
            switched()
            assert live.__dict__["derived"] == 2.5
        else:
            with pytest.raises(module.NotStaged, match=r"proj\.derived"):
                plan(pairs, had, on_cpu=False)
            assert plan(pairs, had, on_cpu=True)


def test_a_loader_that_a_reload_has_left_is_not_used(staged: Any, vllm: Vllm) -> None:
    """It would take the weights for the model that serves, and load nothing."""
    form = vllm.recorded[id(vllm.model.proj)].restore_metadata[0]["weight"]

    def online_process_loader(*_: Any) -> None:
        raise AssertionError("for what serves")

    online_process_loader.__wrapped__ = vllm.model.proj.load  # type: ignore[attr-defined]
    form.weight_loader = online_process_loader
    stage(staged, 1, "other")
    staged.switch(1)
    assert torch.equal(vllm.model.compute(), vllm.expected("other"))


def test_an_allocation_that_fails_is_no_fault_of_the_weights(
    staged: Any, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(sys.modules[f"{LOADER}.utils"], "process_weights_after_loading", fails)
    assert stage(staged, 1, "other")["phase"] == "refused"


def test_weights_are_not_staged_where_memory_lacks(
    staged: Any, module: Any, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_free_memory", lambda device, sharers: 5 << 20)
    look = stage(staged, 1, "other")
    assert look["phase"] == "refused"
    assert "5 MiB are free" in look["why"]


def test_a_container_may_have_less_than_the_machine(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    assert module._free_memory(CPU, 1) == 8000 * 1024
    assert module._free_memory(CPU, 4) == 2000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert module._free_memory(CPU, 1) == 8000 * 1024
    (tmp_path / "memory.max").write_text("4000000\n")
    assert module._free_memory(CPU, 1) == 1_500_000


def test_a_model_that_does_not_say_what_it_loaded_is_loaded_in_place(staged: Any, vllm: Vllm) -> None:
    vllm.model.says_what_it_loaded = False
    assert stage(staged, 1, "other")["phase"] == "refused"


def test_another_form_of_a_parameter_is_not_switched_to(staged: Any, vllm: Vllm) -> None:
    vllm.model.norm.weight = nn.Parameter(torch.zeros(1, WIDTH, dtype=torch.float64), requires_grad=False)
    look = stage(staged, 1, "other")
    assert look["phase"] == "refused"
    assert "norm.weight" in look["why"]


def test_dropped_weights_are_freed_without_a_collection_of_garbage(staged: Any, vllm: Vllm) -> None:
    gc.disable()
    try:
        stage(staged, 1, "other")
        root = staged._attempt.twin.root
        gone = [weakref.ref(root.proj), weakref.ref(root.embed.weight.untyped_storage())]
        kept = weakref.ref(root.norm.weight)
        del root
        staged.drop(1)
        finished(staged)
        assert kept() is None
        assert gone[1]() is None
    finally:
        gc.enable()


def test_a_load_that_is_dropped_ends_and_the_next_one_is_whole(staged: Any, vllm: Vllm) -> None:
    before = vllm.model.compute()
    vllm.model.wait["embed.weight"] = gate = threading.Event()
    assert staged.stage(1, "other") == ""
    assert staged.stage(2, "own") == ""
    assert staged.look(1)["phase"] == "refused"
    # Of the first one, which ends at its next tensor.
    staged.drop(1)
    gate.set()
    finished(staged)
    assert staged.look(2)["phase"] == "staged"
    with pytest.raises(RuntimeError, match="the weights 1 are not staged"):
        staged.switch(1)
    staged.switch(2)
    assert torch.equal(vllm.model.compute(), before)


def test_a_thread_is_busy_until_its_load_has_ended_also_when_nobody_wants_it(staged: Any, vllm: Vllm) -> None:
    """vLLM's config is one for all threads, and the end of a load sets it."""
    assert staged.busy(0) == ""
    vllm.model.wait["embed.weight"] = gate = threading.Event()
    assert staged.stage(1, "other") == ""
    staged.drop(1)
    assert staged.busy(0) == "loading"
    gate.set()
    finished(staged)
    assert staged.busy(0) == ""


class Adapting(nn.Module):
    """As vLLM's layers for adapters: what they are wrapped around has the weights, and they seem to have whatever it has."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_modules", {})
        return own[name] if name in own else getattr(own["base_layer"], name)


def test_layers_for_adapters_stay_around_what_is_switched(staged: Any, vllm: Vllm) -> None:
    wrapped = {name: Adapting(layer) for name, layer in vllm.model.named_children() if name != "norm"}
    for name, layer in wrapped.items():
        setattr(vllm.model, name, layer)
    assert "proj.weight" not in dict(vllm.model.named_parameters())
    assert stage(staged, 1, "other")["kinds"] == ["embed", "head", "norm", "proj"]
    assert torch.equal(vllm.model.compute(), vllm.expected("own"))
    staged.switch(1)
    assert torch.equal(vllm.model.compute(), vllm.expected("other"))
    assert {name: getattr(vllm.model, name) for name in wrapped} == wrapped


def test_half_precision_is_not_proved_with_other_weights(staged: Any) -> None:
    staged._worker.model_runner.vllm_config.model_config.dtype = torch.float16
    assert stage(staged, 1, "own", moved=True)["phase"] == "refused"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda config: setattr(config.parallel_config, "enable_eplb", True), "--enable-eplb"),
        (
            lambda config: setattr(config.model_config, "word_embeddings_untied_by_checkpoint", True),
            "ties to the embeddings",
        ),
    ],
)
def test_what_cannot_be_staged_is_said_at_once(staged: Any, change: Any, why: str) -> None:
    change(staged._worker.model_runner.vllm_config)
    assert why in staged.stage(1, "own")


def test_a_vllm_without_these_modules_stages_nothing(
    staged: Any, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"{LOADER}.reload.layerwise", ModuleType("older"))
    assert "get_layerwise_info" in staged.stage(1, "own")
