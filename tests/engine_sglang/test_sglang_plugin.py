"""The hooks that SGLang loads of midstream, around functions that do to logits what those of SGLang 0.5.23 do."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from midstream.engine.sglang.arguments import PLUGIN_DIR
from midstream.engine.sglang.plugin import midstream_sglang_plugin as plugin

LOGITS = torch.tensor([[1.0, 2.0, 3.0, 0.5], [0.0, -1.0, 4.0, 2.0]])


def passed(*, bias: bool = False, grammars: bool = False, penalties: bool = False) -> tuple[Any, Any]:
    """The output of a pass, and how its requests are sampled."""
    sampling = SimpleNamespace(
        grammars=[object()] if grammars else None,
        logit_bias=torch.zeros(2, 4) if bias else None,
        penalizer_orchestrator=SimpleNamespace(is_required=penalties),
    )
    return SimpleNamespace(next_token_logits=LOGITS.clone()), sampling


def preprocess(runner: Any, output: Any, sampling: Any, observer: Any = None) -> str:
    output.next_token_logits.add_(10.0 * torch.arange(4.0))
    return "state"


def sampled(sampler: Any, output: Any, sampling: Any, return_logprob: bool, *args: Any, **named: Any) -> Any:
    return named.get("logprob_logits"), output.next_token_logits.argmax(-1)


@pytest.mark.parametrize("shaped", [{"bias": True}, {"grammars": True}, {"penalties": True}])
def test_numbers_are_of_what_the_model_gave_and_draws_of_what_was_left(shaped: dict[str, bool]) -> None:
    output, sampling = passed(**shaped)
    assert plugin.keep_raw(preprocess, object(), output, sampling) == "state"
    logits, drawn = plugin.say_raw(sampled, object(), output, sampling, True, [0], [None], None)
    assert torch.equal(logits, LOGITS)
    assert drawn.tolist() == [3, 3]


def test_an_output_that_is_used_again_keeps_nothing_of_the_pass_before() -> None:
    output, sampling = passed(bias=True)
    plugin.keep_raw(preprocess, object(), output, sampling)
    _, plain = passed()
    plugin.keep_raw(preprocess, object(), output, plain)
    assert plugin.say_raw(sampled, object(), output, plain, True)[0] is None
    plugin.keep_raw(preprocess, object(), output, sampling)
    assert plugin.say_raw(sampled, object(), output, sampling, False)[0] is None, "nobody asked"
    assert plugin.say_raw(sampled, object(), output, sampling, True)[0] is None, "that pass is over"


def test_what_sglang_says_of_its_own_stays() -> None:
    output, sampling = passed(bias=True)
    plugin.keep_raw(preprocess, object(), output, sampling, observer=None)
    mine = torch.ones(2, 4)
    assert plugin.say_raw(sampled, object(), output, sampling, True, logprob_logits=mine)[0] is mine


def test_penalties_count_what_a_retracted_request_has_generated() -> None:
    def request(made: list[int], penalty: float) -> Any:
        params = SimpleNamespace(frequency_penalty=penalty, presence_penalty=penalty)
        return SimpleNamespace(output_ids=made, origin_input_ids=[3], sampling_params=params)

    penalizer = SimpleNamespace(
        orchestrator=SimpleNamespace(
            reqs=lambda: [request([1, 1, 2], 0.5), request([], 1.5), request([0], 0.0)]
        ),
        cumulated_frequency_penalties=torch.zeros(3, 4),
        cumulated_presence_penalties=torch.zeros(3, 4),
    )
    plugin.count(None, penalizer)
    plugin.mark(None, penalizer)
    assert penalizer.cumulated_frequency_penalties.tolist() == [[0, 1.0, 0.5, 0], [0] * 4, [0] * 4]
    assert penalizer.cumulated_presence_penalties.tolist() == [[0, 0.5, 0.5, 0], [0] * 4, [0] * 4]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules of SGLang that a hook imports."""
    names = (
        "plugins.hook_registry",
        "constrained.base_grammar_backend",
        "managers.scheduler",
        "runtime_context",
    )
    made = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    return made


def test_a_server_without_a_tokenizer_gets_one_for_grammars(sglang: dict[str, Any]) -> None:
    def get_tokenizer(path: str, **named: Any) -> str:
        if path == "none":
            raise OSError("no tokenizer.json")
        return f"tokenizer of {path}"

    def backend(*args: Any) -> Any:
        return args

    sglang["managers.scheduler"].get_tokenizer = get_tokenizer
    sglang["constrained.base_grammar_backend"].create_grammar_backend = backend
    where = SimpleNamespace(tokenizer_path="model", tokenizer_mode="auto")
    sglang["runtime_context"].get_serving = lambda: where
    sglang["runtime_context"].get_model = lambda: SimpleNamespace(revision=None)
    config = SimpleNamespace(vocab_size=9, hf_eos_token_id={2})
    scheduler, manager = (
        SimpleNamespace(model_config=config, server_args="args"),
        SimpleNamespace(grammar_backend=None),
    )
    plugin.take_grammars(None, manager, scheduler)
    assert manager.grammar_backend == ("args", "tokenizer of model", 9, {2})
    where.tokenizer_path = "none"
    plugin.take_grammars(None, manager, scheduler)
    assert manager.grammar_backend[0] == "args", "its own stays"
    manager.grammar_backend = None
    plugin.take_grammars(None, manager, scheduler)
    assert manager.grammar_backend is None


def test_sglang_finds_the_hooks_by_their_entry_point(
    sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN_DIR))
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins")
    hooks: list[str] = []
    sglang["plugins.hook_registry"].HookType = SimpleNamespace(AROUND="around", AFTER="after")
    sglang["plugins.hook_registry"].HookRegistry = SimpleNamespace(
        register=lambda target, hook, kind: hooks.append(target)
    )
    entry.load()()
    assert len(hooks) == len(set(hooks)) == 5
