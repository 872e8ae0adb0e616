"""Training records out of a session's trace, as sequences of tokens. Pure.

A trace is the decoded answer of `GET /v1/sessions/KEY/trace` (docs/exact-sessions.md). A sequence is one path through its
tree, from a turn without a parent to a turn that no other continues. export.py writes sequences in the formats of trainers.

Always holds:
- A token has the loss mask 1 exactly if it was sampled, in one sequence: where paths share turns, in the first of them.
- A loss mask of 1 has the token's own log-probability beside it. Where it is not known, that is an error, or the turn is
  context alone (`unscored`); it is never a guess. A turn whose record file is gone is context alone, and `gone` names it.
- A route stands where midstream has it: at the token that its pass gave the logits for.

Plain lists and dicts; torch and numpy are never imported. All functions raise ValueError on a trace that lacks what is asked
for.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from midstream.core.masks import kept_ids
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

    session: its key. replica: that served it. model: as its first turn has it. turns: in order. prompt_length: tokens that
    the first turn's request had. token_ids: of prompts, answers and what stood between. loss_mask: 1 where the token was
    sampled, in one sequence alone. logprobs: in nats; 0.0 where loss_mask is 0.
    snapshots: of the weights that sampled the token; None where it was added. routes: expert numbers, layers x top-k in one
    list; None where they are not known. routes_shape: [layers, top-k]. masks: the ids that a sampled token was drawn from,
    ascending; [] where that was every one, None where they are not known. rewards: those of the session, and of the path's
    turns. sampling: of each turn, the parameters that are not the defaults (docs/records.md); None: they are not known.
    gone: numbers of turns whose record file is gone, so that only their tokens and snapshots are known.
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
    masks: list[list[int] | None] = field(repr=False)
    rewards: list[dict[str, Any]]
    sampling: list[dict[str, Any] | None] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)

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
    masks: list[list[int] | None] = []
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
        masks += [None] * len(added) + _masks(about, turn)
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
        masks=masks,
        rewards=[dict(one) for one in rewards if one["turn"] is None or one["turn"] in on_path],
        sampling=[turn.get("sampling") for turn in path],
        gone=[turn["turn"] for turn in path if turn.get("record_gone")],
    )


def _scores(
    about: dict[str, str], turn: dict[str, Any], kind: LogprobKind, unscored: Unscored
) -> list[float] | None:
    given = turn[kind + "s"]
    if given is None or None in given:
        if unscored == "mask" or not turn["token_ids"] or turn.get("record_gone"):
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
                f"{_turn(about, turn)}: its snapshots leave a gap, overlap, or extend beyond its tokens"
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


def _masks(about: dict[str, str], turn: dict[str, Any]) -> list[list[int] | None]:
    given, tokens = turn.get("sampling_masks"), turn["token_ids"]
    if given is None:
        return [None] * len(tokens)
    _check_count(about, turn, "sampling mask", given)
    found: list[list[int] | None] = []
    for encoded, token in zip(given, tokens, strict=True):
        try:
            found.append(list(kept_ids(base64.b64decode(encoded, validate=True), token) or ()))
        except ValueError as error:
            raise ValueError(f"{_turn(about, turn)}: {error}") from error
    return found


def _check_count(about: dict[str, str], turn: dict[str, Any], what: str, given: Sequence[Any]) -> None:
    if len(given) != len(turn["token_ids"]):
        raise ValueError(
            f"{_turn(about, turn)}: one {what} per token, got {len(given)} of {len(turn['token_ids'])}"
        )


def _turn(about: dict[str, str], turn: dict[str, Any]) -> str:
    return f"session {about['session']!r}, {about['replica']}, turn {turn['turn']}"
