"""Routes with the tokens: noted beside vLLM's steps, carried as masks are, read as routes of records, and proved at a start."""

from __future__ import annotations

import base64
import importlib
import io
import json
import random
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import FakeVllm, route_bytes, until, weights_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace
from test_vllm_both_numbers import extension
from test_vllm_masks import with_scheduler
from test_vllm_scoring import PROMPT, prompt_of
from tiers import examples
from vllm_helpers import Reading, asking, attached, begun

from midstream.core.types import EngineCard, GenerateRequest
from midstream.engine.servers.chunks import Chunk
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import InvalidRoutes
from midstream.engine.vllm.protocol import InvalidAnswer, read_answer
from midstream.engine.vllm.routes import passes_of, read_rows, routes_with
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import IDS, ROUTES, ROWS

_FIXTURES = (extension,)
CAPTURER = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
LAYERS, TOP_K, BATCHED = 3, 2, 64
SHAPE = Shape(
    vocab_size=100, moe_layers=(1, 2), top_k=TOP_K, num_experts=8, hidden_layers=LAYERS, eos_token_ids=()
)


@pytest.fixture
def routes(extension: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delitem(sys.modules, "midstream_vllm_routes", raising=False)
    yield importlib.import_module("midstream_vllm_routes")
    del sys.modules["midstream_vllm_routes"]


def row_of(name: str, position: int) -> list[list[int]]:
    """What the routers choose in the pass of a request over a position."""
    return [
        [(position + layer + len(name)) % 8, (position + layer + len(name) + 3) % 8]
        for layer in range(LAYERS)
    ]


def weights_of(name: str, position: int) -> list[list[float]]:
    return [[(position + 1) / 32, (len(name) + layer) / 8] for layer in range(LAYERS)]


class Capturer:
    """As vLLM's RoutedExpertsCapturer."""

    output_dtype_name = "uint8"

    def __init__(self, max_num_batched_tokens: int, vllm_config: Any) -> None:
        self.device_buffer = torch.zeros((max_num_batched_tokens, LAYERS, TOP_K), dtype=torch.int32)

    def capture(self, layer_id: int, found: torch.Tensor) -> None:
        self.device_buffer[: len(found), layer_id] = found


class Router:
    """The choices of a step are given to it, as [tokens, layers, experts]."""

    capture_fn: Any = None

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def select_experts(
        self, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.capture_fn is not None:
            self.capture_fn(chosen[:, self.layer])
        return weights[:, self.layer], chosen[:, self.layer]


class MoERunner:
    is_monolithic = False
    routed_scaling_factor = 1.0

    def __init__(self, layer: int) -> None:
        self.layer_id = layer
        self.router = Router(layer)
        self.routed_experts = SimpleNamespace(apply_router_weight_on_input=False)


class Model:
    routed = tuple(range(LAYERS))

    def __init__(self) -> None:
        self.layers = [MoERunner(layer) for layer in self.routed]

    def modules(self) -> list[Any]:
        return [self, *self.layers]

    def forward(self, passes: list[tuple[str, int]]) -> None:
        chosen = torch.tensor([row_of(*each) for each in passes])
        weights = torch.tensor([weights_of(*each) for each in passes])
        for layer in self.layers:
            given, ids = layer.router.select_experts(chosen=chosen, weights=weights)
            assert (given.shape, ids.shape) == ((len(passes), TOP_K),) * 2


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, as far as it is known here. Its models note in what they are bound to."""
    module = ModuleType(CAPTURER)

    def bind(model: Any, capturer: Any) -> None:
        for layer in model.layers:
            layer.router.capture_fn = partial(capturer.capture, layer.layer_id)

    module.RoutedExpertsCapturer, module.bind_routed_experts_capturer = Capturer, bind  # type: ignore[attr-defined]
    parts = CAPTURER.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, CAPTURER, module)
    return module


def runner_class() -> type[Any]:
    """Of the form of vLLM's model runner."""

    class Runner:
        speculative_config: Any = None
        execute_model_state: Any = None

        def __init__(self, **parallel: Any) -> None:
            self.model = Model()
            self.vllm_config = SimpleNamespace(
                parallel_config=SimpleNamespace(**parallel),
                scheduler_config=SimpleNamespace(max_num_batched_tokens=BATCHED),
            )
            self.requests: dict[str, Any] = {}
            self.query_start_loc = SimpleNamespace(np=np.zeros(17, dtype=np.int32))

        def get_model(self) -> Any:
            return self.model

        def initialize_kv_cache(self, config: Any, is_profiling: bool = False) -> str:
            return "initialized"

        def step(self, scheduled: dict[str, int]) -> Any:
            names = [*scheduled]
            self.input_batch = SimpleNamespace(req_ids=names, num_reqs=len(names), sampling_metadata=object())
            passes: list[tuple[str, int]] = []
            for place, (name, count) in enumerate(scheduled.items()):
                self.query_start_loc.np[place] = len(passes)
                begin = self.requests[name].num_computed_tokens
                passes += [(name, position) for position in range(begin, begin + count)]
            self.model.forward(passes)
            self.execute_model_state = SimpleNamespace(
                scheduler_output=SimpleNamespace(num_scheduled_tokens=scheduled)
            )
            return self.sample_tokens(None)

        def sample_tokens(self, grammar_output: Any) -> Any:
            self.execute_model_state = None
            return SimpleNamespace()

    return Runner


def running(routes: Any, prompts: dict[str, tuple[int, int | None]], weighed: str = "") -> Any:
    """prompts: by request, the size of its prompt and the first pass asked for. weighed: the one that asks for weights."""
    kind = runner_class()
    routes.hook(kind)
    runner = kind()
    assert runner.initialize_kv_cache(None) == "initialized"
    for name, (size, first) in prompts.items():
        extra = {} if first is None else {ROUTES: [first, int(name == weighed)]}
        runner.requests[name] = SimpleNamespace(
            num_prompt_tokens=size,
            num_computed_tokens=0,
            output_token_ids=[],
            sampling_params=SimpleNamespace(extra_args=extra),
        )
    return runner


def said(answer: Any, name: str) -> Any:
    lists = importlib.import_module("midstream_vllm_masks").of(answer).get(name)
    return None if lists is None else read_rows(lists[0].tolist())


def read(passes: Any, *, weights: bool) -> list[Any]:
    shape = structs.replace(SHAPE, moe_layers=(0, 1, 2))
    return routes_with([passes], shape, first=passes.first, count=passes.count, weights=weights)


def expected(name: str, position: int, *, weights: bool) -> tuple[bytes, bytes | None]:
    shares = np.array(weights_of(name, position), dtype="<f4").tobytes()
    return np.array(row_of(name, position), dtype=np.uint8).tobytes(), shares if weights else None


@given(st.randoms(use_true_random=False))
@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_each_token_has_the_row_of_its_pass_however_prompts_are_cut_and_requests_preempted(
    routes: Any, capturing: Any, chance: random.Random
) -> None:
    prompts = {}
    for number in range(chance.randrange(1, 5)):
        size = chance.randrange(1, 30)
        prompts["r" * (number + 1)] = (size, chance.choice((None, size - 1, chance.randrange(size))))
    weighed = chance.choice(["", *prompts])
    runner = running(routes, prompts, weighed)
    got: dict[str, list[Any]] = {name: [] for name in prompts}
    for _ in range(40):
        scheduled: dict[str, int] = {}
        for name in prompts:
            request = runner.requests[name]
            if chance.random() < 0.1:
                request.num_computed_tokens = 0
            left = request.num_prompt_tokens + len(request.output_token_ids) - request.num_computed_tokens
            room = BATCHED - sum(scheduled.values())
            if room and chance.random() < 0.8:
                scheduled[name] = min(left, room, chance.choice((left, chance.randrange(1, 9))))
        if not scheduled:
            continue
        answer = runner.step(scheduled)
        for name, count in scheduled.items():
            request = runner.requests[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens < request.num_prompt_tokens + len(request.output_token_ids):
                # Its token is thrown away, with all that comes with it.
                continue
            got[name].append(said(answer, name))
            request.output_token_ids.append(1)
    for name, (size, first) in prompts.items():
        for number, passes in enumerate(got[name]):
            if first is None:
                assert passes is None
                continue
            begin = first if number == 0 else size + number - 1
            assert (passes.first, passes.count) == (begin, size + number - begin)
            weights = name == weighed
            assert read(passes, weights=weights) == [
                expected(name, p, weights=weights) for p in range(begin, size + number)
            ]


def test_rows_travel_beside_a_mask_of_the_same_token(routes: Any, capturing: Any) -> None:
    masks = importlib.import_module("midstream_vllm_masks")
    answer = SimpleNamespace(_model_runner_output=SimpleNamespace())
    masks.put(answer, {"a": np.array([IDS, 4])})
    masks.put(answer, {"a": np.array([ROWS, 0, 0]), "b": np.array([ROWS, 1, 0])})
    found = masks.of(answer._model_runner_output)
    assert {name: [each.tolist() for each in lists] for name, lists in found.items()} == {
        "a": [[IDS, 4], [ROWS, 0, 0]],
        "b": [[ROWS, 1, 0]],
    }


def test_what_no_router_wrote_is_not_sent(routes: Any, capturing: Any) -> None:
    runner = running(routes, {"a": (4, 3)})
    for layer in runner.model.layers:
        layer.router.capture_fn = None
    passes = said(runner.step({"a": 4}), "a")
    assert (passes.first, passes.count) == (3, 0)
    with pytest.raises(InvalidRoutes, match="--enforce-eager"):
        routes_with([passes], SHAPE, first=3, count=1)


def test_layers_without_experts_have_no_notes_and_the_others_do(
    routes: Any, capturing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first layers of many models."""
    monkeypatch.setattr(Model, "routed", SHAPE.moe_layers)
    runner = running(routes, {"a": (4, 2)}, "a")
    passes = said(runner.step({"a": 4}), "a")
    assert routes_with([passes], SHAPE, first=2, count=2, weights=True) == [
        tuple(part[len(part) // LAYERS :] for part in expected("a", position, weights=True) if part)
        for position in (2, 3)
    ]


def test_weights_that_a_layer_does_not_note_are_not_finite(routes: Any, capturing: Any) -> None:
    runner = running(routes, {"a": (4, 3)}, "a")
    router = runner.model.layers[1].router
    router.select_experts = partial(Router.select_experts, router)
    passes = said(runner.step({"a": 4}), "a")
    assert routes_with([replace(passes, data=passes.data[:8])], SHAPE, first=3, count=1)
    with pytest.raises(InvalidRoutes, match="not finite"):
        routes_with([passes], SHAPE, first=3, count=1, weights=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_no_pass_fails_because_vllm_cannot_note_it(
    routes: Any, capturing: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Where layers choose different numbers of experts, for example."""
    capture = Capturer.capture

    def refuse(self: Capturer, layer_id: int, found: torch.Tensor) -> None:
        if self.device_buffer.dtype == dtype:
            raise RuntimeError("the expanded size of the tensor must match")
        capture(self, layer_id, found)

    monkeypatch.setattr(Capturer, "capture", refuse)
    runner = running(routes, {"a": (4, 3)}, "a")
    passes = said(runner.step({"a": 4}), "a")
    assert "layer 0: the expanded size" in routes.why_not(runner, weights=True)
    if dtype == torch.int32:
        assert (passes, routes.why_not(runner)) == (None, routes.why_not(runner, weights=True))
    else:
        assert (read(passes, weights=False), routes.why_not(runner)) == (
            [expected("a", 3, weights=False)],
            "",
        )


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size above 1"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size above 1"),
        ({"enable_dbo": True}, "--enable-dbo"),
    ],
)
def test_a_worker_that_does_not_see_all_passes_says_so(
    routes: Any, capturing: Any, parallel: dict[str, Any], why: str
) -> None:
    kind = runner_class()
    routes.hook(kind)
    runner = kind(**parallel)
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in routes.why_not(runner)
    runner.initialize_kv_cache(None)
    assert why in routes.why_not(runner)


def test_a_model_or_a_version_without_such_notes_says_so(routes: Any, capturing: Any) -> None:
    kind = runner_class()
    routes.hook(kind)

    def refuse(model: Any, capturer: Any) -> None:
        raise ValueError("no supported router")

    for change in (
        lambda: setattr(capturing, "bind_routed_experts_capturer", refuse),
        lambda: delattr(capturing, "bind_routed_experts_capturer"),
    ):
        change()
        runner = kind()
        runner.initialize_kv_cache(None)
        assert "does not note" in routes.why_not(runner)
        runner.requests["a"] = SimpleNamespace(
            num_prompt_tokens=2,
            num_computed_tokens=0,
            sampling_params=SimpleNamespace(extra_args={ROUTES: [1, 0]}),
        )
        assert said(runner.step({"a": 2}), "a") is None


@pytest.mark.parametrize(
    ("part", "field", "value", "why"),
    [
        ("routed_experts", "apply_router_weight_on_input", True, "multiply their inputs"),
        ("", "routed_scaling_factor", 2.5, "the sum of its experts once more"),
        ("", "is_monolithic", True, "has the router inside"),
        ("", "router", SimpleNamespace(), "has the router inside"),
    ],
)
def test_weights_that_are_not_what_outputs_count_are_not_noted(
    routes: Any, capturing: Any, part: str, field: str, value: Any, why: str
) -> None:
    kind = runner_class()
    routes.hook(kind)
    runner = kind()
    layer = runner.model.layers[1]
    setattr(getattr(layer, part) if part else layer, field, value)
    before = [each.router for each in runner.model.layers]
    runner.initialize_kv_cache(None)
    assert routes.why_not(runner) == ""
    assert why in routes.why_not(runner, weights=True)
    assert all("select_experts" not in vars(router) for router in before)


@pytest.mark.parametrize(("kind", "experts"), [("uint8", 256), ("uint16", 400)])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_what_is_packed_is_read_again(routes: Any, kind: str, experts: int, top_k: int) -> None:
    chance, shape = random.Random(top_k), structs.replace(SHAPE, top_k=top_k, num_experts=experts)
    for count in (1, 2, 5):
        rows = np.array(
            [[chance.sample(range(experts), top_k) for _ in range(LAYERS)] for _ in range(count)],
            dtype=np.int32,
        )
        passes = read_rows(routes.pack(7, rows, np.dtype(kind)).tolist())
        found = routes_with([passes], shape, first=7, count=count)
        assert found == [(row[1:].astype(kind).tobytes(), None) for row in rows]
        with pytest.raises(InvalidRoutes, match="bytes of"):
            routes_with([passes], structs.replace(shape, hidden_layers=LAYERS + 3), first=7, count=count)


def at_the_end(lists: list[np.ndarray], **output: Any) -> tuple[list[np.ndarray], Any]:
    """What stays beside a token, and its output."""
    one = SimpleNamespace(**{"finish_reason": 1, "routed_experts": None, **output})
    return [*importlib.import_module("midstream_vllm_masks").without_passes(lists, one)], one


def text_of(array: np.ndarray) -> str:
    """As vLLM makes it of its own routes."""
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("weights", [False, True])
def test_passes_of_a_prompt_travel_as_bytes_where_its_choice_ends(routes: Any, weights: bool) -> None:
    at = range(7, 12)
    rows = np.array([row_of("r", position) for position in at], dtype=np.int32)
    given = np.array([weights_of("r", position) for position in at], dtype=np.float32) if weights else None
    passes, mask = routes.pack(7, rows, np.dtype("uint8"), given), np.array([IDS, 4])
    stays, output = at_the_end([mask, passes])
    assert stays == [mask]
    (found,) = passes_of(Chunk(routes=text_of(output.routed_experts)))
    assert read(found, weights=weights) == [expected("r", position, weights=weights) for position in at]


def test_what_goes_on_or_has_one_pass_stays_with_its_token(routes: Any) -> None:
    """vLLM keeps what lies in its own place until a choice ends, and older versions have no such place."""
    rows = np.zeros((2, LAYERS, TOP_K), dtype=np.int32)
    many, one = routes.pack(7, rows, np.dtype("uint8")), routes.pack(7, rows[:1], np.dtype("uint8"))
    for lists, output in (([many], {"finish_reason": None}), ([one], {}), ([many], {"routed_experts": rows})):
        assert at_the_end(lists, **output)[0] == lists
    assert importlib.import_module("midstream_vllm_masks").without_passes(
        [many], SimpleNamespace(finish_reason=1)
    ) == [many]


@pytest.mark.parametrize(
    "array", [np.zeros(1, "<u4"), np.zeros(3, "<u2"), np.zeros((3, 1), "<u4"), np.zeros(3, "<i8")]
)
def test_bytes_that_are_no_passes_are_refused(array: np.ndarray) -> None:
    for wrong in (text_of(array), text_of(array)[:-8], "no base64!"):
        with pytest.raises(InvalidRoutes):
            passes_of(Chunk(routes=wrong))


def answer_with(*lists: list[int]) -> bytes:
    content = [{"token_id": 5, "logprob": -1.0}]
    choice = {
        "token_ids": [5],
        "finish_reason": "length",
        "logprobs": {"content": content},
        "sampling_mask": [*lists],
    }
    return json.dumps({"choices": [choice]}).encode()


def test_kv_masks_and_rows_of_a_token_are_told_apart() -> None:
    chunk = read_answer(answer_with([0, 3, 0], [IDS, 5], [ROWS, 4, 1, 9]), kv=True, masks=True)
    assert chunk.kv == ((0, ((3, 0),)),)
    assert len(chunk.masks) == 1
    assert [(one.first, one.count, one.data) for one in chunk.passes] == [(4, 1, bytes([9, 0, 0, 0]))]
    for wrong in ([ROWS], [ROWS, 1], [ROWS, 1, 1, -1], [ROWS, 1, 1, 1 << 40]):
        with pytest.raises(InvalidAnswer):
            read_answer(answer_with(wrong))


def noting(fake: FakeVllm) -> None:
    with_scheduler(fake)
    fake.routes = False


def routed(name: str, **fields: Any) -> GenerateRequest:
    return replace(asking(name, **fields), want_routes=True)


async def test_tokens_come_with_their_routes_as_they_are_sampled(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=noting) as (engine, fake):
        assert engine._info().card.has("routes")
        reading, (request,) = await begun(engine, fake, routed("r"))
        plain, (other,) = await begun(engine, fake, asking("plain"))
        assert "routed_experts_prompt_start" not in request.sampling
        assert ROUTES not in other.sampling.get("extra_args", {})
        request.step(1, 2)
        await until(lambda: len(reading.records()) == 3)
        assert reading.finishes == {}
        request.step()
        other.to_the_end()
        await reading.ended()
        assert reading.errors == []
        size = len(request.prompt)
        assert [r.route for r in reading.records()] == [route_bytes(size - 1 + i) for i in range(4)]
        assert [r.route for r in (await plain.ended()).records()] == [None] * 4
        assert {r.router_weights for r in reading.records()} == {None}
        asked = replace(routed("weighed"), want_router_weights=True)
        weighed, (request,) = await begun(engine, fake, asked)
        request.to_the_end()
        records = (await weighed.ended()).records()
        assert [r.router_weights for r in records] == [weights_bytes(size - 1 + i) for i in range(4)]


async def test_routes_of_a_prompt_come_with_its_scores(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=noting) as (engine, fake):
        asked = routed("scored", prompt=PROMPT, max_tokens=0, prompt_records=5)
        reading = await Reading(engine, asked).ended()
        (records,) = prompt_of(reading)
        assert [r.route for r in records] == [route_bytes(i - 1) for i in range(len(PROMPT) - 5, len(PROMPT))]
        weighed = structs.replace(asked, request_id="weighed", want_router_weights=True)
        (records,) = prompt_of(await Reading(engine, weighed).ended())
        assert [r.router_weights for r in records] == [
            weights_bytes(i - 1) for i in range(len(PROMPT) - 5, len(PROMPT))
        ]
        fake.notes_routes = False
        lost = await Reading(engine, routed("lost", prompt=PROMPT, max_tokens=0, prompt_records=5)).ended()
        assert "routes of 0 passes" in lost.errors[0]


@pytest.mark.parametrize(
    ("fault", "why"),
    [("notes_routes", "routes of 0 passes"), ("misplaces_routes", "1 passes from position")],
)
async def test_a_token_without_its_route_ends_its_request_alone(tmp_path: Path, fault: str, why: str) -> None:
    async with attached(tmp_path, set_up=noting) as (engine, fake):
        reading, (request,) = await begun(engine, fake, routed("r"))
        plain, (other,) = await begun(engine, fake, asking("plain"))
        request.step()
        await until(lambda: len(reading.records()) == 1)
        setattr(fake, fault, 1 - getattr(fake, fault))
        request.step()
        assert why in (await reading.ended()).errors[0]
        other.to_the_end()
        assert (await plain.ended()).errors == []


async def card_of_one_that(lacks: str, value: Any, directory: Path) -> EngineCard:
    """Of a server that notes routes, with one attribute of the fake set to `value`."""

    def set_up(fake: FakeVllm) -> None:
        noting(fake)
        setattr(fake, lacks, value)

    async with attached(directory, set_up=set_up) as (engine, _):
        return engine._info().card


@pytest.mark.parametrize(
    ("lacks", "value", "why"),
    [
        ("checks_in_pause", False, "--scheduler-cls midstream_vllm_scheduler.scheduler"),
        ("both", False, "--worker-extension-cls midstream_vllm_worker.Worker"),
        ("no_routes", "made up by the test", "made up by the test"),
        ("notes_routes", False, "routes of 0 passes"),
        ("misplaces_routes", 2, "passes from position"),
        ("moves_routes", 1, "gives an answer other routes than the same tokens of a prompt"),
    ],
)
async def test_a_server_that_fails_the_proof_says_why_on_its_card(
    tmp_path: Path, lacks: str, value: Any, why: str
) -> None:
    card = await card_of_one_that(lacks, value, tmp_path)
    assert not card.has("routes")
    assert why in card.why["routes"]


@pytest.mark.parametrize(
    ("lacks", "value", "why"),
    [
        ("no_router_weights", "made up by the test", "made up by the test"),
        ("no_weights", True, "bytes of "),
        ("moves_weights", 1, "gives the experts of an answer other weights"),
        ("routes", True, "vLLM's own routes come without them"),
    ],
)
async def test_a_server_may_have_routes_without_the_weights_of_routers(
    tmp_path: Path, lacks: str, value: Any, why: str
) -> None:
    card = await card_of_one_that(lacks, value, tmp_path)
    assert card.has("routes")
    assert not card.has("router_weights")
    assert why in card.why["router_weights"]
