"""Whether answers are borne out by the weights that they name: recomputed, and compared with their turns in the traces.

Owns: how an answer becomes a claim of `midstream verify`, and the recomputation of what a claim has not: scored prompts and
alternatives.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pair_answers import Told
from pair_asking import ROUNDING, Asked
from recompute import Passes, Recomputer

TOP_K = 2


def record_of(asked: Asked, told: Told, number: int) -> dict[str, Any]:
    """Of one choice, as a replica would keep it."""
    spans = [{"snapshot": label, "start": at, "end": at + 1} for at, label in enumerate(told.labels)]
    routed = len(told.routes) == len(told.ids) > 0
    turn = {
        "turn": 1,
        "parent": 0,
        "model": "m",
        "added": told.prompt,
        "token_ids": told.ids,
        "loss_mask": [0] * len(told.prompt or ()) + [1] * len(told.ids),
        "finish_reason": "stop",
        "created": 0.0,
        "logprobs": told.logprobs,
        "sampling_logprobs": None,
        "routing_matrix": told.routes if routed else None,
        "routing_matrix_dtype": "uint8" if routed else None,
        "routing_matrix_shape": [len(b64decode(told.routes[0])) // TOP_K, TOP_K] if routed else None,
        "router_weights": told.weights if routed and len(told.weights) == len(told.ids) else None,
        "snapshots": spans,
        "kv_snapshots": told.kv,
        "earlier_kv_snapshots": told.earlier,
    }
    name = f"{asked.session}, {asked.row}, choice {told.index}"
    where = {
        "segment": name,
        "line": 1,
        "deployment": "d",
        "tenant": "",
        "session": f"{number}",
        "tree": number,
    }
    return {"n": number, "replica": "r", "boot": "b", "kind": "turn", "turn": turn, **where}


def has_numbers(told: Told) -> bool:
    return bool(told.prompt and told.ids and told.kv) and len(told.logprobs) == len(told.ids)


def prompt_faults(told: Told, recomputer: Recomputer) -> Iterator[str]:
    """Of what is shown of a prompt, and of alternatives, where one snapshot made all."""
    names = {*told.labels, *(span["snapshot"] for span in told.kv or ())}
    if len(names) != 1 or not told.prompt or told.earlier:
        return
    (name,), ids = names, [*told.prompt, *told.ids]
    echoed, prompt = _scores(told), told.prompt
    off = [0.0, 0.0]
    tops = [each for each in told.tops if each] if len(told.tops) == len(told.ids) else []

    def fits(made: Passes) -> bool:
        scored = [(float(made.logprobs[at - 1, ids[at]]), logprob) for at, logprob in echoed if at]
        off[0] = max((abs(own - logprob) for own, logprob in scored), default=0.0)
        off[1] = 0.0
        for at, each in enumerate(tops):
            best = made.logprobs[len(prompt) - 1 + at].topk(len(each)).values
            said = torch.tensor(sorted((_logprob(one) for one in each_of(each)), reverse=True)[: len(each)])
            off[1] = max(off[1], float((best - said).abs().max()))
        return max(off) <= ROUNDING

    if (echoed or tops) and recomputer.first_that(fits, ids[:-1] or ids, [name] * len(ids)) is None:
        yield f"prompt scores are {off[0]} off those of {name}, alternatives {off[1]}: {told}"


def each_of(top: Any) -> list[Any]:
    return list(top.values()) if isinstance(top, dict) else list(top)


def _logprob(one: Any) -> float:
    if isinstance(one, dict):
        return float(one["logprob"])
    return float(one[0] if isinstance(one, list) else one)


def _scores(told: Told) -> list[tuple[int, float]]:
    """(position, logprob) of the prompt tokens that the answer shows."""
    size, found = len(told.prompt or ()), list[tuple[int, float]]()
    for at, entry in enumerate(told.echoed):
        logprob = entry["logprob"] if isinstance(entry, dict) else entry[1]
        found.append((size - len(told.echoed) + at, logprob or 0.0))
    scores = told.prompt_scores or []
    for at, entry in enumerate(scores):
        position = size - len(scores) + at
        if isinstance(entry, dict):
            found.append((position, entry[str((told.prompt or ())[position])]["logprob"]))
        elif entry is not None and entry[0] is not None:
            found.append((position, entry[0]))
    return found


def trace_faults(asked: Asked, traces: list[dict[str, Any]]) -> Iterator[str]:
    """The answer's turn is in the trace of its session, with the same numbers."""
    turns = list[tuple[list[int], dict[str, Any]]]()
    for tree in traces:
        tokens = {0: list[int]()}
        for turn in tree["turns"]:
            prompt = tokens[turn["parent"]] + turn["added"]
            tokens[turn["turn"]] = prompt + turn["token_ids"]
            turns.append((prompt, turn))
    for told in asked.said.choices.values():
        if not told.ids:
            # What samples nothing is no turn.
            continue
        own = [turn for prompt, turn in turns if (prompt, turn["token_ids"]) == (told.prompt, told.ids)]
        if not own:
            yield f"choice {told.index} has no turn"
        elif not any(_agrees(told, turn, asked) for turn in own):
            yield f"choice {told.index}: {told} is not {own}"


def _agrees(told: Told, turn: dict[str, Any], asked: Asked) -> bool:
    if turn["resumed"]:
        return True
    labels = [span["snapshot"] for span in turn["snapshots"] for _ in range(span["start"], span["end"])]
    same = [labels == told.labels, told.kv is None or turn["kv_snapshots"] == told.kv]
    same.append(told.kv is None or turn["earlier_kv_snapshots"] == told.earlier)
    kept = asked.row["kept"]
    if kept != "none" and told.logprobs:
        same.append(_near(told.logprobs, turn["logprobs"]))
    if kept in ("routes", "masks") and told.routes:
        same.append(told.routes == turn["routing_matrix"])
    if kept == "masks" and told.masks and isinstance(told.masks[0], str):
        same.append(told.masks == turn["sampling_masks"])
    if kept != "none" and told.sampling and None not in told.sampling:
        same.append(_near(told.sampling, turn["sampling_logprobs"]))
    return all(same)


def _near(said: Any, kept: Any) -> bool:
    return (
        kept is not None
        and len(said) == len(kept)
        and all(abs(a - b) < 1e-6 for a, b in zip(said, kept, strict=True))
    )


Judge = Callable[[list[dict[str, Any]]], list[Any]]
