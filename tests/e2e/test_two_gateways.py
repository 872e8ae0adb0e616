"""Two gateways without replicas of their own, on replicas that run by themselves."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, serve, started, with_built_in_model

DEADLINE_S = 150.0
READY = re.compile(r"midstream replica ready on (http://\S+) \(model (\S+)\)")
KEYS = [f"trajectory-{number}" for number in range(12)]


def replica(folder: Path, name: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """`midstream replica`, not waited for."""
    with_built_in_model(folder / name)
    return started(folder / f"{name}.log", "replica", "--port", "0", "--state-dir", str(folder / name))


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    match = READY.fullmatch(line.strip())
    assert match, f"no ready line, but {line!r}"
    return match[1]


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to be"
        # A poll.
        time.sleep(0.05)


def usable(server: Server) -> list[str]:
    health = httpx.get(f"{server.url}/health", timeout=60, trust_env=False).json()
    return [replica["name"] for replica in health["replicas"] if replica["usable"]]


def known_sessions(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    found = re.search(r"^midstream_gateway_sessions (\S+)$", text, re.MULTILINE)
    assert found
    return float(found[1])


def homes(server: Server) -> dict[str, tuple[str, str]]:
    found = {}
    body = {"model": server.model, "prompt": "hello", "max_tokens": 2}
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        for key in KEYS:
            answer = http.post("/v1/completions", json=body, headers={"x-session-id": key})
            assert answer.status_code == 200, answer.text
            found[key] = (
                answer.headers["x-midstream-replica"],
                answer.headers["x-midstream-route-reason"],
            )
    return found


@pytest.mark.timeout(900)
@pytest.mark.variant
def test_sessions_are_in_one_place_for_both_gateways_and_outlive_either(tmp_path: Path) -> None:
    with replica(tmp_path, "a") as a, replica(tmp_path, "b") as b:
        urls = [url_of(a), url_of(b)]
        names = sorted(url.removeprefix("http://") for url in urls)
        options = ["--replicas", "0", *(word for url in urls for word in ("--replica-url", url))]
        with serve(tmp_path / "other", *options) as other:
            with serve(tmp_path / "one", *options) as one:
                until(lambda: sorted(usable(one)) == sorted(usable(other)) == names)
                first = homes(one)
                assert {replica for replica, _ in first.values()} == set(names)
                until(lambda: known_sessions(other) == len(KEYS))
                sticky = {key: (replica, "sticky") for key, (replica, _) in first.items()}
                assert homes(other) == sticky
            with serve(tmp_path / "third", *options) as third:
                # A new session waits only so long for a replica.
                until(lambda: sorted(usable(third)) == names)
                assert homes(third) == sticky
                drained = names[0]
                path = f"/v1/{third.deployment}/replicas/{drained}"
                answer = httpx.patch(third.url + path, json={"drain": True}, timeout=60, trust_env=False)
                assert (answer.status_code, answer.json()["standing"]) == (200, "leaving")
                moved = homes(third)
                assert {replica for replica, _ in moved.values()} == {names[1]}
                stayed = [key for key in KEYS if first[key][0] == names[1]]
                assert all(moved[key] == sticky[key] for key in stayed), "only the leaver's sessions move"
                until(
                    lambda: (
                        {key: replica for key, (replica, _) in homes(other).items()}
                        == dict.fromkeys(KEYS, names[1])
                    )
                )
