"""An RL loop against a live server: GRPO on a tiny MoE, with a hot load after every step. Needs torch, transformers and openai.

    make demo DEMO_ARGS="--steps 20"

Starts a `midstream serve` of its own, and ends it. Prints what happened, and writes it to summary.json. Exits with 1 if one of
`misses` holds.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from grpo import Mismatch, Trainer
from transformers import AutoTokenizer
from two_turns import Rollout, Sampler

from midstream.client import SnapshotPublisher
from midstream.client.publication import Published
from midstream.client.status import Status

CLI = [sys.executable, "-m", "midstream.cli"]
READY = re.compile(r"midstream ready on (\S+) \(\d+ replicas?, model (\S+), deployment ([^\s)]+)")
#: A server that is not ready by then does not start, in seconds.
START_S = 180.0
#: Of a replica that is about to switch.
STAGES = {"verifying", "staging", "staged", "committing", "checking"}


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="an RL loop against a live server")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the sampling")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="summary.json goes here")
    parser.add_argument("--learning-rate", type=float, default=8e-4, help="of the trainer's optimizer")
    for name, default, what in (
        ("steps", 20, "training steps, each with a swap"),
        ("groups", 6, "problems per step"),
        ("samples", 6, "rollouts per problem"),
        ("tokens", 32, "tokens per turn"),
        ("replicas", 2, "of the server that is started"),
        ("full_every", 5, "a full snapshot every so many, deltas between them"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=what)
    options = parser.parse_args(arguments)
    for name, least in {"steps": 1, "groups": 1, "samples": 2, "tokens": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name}: must be at least {least}")
    return options


def bucket(work: Path) -> str:
    return (work / "bucket").as_uri()


def records(work: Path) -> str:
    return (work / "records").as_uri()


@contextlib.contextmanager
def server(out: Path, work: Path, replicas: int) -> Iterator[tuple[str, str, str]]:
    """The URL, model and deployment of a server. Its processes have ended after the block, however that ends."""
    command = [*CLI, "serve", "--model", str(work / "model"), "--replicas", str(replicas), "--port", "0"]
    command += ["--bucket", bucket(work), "--state-dir", str(work / "state"), "--records", records(work)]
    with (out / "serve.log").open("wb") as log:
        # It has a session of its own, so that Ctrl-C reaches the demo alone.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    late = threading.Timer(START_S, process.terminate)
    late.start()
    try:
        ready = next(filter(None, map(READY.search, process.stdout)), None)
        late.cancel()
        if ready is None:
            raise SystemExit(f"midstream serve did not start:\n{(out / 'serve.log').read_text()[-2000:]}")
        yield ready[1], ready[2], ready[3]
    finally:
        late.cancel()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


@dataclass
class Loop:
    """A third of a step's groups are sampled while the trainer computes on the step before. The others start one after another
    until a replica is about to switch to that step's snapshot, and then all at once. So answers are running when it switches,
    and no rollout starts more than one snapshot behind."""

    options: argparse.Namespace
    sampler: Sampler
    trainer: Trainer
    publisher: SnapshotPublisher
    batches: list[list[Rollout]] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)

    def run(self) -> None:
        groups, third = range(self.options.groups), self.options.groups // 3
        with ThreadPoolExecutor(self.options.groups * self.options.samples + 2) as self.pool:
            running, serving = self.sample(0, groups), None
            for step in range(self.options.steps):
                batch = [rollout for one in running if (rollout := one.result()) is not None]
                if not batch:
                    raise SystemExit(f"every rollout of step {step + 1} failed: {self.sampler.errors[0]}")
                self.batches.append(batch)
                running = self.sample(step + 1, groups[:third])
                self.mismatches.append(self.trainer.mismatch(batch))
                self.trainer.update(batch)
                print(f"step {step + 1}: reward {mean_reward(batch):.3f}", flush=True)
                if serving is not None:
                    serving.result()
                near = Future[None]()
                serving = self.publish(f"step-{step + 1}", near)
                for group in groups[third:]:
                    one = self.sample(step + 1, range(group, group + 1))
                    running += one
                    wait([near, self.pool.submit(wait, one)], return_when=FIRST_COMPLETED)
            serving.result()

    def sample(self, step: int, groups: range) -> list[Future[Rollout | None]]:
        if step == self.options.steps:
            return []
        every = [(group, sample) for group in groups for sample in range(self.options.samples)]
        return [self.pool.submit(self.sampler.rollout, step, *one) for one in every]

    def publish(self, snapshot: str, near: Future[None]) -> Future[None]:
        """Returns when the weights are copied. near: done when a replica is about to switch, or the publication ended."""

        def look(status: Status) -> None:
            if any(replica.stage in STAGES for replica in status.replicas) and not near.done():
                near.set_result(None)

        def served() -> None:
            try:
                done = publication.wait()
            finally:
                if not near.done():
                    near.set_result(None)
            self.published.append(done)
            told = f"{done.kind}, {done.bytes_sent / 1e6:.2f} MB, paused for {max(pauses(done), default=0):.1f} ms"
            print(f"{snapshot} serves on every replica: {told}", flush=True)

        where = {"model": self.trainer.model, "config_dir": self.trainer.directory}
        publication = self.publisher.begin(snapshot, **where, dtype="bfloat16", on_status=look)
        self.trainer.remember(snapshot)
        return self.pool.submit(served)


def mean_reward(batch: list[Rollout]) -> float:
    return statistics.fmean(rollout.reward for rollout in batch)


def pauses(done: Published) -> list[float]:
    swaps = [replica.last_swap or {} for replica in done.replicas]
    return [swap["pause_ms"] for swap in swaps if swap.get("snapshot") == done.identity]


def summary_of(loop: Loop) -> dict[str, Any]:
    """reward_stderr: of the rise. affinity_share: of rollouts that one replica served alone. kl: means over tokens, in nats,
    when the trainer replays what the name says."""
    rollouts = [rollout for batch in loop.batches for rollout in batch]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    first, last = loop.batches[0], loop.batches[-1]
    mismatch = Mismatch(*map(torch.cat, zip(*loop.mismatches, strict=True)))
    sizes = [size for turn in turns for size in np.diff(turn.masks.offsets).tolist()]
    paused = [pause for done in loop.published for pause in pauses(done)]
    said = sorted((one.session, [(turn.prompt, turn.tokens) for turn in one.turns]) for one in first)
    return {
        "reward_first": mean_reward(first),
        "reward_last": mean_reward(last),
        "reward_stderr": math.hypot(*map(stderr, (first, last))),
        "swaps": len(loop.published),
        "pause_ms_p50": statistics.median(paused or [0.0]),
        "pause_ms_max": max(paused, default=0.0),
        "snapshots": published(loop, "full") | published(loop, "delta"),
        "failed_requests": len(loop.sampler.errors),
        "answers": len(turns),
        "answers_crossed_swap": sum(len(turn.pieces) > 1 for turn in turns),
        "affinity_share": statistics.fmean(len({t.replica for t in one.turns}) == 1 for one in rollouts),
        "cached_prompt_share": sum(t.cached_tokens for t in turns) / sum(len(t.prompt) for t in turns),
        "kl_neither": mismatch.neither.mean().item(),
        "kl_routes": mismatch.routes.mean().item(),
        "kl_masks": mismatch.masks.mean().item(),
        "kl_routes_and_masks": mismatch.both.mean().item(),
        "route_diff_share": mismatch.differ.double().mean().item(),
        "mask_tokens_mean": statistics.fmean(sizes),
        "mask_singleton_share": statistics.fmean(size == 1 for size in sizes),
        "first_rollouts_sha256": hashlib.sha256(repr(said).encode()).hexdigest(),
    }


def stderr(batch: list[Rollout]) -> float:
    return statistics.stdev(rollout.reward for rollout in batch) / math.sqrt(len(batch)) if batch[1:] else 0.0


def published(loop: Loop, kind: str) -> dict[str, Any]:
    """How many snapshots of the kind, and medians of their bytes and of the seconds until all replicas served them."""
    those = [done for done in loop.published if done.kind == kind]
    took = [done.encode_s + done.upload_s + done.load_s for done in those]
    sizes = [done.bytes_sent for done in those]
    middle = {"bytes": statistics.median(sizes), "publish_s": statistics.median(took)} if those else {}
    return {kind: {"count": len(those), **middle}}


def misses(found: dict[str, Any]) -> list[str]:
    """The checks of a run that do not hold."""
    rise = found["reward_last"] - found["reward_first"]
    checks = {
        "the reward rose by less than 3 standard errors": rise > 0 and rise >= 3 * found["reward_stderr"],
        "not every step's snapshot was served": found["swaps"] == found["steps"],
        "requests failed": found["failed_requests"] == 0,
        "no answer crossed a swap": found["answers_crossed_swap"] > 0 or found["steps"] < 2,
        "a session changed its replica": found["affinity_share"] == 1.0,
        "replayed routes are no closer": found["kl_routes_and_masks"] < found["kl_masks"],
        "replayed masks are no closer": found["kl_routes_and_masks"] < found["kl_routes"],
        "records are not what their snapshots compute": found.get("verified", "clean") == "clean",
    }
    return [name for name, holds in checks.items() if not holds]


def trained(options: argparse.Namespace, work: Path) -> Loop:
    model_of = [*CLI, "model", "tiny-moe", str(work / "model"), "--seed", str(options.seed)]
    subprocess.run(model_of, check=True)
    # The replicas' engines share these cores.
    torch.set_num_threads(1)
    trainer = Trainer(work / "model", options.learning_rate)
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    print(f"starting midstream serve with {options.replicas} replicas", flush=True)
    with (
        server(options.out, work, options.replicas) as (url, model, deployment),
        openai.OpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0, timeout=120.0) as client,
        SnapshotPublisher(
            url, bucket(work), model=model, deployment=deployment, full_every=options.full_every
        ) as publisher,
    ):
        top_k = trainer.model.config.num_experts_per_tok
        sampler = Sampler(client, model, tokenizer, options.seed, options.tokens, top_k)
        loop = Loop(options, sampler, trainer, publisher)
        print("sampling the first rollouts", flush=True)
        loop.run()
    return loop


def verified(out: Path, work: Path) -> dict[str, Any]:
    """What `midstream verify` says of all records of the run: each token's number and route, computed again."""
    print("verifying the records of the run", flush=True)
    verify = [*CLI, "verify", records(work), "--bucket", bucket(work), "--base", str(work / "model")]
    done = subprocess.run([*verify, "--out", str(out / "verified.json")], check=False)
    if done.returncode not in (0, 1):
        return {"verified": "unreadable", "verified_tokens": 0}
    statement = json.loads((out / "verified.json").read_text())
    return {"verified": statement["result"], "verified_tokens": statement["verified"]["tokens"]}


def main(options: argparse.Namespace) -> int:
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.absolute(), prefix="run-") as work:
        loop = trained(options, Path(work))
        proof = verified(options.out, Path(work))
    found = {"seed": options.seed, "steps": options.steps, "seconds": time.monotonic() - began}
    found |= summary_of(loop) | proof
    (options.out / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    for name, value in found.items():
        print(f"{name:22} {value:.4g}" if isinstance(value, float) else f"{name:22} {value}")
    missed = misses(found)
    print("\n".join([*loop.sampler.errors[:5], *(f"MISSED: {miss}" for miss in missed)]))
    return 1 if missed else 0


if __name__ == "__main__":
    # SIGTERM ends the server as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(options_of()))
    except KeyboardInterrupt:
        print("interrupted; the server is stopped")
        sys.exit(130)
