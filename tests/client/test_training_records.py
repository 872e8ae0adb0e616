"""Training records recomputed: every sampled token counts once, with its own numbers, in every format."""

from __future__ import annotations

import base64
import struct
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.client.export import (
    expert_rows,
    jsonl_records,
    nemo_gym_records,
    tinker_data,
    verifiers_rollouts,
    verl_batch,
    verl_rows,
)
from midstream.client.records import TrainingSequence, sequences_of

LAYERS, TOP_K = 2, 3
#: (replica, turn, position among the sampled tokens): says everything of a token.
Place = tuple[int, int, int]


def token_of(place: Place) -> int:
    return 10_000 * place[0] + 100 * place[1] + place[2]


def logprob_of(place: Place) -> float:
    return -token_of(place) / 8


def route_of(place: Place) -> list[int]:
    return [(token_of(place) + i) % 251 for i in range(LAYERS * TOP_K)]


def mask_of(place: Place) -> bytes:
    """Alone, with the next token, or among all."""
    token = token_of(place)
    return (b"\0", b"\4" + struct.pack("<II", token, token + 1), b"\1")[token % 3]


def a_turn(replica: int, number: int, parent: int, added: int, sampled: int, wide: bool) -> dict[str, Any]:
    places = [(replica, number, at) for at in range(sampled)]
    code = f"<{LAYERS * TOP_K}{'H' if wide else 'B'}"
    routes = [base64.b64encode(struct.pack(code, *route_of(place))).decode() for place in places]
    half = sampled // 2
    spans = [
        {"snapshot": name, "start": start, "end": end}
        for name, start, end in (("one", 0, half), ("two", half, sampled))
        if start < end
    ]
    return {
        "turn": number,
        "parent": parent,
        "model": "m",
        "added": [90_000 + number] * added,
        "token_ids": [token_of(place) for place in places],
        "loss_mask": [0] * added + [1] * sampled,
        "finish_reason": "stop" if number % 2 else "length",
        "created": 1.5,
        "logprobs": [logprob_of(place) for place in places],
        "sampling_logprobs": [logprob_of(place) / 2 for place in places],
        "routing_matrix": routes,
        "routing_matrix_dtype": "uint16" if wide else "uint8",
        "routing_matrix_shape": [LAYERS, TOP_K],
        "snapshots": spans,
        "kv_snapshots": [],
        "branch": None,
        "sampling_masks": [base64.b64encode(mask_of(place)).decode() for place in places],
    }


def a_trace(*trees: list[tuple[int, int, int]], wide: bool = False, rewards: Any = ()) -> dict[str, Any]:
    """trees: of each replica (parent, added tokens, sampled tokens) of each turn."""
    return {
        "id": "s",
        "traces": [
            {
                "replica": f"r{at}",
                "turns": [a_turn(at, number, *turn, wide) for number, turn in enumerate(tree, 1)],
                "rewards": list(rewards),
                "forgotten": False,
            }
            for at, tree in enumerate(trees)
        ],
    }


def trees() -> st.SearchStrategy[list[tuple[int, int, int]]]:
    sizes = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 5))
    whole = st.lists(sizes, min_size=1, max_size=7)
    return whole.map(
        lambda turns: [(parent % number, *rest) for number, (parent, *rest) in enumerate(turns, 1)]  # type: ignore[misc]
    )


traces = st.builds(
    lambda found, wide: a_trace(*found, wide=wide), st.lists(trees(), min_size=1, max_size=2), st.booleans()
)


def sampled_in(trace: dict[str, Any]) -> list[int]:
    return sorted(t for one in trace["traces"] for turn in one["turns"] for t in turn["token_ids"])


@settings(max_examples=60, deadline=None)
@given(traces)
def test_every_sampled_token_counts_once_with_its_own_numbers(trace: dict[str, Any]) -> None:
    sequences = sequences_of(trace)
    counted = []
    for one in sequences:
        tokens = one.token_ids
        assert {
            len(one.loss_mask),
            len(one.logprobs),
            len(one.snapshots),
            len(one.routes),
            len(one.masks),
        } == {len(tokens)}
        rows = expert_rows(one)
        for at, (token, counts) in enumerate(zip(tokens, one.loss_mask, strict=True)):
            if counts:
                counted.append(token)
                assert one.logprobs[at] == -token / 8
                assert one.snapshots[at] in ("one", "two")
                # The pass that read the token before it chose these experts.
                before = rows[at - 1]
                assert before is not None
                assert list(chain.from_iterable(before)) == [(token + i) % 251 for i in range(LAYERS * TOP_K)]
                assert one.masks[at] == ([token], [token, token + 1], [])[token % 3]
            else:
                assert one.logprobs[at] == 0.0
    assert sorted(counted) == sampled_in(trace)
    # Each path is its turns' tokens, one behind the other; and all leaves are there.
    turns = {(one["replica"], turn["turn"]): turn for one in trace["traces"] for turn in one["turns"]}
    for one in sequences:
        told = [turns[one.replica, span.turn] for span in one.turns]
        assert [turn["parent"] for turn in told] == [0, *(turn["turn"] for turn in told[:-1])]
        assert one.token_ids == [token for turn in told for token in turn["added"] + turn["token_ids"]]
        assert one.prompt_length == len(told[0]["added"])
    parents = {(replica, turn["parent"]) for (replica, _), turn in turns.items()}
    assert {(one.replica, one.turns[-1].turn) for one in sequences} == set(turns) - parents


@settings(max_examples=40, deadline=None)
@given(traces)
def test_every_format_has_the_same_tokens_and_numbers(trace: dict[str, Any]) -> None:
    sequences, expected = sequences_of(trace), sampled_in(trace)

    def check(pairs: list[tuple[int, float]]) -> None:
        assert sorted(token for token, _ in pairs) == expected
        assert all(logprob == -token / 8 for token, logprob in pairs)

    check(
        [
            (token, logprob)
            for record in jsonl_records(sequences)
            for token, logprob, counts in zip(
                record["token_ids"], record["logprobs"], record["loss_mask"], strict=True
            )
            if counts
        ]
    )
    pairs = []
    for one, data in zip(sequences, tinker_data(sequences, lambda _: -2.0), strict=True):
        (chunk,), inputs = data["model_input"]["chunks"], data["loss_fn_inputs"]
        assert (
            [*chunk["tokens"], one.token_ids[-1]]
            == one.token_ids
            == [one.token_ids[0], *inputs["target_tokens"]]
        )
        assert inputs["advantages"] == [-2.0 * weight for weight in inputs["weights"]]
        rows = zip(inputs["target_tokens"], inputs["logprobs"], inputs["weights"], strict=True)
        pairs += [(token, logprob) for token, logprob, weight in rows if weight]
    check(pairs)
    records = nemo_gym_records(sequences)
    assert len(records) == sum(len(one["turns"]) for one in trace["traces"])
    pairs = []
    for record in records:
        ids = record["generation_token_ids"]
        pairs += list(zip(ids, record["generation_log_probs"], strict=True))
        told = record["routed_experts"]
        assert told["start"] == len(record["prompt_token_ids"]) - 1
        assert told["shape"] == [len(ids), LAYERS, TOP_K]
        flat = base64.b64decode(told["data"])
        assert list(flat[: LAYERS * TOP_K]) == [(ids[0] + i) % 251 for i in range(6)]
    check(pairs)
    pairs = []
    for one, rollout in zip(sequences, verifiers_rollouts(sequences), strict=True):
        nodes = rollout["nodes"]
        assert [node["parent"] for node in nodes] == [None, *range(len(nodes) - 1)]
        assert [node["sampled"] for node in nodes] == [False, True] * len(one.turns)
        assert one.token_ids == [token for node in nodes for token in node["token_ids"]]
        for node in nodes:
            counted = [token for token, counts in zip(node["token_ids"], node["mask"], strict=True) if counts]
            pairs += list(zip(counted, node["logprobs"], strict=True))
    check(pairs)


def test_verl_counts_an_answer_that_was_cut_and_continued_once() -> None:
    """user, assistant, then the rest of the same answer; tool, assistant."""
    [row] = verl_rows(sequences_of(a_trace([(0, 2, 2), (1, 0, 3), (2, 1, 1)])))
    assert row["num_turns"] == 4


@settings(max_examples=40, deadline=None)
@given(traces, st.integers(0, 3))
def test_a_verl_batch_is_padded_and_keeps_every_place(trace: dict[str, Any], more: int) -> None:
    sequences = sequences_of(trace)
    rows = verl_rows(sequences)
    behind = max(len(row["response_ids"]) for row in rows) + more
    batch = verl_batch(rows, pad_token_id=7, response_length=behind)
    before = max(len(row["prompt_ids"]) for row in rows)
    for number, one in enumerate(sequences):
        at = {name: values[number] for name, values in batch.items()}
        assert (len(at["prompts"]), len(at["responses"])) == (before, behind)
        assert at["input_ids"] == at["prompts"] + at["responses"]
        real = [i for i, counts in enumerate(at["attention_mask"]) if counts]
        assert [at["input_ids"][i] for i in real] == one.token_ids
        assert [at["position_ids"][i] for i in real] == [*range(len(one.token_ids))]
        assert {at["input_ids"][i] for i in range(before + behind) if i not in real} <= {7}
        assert [at["routed_experts"][i] for i in real if at["routed_experts_mask"][i]] == [
            row for row in expert_rows(one) if row is not None
        ]
        for i, counts in enumerate(at["response_mask"]):
            assert at["rollout_log_probs"][i] == (-at["responses"][i] / 8 if counts else 0.0)
        assert sum(at["response_mask"]) == sum(one.loss_mask)
        # verl has no field of its own for what a token was drawn from.
        row = rows[number]
        masks = row["extra_fields"]["sampling_masks"]
        assert len(masks) == len(row["response_ids"])
        assert masks == one.masks[one.prompt_length :]
    with pytest.raises(ValueError, match=f"the batch has {before} and 1"):
        verl_batch(
            [rows[0] | {"response_ids": [1, 2]}], pad_token_id=0, prompt_length=before, response_length=1
        )


def a_reward(reward: float, turn: int | None = None, name: str = "reward") -> dict[str, Any]:
    return {"reward": reward, "turn": turn, "name": name, "metadata": None, "created": 0.0}


def test_a_sequence_has_the_rewards_of_its_session_and_of_its_own_turns() -> None:
    rewards = [a_reward(1.0), a_reward(0.5, 2), a_reward(4.0, 3), a_reward(9.0, None, "style")]
    trace = a_trace([(0, 2, 2), (1, 1, 2), (1, 1, 3)], rewards=rewards)
    left, right = sequences_of(trace)
    assert (left.reward, right.reward) == (1.5, 5.0)
    assert [one["reward"] for one in left.rewards] == [1.0, 0.5, 9.0]
    batch = verl_batch(verl_rows([left, right]), pad_token_id=0)
    assert batch["rm_scores"] == [[0, 0, 0, 0, 1.5, 0], [0, 0, 0, 0, 0, 5.0]]
    assert batch["response_mask"] == [[1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    for one, rollout in zip((left, right), verifiers_rollouts([left, right]), strict=True):
        assert rollout["rewards"] == {"reward": {"score": one.reward}}
        assert rollout["metrics"] == {"style": 9.0}
    assert tinker_data([left])[0]["loss_fn_inputs"]["advantages"] == [0, 1.5, 1.5, 0, 1.5, 1.5]
    assert sequences_of(a_trace([(0, 1, 1)]))[0].reward is None


def test_a_turn_without_numbers_is_refused_by_name_or_does_not_count() -> None:
    trace = a_trace([(0, 2, 2), (1, 1, 2)])
    trace["traces"][0]["turns"][0] |= {"logprobs": None, "routing_matrix": None}
    with pytest.raises(ValueError, match=r"session 's', r0, turn 1 has no logprob .* x-midstream-records"):
        sequences_of(trace)
    (one,) = sequences_of(trace, unscored="mask")
    assert one.loss_mask == [0, 0, 0, 0, 0, 1, 1]
    (record,) = nemo_gym_records([one])
    assert record["prompt_token_ids"] == one.token_ids[:5]
    trace["traces"][0]["turns"][1]["sampling_logprobs"][1] = None
    with pytest.raises(ValueError, match="turn 2 has no sampling_logprob"):
        sequences_of(trace, logprobs="sampling_logprob", unscored="refuse")


@pytest.mark.parametrize("name", ["logprobs", "routing_matrix", "snapshots"])
def test_a_trace_with_a_number_too_few_is_refused(name: str) -> None:
    trace = a_trace([(0, 2, 2)])
    trace["traces"][0]["turns"][0][name].pop()
    with pytest.raises(ValueError, match=r"turn 1: one \w+ per token, got 1 of 2"):
        sequences_of(trace)


def without(trace: dict[str, Any], name: str) -> None:
    del trace["traces"][0]["turns"][0][name]


def turns_set(name: str, value: Any, at: int = 0) -> Any:
    return lambda trace: trace["traces"][0]["turns"][at].update({name: value})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda trace: trace.clear(),
        lambda trace: trace.update(traces=[1]),
        lambda trace: trace["traces"][0].pop("replica"),
        lambda trace: trace["traces"][0].update(rewards=[{"name": "reward"}]),
        lambda trace: trace["traces"][0].update(
            rewards=[{"reward": 10**400, "turn": None, "name": "reward"}]
        ),
        lambda trace: without(trace, "added"),
        turns_set("token_ids", "abc"),
        turns_set("logprobs", [{}] * 3),
        turns_set("routing_matrix", ["\u00fc"] * 3),
        turns_set("routing_matrix_shape", None),
        turns_set("routing_matrix_shape", [-LAYERS, -TOP_K]),
        turns_set("routing_matrix_shape", [LAYERS * TOP_K, 1]),
        # As many labels as no memory holds.
        turns_set("snapshots", [{"snapshot": "s", "start": 0, "end": 2**62}]),
        # A path without an end, and turns of which one hides another.
        turns_set("parent", 2),
        turns_set("turn", 2),
        turns_set("turn", 0),
    ],
)
def test_what_is_no_trace_is_refused(spoil: Any) -> None:
    trace = a_trace([(0, 2, 3), (1, 2, 3), (2, 1, 1)])
    spoil(trace)
    with pytest.raises(ValueError, match=r"\S"):
        sequences_of(trace)


def test_whole_numbers_are_log_probabilities_too() -> None:
    trace = a_trace([(0, 2, 3)])
    turns_set("logprobs", [0, -1, -2])(trace)
    (sequence,) = sequences_of(trace)
    assert [type(one) for one in sequence.logprobs] == [float] * 5


def test_neither_torch_nor_numpy_is_needed_for_the_module() -> None:
    path = sys.modules[TrainingSequence.__module__].__file__
    run = f"exec(compile(open({path!r}).read(), 'm', 'exec'))"
    code = f"import sys; {run}; print(sorted({{'numpy', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_records_without_masks_are_read_and_a_mask_of_another_token_is_an_error() -> None:
    trace = a_trace([(0, 2, 3)])
    (turn,) = trace["traces"][0]["turns"]
    masks = turn.pop("sampling_masks")
    (one,) = sequences_of(trace)
    assert one.masks == [None] * 5
    assert jsonl_records([one])[0]["sampling_masks"] is None
    assert verl_rows([one])[0]["extra_fields"]["sampling_masks"] is None
    turn["sampling_masks"] = masks
    (one,) = sequences_of(trace)
    assert jsonl_records([one])[0]["sampling_masks"] == one.masks
    assert one.masks[:2] == [None, None]
    for wrong, says in (
        ([*masks[1:], "AgUABgA="], "turn 1: a sampling mask of 2 ids"),
        (masks[1:], "got 2 of 3"),
    ):
        turn["sampling_masks"] = wrong
        with pytest.raises(ValueError, match=says):
            sequences_of(trace)
