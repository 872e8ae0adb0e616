"""Training sequences in the formats of trainers: as JSON lines, for Tinker, verl, NeMo-Gym, and verifiers or prime-rl. Pure.

Always holds: every record has all tokens of its sequence, with the loss mask and log-probabilities of records.py. `expert_rows`
moves a route to the token that its pass read, as trainers count. Plain lists and dicts, ready for JSON; torch and numpy are
never imported. All functions raise ValueError on sequences that lack what the format needs.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from midstream.client.records import REWARD, TrainingSequence


def expert_rows(sequence: TrainingSequence) -> list[list[list[int]] | None]:
    """[layers][top-k] expert numbers of the pass that read each token; None where they are not known.

    The last token was read by no pass, and of prompts a trace has the last token's pass alone.
    """
    if sequence.routes_shape is None:
        return [None] * len(sequence.token_ids)
    _, top_k = sequence.routes_shape
    return [
        None if row is None else [row[at : at + top_k] for at in range(0, len(row), top_k)]
        for row in (*sequence.routes[1:], None)
    ]


def _payload(
    rows: list[list[list[int]] | None], shape: list[int] | None, start: int
) -> dict[str, Any] | None:
    """Rows of tokens from `start` on, as prime-rl's object has them; None unless all are known."""
    known = [row for row in rows if row is not None]
    if shape is None or len(known) != len(rows):
        return None
    flat = [number for row in known for layer in row for number in layer]
    wide = max(flat, default=0) > 255
    data = array("H" if wide else "B", flat).tobytes()
    return {
        "data": base64.b64encode(data).decode(),
        "shape": [len(rows), *shape],
        "start": start,
        "dtype": "uint16" if wide else "uint8",
    }


# -- JSON lines


def jsonl_records(sequences: Iterable[TrainingSequence]) -> list[dict[str, Any]]:
    """One record per sequence, with all that it has: lists and numbers, ready for JSON.

    `routed_experts` is [tokens][layers][top_k], moved to the token that the pass read, with None where it is not known.
    `sampling_masks` has the ids that each sampled token was drawn from, [] where that was every one, None likewise.
    """
    return [
        {
            "session": one.session,
            "replica": one.replica,
            "model": one.model,
            "turns": [turn._asdict() for turn in one.turns],
            "prompt_length": one.prompt_length,
            "token_ids": one.token_ids,
            "loss_mask": one.loss_mask,
            "logprobs": one.logprobs,
            "snapshots": one.snapshots,
            "routed_experts": expert_rows(one) if one.routes_shape else None,
            "sampling_masks": one.masks if any(ids is not None for ids in one.masks) else None,
            "reward": one.reward,
            "rewards": one.rewards,
            "sampling": one.sampling,
            "gone_turns": one.gone,
        }
        for one in sequences
    ]


# -- Tinker


def tinker_data(
    sequences: Iterable[TrainingSequence], advantage: Callable[[TrainingSequence], float] | None = None
) -> list[dict[str, Any]]:
    """Fields of `tinker.Datum`, one for each sequence: see `tinker_datum`.

    advantage: of each sampled token; without it, the sequence's reward, or 0.0.

    Target i is token i + 1, so the lists of
    `loss_fn_inputs` are one token shorter than the sequence. weights are those of `cross_entropy`; logprobs and advantages
    those of the policy losses. Each loss takes its own: leave out the others before sending.
    """
    data = []
    for one in sequences:
        value = (one.reward or 0.0) if advantage is None else advantage(one)
        mask = one.loss_mask[1:]
        inputs = {
            "target_tokens": one.token_ids[1:],
            "weights": [float(counts) for counts in mask],
            "logprobs": one.logprobs[1:],
            "advantages": [value if counts else 0.0 for counts in mask],
        }
        chunk = {"type": "encoded_text", "tokens": one.token_ids[:-1]}
        data.append({"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs})
    return data


def tinker_datum(data: Mapping[str, Any], tinker: Any, inputs: Iterable[str] | None = None) -> Any:
    """A `tinker.Datum` of one entry of `tinker_data`. tinker: the imported package. inputs: which of loss_fn_inputs it has."""
    tokens = [token for chunk in data["model_input"]["chunks"] for token in chunk["tokens"]]
    given: Mapping[str, list[Any]] = data["loss_fn_inputs"]
    wanted = given if inputs is None else {name: given[name] for name in inputs}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=dict(wanted))


# -- verl


def verl_rows(sequences: Iterable[TrainingSequence]) -> list[dict[str, Any]]:
    """Fields of verl's AgentLoopOutput, one for each sequence: what its first turn was asked, and all behind it.

    num_turns: as verl counts, those of the user and of tools as well; an answer that was cut and continued is one.
    routed_experts: of all tokens, zeros where they are not known; make it an array. extra_fields has routed_experts_mask, which
    says where they are; sampling_masks, the ids that each token of the response was drawn from, as in `jsonl_records`; None
    where the sequence has no routes, or no masks; and sampling, the parameters of each turn.
    """
    rows = []
    for one in sequences:
        at = one.prompt_length
        masks = one.masks[at:] if any(ids is not None for ids in one.masks) else None
        experts = expert_rows(one) if one.routes_shape else None
        zero = [] if one.routes_shape is None else [[0] * one.routes_shape[1]] * one.routes_shape[0]
        known = None if experts is None else [int(row is not None) for row in experts]
        rows.append(
            {
                "prompt_ids": one.token_ids[:at],
                "response_ids": one.token_ids[at:],
                "response_mask": one.loss_mask[at:],
                "response_logprobs": one.logprobs[at:],
                "reward_score": one.reward,
                "num_turns": 2 * (1 + sum(turn.end < after.start for turn, after in pairwise(one.turns))),
                "routed_experts": None if experts is None else [row or zero for row in experts],
                "metrics": {},
                "extra_fields": {
                    "routed_experts_mask": known,
                    "sampling_masks": masks,
                    "sampling": one.sampling,
                },
            }
        )
    return rows


def verl_batch(
    rows: Sequence[Mapping[str, Any]],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> dict[str, list[Any]]:
    """Fields of verl's DataProto: make a tensor of each, and DataProto.from_dict of them. verl has routed_experts in int16.

    Prompts are padded on the left to `prompt_length`, responses on the right to `response_length`, each the longest one's
    unless given. rm_scores: the reward at the last token, if all rows have one. routed_experts: if all rows have routes.
    Raises ValueError for a row that is longer.
    """
    if not rows:
        raise ValueError("there are no sequences to make a batch of")
    before = prompt_length or max(len(row["prompt_ids"]) for row in rows)
    behind = response_length or max(len(row["response_ids"]) for row in rows)
    scored = all(row["reward_score"] is not None for row in rows)
    routed = all(row["routed_experts"] for row in rows)
    batch: dict[str, list[Any]] = {}

    def put(name: str, row: list[Any]) -> None:
        batch.setdefault(name, []).append(row)

    for number, row in enumerate(rows):
        prompt, response = row["prompt_ids"], row["response_ids"]
        if len(prompt) > before or len(response) > behind:
            raise ValueError(
                f"sequence {number}: {len(prompt)} and {len(response)} tokens, the batch has {before} and {behind}"
            )
        left, right = before - len(prompt), behind - len(response)
        prompts, responses = [pad_token_id] * left + prompt, response + [pad_token_id] * right
        put("prompts", prompts)
        put("responses", responses)
        put("input_ids", prompts + responses)
        put("attention_mask", [0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
        put("position_ids", [0] * left + list(range(len(prompt) + len(response))) + [0] * right)
        put("response_mask", row["response_mask"] + [0] * right)
        put("rollout_log_probs", row["response_logprobs"] + [0.0] * right)
        if scored:
            last = len(response) - 1
            put("rm_scores", [row["reward_score"] if at == last else 0.0 for at in range(behind)])
        if routed:
            layers, top_k = len(row["routed_experts"][0]), len(row["routed_experts"][0][0])
            zero = [[0] * top_k] * layers
            put("routed_experts", [zero] * left + row["routed_experts"] + [zero] * right)
            put("routed_experts_mask", [0] * left + row["extra_fields"]["routed_experts_mask"] + [0] * right)
    return batch


# -- NeMo-Gym


def nemo_gym_records(sequences: Iterable[TrainingSequence]) -> list[dict[str, Any]]:
    """NeMo-Gym's token entries, one for each turn that counts in the loss.

    `routed_experts` has base64 of [tokens, layers, top_k] in uint8 or uint16, with shape and dtype; None unless all are known.
    """
    records = []
    for one in sequences:
        rows = expert_rows(one)
        for turn, start, end, _ in one.turns:
            if not any(one.loss_mask[start:end]):
                continue
            records.append(
                {
                    "rollout_id": one.session,
                    "model_call_id": f"{one.replica}/{turn}",
                    "model": one.model,
                    "prompt_token_ids": one.token_ids[:start],
                    "generation_token_ids": one.token_ids[start:end],
                    "generation_log_probs": one.logprobs[start:end],
                    "routed_experts": _payload(rows[start - 1 : end - 1], one.routes_shape, start - 1),
                }
            )
    return records


# -- verifiers


#: The ends of a turn that verifiers knows. Others become None.
_VERIFIERS_ENDS = ("stop", "length", "tool_calls")


def verifiers_rollouts(sequences: Iterable[TrainingSequence]) -> list[dict[str, Any]]:
    """verifiers' traces, as prime-rl takes them, one for each sequence: `WireTrace.model_validate` reads an entry.

    A turn is two nodes: what its request added, and what was sampled. Their messages are empty: a trace of tokens has no text.
    rewards has the sequence's reward; metrics has those of other names. Routes are left out: verifiers takes those of whole
    sequences only, and of prompts they are not known.
    """
    return [_verifiers_trace(one) for one in sequences]


def _verifiers_trace(one: TrainingSequence) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    calls = []
    end = 0
    for span in one.turns:
        nodes.append(_node(nodes, one, end, span.start, "user"))
        nodes.append(_node(nodes, one, span.start, span.end, "assistant"))
        end = span.end
        usage = {"prompt_tokens": span.start, "completion_tokens": span.end - span.start}
        reason = span.finish_reason if span.finish_reason in _VERIFIERS_ENDS else None
        calls.append({"node": len(nodes) - 1, "model": one.model, "finish_reason": reason, "usage": usage})
    others = {each["name"] for each in one.rewards} - {REWARD}
    return {
        "id": f"{one.session}/{one.replica}/{one.turns[-1].turn}",
        "task": {"type": "session", "data": {"name": one.session}},
        "agent": {"config": {"model": one.model}},
        "nodes": nodes,
        "calls": calls,
        "rewards": {} if one.reward is None else {REWARD: {"score": one.reward}},
        "metrics": {name: one.total(name) for name in sorted(others)},
        "info": {"rewards": one.rewards, "turns": [span.turn for span in one.turns]},
        "is_completed": True,
        "ok": True,
    }


def _node(nodes: list[Any], one: TrainingSequence, start: int, end: int, role: str) -> dict[str, Any]:
    """The node behind `nodes` that has the tokens from start to end."""
    mask = [bool(counts) for counts in one.loss_mask[start:end]]
    return {
        "parent": len(nodes) - 1 if nodes else None,
        "message": {"role": role, "content": ""},
        "sampled": role == "assistant",
        "token_ids": one.token_ids[start:end],
        "mask": mask,
        "logprobs": one.logprobs[start:end] if any(mask) else [],
    }
