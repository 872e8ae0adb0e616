"""The embedded engine against a plain Hugging Face forward, and against itself under every schedule."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_helpers import Collected, Reference, needs_compiler, reference, request, run
from safetensors.torch import load_file, save_file
from tiers import slow
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.errors import ConfigError, SnapshotError, SnapshotIncompatible, SnapshotNotFinite
from midstream.core.types import BASE_SNAPSHOT, GenerateRequest, SamplingParams, TokenRecord
from midstream.engine.embedded.core import EngineCore
from midstream_kernels.decoder import CpuDecoder


@pytest.fixture(autouse=True, params=["native", slow("torch")])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for both ways of running the model."""
    needs_compiler(request.param)
    KERNELS.append(request.param)
    yield
    KERNELS.pop()


KERNELS: list[Any] = []


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(kernels=KERNELS[-1], **changes)


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def assert_equals_reference(ref: Reference, prompt: list[int], got: Collected) -> None:
    """Teacher forcing: every record's logprob within 1e-4, every route equal."""
    ids = prompt + [r.token_id for r in got.tokens]
    records = got.prompt + got.tokens
    assert [r.token_id for r in records] == ids
    logprobs, routes = ref(ids)
    assert records[0].logprob == 0.0
    assert records[0].route is None
    for i, record in enumerate(records[1:], start=1):
        assert record.logprob == pytest.approx(logprobs[i - 1, ids[i]].item(), abs=1e-4)
        assert record.route == routes[i - 1].tobytes()


@pytest.mark.parametrize("batch_tokens", [16, 1024], ids=["chunked", "whole"])
@pytest.mark.parametrize("count", [1, 32])
def test_records_equal_a_plain_forward_cold_and_warm(
    tiny_model: Callable[..., Path], batch_tokens: int, count: int
) -> None:
    model = tiny_model()
    core = EngineCore(model, settings(max_batch_tokens=batch_tokens, max_running=batch_tokens))
    ref = reference(model)
    given = prompts(count, 1, 120)
    cold = run(core, [request(f"cold{i}", p, seed=i) for i, p in enumerate(given)])
    warm = run(core, [request(f"warm{i}", p, seed=i) for i, p in enumerate(given)])
    for i, p in enumerate(given):
        assert_equals_reference(ref, p, cold[f"cold{i}", 0])
        assert_equals_reference(ref, p, warm[f"warm{i}", 0])
        assert warm[f"warm{i}", 0].cached == len(p) // 16 * 16


def assert_the_same(got: list[TokenRecord], expected: list[TokenRecord]) -> None:
    """To the last bit with native kernels. Torch's, in float32, round otherwise where rows are few."""
    if KERNELS[-1] == "native":
        assert got == expected
        return
    assert [(r.token_id, r.route) for r in got] == [(r.token_id, r.route) for r in expected]
    assert [r.logprob for r in got] == pytest.approx([r.logprob for r in expected], abs=1e-4)


def exact(tiny_model: Callable[..., Path]) -> Path:
    """A model whose tokens do not depend on the batch: in bfloat16 torch's do, on some processors."""
    return tiny_model(dtype="bfloat16" if KERNELS[-1] == "native" else "float32")


def test_tokens_do_not_depend_on_batch_chunks_or_cache(tiny_model: Callable[..., Path]) -> None:
    model = exact(tiny_model)
    given = prompts(12, 1, 140)
    alone = EngineCore(model, settings())
    together = EngineCore(model, settings(max_batch_tokens=48))
    expected = [
        run(alone, [request(f"{i}", p, seed=i, max_tokens=24, salt=b"%d" % i)])[f"{i}", 0]
        for i, p in enumerate(given)
    ]
    for label in ("cold", "warm"):
        got = run(together, [request(f"{label}{i}", p, seed=i, max_tokens=24) for i, p in enumerate(given)])
        for i in range(len(given)):
            assert_the_same(got[f"{label}{i}", 0].tokens, expected[i].tokens)
            assert_the_same(got[f"{label}{i}", 0].prompt, expected[i].prompt)


def test_preempted_sequences_report_the_same_records(tiny_model: Callable[..., Path]) -> None:
    model = exact(tiny_model)
    given = prompts(6, 20, 40)
    wanted = [request(f"{i}", p, seed=i, max_tokens=60, echo=0) for i, p in enumerate(given)]
    roomy = run(EngineCore(model, settings()), wanted)
    tight_core = EngineCore(model, settings(kv_cache_tokens=256))
    preemptions = 0
    release = tight_core.scheduler._preempt

    def counted(seq: object) -> None:
        nonlocal preemptions
        preemptions += 1
        release(seq)  # type: ignore[arg-type]

    tight_core.scheduler._preempt = counted  # type: ignore[method-assign]
    tight = run(tight_core, wanted)
    assert preemptions > 0
    for key, got in roomy.items():
        assert_the_same(tight[key].tokens, got.tokens)


def test_a_swap_labels_each_token_with_the_weights_that_made_it(tiny_model: Callable[..., Path]) -> None:
    """Recomputed by hand: positions before the switch keep the KV of the old weights, later ones use the new."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    core = EngineCore(old, settings())
    given = prompts(4, 30, 60)

    def swap(step: int) -> None:
        if step == 10:
            core.set_staged(core.stage(new))
            assert core.commit("step-1").streams_crossed == 4

    results = run(
        core, [request(f"{i}", p, seed=i, max_tokens=24) for i, p in enumerate(given)], after_step=swap
    )
    models = {BASE_SNAPSHOT: reference(old).model, "step-1": reference(new).model}
    for i, p in enumerate(given):
        got = results[f"{i}", 0]
        labels = [r.snapshot for r in got.tokens]
        assert labels == [BASE_SNAPSHOT] * 10 + ["step-1"] * 14
        ids = p + [r.token_id for r in got.tokens]
        cache = None
        position = 0
        spans = [(BASE_SNAPSHOT, len(p)), *((label, 1) for label in labels[1:])]
        for record, (label, width) in zip(got.tokens, spans, strict=True):
            with torch.no_grad():
                output = models[label](
                    torch.tensor([ids[position : position + width]]), past_key_values=cache, use_cache=True
                )
            cache, position = output.past_key_values, position + width
            expected = output.logits[0, -1].log_softmax(-1)[ids[position]].item()
            assert record.snapshot == label
            assert record.logprob == pytest.approx(expected, abs=1e-4)


def test_an_echo_after_a_swap_is_scored_by_the_snapshot_it_is_labelled_with(
    tiny_model: Callable[..., Path],
) -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    core = EngineCore(old, settings())
    (prompt,) = prompts(1, 64, 65)
    before = run(core, [request("before", prompt)])["before", 0]
    core.set_staged(core.stage(new))
    core.commit("step-1")
    after = run(core, [request("after", prompt, salt=b"")])["after", 0]
    assert {r.snapshot for r in before.prompt[1:]} == {BASE_SNAPSHOT}
    assert {r.snapshot for r in after.prompt[1:]} == {"step-1"}
    assert_equals_reference(reference(new), prompt, after)
    # Starts on a block boundary.
    tail = run(core, [request("tail", prompt, echo=32)])["tail", 0]
    assert [(r.logprob, r.route, r.snapshot) for r in tail.prompt] == [
        (r.logprob, r.route, r.snapshot) for r in after.prompt[-32:]
    ]
    again = run(core, [request("again", prompt)])["again", 0]
    assert again.cached == 64
    assert again.prompt == after.prompt


def test_no_cache_hit_crosses_a_salt(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), settings())
    (prompt,) = prompts(1, 80, 81)
    run(core, [request("a", prompt, salt=b"one", echo=0)])
    other = run(core, [request("b", prompt, salt=b"two", echo=0)])["b", 0]
    same = run(core, [request("c", prompt, salt=b"one", echo=0)])["c", 0]
    assert (other.cached, same.cached) == (0, 80)


def test_choices_share_one_prefill_and_differ_by_their_random_stream(
    tiny_model: Callable[..., Path],
) -> None:
    core = EngineCore(tiny_model(dtype="bfloat16"), settings())
    (prompt,) = prompts(1, 64, 65)
    both = run(core, [request("n", prompt, n=3, echo=0, max_tokens=16)])
    assert [both["n", i].cached for i in range(3)] == [0, 64, 64]
    assert len({tuple(r.token_id for r in both["n", i].tokens) for i in range(3)}) == 3
    again = run(core, [request("again", prompt, echo=0, max_tokens=16)])["again", 0]
    assert again.tokens == both["n", 0].tokens


def test_a_turn_that_continues_a_rollout_finds_its_generated_tokens_cached_with_scores_and_routes(
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model()
    core = EngineCore(model, settings())
    (prompt,) = prompts(1, 40, 41)
    first = run(core, [request("t1", prompt, max_tokens=40)])["t1", 0]
    second_prompt = prompt + [r.token_id for r in first.tokens] + [10, 11, 12]
    second = run(core, [request("t2", second_prompt)])["t2", 0]
    # 79 tokens have KV: four full blocks.
    assert second.cached == 64
    assert_equals_reference(reference(model), second_prompt, second)


def test_scoring_without_generation_returns_the_prompt_alone(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model()
    core = EngineCore(model, settings())
    (prompt,) = prompts(1, 48, 49)
    got = run(core, [request("score", prompt, max_tokens=0)])["score", 0]
    assert (got.tokens, got.finish) == ([], "length")
    assert_equals_reference(reference(model), prompt, got)


def test_echo_last_returns_only_the_last_records_aligned(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), settings())
    (prompt,) = prompts(1, 50, 51)
    whole = run(core, [request("whole", prompt, salt=b"w")])["whole", 0]
    last = run(core, [request("last", prompt, echo=7)])["last", 0]
    assert [r.token_id for r in last.prompt] == prompt[-7:]
    for a, b in zip(last.prompt, whole.prompt[-7:], strict=True):
        assert (a.logprob, a.route) == (pytest.approx(b.logprob, abs=1e-5), b.route)


def test_generation_ends_at_a_stop_token_and_keeps_it(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), settings())
    free = run(core, [request("free", [1, 2, 3], max_tokens=12)])["free", 0]
    stop = free.tokens[5].token_id
    first = [r.token_id for r in free.tokens].index(stop)
    got = run(core, [request("stopped", [1, 2, 3], max_tokens=12, stop_token_ids=(stop,))])["stopped", 0]
    assert got.tokens == free.tokens[: first + 1]
    assert got.finish == "stop"


def test_an_aborted_request_gives_its_blocks_back_and_the_others_go_on(
    tiny_model: Callable[..., Path],
) -> None:
    core = EngineCore(tiny_model(), settings())
    core.add(request("gone", list(range(100)), max_tokens=500, n=2))
    core.add(request("stays", [7, 8, 9], max_tokens=20))
    for _ in range(5):
        core.step()
    core.abort("gone")
    seen = []
    while not core.idle:
        seen += core.step()
    assert {request_id for request_id, _ in seen} == {"stays"}
    core.check()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", []), "the prompt is empty"),
        (request("r", [1, 264]), "prompt token ids must be 0 to 263"),
        (request("r", [1] * 10, max_tokens=3000), "the KV cache holds 2048"),
        (request("r", [1] * 10, max_tokens=4087), "4097 tokens, but the model's context is 4096"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_reason(
    tiny_model: Callable[..., Path], bad: object, message: str
) -> None:
    core = EngineCore(tiny_model(), settings(kv_cache_tokens=2048))
    ((request_id, event),) = core.add(bad)  # type: ignore[arg-type]
    assert request_id == "r"
    assert message in (event.error or "")
    assert core.idle


def test_after_a_preemption_a_kept_logprob_still_comes_with_the_route_of_its_own_pass(
    tiny_model: Callable[..., Path],
) -> None:
    """Recomputed under other weights, a position takes another route; what was reported once must not change."""
    core = EngineCore(tiny_model(dtype="bfloat16"), settings())
    (prompt,) = prompts(1, 40, 41)
    wanted = request("r", prompt, max_tokens=24)
    core.add(wanted)
    events = []
    while sum(len(e.tokens) for _, e in events) < 9:
        events += core.step()
    core.set_staged(core.stage(tiny_model(seed=1, dtype="bfloat16")))
    core.commit("step-1")
    core.scheduler._preempt(core.scheduler.running[0])
    # Evicts what is cached.
    for block in [core.pool.allocate() for _ in range(core.pool.available)]:
        core.pool.release(block)
    while not core.idle:
        events += core.step()
    reported = [r for _, e in events for r in (*(e.prompt or ()), *e.tokens)]
    ids = [r.token_id for r in reported]
    echoed = run(core, [request("echo", ids, max_tokens=0)])["echo", 0].prompt
    for position in range(1, len(ids)):
        again = echoed[position]
        # Kept, not computed again.
        if again.logprob == reported[position].logprob:
            assert (again.route, again.snapshot) == (reported[position].route, reported[position].snapshot)
    assert {r.snapshot for r in echoed[1:]} == {"step-1"}


@pytest.mark.parametrize("batch_tokens", [16, 1024])
def test_alternatives_of_prompt_tokens_survive_chunked_prefill(
    tiny_model: Callable[..., Path], batch_tokens: int
) -> None:
    core = EngineCore(tiny_model(), settings(max_batch_tokens=batch_tokens, max_running=16))
    (prompt,) = prompts(1, 64, 65)
    wanted = GenerateRequest(
        request_id="r",
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=1),
        top_logprobs=3,
        prompt_records=64,
    )
    got = run(core, [wanted])["r", 0]
    assert [len(r.top_logprobs) for r in got.prompt] == [0] + [3] * 63
    best = [r.top_logprobs[0].logprob for r in got.prompt[1:]]
    assert all(top >= r.logprob for top, r in zip(best, got.prompt[1:], strict=True))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    own = logits.gather(1, torch.tensor(prompt[1:])[:, None])
    above, near = (logits > own + 1e-4).sum(-1).tolist(), (logits > own - 1e-4).sum(-1).tolist()
    assert all(low < r.rank <= high + 1 for low, high, r in zip(above, near, got.prompt[1:], strict=True))
    assert got.prompt[0].rank == 0


@pytest.mark.parametrize(
    ("name", "row", "value", "error", "says"),
    [
        ("model.norm.weight", 3, float("nan"), SnapshotNotFinite, "fixed prompt are not finite"),
        # Of the first token of the canary.
        (
            "model.embed_tokens.weight",
            13,
            float("inf"),
            SnapshotNotFinite,
            "fixed prompt are not finite",
        ),
        # Finite, and too large to compute with.
        ("model.layers.1.mlp.experts.2.down_proj.weight", ..., 3e38, SnapshotNotFinite, "are not finite"),
        (None, ..., 0.0, SnapshotIncompatible, "logits of a fixed prompt are all equal"),
    ],
)
def test_weights_that_compute_nothing_are_refused_before_they_serve(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    name: str | None,
    row: Any,
    value: float,
    error: type[SnapshotError],
    says: str,
) -> None:
    """name: None for every tensor."""
    core = EngineCore(tiny_model(), settings())
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model(seed=1), broken)
    tensors = load_file(broken / "model.safetensors")
    for each in tensors if name is None else [name]:
        tensors[each][row] = value
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error, match=says):
        core.stage(broken)


def test_staging_leaves_the_default_dtype_alone_and_gives_the_serving_dtypes(
    tiny_model: Callable[..., Path],
) -> None:
    """torch's default dtype is process-wide: a load that changes it would change what a running step samples."""
    core = EngineCore(tiny_model(dtype="bfloat16"), settings())
    seen: set[torch.dtype] = set()
    done = threading.Event()

    def watch() -> None:
        # Not as fast as it can: it would hold the interpreter's lock half of the time.
        while not done.wait(0.0005):
            seen.add(torch.get_default_dtype())

    watcher = threading.Thread(target=watch)
    watcher.start()
    models = [core.stage(tiny_model(seed=1, dtype="bfloat16")) for _ in range(4)]
    done.set()
    watcher.join()
    assert seen == {torch.float32}
    # inv_freq.
    assert {dtype for _, dtype in core.runner.model.shapes.values()} == {
        torch.bfloat16,
        torch.float32,
    }
    for model in models:
        assert model.model.shapes == core.runner.model.shapes


def test_sampling_does_not_depend_on_the_default_dtype(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), settings())
    wanted = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01, "top_k": 50, "max_tokens": 12, "seed": 4}
    expected = run(core, [request("a", [1, 2, 3], **wanted)])["a", 0].tokens
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = run(core, [request("b", [1, 2, 3], **wanted)])["b", 0].tokens
    finally:
        torch.set_default_dtype(torch.float32)
    assert [r.token_id for r in got] == [r.token_id for r in expected]
    assert [r.sampling_logprob for r in got] == pytest.approx(
        [r.sampling_logprob for r in expected], abs=1e-5
    )


def test_one_choice_can_be_ended_while_the_others_go_on(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), settings())
    core.add(request("r", [1, 2, 3], n=3, max_tokens=30, echo=0))
    seen = [output for _ in range(6) for output in core.step()]
    core.abort("r", 1)
    before = len(seen)
    while not core.idle:
        seen += core.step()
    core.check()
    assert {event.index for _, event in seen[before:]} == {0, 2}
    assert sum(event.finish == "length" for _, event in seen) == 2


def test_kv_provenance_names_the_snapshot_that_computed_each_position_cached_or_not(
    tiny_model: Callable[..., Path],
) -> None:
    core = EngineCore(tiny_model(), settings())
    (prompt,) = prompts(1, 40, 41)

    def provenance(name: str, given: list[int], swap_at: int | None = None) -> list[tuple[str, int, int]]:
        wanted = msgspec.structs.replace(
            request(name, given, max_tokens=20, echo=0), want_kv_snapshots=True, want_routes=False
        )
        core.add(wanted)
        spans: list[tuple[str, int, int]] = []
        step = 0
        while not core.idle:
            for _, event in core.step():
                spans = list(event.kv_snapshots or spans)
            step += 1
            if step == swap_at:
                core.set_staged(core.stage(tiny_model(seed=1)))
                core.commit("step-1")
        return spans

    # 40 prompt tokens and 9 generated ones had been computed when the weights changed; the 20th has no KV.
    assert provenance("crossing", prompt, swap_at=10) == [("base", 0, 49), ("step-1", 49, 59)]
    # Two blocks of the prompt come from the cache, under the old weights; the rest is computed under the new ones.
    assert provenance("after", prompt) == [("base", 0, 32), ("step-1", 32, 59)]


@pytest.mark.parametrize("overwritten", [False, True])
def test_kv_of_several_loads_of_one_snapshot_is_one_span_unless_its_files_were_others(
    tiny_model: Callable[..., Path], overwritten: bool
) -> None:
    core = EngineCore(tiny_model(), settings())
    (prompt,) = prompts(1, 20, 21)
    core.add(
        msgspec.structs.replace(
            request("r", prompt, max_tokens=20, echo=0), want_kv_snapshots=True, want_routes=False
        )
    )

    def commit(name: str, seed: int, *renamed: tuple[str, str]) -> None:
        core.set_staged(core.stage(tiny_model(seed=seed)))
        core.commit(name, "", f"files {seed}", renamed)

    commit("s2", 1)
    told, step = [], 0
    while not core.idle:
        told += [event for _, event in core.step() if event.kv_snapshots]
        step += 1
        if step == 5:
            # Nothing is computed under it.
            commit("s1", 2)
            assert core.snapshots == ["base", "s2", "s1"]
            commit("s2", 3 if overwritten else 1, *[("s2", "s2@1")] * overwritten)
    spans = [("s2@1", 0, 24), ("s2", 24, 39)] if overwritten else [("s2", 0, 39)]
    assert list(told[-1].kv_snapshots or ()) == spans
    assert [event.renamed for event in told if event.renamed] == [(("s2", "s2@1"),)] * overwritten
    files = [event.kv_files for event in told]
    assert (files[0], files[-1]) == ("files 1", "files 3" if overwritten else "files 1")
    # What a later request is told is of the new files from its first event on.
    core.add(msgspec.structs.replace(request("later", prompt, max_tokens=2), want_kv_snapshots=True))
    while not core.idle:
        assert [event.renamed for _, event in core.step() if event.renamed] == []
    assert core.store.track("", "s2") is not None
    core.check()


def test_the_kv_cache_takes_the_memory_it_was_given(tiny_model: Callable[..., Path]) -> None:
    """tiny-moe in float32: 4 layers x keys and values x 2 heads x 32 x 4 bytes = 2 KiB a token."""
    core = EngineCore(tiny_model(), settings(kv_cache_memory="1MiB"))
    assert core.runner.cache.bytes_per_token == 2048
    assert core.pool.total * core.pool.block_size == 512
    assert core.info().max_model_len == 512
    with pytest.raises(ConfigError, match="holds 15 tokens of 2048 bytes, fewer than two blocks of 16"):
        EngineCore(tiny_model(), settings(kv_cache_memory="30.5KiB"))


@pytest.mark.parametrize("batch_tokens", [24, 1024], ids=["chunked", "whole"])
def test_kv_of_a_forward_pass_that_was_not_finite_is_never_reused(
    tiny_model: Callable[..., Path], batch_tokens: int
) -> None:
    core = EngineCore(tiny_model(), settings(max_batch_tokens=batch_tokens, max_running=16))
    (prompt,) = prompts(1, 64, 65)
    core.set_staged(core.stage(tiny_model(seed=1)))
    core.commit("broken")
    # Past what staging checks.
    decoder: Any = core.runner.model.decoder
    if isinstance(decoder, CpuDecoder):
        decoder.layers[0].input_norm.fill_(float("nan"))
    else:
        decoder.module.model.layers[0].input_layernorm.weight.fill_(float("nan"))
    failed = run(core, [request("r", prompt, echo=0)])["r", 0]
    assert failed.error == "snapshot broken gave a logit that is not finite"
    # Checked before it serves, beside broken weights.
    core.set_staged(core.stage(tiny_model()))
    core.commit("good")
    again = run(core, [request("again", prompt, echo=0)])["again", 0]
    assert again.cached == 0
    fresh = EngineCore(tiny_model(), settings())
    expected = run(fresh, [request("again", prompt, echo=0)])["again", 0].tokens
    assert [r.token_id for r in again.tokens] == [r.token_id for r in expected]
