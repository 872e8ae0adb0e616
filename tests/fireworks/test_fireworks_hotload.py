"""The real client's DeploymentManager and WeightSyncer hot-load full and incremental snapshots."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fireworks_helpers import (
    WEIGHTS,
    Endpoint,
    assert_served,
    nudged,
    reference_delta,
    routes_of,
    score,
    sharded,
)
from serving import serve

from midstream.snapshots.arc2.encode import encode_delta

PROMPT = list(b"The weights that")
ATTEMPTS = 4


def incremental(previous: str, compression: str = "arc_v2", checksum: str = "alder32") -> dict[str, str]:
    return {
        "previous_snapshot_identity": previous,
        "compression_format": compression,
        "checksum_format": checksum,
    }


def test_hotload_and_wait_full_then_deltas_of_both_encoders_serve_the_very_weights(
    published: Endpoint, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    full = tiny_model(seed=1)
    children = [nudged(full, tmp_path / "child-0", 1)]
    children += [nudged(children[0], tmp_path / "child-1", 2)]
    children += [nudged(children[1], tmp_path / "child-2", 3)]
    shutil.copytree(full, published.bucket / "full-1")
    reference_delta(full, children[0], published.bucket / "delta-1", "arc_v2")
    encode_delta(children[0], children[1], published.bucket / "delta-2", "arc_v2")
    reference_delta(children[1], children[2], published.bucket / "delta-3", "arc_v1")
    signals = [
        {"identity": "full-1"},
        {"identity": "delta-1", "incremental": incremental("full-1")},
        {"identity": "delta-2", "incremental": incremental("delta-1"), "reset_prompt_cache": False},
        {"identity": "delta-3", "incremental": incremental("delta-2", "arc_v1")},
    ]
    got = published.run("hot_load", signals=signals, prompt=PROMPT)
    assert got["account"] == "acme"
    for step, signal, checkpoint in zip(got["steps"], signals, [full, *children], strict=True):
        assert (step["ok"], step["refusal"], step["error"]) == (True, None, None)
        replicas = step["status"]["replicas"]
        assert [r["current_snapshot_identity"] for r in replicas] == [signal["identity"]] * 2
        assert all(r["readiness"] and r["loading_state"]["stage"] == "done" for r in replicas)
        assert len(step["samples"]) == 4
        for sample in step["samples"]:
            assert_served(sample, checkpoint)


@pytest.mark.variant
def test_a_delta_of_a_sharded_checkpoint(
    published: Endpoint, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    full = sharded(tiny_model(seed=2), tmp_path / "full", 3)
    child = nudged(full, tmp_path / "child", 4)
    shutil.copytree(full, published.bucket / "sharded")
    reference_delta(full, child, published.bucket / "sharded-delta", "arc_v2")
    signals = [
        {"identity": "sharded"},
        {"identity": "sharded-delta", "incremental": incremental("sharded", checksum="adler32")},
    ]
    steps = published.run("hot_load", signals=signals, prompt=PROMPT)["steps"]
    assert [step["ok"] for step in steps] == [True, True]
    for sample in steps[1]["samples"]:
        assert_served(sample, child)


def test_what_cannot_be_loaded_is_a_failure_at_once_and_the_old_snapshot_goes_on(
    published: Endpoint, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    full = tiny_model(seed=3)
    child = nudged(full, tmp_path / "child", 5)
    shutil.copytree(full, published.bucket / "good")
    shutil.copytree(full, published.bucket / "short")
    weights = published.bucket / "short" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-64])
    # Made against another parent: the checksums do not fit.
    reference_delta(tiny_model(seed=4), child, published.bucket / "misfit", "arc_v2")
    reference_delta(full, child, published.bucket / "fits", "arc_v2")
    signals = [
        {"identity": "good"},
        {"identity": "short"},
        {"identity": "nowhere"},
        {"identity": "good"},
        {"identity": "misfit", "incremental": incremental("good")},
        {"identity": "fits", "incremental": incremental("never-signalled")},
        {"identity": "fits", "incremental": incremental("good", "arc_v3")},
        {"identity": "fits", "incremental": incremental("good")},
    ]
    steps = published.run("hot_load", signals=signals, prompt=PROMPT)["steps"]
    good, short, nowhere, again, misfit, orphan, arc_v3, fits = steps
    assert (good["ok"], again["ok"], fits["ok"]) == (True, True, True)
    for failed, identity in ((short, "short"), (misfit, "misfit")):
        assert failed["ok"] is False
        assert f"Hotload failed for snapshot '{identity}'" in failed["error"]
        assert failed["seconds"] < 150, "the client waited for its time-out"
        first = failed["status"]["replicas"][0]
        assert first["loading_state"] == {"stage": "error", "target_snapshot_identity": identity}
        for sample in failed["samples"]:
            assert_served(sample, full)
    assert WEIGHTS in short["status"]["replicas"][0]["midstream"]["error"]
    assert "checksum" in misfit["status"]["replicas"][0]["midstream"]["error"].lower()
    for refused, names in ((nowhere, "nowhere"), (orphan, "never-signalled"), (arc_v3, "arc_v3")):
        assert refused["refusal"]["status"] == 400
        assert refused["refusal"]["code"] == "invalid_request_error"
        assert names in refused["refusal"]["message"]
        assert refused["seconds"] < 30, "the client retried what cannot work"
    for sample in fits["samples"]:
        assert_served(sample, child)


def test_weight_syncer_saves_full_once_and_deltas_after_and_goes_on_after_a_failure(
    published: Endpoint, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoints = [tiny_model(seed=6)]
    for i in (1, 2, 3):
        checkpoints.append(nudged(checkpoints[-1], tmp_path / f"step-{i}", 10 + i))
    deltas = {
        "step-1": encode_delta_to(checkpoints[0], checkpoints[1], tmp_path / "delta-1"),
        # Cut short on its way into the bucket; the syncer's next delta is again against step 1.
        "broken": encode_delta_to(checkpoints[1], checkpoints[2], tmp_path / "delta-broken"),
        "step-3": encode_delta_to(checkpoints[1], checkpoints[3], tmp_path / "delta-3"),
    }
    broken = deltas["broken"] / WEIGHTS
    broken.write_bytes(broken.read_bytes()[:-40])
    saves = {"step-0": {"base": str(checkpoints[0])}}
    saves |= {name: {"delta": str(delta)} for name, delta in deltas.items()}
    got = published.run(
        "weight_syncer",
        bucket=str(published.bucket),
        saves=saves,
        steps=["step-0", "step-1", "broken", "step-3"],
        prompt=PROMPT,
    )
    assert got["saved"] == ["base", "delta", "delta", "delta"]
    first, second, failed, last = got["steps"]
    for step, identity, checkpoint in (
        (first, "step-0-base", checkpoints[0]),
        (second, "step-1-delta", checkpoints[1]),
        (last, "step-3-delta", checkpoints[3]),
    ):
        assert (step["snapshot"], step["error"], step["state"]) == (identity, None, identity)
        assert step["timing"]["warmup_time_s"] < 60, "the warm-up request was not answered at once"
        for sample in step["samples"]:
            assert_served(sample, checkpoint)
    assert failed["snapshot"] is None
    assert "Hotload failed for snapshot 'broken-delta'" in failed["error"]
    for sample in failed["samples"]:
        assert_served(sample, checkpoints[1])
    sampled = got["sampling_client"]
    assert len(sampled["sequences"]) == 2
    for sequence in sampled["sequences"]:
        assert len(sequence["tokens"]) == len(sequence["logprobs"]) > 0
    assert sampled["prompt_logprobs"][0] is None
    assert len(sampled["prompt_logprobs"]) == len(PROMPT)


def encode_delta_to(parent: Path, child: Path, out: Path) -> Path:
    encode_delta(parent, child, out, "arc_v2")
    return out


@pytest.mark.timeout(900)
@pytest.mark.variant
def test_async_rollouts_cross_a_hot_load_without_a_retry(
    published: Endpoint, tiny_model: Callable[..., Path]
) -> None:
    for attempt in range(ATTEMPTS):
        identity = f"crossed-{attempt}"
        shutil.copytree(tiny_model(seed=7 + attempt % 2), published.bucket / identity)
        got = published.run("transition", identity=identity, prompt=PROMPT, early=8, early_tokens=3500)
        assert got["ok"] is True
        assert [len(rollout["full_tokens"]) for rollout in got["early"]] == [len(PROMPT) + 3500] * 8
        for rollout in got["early"] + got["late"]:
            assert [(m["http_status_code"], m["error"]) for m in rollout["attempts"]] == [(200, None)]
        assert not [m for m in got["messages"] if "not ready" in m]
        swaps = [replica["midstream"]["last_swap"] for replica in got["status"]["replicas"]]
        if crossed := sum(swap["streams_crossed"] for swap in swaps) >= 8:
            # Otherwise one ended before the swap.
            break
    assert crossed


@pytest.mark.timeout(900)
@pytest.mark.variant
def test_sync_rollouts_finish_on_the_old_weights_and_new_ones_are_retried_after_425(
    config: Path, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    arguments = (
        "--model",
        str(tiny_model()),
        "--replicas",
        "1",
        "--transition",
        "sync",
        "--config",
        str(config),
    )
    with serve(tmp_path / "state", *arguments) as server:
        before = tiny_model()
        for attempt in range(ATTEMPTS):
            identity, after = f"after-{attempt}", tiny_model(seed=8 + attempt % 2)
            shutil.copytree(after, server.bucket / identity)
            got = Endpoint(server).run(
                "transition", identity=identity, prompt=PROMPT, early=2, early_tokens=3500
            )
            assert got["ok"] is True
            for rollout in got["early"]:
                assert len(rollout["full_tokens"]) == len(PROMPT) + 3500
                logprobs, _ = score(before, rollout["full_tokens"], routes_of(rollout))
                assert rollout["inference_logprobs"] == pytest.approx(logprobs, abs=1e-4)
            assert_served(got["late"][-1], after)
            if held_off := [m for m in got["messages"] if "HTTP 425" in m]:
                # Otherwise the early ones ended before the swap.
                break
            before = after
    assert held_off, "no rollout was held off"
