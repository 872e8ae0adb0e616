"""MoE router replay: the experts of every token, in the form and the alignment that trainers replay."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from midstream.client.decode import RouteDtype, decode_routing_matrix
from midstream.snapshots.layout import read_spec
from midstream_conformance.answers import Choice, Token
from midstream_conformance.checks.asking import plain_and_streamed
from midstream_conformance.outcome import expect, fail
from midstream_conformance.rows import FIREWORKS, PROTOCOL, Evidence, row
from midstream_conformance.session import Session
from midstream_conformance.target import EXPERTS_FIELDS

ROUTES = f"{FIREWORKS}: MoE Router Replay"
MODES = f"{ROUTES}, Other API modes"
NEEDS = ("routes", "moe")
ASK: dict[str, Any] = {"include_routing_matrix": True, "logprobs": True, "ignore_eos": True}
# The part of a tensor's name that has the layer of its experts.
_EXPERTS = re.compile(r"\.(\d+)\.(?:.*\.)?experts\.")
# Share of matrices. In bfloat16 another batch may choose another expert where two are near a tie.
SAME_SHARE = 0.9


@row(
    "routes.completions",
    "include_routing_matrix gives each token base64 of one [moe_layers, top_k] array of expert indices",
    ROUTES,
    NEEDS,
)
async def completions(session: Session) -> Evidence:
    answer = await session.endpoint.complete(session.prompt(24), max_tokens=12, **ASK)
    return _sound(session, answer.choice.tokens, 12)


@row(
    "routes.chat",
    "Chat completions have it at choices[i].logprobs.content[j].routing_matrix, for each of n choices",
    ROUTES,
    NEEDS,
)
async def chat(session: Session) -> Evidence:
    answer = await session.endpoint.chat("Say something.", n=2, max_tokens=12, **ASK)
    expect(len(answer.choices) == 2, "two choices were expected", got=len(answer.choices))
    for choice in answer.choices.values():
        evidence = _sound(session, choice.tokens, 12)
    return {**evidence, "choices": 2}


@row(
    "routes.stream", "Every streamed token's entry has its matrix, the one of the plain answer", MODES, NEEDS
)
async def stream(session: Session) -> Evidence:
    answers = await plain_and_streamed(session, session.prompt(24), max_tokens=12, **ASK)
    plain, streamed = (answer.choice for answer in answers)
    _sound(session, streamed.tokens, 12)
    expect(plain.ids == streamed.ids, "greedy tokens differ")
    return _agree(plain.tokens, streamed.tokens, "the stream's matrices are not the plain answer's")


@row(
    "routes.echo",
    "echo gives the prompt tokens' matrices too, all but the first token's",
    MODES,
    (*NEEDS, "prompt_logprobs"),
)
async def echo(session: Session) -> Evidence:
    choice = (await session.endpoint.complete(session.prompt(24), max_tokens=6, echo=True, **ASK)).choice
    expect(len(choice.tokens) == 30, "30 entries were expected", got=len(choice.tokens))
    expect(choice.tokens[0].route is None, "the first prompt token, which no pass produced, has a matrix")
    return _sound(session, choice.tokens[1:], 29)


@row(
    "routes.echo_last",
    "echo_last N gives the matrices of the last N prompt tokens only",
    MODES,
    (*NEEDS, "prompt_logprobs"),
)
async def echo_last(session: Session) -> Evidence:
    answer = await session.endpoint.complete(session.prompt(24), max_tokens=6, echo=True, echo_last=5, **ASK)
    return _sound(session, answer.choice.tokens, 11)


@row(
    "routes.alignment",
    "A token's matrix is of the pass that produced it: an echo of the tokens gives the same at the same places",
    f"{PROTOCOL}: Router replay (R3) alignment",
    (*NEEDS, "prompt_logprobs"),
)
async def alignment(session: Session) -> Evidence:
    prompt = session.prompt(24)
    made = (await session.endpoint.complete(prompt, max_tokens=24, **ASK)).choice
    scored = await _scored(session, [*prompt, *made.ids])
    shifted = _share(made.tokens[:-1], scored.tokens[25:])
    evidence = _agree(made.tokens, scored.tokens[24:], "the echo gives other matrices at the tokens' places")
    expect(evidence["same_share"] > shifted, "one place further on they agree as well", shifted_share=shifted)
    return {**evidence, "shifted_share": shifted}


@row(
    "routes.warm",
    "A cached prompt gives the same matrices as a cold one",
    f"{PROTOCOL}: Router replay (R3) alignment",
    (*NEEDS, "prompt_logprobs"),
)
async def warm(session: Session) -> Evidence:
    prompt, key = session.prompt(), session.key()
    first, second = [(await session.turn(prompt, key, echo=True, **ASK)).choice for _ in range(2)]
    _sound(session, second.tokens[1:], len(prompt))
    count = len(prompt)
    return _agree(first.tokens[1:count], second.tokens[1:count], "the second echo has other matrices")


async def _scored(session: Session, ids: list[int]) -> Choice:
    fields: dict[str, Any] = {**ASK, "max_tokens": 0, "echo": True, "prompt_cache_max_len": 0}
    return (await session.endpoint.complete(ids, **fields)).choice


def _sound(session: Session, tokens: Sequence[Token], count: int) -> Evidence:
    """Every token has a matrix, all of one size, whose rows are different experts that the model has."""
    expect(len(tokens) == count, f"{count} entries were expected, got {len(tokens)}")
    bare = [i for i, token in enumerate(tokens) if token.route is None]
    expect(not bare, "tokens without routing_matrix", at=bare[:8])
    sizes = {len(base64.b64decode(token.route or "", validate=True)) for token in tokens}
    expect(len(sizes) == 1 and 0 not in sizes, "the matrices differ in size", bytes=sorted(sizes))
    config = session.target.config
    top_k = config.get("num_experts_per_tok")
    experts = next((config[name] for name in EXPERTS_FIELDS if name in config), None)
    evidence: dict[str, Any] = {"tokens": count, "bytes": sizes.pop()}
    if not isinstance(top_k, int) or not isinstance(experts, int):
        return {**evidence, "shape": "not checked: no checkpoint says top_k and experts"}
    layers = _moe_layers(session.snapshots.checkpoint, config.get("num_hidden_layers"))
    for token in tokens:
        _check_matrix(token, top_k, experts, layers)
    return {**evidence, "layers": layers or "not checked: no tensor is called experts", "top_k": top_k}


def _check_matrix(token: Token, top_k: int, experts: int, layers: int | None) -> None:
    dtype: RouteDtype = token.entry.get("routing_matrix_dtype") or "uint8"
    matrix = decode_routing_matrix(token.route or "", top_k=top_k, dtype=dtype)
    expect(layers in (None, len(matrix)), f"{len(matrix)} rows for {layers} layers with experts")
    for chosen in matrix.tolist():
        if len(set(chosen)) != top_k or max(chosen) >= experts:
            fail(f"a row is not {top_k} different experts of {experts}", row=chosen)


@cache
def _moe_layers(checkpoint: Path, hidden_layers: Any) -> int | None:
    """How many of the layers that predict the next token have experts, by the names of the tensors; None: these say nothing."""
    found = {int(match[1]) for name in read_spec(checkpoint).tensors if (match := _EXPERTS.search(name))}
    count = sum(layer < hidden_layers for layer in found) if isinstance(hidden_layers, int) else len(found)
    return count or None


def _share(first: Sequence[Token], second: Sequence[Token]) -> float:
    same = sum(a.route == b.route for a, b in zip(first, second, strict=True))
    return same / max(1, len(first))


def _agree(first: Sequence[Token], second: Sequence[Token], why: str) -> dict[str, Any]:
    share = _share(first, second)
    expect(share >= SAME_SHARE, why, same_share=share, tokens=len(first))
    return {"tokens": len(first), "same_share": share}
