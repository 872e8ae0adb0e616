"""A trainer that makes one mistake per conversation, and `midstream explain`, which names each. Needs torch and transformers.

    python examples/explain/mistakes.py DIRECTORY

Starts a `midstream serve` of its own, and ends it. The trainer's numbers are in DIRECTORY/trainer.jsonl, and the report is
DIRECTORY/explained.html. Exits with 1 if a mistake is not named.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from midstream.client import SnapshotPublisher
from midstream.client.export import expert_rows
from midstream.client.journal import read_records, traces_of
from midstream.client.records import TrainingSequence, TurnSpan, sequences_of
from midstream.client.replay import OWN_ROUTE, RouterTap

CLI = [sys.executable, "-m", "midstream.cli"]
READY = re.compile(r"midstream ready on (\S+) \(\d+ replicas?, model (\S+), deployment")
TEMPERATURE = 0.8
#: What the trainer does wrong in a session, and the cause that it must be named by.
MISTAKES = {
    "forgets-the-temperature": "temperature or penalties",
    "forgets-the-masks": "mask",
    "shifts-by-one": "other tokens",
    "tokenizes-again": "other tokens",
    # It is the server's: a session from before the swap goes on over its old KV.
    "goes-on-over-old-kv": "stale KV",
    "computes-by-old-weights": "wrong snapshot",
    "forgets-the-routes": "route",
    "rounds": "precision",
    "makes-none": "precision",
}


def sample(work: Path) -> None:
    """A turn for each mistake, by the weights of step-1."""
    serve = [*CLI, "serve", "--model", str(work / "step-0"), "--replicas", "1", "--port", "0", "--no-tinker"]
    serve += ["--state-dir", str(work / "state"), "--records", (work / "records").as_uri()]
    serve += ["--bucket", (work / "bucket").as_uri()]
    with (work / "serve.log").open("wb") as log:
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        ready = next(filter(None, map(READY.search, server.stdout)))
        said = turn(ready[1], ready[2], "goes-on-over-old-kv", list(b"Before the swap."))
        with SnapshotPublisher(ready[1], (work / "bucket").as_uri()) as publisher:
            publisher.publish("step-1", work / "step-1", reset_prompt_cache="new_session")
        for name in MISTAKES:
            before = said if MISTAKES[name] == "stale KV" else []
            turn(ready[1], ready[2], name, [*before, *f"Mistake: {name}.".encode()])
    finally:
        server.terminate()
        server.wait(60)
        assert server.stdout is not None
        server.stdout.close()


def turn(url: str, model: str, session: str, prompt: list[int]) -> list[int]:
    """The prompt and the answer. Masks are of few sessions: a token of other text would not be in one."""
    headers = {"x-multi-turn-session-id": session, "x-midstream-records": "masks"}
    fields = {"max_tokens": 32, "ignore_eos": True, "return_token_ids": True, "seed": len(prompt)}
    top_p = 0.9 if session in ("forgets-the-masks", "makes-none") else 1.0
    body = {"model": model, "prompt": prompt, "temperature": TEMPERATURE, "top_p": top_p, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120).raise_for_status()
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return prompt + ids


def by_one_pass(
    model: Any, ids: list[int], start: int, temperature: float, masks: list[list[int] | None]
) -> list[float]:
    """Log-probabilities of ids[start:], by one forward pass in float32. masks: the ids that each was drawn from; None: all."""
    logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].double() / temperature
    for row, kept in zip(logits, masks, strict=True):
        if kept:
            left = torch.full_like(row, -torch.inf)
            left[kept] = row[kept]
            row.copy_(left)
    targets = torch.tensor(ids[start:])[:, None]
    found: list[float] = logits.log_softmax(-1).gather(1, targets)[:, 0].tolist()
    return found


def trained(
    model: Any, tap: RouterTap, sequence: TrainingSequence, span: TurnSpan, logprobs: Any
) -> dict[str, Any]:
    """The trainer's numbers of a turn. logprobs: as `by_one_pass`."""
    mistake, ids = sequence.session, sequence.token_ids[: span.end]
    if mistake == "tokenizes-again":
        ids[span.start + 4] = (ids[span.start + 4] + 1) % 256
    assert sequence.routes_shape is not None
    layers, top_k = sequence.routes_shape
    own = [[OWN_ROUTE] * top_k] * layers
    # Routes of earlier turns were chosen by older weights.
    rows = [own] * (span.start - 1) + [
        row or own for row in expert_rows(sequence)[span.start - 1 : span.end - 1]
    ]
    # The pass over the last token gives no number.
    routes = torch.tensor([*rows, own])
    temperature = 1.0 if mistake == "forgets-the-temperature" else TEMPERATURE
    masks = sequence.masks[span.start : span.end]
    if mistake == "forgets-the-masks":
        masks = [None] * len(masks)
    with torch.no_grad(), tap.forcing(None if mistake == "forgets-the-routes" else routes):
        numbers = logprobs(model, ids, span.start, temperature, masks)
    sampled = ids[span.start :]
    if mistake == "shifts-by-one":
        # The last number is another turn's.
        numbers = [*numbers[1:], -1.0]
    if mistake == "rounds":
        numbers = [min(0.0, number + 0.02 * (-1) ** at) for at, number in enumerate(numbers)]
    return {"session": mistake, "turn": span.turn, "logprobs": numbers, "token_ids": sampled}


def train(work: Path, logprobs: Any = by_one_pass) -> None:
    """The numbers of each session's last turn. logprobs: as `by_one_pass`."""
    models = {}
    for snapshot, name in (("base", "step-0"), ("step-1", "step-1")):
        model = AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.float32)
        models[snapshot] = model, RouterTap(model)
    rows = []
    for trace in traces_of(read_records((work / "records").as_uri())):
        for sequence in sequences_of(trace):
            by = "base" if sequence.session == "computes-by-old-weights" else "step-1"
            rows.append(trained(*models[by], sequence, sequence.turns[-1], logprobs))
    (work / "trainer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(work: Path) -> int:
    for seed in range(2):
        made = work / f"step-{seed}"
        subprocess.run([*CLI, "model", "tiny-moe", str(made), "--seed", str(seed)], check=True)
    sample(work)
    train(work)
    return explained(work)


def explained(work: Path, expected: dict[str, str] = MISTAKES) -> int:
    """0 if each mistake is named. expected: by what."""
    explain = [*CLI, "explain", str(work / "records"), str(work / "trainer.jsonl")]
    explain += ["--bucket", (work / "bucket").as_uri(), "--base", str(work / "step-0")]
    explain += ["--report", str(work / "explained.html"), "--out", str(work / "explained.json")]
    done = subprocess.run(explain, check=False)
    if done.returncode not in (0, 1):
        return done.returncode
    turns = json.loads((work / "explained.json").read_text())["turns"]
    named = {one["session"]: one["details"] or {one["cause"]: ""} for one in turns}
    for mistake, cause in expected.items():
        found = "named" if [*named.get(mistake, ())] == [cause] else f"MISSED, found {named.get(mistake)}"
        print(f"{mistake}: {cause}: {found}")
    return 0 if all([*named.get(mistake, ())] == [cause] for mistake, cause in expected.items()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
