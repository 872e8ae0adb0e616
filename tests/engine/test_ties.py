"""Near ties: what records say of a choice that another rounding may make differently."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import GPU, needs_compiler, request, run
from families import write_model
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.types import NEAR_GREEDY, NEAR_MIN_P, NEAR_ROUTER, NEAR_TOP_K, NEAR_TOP_P, SamplingParams
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.near_ties import Routers
from midstream.engine.embedded.sampler import Sampler
from midstream.engine.embedded.token_scores import ScoreStore
from midstream.engine.step import SampleRow
from midstream_kernels import CpuSampler

CASES = [
    ("qwen3-moe", "native", "cpu"),
    ("qwen3-moe", "torch", "cpu"),
    ("mixtral", "native", "cpu"),
    ("deepseek-v3", "torch", "cpu"),
    ("gpt-oss", "torch", "cpu"),
    *(pytest.param(f, "auto", "cuda", marks=GPU) for f in ("qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss")),
]


def with_equal_experts(family: str, place: Path) -> Path:
    """A checkpoint in which experts 0 and 1 of each layer are equal, and their router rows are. Whenever one of them is the
    last to be chosen and the other the first not to be, that is a tie to the last bit, and changes no other number."""
    directory = write_model(family, place)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for part in model.modules():
        if type(part).__name__.lower().endswith(("topkrouter", "experts")):
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                tensor.data[1] = tensor.data[0]
    model.save_pretrained(directory)
    return directory


def routers(model: Any) -> list[Any]:
    return [part for part in model.modules() if type(part).__name__.lower().endswith("topkrouter")]


class Margins:
    """By how much the last expert chosen stood above the next, as a share of the largest router logit: the least of all
    layers, recomputed in plain transformers."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._found: list[np.ndarray] = []
        for router in routers(self._model):
            router.register_forward_hook(lambda router, _, output: self._note(router, output[0].double()))

    def _note(self, router: Any, logits: torch.Tensor) -> None:
        scores, scale = logits, logits.abs().amax(-1)
        kept = router.top_k
        least = torch.full_like(scale, torch.inf)
        if hasattr(router, "e_score_correction_bias"):
            scores, scale = logits.sigmoid() + router.e_score_correction_bias, scale / 4
            parts = scores.view(len(scores), router.num_group, -1)
            groups = parts.topk(2).values.sum(-1).sort(descending=True)
            least = (groups.values[:, router.topk_group - 1] - groups.values[:, router.topk_group]) / 2
            for row, order in enumerate(groups.indices):
                parts[row, order[router.topk_group :]] = -torch.inf
        ranked = scores.sort(descending=True).values
        self._found.append((torch.minimum(ranked[:, kept - 1] - ranked[:, kept], least) / scale).numpy())

    def __call__(self, ids: list[int]) -> np.ndarray:
        self._found.clear()
        with torch.no_grad():
            self._model(torch.tensor([ids]), use_cache=False)
        return np.min(self._found, axis=0)


@pytest.mark.parametrize(("family", "kernels", "device"), CASES)
def test_a_routers_tie_is_marked_and_a_clear_choice_is_not_cold_warm_and_in_later_turns(
    family: str, kernels: Any, device: str, tmp_path: Path
) -> None:
    needs_compiler(kernels)
    directory = with_equal_experts(family, tmp_path)
    core = EngineCore(
        directory,
        EngineSettings(
            max_batch_tokens=64, max_running=8, kv_cache_tokens=8192, kernels=kernels, device=device
        ),
    )
    margins = Margins(directory)
    rng = random.Random(1)
    given = [[rng.randrange(128) for _ in range(70)] for _ in range(6)]
    cold = run(core, [request(f"cold{i}", p, seed=i, max_tokens=20) for i, p in enumerate(given)])
    warm = run(core, [request(f"warm{i}", p, seed=i, max_tokens=20) for i, p in enumerate(given)])
    whole = [p + [r.token_id for r in cold[f"cold{i}", 0].tokens] for i, p in enumerate(given)]
    later = run(core, [request(f"later{i}", ids, max_tokens=1) for i, ids in enumerate(whole)])
    marked = clear = 0
    for i, ids in enumerate(whole):
        got = cold[f"cold{i}", 0]
        said = [record.near_tie for record in (*got.prompt, *got.tokens)]
        again = warm[f"warm{i}", 0]
        assert [record.near_tie for record in (*again.prompt, *again.tokens)] == said
        assert [record.near_tie for record in later[f"later{i}", 0].prompt] == said
        assert later[f"later{i}", 0].cached == len(ids) // 16 * 16
        assert said[0] == 0, "no pass gave the first token"
        found = margins(ids)[:-1]
        for near, margin in zip(said[1:], found, strict=True):
            if margin < 1e-6:
                assert near == NEAR_ROUTER
                marked += 1
            elif margin > 1e-4:
                assert near == 0
                clear += 1
    assert marked > 20
    assert clear > 150


def test_the_experts_that_a_plain_forward_takes_instead_are_marked(tmp_path: Path) -> None:
    """The case that was seen: in 36,000 tokens one second expert is another in float64, behind a margin of 1e-6."""
    directory = write_model("qwen3-moe", tmp_path)
    rng = random.Random(1)
    given = [[rng.randrange(128) for _ in range(rng.randrange(20, 200))] for _ in range(102)][101]
    core = EngineCore(directory, EngineSettings(kv_cache_tokens=1024))
    (got,) = run(core, [request("x", given, max_tokens=1)]).values()
    margins = Margins(directory)(given)
    assert margins[46] < 1e-6
    assert [at for at, record in enumerate(got.prompt) if record.near_tie] == [47]


def test_a_tie_is_marked_though_another_rule_explains_the_first_choices_too() -> None:
    """A softmax with a bias, as Ernie has: sigmoids would have chosen the same, and clearly."""

    class Router(torch.nn.Module):
        def __init__(self, bias: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("e_score_correction_bias", bias)

    torch.manual_seed(0)
    for _ in range(100):
        logits, bias = torch.randn(1, 1, 8), torch.randn(8) * 0.02
        scores = logits.softmax(-1)[0, 0] + bias
        second, third = scores.argsort(descending=True)[1:3]
        bias[third] += scores[second] - scores[third] - 1e-7
        chosen = (logits.softmax(-1) + bias).topk(2, dim=-1).indices
        assert Routers([Router(bias)], 2e-5).ties(logits, chosen).tolist() == [True]


def test_a_routers_rule_is_found_and_what_no_rule_explains_is_marked() -> None:
    class Router(torch.nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            if bias:
                self.register_buffer("e_score_correction_bias", torch.tensor([0.0, 0.5, 0.0, 0.0]))

    logits = torch.tensor([[[3.0, 2.0, 1.0, -1.0]], [[3.0, 1.0, 2.99999, 0.0]]])
    by_logits = torch.tensor([[[0, 1]], [[0, 2]]])
    assert Routers([Router(False)], 2e-5).ties(logits, by_logits).tolist() == [False, False]
    assert Routers([Router(False)], 2e-5).ties(logits, by_logits[..., :1]).tolist() == [False, True]
    # The bias raises expert 1 above all others, whether scores are sigmoids or a softmax.
    assert Routers([Router(True)], 2e-5).ties(logits, torch.tensor([[[1]], [[1]]])).tolist() == [False, False]
    softmax_only = torch.tensor([[[1, 0]], [[1, 0]]])
    assert Routers([Router(True)], 2e-5).ties(logits, softmax_only).tolist() == [False, True]
    assert Routers([Router(True)], 2e-5).ties(logits, torch.tensor([[[3]], [[1]]])).tolist() == [True, False]
    assert Routers([Router(False)], 2e-5).ties(logits, torch.tensor([[[3]], [[0]]])).tolist() == [True, True]


SAMPLERS = ["native", "torch"]
QUARTERS = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()


def ties_of(kernels: str, logits: torch.Tensor, draws: int = 40, **params: Any) -> dict[int, set[int]]:
    """By drawn token: the near ties that its draws had."""
    needs_compiler(kernels)
    sampler = Sampler(CpuSampler(threads=1) if kernels == "native" else None)
    rows = [SampleRow(SamplingParams(max_tokens=1, seed=5, **params), 0, i, [], 0, 0) for i in range(draws)]
    got = sampler.sample(logits.expand(draws, -1).contiguous(), rows)
    found: dict[int, set[int]] = {}
    for token, near in zip(got.tokens, got.near_ties, strict=True):
        found.setdefault(token, set()).add(near)
    return found


@pytest.mark.parametrize("kernels", SAMPLERS)
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0: 0, 1: 0, 2: 0, 3: 0}),
        ({"top_p": 0.8}, {0: 0, 1: 0, 2: 0}),
        # One fewer or one more may be kept.
        ({"top_p": 0.75}, {0: NEAR_TOP_P, 1: NEAR_TOP_P}),
        ({"top_p": 0.749999}, {0: NEAR_TOP_P, 1: NEAR_TOP_P}),
        ({"top_p": 0.750001}, {0: NEAR_TOP_P, 1: NEAR_TOP_P, 2: NEAR_TOP_P}),
        ({"top_k": 2}, {0: 0, 1: 0}),
        # Of the three, 0.83.
        ({"top_k": 3, "top_p": 0.75}, {0: 0, 1: 0}),
        ({"min_p": 0.4}, {0: 0, 1: 0}),
        ({"min_p": 0.499999}, {0: NEAR_MIN_P, 1: NEAR_MIN_P}),
        ({"min_p": 0.500001}, {0: NEAR_MIN_P}),
        ({"temperature": 0.0}, {0: 0}),
    ],
)
def test_a_filters_border_within_rounding_is_marked(
    params: dict[str, Any], expected: dict[int, int], kernels: str
) -> None:
    assert ties_of(kernels, QUARTERS, **params) == {token: {near} for token, near in expected.items()}


@pytest.mark.parametrize("kernels", SAMPLERS)
def test_a_token_is_marked_that_weighs_as_much_as_one_that_was_cut_off(kernels: str) -> None:
    """How many are kept does not change, so the others' numbers do not either."""
    equal = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    assert ties_of(kernels, equal, top_k=2) == {0: {0}, 1: {NEAR_TOP_K}}
    assert ties_of(kernels, equal, top_p=0.5) == {0: {0}, 1: {NEAR_TOP_P}}
    assert ties_of(kernels, equal, top_k=1) == {0: {0}}


@pytest.mark.parametrize("kernels", SAMPLERS)
def test_a_greedy_choice_between_equals_is_marked(kernels: str) -> None:
    logits = torch.tensor([[-4.0, 2.0, 1.0, 2.0]])
    assert ties_of(kernels, logits, temperature=0.0) == {1: {NEAR_GREEDY}}
    logits[0, 3] -= 1e-3
    assert ties_of(kernels, logits, temperature=0.0) == {1: {0}}
    assert ties_of(kernels, logits.bfloat16(), temperature=0.0) == {1: {NEAR_GREEDY}}
    logits[0, 3] = -torch.inf
    assert ties_of(kernels, logits[:, :3], temperature=0.0, logit_bias={2: 1.0}) == {1: {NEAR_GREEDY}}


def test_the_torch_samplers_own_sums_do_not_move_the_border_of_top_p() -> None:
    """Sums in float32 kept another number of tokens than any recomputation, 1e-7 from the border."""
    generator = torch.Generator().manual_seed(0)
    wrong = 0
    for _ in range(300):
        logits = torch.randn(1, 128, generator=generator) * 2
        ordered = logits[0].double().softmax(-1).sort(descending=True).values
        reached = ordered.cumsum(0)
        count = int((reached < 0.9).sum())
        for side in (-1.5e-7, 1.5e-7):
            row = SampleRow(SamplingParams(max_tokens=1, top_p=float(reached[count]) + side), 0, 0, [], 0, 0)
            got = Sampler().sample(logits, [row])
            kept = reached[count + (side > 0)]
            expected = got.logprobs[0] - float(kept.log())
            wrong += abs(got.sampling_logprobs[0] - expected) > 1e-5
            assert got.near_ties == [NEAR_TOP_P]
    assert wrong == 0


def test_a_kept_score_keeps_its_tie_when_it_is_copied_and_a_new_owner_has_none() -> None:
    store = ScoreStore(4, 16, 2)
    slots = np.arange(16, 32)
    ties = np.arange(16, dtype=np.uint8) % 2
    store.write(slots, np.full(16, -1.0), np.zeros((16, 2)), 0, ties)
    store.copy(1, 2, 0)
    assert [store.read(slot)[3] for slot in range(32, 48)] == ties.tolist()
    store.forget(2)
    store.write(np.array([33]), np.array([-2.0]), np.zeros((1, 2)), 1)
    assert store.read(33) == (-2.0, 1, b"\0\0", 0)
