"""A replica that is killed is another process at once, which waited with everything imported."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from serving import descendants, serve, words_of

CONFIG = """
[log]
format = "json"

[embedded]
spare_after_s = 0.05
"""
ASKED = {"model": "tiny-moe", "prompt": [5, 6, 7], "max_tokens": 8, "seed": 3, "return_token_ids": True}
WITHIN_S = 120


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


def test_a_killed_replica_is_the_spare_process_that_waited_and_answers_as_it_did(tmp_path: Path) -> None:
    config = tmp_path / "midstream.toml"
    config.write_text(CONFIG)
    with serve(tmp_path / "state", "--config", str(config), "--replicas", "1", "--no-tinker") as server:

        def logged(words: str) -> list[dict[str, Any]]:
            lines = map(json.loads, server.log.read_text().splitlines())
            return [line for line in lines if words in line["message"]]

        def tokens() -> Any:
            try:
                answer = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60)
            except httpx.TransportError:
                return None
            return answer.status_code == 200 and answer.json()["choices"][0]["token_ids"]

        before = until(tokens)
        until(lambda: logged("a spare replica process waits"))
        [spare] = [pid for pid in server.children() if "midstream.launch.spare_replica" in words_of(pid)]
        [engine] = descendants(spare)
        [replica] = [pid for pid in server.children() if "midstream.launch.replica" in words_of(pid)]
        os.kill(replica, signal.SIGKILL)
        until(lambda: logged(f"replica-0 takes the spare process (pid {spare})"))
        assert until(tokens) == before
        [loaded] = [line for line in logged("is loaded, in") if line["pid"] == engine]
        assert (loaded["process"], loaded["replica"]) == ("engine", "replica-0")
        scores = {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in (spare, engine)}
        assert scores == {Path("/proc/self/oom_score_adj").read_text()}, (
            "it is killed no earlier than others now"
        )
