"""Training records out of a session's trace: as JSON lines, for Tinker, verl, NeMo-Gym, and verifiers or prime-rl. Pure.

A trace is the decoded answer of `GET /v1/sessions/KEY/trace` (docs/exact-sessions.md). A sequence is one path through its
tree, from a turn without a parent to a turn that no other continues.

Always holds:
- A token has the loss mask 1 exactly if it was sampled, in one sequence: where paths share turns, in the first of them.
- A loss mask of 1 has the token's own log-probability beside it. Where it is not known, that is an error, or the turn is
  context alone (`unscored`); it is never a guess.
- A route stands where midstream tells it: at the token whose logits its pass gave. `expert_rows` moves it to the token that
  the pass read, as trainers count.

Plain lists and dicts, ready for JSON; torch and numpy are never imported. All functions raise ValueError on a trace that
lacks what is asked for.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from midstream.core.traces import check_trace

Trace = Mapping[str, Any]
#: Of the model's own distribution, or of the one that was sampled from (temperature, top-p and so on).
LogprobKind = Literal["logprob", "sampling_logprob"]
#: What becomes of a turn without log-probabilities: an error, or a turn that only others' tokens follow.
Unscored = Literal["refuse", "mask"]
#: The name of the reward that training uses. Others are passed on.
REWARD = "reward"


class TurnSpan(NamedTuple):
    """Where a sequence has the tokens that a turn sampled.

    turn: its number in the session. start, end: places in the sequence's lists; `end` is exclusive.
    finish_reason: how it ended.
    """

    turn: int
    start: int
    end: int
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """One path of a session's tree. Lists have one entry per token, unless they say otherwise.

    session: its key. replica: that served it. model: as its first turn was told it. turns: in order. prompt_length: tokens that
    the first turn's request had. token_ids: of prompts, answers and what stood between. loss_mask: 1 where the token was
    sampled, in one sequence alone. logprobs: in nats; 0.0 where loss_mask is 0.
    snapshots: of the weights that sampled the token; None where it was added. routes: expert numbers, layers x top-k in one
    list; None where they are not known. routes_shape: [layers, top-k]. rewards: those of the session, and of the path's turns.
    """

    session: str
    replica: str
    model: str
    turns: list[TurnSpan]
    prompt_length: int
    token_ids: list[int] = field(repr=False)
    loss_mask: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    snapshots: list[str | None] = field(repr=False)
    routes: list[list[int] | None] = field(repr=False)
    routes_shape: list[int] | None
    rewards: list[dict[str, Any]]

    @property
    def reward(self) -> float | None:
        """The rewards named "reward" of the session and of the path's turns, added; None without any."""
        return self.total(REWARD)

    def total(self, name: str) -> float | None:
        """As `reward`, of the rewards that are called `name`."""
        found = [one["reward"] for one in self.rewards if one["name"] == name]
        return float(sum(found)) if found else None


def sequences_of(
    trace: Trace, *, logprobs: LogprobKind = "logprob", unscored: Unscored = "refuse"
) -> list[TrainingSequence]:
    """The sequences of a trace, of each replica in the order of their last turns.

    trace: the answer of `GET /v1/sessions/KEY/trace`, or an item of `traces_of`. logprobs: which of the two log-probabilities a
    sequence gets. unscored: what becomes of a turn without them: "refuse" raises, "mask" leaves it out of the loss.
    Raises ValueError on a trace that lacks what is asked for.
    """
    check_trace(trace)
    found: list[TrainingSequence] = []
    for one in trace["traces"]:
        turns = {turn["turn"]: turn for turn in one["turns"]}
        parents = {turn["parent"] for turn in one["turns"]}
        trained: set[int] = set()
        for last in turns:
            if last in parents:
                continue
            path, at = [], last
            while at:
                path.append(turns[at])
                at = turns[at]["parent"]
            about = {"session": trace["id"], "replica": one["replica"]}
            rewards = one.get("rewards") or []
            found.append(_sequence(about, path[::-1], rewards, trained, logprobs, unscored))
            trained.update(turn["turn"] for turn in path)
    return found


def _sequence(
    about: dict[str, str],
    path: list[dict[str, Any]],
    rewards: Iterable[dict[str, Any]],
    trained: set[int],
    kind: LogprobKind,
    unscored: Unscored,
) -> TrainingSequence:
    ids: list[int] = []
    mask: list[int] = []
    scores: list[float] = []
    snapshots: list[str | None] = []
    routes: list[list[int] | None] = []
    spans = []
    for turn in path:
        added, sampled = turn["added"], turn["token_ids"]
        own = _scores(about, turn, kind, unscored) if turn["turn"] not in trained else None
        start = len(ids) + len(added)
        spans.append(TurnSpan(turn["turn"], start, start + len(sampled), turn["finish_reason"]))
        ids += [*added, *sampled]
        mask += [0] * len(added) + [int(own is not None)] * len(sampled)
        scores += [0.0] * len(added) + (own or [0.0] * len(sampled))
        snapshots += [None] * len(added) + _labels(about, turn)
        routes += [None] * len(added) + _routes(about, turn)
    on_path = {turn["turn"] for turn in path}
    return TrainingSequence(
        **about,
        model=path[0]["model"],
        turns=spans,
        prompt_length=len(path[0]["added"]),
        token_ids=ids,
        loss_mask=mask,
        logprobs=scores,
        snapshots=snapshots,
        routes=routes,
        routes_shape=next((turn["routing_matrix_shape"] for turn in path if turn["routing_matrix"]), None),
        rewards=[dict(one) for one in rewards if one["turn"] is None or one["turn"] in on_path],
    )


def _scores(
    about: dict[str, str], turn: dict[str, Any], kind: LogprobKind, unscored: Unscored
) -> list[float] | None:
    given = turn[kind + "s"]
    if given is None or None in given:
        if unscored == "mask" or not turn["token_ids"]:
            return None
        raise ValueError(f"{_turn(about, turn)} has no {kind} of each token: {_why_unscored(turn)}")
    _check_count(about, turn, kind, given)
    return [float(logprob) for logprob in given]


def _why_unscored(turn: dict[str, Any]) -> str:
    """The cause, and what to do."""
    if resumed := turn.get("resumed"):
        return (
            f"its replica was lost after {resumed} of {len(turn['token_ids'])} tokens, and another one went on with"
            " it; only the response has their log-probabilities; leave it out of the loss (--unscored mask)"
        )
    return "send x-midstream-records: logprobs, or leave it out of the loss (--unscored mask)"


def _labels(about: dict[str, str], turn: dict[str, Any]) -> list[str | None]:
    labels: list[str | None] = []
    for span in turn["snapshots"]:
        if span["start"] != len(labels) or span["end"] > len(turn["token_ids"]):
            raise ValueError(
                f"{_turn(about, turn)}: its snapshots leave a gap, overlap, or go on behind its tokens"
            )
        labels += [span["snapshot"]] * (span["end"] - span["start"])
    _check_count(about, turn, "snapshot", labels)
    return labels


def _routes(about: dict[str, str], turn: dict[str, Any]) -> list[list[int] | None]:
    given = turn["routing_matrix"]
    if given is None:
        return [None] * len(turn["token_ids"])
    _check_count(about, turn, "route", given)
    code, size = ("H", 2) if turn["routing_matrix_dtype"] == "uint16" else ("B", 1)
    layers, top_k = turn["routing_matrix_shape"]
    found: list[list[int] | None] = []
    for encoded in given:
        raw = base64.b64decode(encoded, validate=True)
        if len(raw) != size * layers * top_k:
            raise ValueError(f"{_turn(about, turn)}: a route of {len(raw)} bytes is no [{layers}, {top_k}]")
        # Little-endian, as all machines are that train.
        found.append(array(code, raw).tolist())
    return found


def _check_count(about: dict[str, str], turn: dict[str, Any], what: str, given: Sequence[Any]) -> None:
    if len(given) != len(turn["token_ids"]):
        raise ValueError(
            f"{_turn(about, turn)}: one {what} per token, got {len(given)} of {len(turn['token_ids'])}"
        )


def _turn(about: dict[str, str], turn: dict[str, Any]) -> str:
    return f"session {about['session']!r}, {about['replica']}, turn {turn['turn']}"


# -- routes as trainers count


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
            "reward": one.reward,
            "rewards": one.rewards,
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

    num_turns: as verl counts, those of the user and of tools as well. routed_experts: of all tokens, zeros where they are not
    known; make it an array. extra_fields has routed_experts_mask, which says where they are. None where the sequence has no
    routes.
    """
    rows = []
    for one in sequences:
        at = one.prompt_length
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
                "num_turns": 2 * len(one.turns),
                "routed_experts": None if experts is None else [row or zero for row in experts],
                "metrics": {},
                "extra_fields": {"routed_experts_mask": known},
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


#: What verifiers knows of how a turn ended. Others are told as None.
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
