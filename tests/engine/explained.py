"""A server and a trainer in plain transformers, for the tests of `midstream explain`: records of known faults."""

from __future__ import annotations

import itertools
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recompute import OWN_ROUTE, Recomputer

from midstream.core.masks import kept_ids
from midstream.verify.claims import Tree, gather


def spans(names: Sequence[str]) -> list[dict[str, Any]]:
    found, at = [], 0
    for name, run in itertools.groupby(names):
        size = sum(1 for _ in run)
        found.append({"snapshot": name, "start": at, "end": at + size})
        at += size
    return found


def distribution(row: torch.Tensor, temperature: float, kept: Sequence[int] | None) -> torch.Tensor:
    """Log-probabilities of the tokens in `kept`, minus infinity elsewhere."""
    warm = row.double() / temperature
    if kept is not None:
        inside = torch.full_like(warm, float("-inf"))
        inside[list(kept)] = warm[list(kept)]
        warm = inside
    return warm.log_softmax(-1)


def top_p_of(row: torch.Tensor, temperature: float, top_p: float) -> list[int] | None:
    if top_p >= 1:
        return None
    chances = distribution(row, temperature, None).exp()
    order = chances.argsort(descending=True)
    before = chances[order].cumsum(0) - chances[order]
    return sorted(order[before < top_p].tolist())


def mask_bytes(kept: Sequence[int] | None, token: int) -> str:
    if kept is None:
        return b64encode(b"\1").decode()
    if list(kept) == [token]:
        return b64encode(b"\0").decode()
    return b64encode(b"\2" + np.array(kept, dtype="<u2").tobytes()).decode()


class World:
    """Turns as a server would record them, and a trainer's numbers of them.

    moe_layers, top_k: of the models; 0: dense.
    """

    def __init__(self, checkpoints: dict[str, Path], seed: int = 0) -> None:
        self.checkpoints = checkpoints
        self.oracle = Recomputer(checkpoints)
        self.random = np.random.default_rng(seed)
        self.records: list[dict[str, Any]] = []
        one = self.oracle.passes([0], [next(iter(checkpoints))])
        self.vocab = one.logits.shape[-1]
        self.shape = one.routes.shape[1:]
        self.experts = self.oracle.experts

    def prompt(self, size: int = 20) -> list[int]:
        return self.random.integers(2, self.vocab, size).tolist()

    def other_routes(self, count: int) -> np.ndarray:
        """Routes that no model chose: such as one that rounds more."""
        drawn = [
            [self.random.permutation(self.experts)[: self.shape[1]] for _ in range(self.shape[0])]
            for _ in range(count)
        ]
        return np.array(drawn, dtype=np.int64)

    def turn(
        self,
        label: str | Sequence[str],
        *,
        kv: Sequence[str] | None = None,
        tokens: int = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        penalty: float = 0.0,
        routes: np.ndarray | None = None,
        prompt: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """The turn of a new session. label: of all tokens, or of each. kv: of the prompt's positions.

        routes: that its sampling passes took. penalty: of tokens that stand before, subtracted from their logits.
        """
        added = list(prompt or self.prompt())
        labels = [label] * tokens if isinstance(label, str) else list(label)
        under = list(kv or [labels[0]] * len(added))
        ids = list(added)
        rows: dict[str, list[Any]] = {
            name: [] for name in ("logprobs", "sampling_logprobs", "sampling_masks", "routing_matrix")
        }
        for at in range(tokens):
            forced = self.forced(len(ids), len(added), None if routes is None else routes[: at + 1])
            passes = self.oracle.passes(ids, under, forced=forced, row=len(ids) - 1)
            row = passes.logits[0].double()
            punished = row.clone()
            punished[sorted(set(ids))] -= penalty
            kept = top_p_of(punished, temperature, top_p)
            own = distribution(punished, temperature, kept)
            token = int(self.random.choice(self.vocab, p=own.exp().numpy() / own.exp().sum().item()))
            rows["logprobs"].append(row.log_softmax(-1)[token].item())
            rows["sampling_logprobs"].append(own[token].item())
            rows["sampling_masks"].append(mask_bytes(kept, token))
            rows["routing_matrix"].append(b64encode(passes.routes[-1].astype("u1").tobytes()).decode())
            ids.append(token)
            under.append(labels[min(at + 1, tokens - 1)])
        moe = bool(self.shape[0])
        number = len(self.records) + 1
        turn = {
            "turn": 1,
            "parent": 0,
            "model": "m",
            "added": added,
            "token_ids": ids[len(added) :],
            "loss_mask": [],
            "finish_reason": "length",
            "created": float(number),
            **rows,
            "routing_matrix": rows["routing_matrix"] if moe else None,
            "routing_matrix_dtype": "uint8" if moe else None,
            "routing_matrix_shape": list(self.shape) if moe else None,
            "snapshots": spans(labels),
            "kv_snapshots": spans(under[: len(ids) - 1]),
        }
        about = {"n": number, "replica": "r", "boot": "b", "kind": "turn", "segment": "s", "line": number}
        session = {"deployment": "d", "tenant": "", "session": f"s-{number}", "tree": number}
        self.records.append({**about, **session, "turn": turn})
        return turn

    def forced(self, count: int, prompt: int, routes: np.ndarray | None) -> torch.Tensor | None:
        """Routes of the passes that gave the sampled tokens' logits."""
        if routes is None:
            return None
        forced = torch.full((count, *self.shape), OWN_ROUTE)
        forced[prompt - 1 :] = torch.from_numpy(routes[: count - prompt + 1])
        return forced

    def trees(self) -> list[Tree]:
        return self.trees_of(self.records)

    @staticmethod
    def trees_of(records: list[dict[str, Any]]) -> list[Tree]:
        found = gather(records, [])
        assert found.findings == []
        return found.trees

    def train(
        self,
        turn: dict[str, Any],
        snapshot: str,
        *,
        temperature: float = 1.0,
        masks: Sequence[Sequence[int] | None] | None = None,
        routes: np.ndarray | None = None,
        forced: torch.Tensor | None = None,
        ids: Sequence[int] | None = None,
    ) -> np.ndarray:
        """A trainer's numbers: one forward pass over the whole sequence, by one snapshot."""
        answer = turn["token_ids"] if ids is None else list(ids)
        every = [*turn["added"], *answer]
        first = len(turn["added"]) - 1
        if routes is not None:
            forced = self.forced(len(every) - 1, len(turn["added"]), routes)
        passes = self.oracle.passes(every[:-1], [snapshot] * (len(every) - 1), forced=forced, row=first)
        found = []
        for at, token in enumerate(answer):
            row = distribution(passes.logits[at], temperature, None if masks is None else masks[at])
            found.append(row[token].item())
        return np.array(found)


def masks_of_turn(turn: dict[str, Any]) -> list[Sequence[int] | None]:
    pairs = zip(turn["sampling_masks"], turn["token_ids"], strict=True)
    return [kept_ids(b64decode(mask), token) for mask, token in pairs]


def routes_of_turn(turn: dict[str, Any]) -> np.ndarray:
    rows = [np.frombuffer(b64decode(one), "u1") for one in turn["routing_matrix"]]
    return np.array(rows, dtype=np.int64).reshape(len(rows), *turn["routing_matrix_shape"])
