"""The continuous audit of a running server: what is planted is found and named, and true turns are true."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, serve
from tiers import variant
from verified_records import Rollouts

from midstream.cli import main
from midstream.client import SnapshotPublisher

#: Changes what the replica keeps of turns of the session `bad`: one number, or one label.
FAULT = """
import midstream.replica.turns.trace as trace

true = trace.traced

def planted(turn, *more, **how):
    found = true(turn, *more, **how)
    if len(found.token_ids) != 13:
        return found
    if FAULT == "logprob":
        found.logprobs[5] -= 0.01
    else:
        spans = found.snapshots
        found.snapshots[:] = [type(spans[0])("step-0", 0, 13)]
    return found

trace.traced = planted
"""


def samples(server: Server) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text):
        for sample in family.samples:
            if sample.name.startswith("midstream_audit"):
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(found: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    return sum(value for _, value in found.get(name, []))


def until_audited(server: Server, turns: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    deadline = time.monotonic() + 150
    while True:
        found = samples(server)
        done = total(found, "midstream_audit_turns_total") + total(found, "midstream_audit_skipped_total")
        if done >= turns:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def audited(tmp_path: Path, *options: str) -> Any:
    config = tmp_path / "audit.toml"
    # Room for every snapshot, so that each can be computed by.
    config.write_text('[records]\naudit_share = 1.0\n[replica]\nsnapshot_cache = "1GiB"\n')
    return serve(tmp_path / "state", "--replicas", "1", "--no-tinker", "--config", str(config), *options)


@pytest.mark.variant
def test_turns_over_swaps_with_every_cache_policy_are_found_true(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    with audited(tmp_path, "--model", str(tiny_model())) as server:
        made = Rollouts(server, tiny_model)
        turns = 0
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            for step, policy in enumerate(("all", "none", "new_session", {"max_age": 1}), start=1):
                for session, how in (("a", {}), (f"new-{step}", {"temperature": 0.7, "top_p": 0.9})):
                    made.turn(session, **how)
                    turns += 1
                made.swap(publisher, f"step-{step}", policy, tiny_model(seed=step))
            made.turn("a", temperature=0, repetition_penalty=1.3)
            found = until_audited(server, turns + 1)
        assert total(found, "midstream_audit_turns_total") == turns + 1
        assert total(found, "midstream_audit_mismatches_total") == 0
        assert total(found, "midstream_audit_max_dlogprob") < 1e-4
        assert "midstream_audit_last_mismatch_timestamp_seconds" not in found


@pytest.mark.parametrize("fault", ["logprob", variant("label")])
def test_a_planted_fault_is_found_and_named(
    fault: str,
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"FAULT = {fault!r}\n{FAULT}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    with audited(tmp_path, "--model", str(tiny_model())) as server:
        made = Rollouts(server, tiny_model)
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            made.swap(publisher, "step-0", "all", tiny_model(seed=1))
            made.swap(publisher, "step-1", "all", tiny_model(seed=2))
        made.turn("good")
        made.turn("bad")
        made.turn("bad", 13)
        found = until_audited(server, 3)
        cause = "moved logprob" if fault == "logprob" else "wrong label"
        snapshot = "step-1" if fault == "logprob" else "step-0"
        assert {labels["cause"]: n for labels, n in found["midstream_audit_mismatches_total"] if n} == {
            cause: 1
        }
        [(labels, at)] = found["midstream_audit_last_mismatch_timestamp_seconds"]
        assert labels == {
            "replica": "replica-0",
            "session": "bad",
            "turn": "2",
            "snapshot": snapshot,
            "cause": cause,
        }
        assert abs(at - time.time()) < 120
        if fault == "logprob":
            assert total(found, "midstream_audit_max_dlogprob") == pytest.approx(0.01, abs=1e-4)
        assert main(["status", "--server", server.url]) == 0
        assert f"1 turns differ, the last one is turn 2 of bad ({cause})" in capsys.readouterr().out
        logged = server.log.read_text()
    assert f"audit: session 'bad', turn 2, on replica-0, snapshot {snapshot}: {cause}: " in logged
