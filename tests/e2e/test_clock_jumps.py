"""The system's clock is set forth and back by hours under a real server: nothing expires, no order and no label is lost."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import serve
from test_version_admission import Stream

from midstream.client import SnapshotPublisher, snapshot_of

# Python runs it first in every process of the server. The file says how far the clock is off.
SITE = """
import os, time
_real = time.time
def _set():
    with open(os.environ["CLOCK_OFFSET_FILE"]) as file:
        return _real() + float(file.read() or 0)
time.time = _set
"""
# More than the hour after which a session is idle.
JUMPS_S = (3700.0, -7400.0, 0.0)
LONG = 3000


@pytest.mark.variant
def test_a_clock_that_is_set_changes_nothing_for_sessions_streams_and_signals(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv("CLOCK_OFFSET_FILE", str(offset))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def set_clock(to_s: float) -> None:
        # In one move: no process reads half of it.
        (tmp_path / "next").write_text(str(to_s))
        (tmp_path / "next").rename(offset)

    session = {"x-session-id": "trajectory"}
    prompt = list(range(1, 65))
    with (
        serve(tmp_path / "state", "--replicas", "2", "--no-tinker") as server,
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http,
        SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher,
    ):

        def turn() -> tuple[str, str | None, int]:
            """Replica, label, and prompt tokens that were cached."""
            body: dict[str, Any] = {"model": server.model, "prompt": prompt, "max_tokens": 2}
            answer = http.post("/v1/completions", json=body, headers=session)
            assert answer.status_code == 200, answer.text
            said = answer.json()
            cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer.headers["x-midstream-replica"], snapshot_of(said["model"]), cached

        children = sorted(server.children())
        home, _, _ = turn()
        opened = http.get("/v1/sessions/trajectory").json()["opened_at"]
        labels = ["base"]
        for step, jump_s in enumerate(JUMPS_S):
            stream = Stream(server, {}, LONG).begin()
            set_clock(jump_s)
            replica, label, cached = turn()
            assert (replica, label) == (home, labels[-1]), "the session is where it was"
            assert cached > 0, "and so is its cache"
            shutil.copytree(tiny_model(seed=step + 1, dtype="bfloat16"), server.bucket / f"step-{step}")
            publisher.snapshots.signal(f"step-{step}", reset_prompt_cache="none")
            publisher.snapshots.wait_until_ready(f"step-{step}", timeout_s=150)
            labels.append(f"step-{step}")
            assert turn()[:2] == (home, labels[-1]), "the newest signal serves"
            stream.join()
            assert (stream.error, stream.done, len(stream.labels)) == (None, True, LONG)
            assert stream.labels == sorted(stream.labels, key=labels.index)
            shown = http.get("/v1/sessions/trajectory").json()
            assert shown["turns"] == 3 + 2 * step
            assert shown["opened_at"] == opened
        ledger = http.get(f"/v1/{server.deployment}/ledger").json()
        assert [row["generation"] for row in ledger["snapshots"]] == sorted(
            row["generation"] for row in ledger["snapshots"]
        )
        times = [row["signalled_at"] for row in ledger["snapshots"]]
        assert times[0] > time.time() + 3000 > times[1], "the processes saw the clock that was set"
        assert ledger["disagreements"] == []
        assert sorted(server.children()) == children, "no process ended"
    assert "Traceback" not in server.log.read_text()
