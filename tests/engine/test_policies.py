"""Many policies in one engine: each request has the numbers of its own adapter, whatever else is in the step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import ATTENTION, EXPERTS, MLP, adapted, write_adapter
from engine_helpers import Collected, needs_compiler, request, run
from families import FUSED, write_model
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiers import few_fast
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.errors import SnapshotIncompatible, SnapshotNotFinite
from midstream.core.types import GenerateRequest
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.model_runner import dispose

KERNELS = ("native", "torch")


def settings(kernels: str, **more: Any) -> EngineSettings:
    return EngineSettings(kernels=kernels, kv_cache_tokens=2048, **more)


def write(base: Path, place: Path, seed: int, *, experts: bool = True, rank: int = 8) -> Path:
    """A PEFT adapter of the model in `base`."""
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    moe = any(".experts." in name for name, _ in module.named_parameters())
    targets: dict[str, Any] = {"target_modules": [*ATTENTION, *([] if moe else MLP)]}
    if moe and experts:
        targets["target_parameters"] = EXPERTS
    peft = adapted(module, seed, r=rank, lora_alpha=2 * rank, **targets)
    directory = place / f"adapter-{seed}"
    write_adapter(peft, directory)
    return directory


def load(core: EngineCore, directory: Path, snapshot: str, policy: str = "") -> None:
    core.set_staged(core.stage(directory), policy)
    core.commit(snapshot, policy)


def asked(
    name: str, prompt: Sequence[int], policy: str, snapshot: str | None = None, **more: Any
) -> GenerateRequest:
    salted = request(name, prompt, salt=f"{policy}@{snapshot}".encode(), **more)
    return replace(salted, policy=policy, snapshot=snapshot, want_kv_snapshots=True)


def numbers(found: Collected) -> list[tuple[Any, ...]]:
    return [(t.token_id, t.logprob, t.sampling_logprob, t.route) for t in (*found.prompt, *found.tokens)]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    needs_compiler(request.param)
    return str(request.param)


@pytest.mark.parametrize("dtype", few_fast(["float32", "bfloat16"], "bfloat16"))
def test_a_step_of_many_policies_has_the_numbers_of_each_alone(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str, dtype: str
) -> None:
    base = tiny_model(dtype=dtype)
    adapters = [write(base, tmp_path, seed) for seed in range(3)]
    prompts = [list(range(1 + i, 20 + 3 * i)) for i in range(7)]
    policy_of = ["p0", "", "p1", "p0", "p2", "", "p1"]
    together = EngineCore(base, settings(kernels))
    for number, directory in enumerate(adapters):
        load(together, directory, f"step-{number}", f"p{number}")
    requests = [asked(f"r{i}", p, policy_of[i], temperature=0.8, seed=i) for i, p in enumerate(prompts)]
    found = run(together, requests)
    together.check()
    for number in (None, 0, 1, 2):
        policy = "" if number is None else f"p{number}"
        alone = EngineCore(base, settings(kernels))
        if number is not None:
            # It is the only policy there, and the default one.
            load(alone, adapters[number], f"step-{number}")
        own = [r for r in requests if r.policy == policy]
        expected = run(alone, [replace(r, policy="") for r in own])
        for r in own:
            mine, theirs = found[r.request_id, 0], expected[r.request_id, 0]
            assert {t.snapshot for t in mine.tokens} == {"base" if number is None else f"step-{number}"}
            assert mine.kv == theirs.kv
            if kernels == "native":
                assert numbers(mine) == numbers(theirs)
            elif dtype == "float32":
                assert [t.token_id for t in mine.tokens] == [t.token_id for t in theirs.tokens]
                pairs = zip(mine.tokens, theirs.tokens, strict=True)
                assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


def test_log_probabilities_are_those_of_transformers_and_peft(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str
) -> None:
    base = tiny_model(dtype="float32")
    core = EngineCore(base, settings(kernels))
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for seed in range(2):
        load(core, write(base, tmp_path, seed), f"s{seed}", f"p{seed}")
    requests = [asked(f"r{i}", range(3, 40), f"p{i}", max_tokens=12) for i in range(2)]
    found = run(core, requests)
    for seed in range(2):
        peft = adapted(module, seed, r=8, lora_alpha=16, target_modules=ATTENTION, target_parameters=EXPERTS)
        mine = found[f"r{seed}", 0]
        ids = [*range(3, 40), *(t.token_id for t in mine.tokens)]
        with torch.inference_mode():
            logits = peft(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        expected = logits.log_softmax(-1)
        for position, record in enumerate([*mine.prompt, *mine.tokens]):
            if position:
                assert abs(record.logprob - float(expected[position - 1, ids[position]])) < 1e-4


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3-moe", {"target_modules": [*ATTENTION, *MLP]}),
        ("deepseek-v3", {"target_modules": MLP}),
        ("mixtral", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
        ("gemma2", {"target_modules": [*ATTENTION, *MLP]}),
        ("llama", {"target_modules": "all-linear"}),
    ],
)
def test_what_stock_peft_writes_for_experts_is_taken_with_its_patterns(
    tmp_path: Path, family: str, targets: dict[str, Any], kernels: str
) -> None:
    """PEFT finds no module for the experts' maps, and writes a `rank_pattern` for the tensor that holds two of them."""
    if kernels == "native" and family not in FUSED:
        pytest.skip("the kernels do not know this family")
    if kernels == "torch" and family == "qwen3-moe":
        pytest.skip("a module with so many experts takes no adapter of them")
    base = write_model(family, tmp_path)
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = adapted(module, 0, r=4, lora_alpha=6, **targets)
    write_adapter(peft, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    if targets["target_modules"] in (MLP, [*ATTENTION, *MLP]) and family != "gemma2":
        assert list(config["rank_pattern"]) == [r".*\.gate_up_proj"]
    core = EngineCore(base, settings(kernels))
    load(core, tmp_path / "adapter", "s", "p")
    mine = run(core, [asked("r", range(3, 40), "p", max_tokens=6)])["r", 0]
    ids = [*range(3, 40), *(t.token_id for t in mine.tokens)]
    with torch.inference_mode():
        expected = peft(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    for position, record in enumerate([*mine.prompt, *mine.tokens]):
        if position:
            assert abs(record.logprob - float(expected[position - 1, ids[position]])) < 1e-3


def test_a_policys_switch_touches_no_other(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str
) -> None:
    base = tiny_model()
    core = EngineCore(base, settings(kernels))
    first, second = (write(base, tmp_path, seed) for seed in range(2))
    load(core, first, "a", "moves")
    load(core, first, "b", "stays")
    staged = core.stage(second)

    def switch(step: int) -> None:
        if step == 4:
            core.set_staged(staged, "moves")
            timing = core.commit("c", "moves")
            assert timing.streams_crossed == 1

    prompt = range(1, 30)
    found = run(core, [asked(p, prompt, p, max_tokens=10) for p in ("moves", "stays", "")], switch)
    labels = {p: [t.snapshot for t in found[p, 0].tokens] for p in ("moves", "stays", "")}
    assert labels == {"moves": ["a"] * 4 + ["c"] * 6, "stays": ["b"] * 10, "": ["base"] * 10}
    assert found["moves", 0].kv == [("a", 0, 32), ("c", 32, 38)]
    assert numbers(found["moves", 0])[:33] == numbers(found["stays", 0])[:33]
    assert numbers(found["moves", 0])[33:] != numbers(found["stays", 0])[33:]
    again = run(core, [asked("again", prompt, "stays", max_tokens=10)])
    assert [t.token_id for t in again["again", 0].tokens] == [t.token_id for t in found["stays", 0].tokens]
    core.check()


def test_adapters_stand_on_the_base_weights_whatever_the_deployment_serves(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str
) -> None:
    base = tiny_model()
    directory = write(base, tmp_path, 0)
    core = EngineCore(base, settings(kernels))
    load(core, directory, "a", "early")

    def sampled(policy: str, salt: str) -> list[tuple[Any, ...]]:
        """A salt of its own, so that no KV is reused: with modules it would change the last bits."""
        found = run(core, [replace(asked("r", range(1, 20), policy), salt=salt.encode())])["r", 0]
        return numbers(found)

    expected = sampled("early", "1")
    load(core, tiny_model(seed=1), "full-1")
    assert core.take_retired() == []
    assert sampled("early", "2") == expected
    core.end_policy("early")
    # The adapter, and the base weights that nothing else stands on.
    retired = core.take_retired()
    assert len(retired) == 2
    dispose(retired)
    # They are read again.
    load(core, directory, "b", "late")
    assert sampled("late", "3") == expected
    full = run(core, [asked("r", range(1, 20), "")])["r", 0]
    assert {t.snapshot for t in full.tokens} == {"full-1"}
    assert numbers(full) != expected


def test_resident_snapshots_serve_beside_the_newest(tiny_model: Callable[..., Path], kernels: str) -> None:
    core = EngineCore(tiny_model(), settings(kernels))
    core.retain("", ["base", "one", "two"])
    for seed, snapshot in enumerate(("one", "two", "three"), 1):
        load(core, tiny_model(seed=seed), snapshot)
    assert core.take_retired() == []
    names = ("base", "one", "two", "three")
    prompt = range(5, 40)
    found = run(core, [asked(n, prompt, "", n, max_tokens=6) for n in names])
    for seed, name in enumerate(names):
        alone = EngineCore(tiny_model(seed=seed), settings(kernels))
        expected = run(alone, [asked("r", prompt, "", max_tokens=6)])["r", 0]
        mine = found[name, 0]
        assert {t.snapshot for t in mine.tokens} == {name}
        assert [t.token_id for t in mine.tokens] == [t.token_id for t in expected.tokens]
        if kernels == "native":
            assert numbers(mine) == numbers(expected)
    core.check()


def test_what_a_request_runs_under_is_freed_when_it_ends(
    tiny_model: Callable[..., Path], kernels: str
) -> None:
    core = EngineCore(tiny_model(), settings(kernels))
    staged = core.stage(tiny_model(seed=1))
    freed: list[int] = []

    def switch(step: int) -> None:
        if step == 2:
            core.set_staged(staged)
            core.commit("one")
        freed.append(len(core.take_retired()))

    found = run(
        core, [asked("pinned", range(9), "", "base", max_tokens=6), asked("newest", range(9), "")], switch
    )
    assert {t.snapshot for t in found["pinned", 0].tokens} == {"base"}
    assert [t.snapshot for t in found["newest", 0].tokens] == ["base"] * 2 + ["one"] * 6
    assert freed == [0, 0, 0, 0, 0, 1, 0, 0]
    (error,) = (e.error for _, e in core.add(asked("late", range(9), "", "base")))
    assert error == "the default policy@base is not loaded"


def test_a_resident_snapshot_is_freed_when_it_is_let_go_and_nothing_runs_under_it(
    tiny_model: Callable[..., Path], kernels: str
) -> None:
    core = EngineCore(tiny_model(), settings(kernels))
    core.retain("", ["base"])
    load(core, tiny_model(seed=1), "one")
    freed: list[int] = []

    def let_go(step: int) -> None:
        if step == 1:
            core.retain("", [])
        freed.append(len(core.take_retired()))

    prompt = range(9)
    found = run(core, [asked("r", prompt, "", "base", max_tokens=4), asked("n", prompt, "")], let_go)
    assert {t.snapshot for t in found["r", 0].tokens} == {"base"}
    assert {t.snapshot for t in found["n", 0].tokens} == {"one"}
    assert freed == [0, 0, 0, 1, 0, 0, 0, 0]
    # One of the same name that comes back is another load.
    core.retain("", ["one"])
    load(core, tiny_model(seed=2), "two")
    load(core, tiny_model(seed=1), "one")
    assert len(core.take_retired()) == 2
    (error,) = (e.error for _, e in core.add(asked("late", prompt, "", "two")))
    assert error == "the default policy@two is not loaded"
    core.check()


def test_a_policy_of_an_old_name_is_another(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str
) -> None:
    base = tiny_model()
    core = EngineCore(base, settings(kernels))
    first, second = (write(base, tmp_path, seed) for seed in range(2))
    load(core, first, "v1", "p")

    def end(step: int) -> None:
        if step == 3:
            core.end_policy("p")

    results = run(core, [asked("first", range(9), "p", max_tokens=8)], end)
    before = numbers(results["first", 0])
    load(core, second, "v1", "p")
    after = numbers(run(core, [asked("r", range(9), "p", max_tokens=8)])["r", 0])
    assert len(before) == len(after) == 17
    assert before != after


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True, which is not served"),
        ({"r": 4}, "has rank 8, adapter_config.json says 4"),
        ({"r": 0}, "r is 0, a number from 1 to 256 is expected"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', a number is expected"),
        ({"bias": "all"}, "bias is 'all', which is not served"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', which is not served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not served"),
        ({"target_modules": ["lm_head"]}, "but the adapter has nothing for lm_head"),
        ({"rank_pattern": {"(a+)+": 3}}, "rank_pattern has (a+)+"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, tiny_model: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    base = tiny_model()
    directory = write(base, tmp_path, 0)
    config = directory / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    core = EngineCore(base, settings("auto"))
    with pytest.raises(Exception, match=re.escape(message)):
        core.stage(directory)
    # Nothing changed.
    assert run(core, [asked("r", range(9), "")])["r", 0].error is None


def test_a_map_that_is_not_run_is_refused_as_the_adapters_fault(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str
) -> None:
    """PEFT's all-linear adapts the routers of an MoE model, too. A refusal that says to try again would never end."""
    base = tiny_model()
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    write_adapter(adapted(module, 0, r=4, lora_alpha=8, target_modules="all-linear"), tmp_path / "adapter")
    core = EngineCore(base, settings(kernels))
    with pytest.raises(SnapshotIncompatible, match=r"does not run an adapter of model\.layers\.0\.mlp\.gate"):
        core.stage(tmp_path / "adapter")
    assert run(core, [asked("r", range(9), "")])["r", 0].error is None


@pytest.mark.parametrize("case", ["expert", "checkpoint", "huge"])
def test_what_could_mean_two_things_is_refused(
    tmp_path: Path, tiny_model: Callable[..., Path], case: str
) -> None:
    base = tiny_model()
    directory = write(base, tmp_path, 0)
    file, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    expected = "adapted twice: by itself and with all experts"
    if case == "expert":
        tensors = load_file(file)
        name = "base_model.model.model.layers.0.mlp.experts.0.gate_proj"
        rank, hidden = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape
        inner = json.loads((base / "config.json").read_text())["moe_intermediate_size"]
        tensors[f"{name}.lora_A.weight"] = torch.zeros(rank, hidden)
        tensors[f"{name}.lora_B.weight"] = torch.zeros(inner, rank)
        save_file(tensors, file)
    elif case == "checkpoint":
        save_file({"a": torch.zeros(1)}, directory / "model.safetensors")
        expected = "holds an adapter and a checkpoint"
    else:
        text = config.read_text()
        config.write_text(re.sub(r'"lora_alpha": \d+', f'"lora_alpha": {10**400}', text))
        expected = "a number is expected"
    with pytest.raises(Exception, match=expected):
        EngineCore(base, settings("auto")).stage(directory)


def test_an_adapter_with_numbers_that_are_not_finite_is_refused(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str
) -> None:
    base = tiny_model()
    directory = write(base, tmp_path, 0)
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(SnapshotNotFinite, match="not finite"):
        EngineCore(base, settings(kernels)).stage(directory)


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_an_adapter_of_numbers_too_large_to_compute_with_is_unfit(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str, scale: float
) -> None:
    """Each of its numbers is finite."""
    base = tiny_model()
    directory = write(base, tmp_path, 0)
    file = directory / "adapter_model.safetensors"
    save_file({name: tensor * scale for name, tensor in load_file(file).items()}, file)
    core = EngineCore(base, settings(kernels))
    before = run(core, [request("r", [1, 2, 3], max_tokens=8)])["r", 0].tokens
    said = core.stage(directory).unfit()
    assert (
        said is None
        if scale == 1.0
        else said == ("SnapshotNotFinite: the log-probabilities of a fixed prompt are not finite")
    )
    assert run(core, [request("s", [1, 2, 3], max_tokens=8)])["s", 0].tokens == before
    core.check()
