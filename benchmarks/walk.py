"""Which files of midstream a streamed chat, a hot load and a Tinker sample pass, in all processes of a live server.

    python benchmarks/walk.py [--write]

A function that also runs while nothing is asked is of a loop beside requests, and does not count. Prints JSON: for each walk,
how many files, and which in which process. --write: also to benchmarks/results/walk.json, which tests/test_size.py holds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from hardware import provenance, write_result
from servers import family
from start import ASKED, first_token

import midstream

SOURCE = Path(midstream.__file__).parents[1]
OURS = ("midstream.", "midstream_tinker.")
WALKING = Path(__file__).parent / "walking"
#: A server at rest is watched for so long: every loop of its own has come round.
REST_S = 8.0
#: Processes look so often whether they are watched.
SETTLED_S = 0.3


class Watched:
    """A server each of whose processes notes the functions that run."""

    def __init__(self, place: Path, server: subprocess.Popen[str]) -> None:
        self.place, self.server = place, server
        assert server.stdout is not None
        ready = next(filter(None, (re.search(r"ready on (\S+)", line) for line in server.stdout)), None)
        if ready is None:
            raise SystemExit("the server ended before it was ready")
        self.url = ready[1]

    def seen(self, name: str, act: Callable[[], None]) -> dict[str, set[str]]:
        """By process, the functions that ran meanwhile."""
        switch = self.place / "on"
        switch.write_text(name)
        time.sleep(SETTLED_S)
        act()
        time.sleep(SETTLED_S)
        switch.unlink()
        processes = sum(is_python(pid) for pid in family(self.server.pid))
        while len(list(self.place.glob(f"{name}-*.json"))) < processes:
            time.sleep(SETTLED_S)
        found: dict[str, set[str]] = {}
        for file in self.place.glob(f"{name}-*.json"):
            told = json.loads(file.read_text())
            found.setdefault(process_of(told["command"]), set()).update(told["functions"])
        return found


def process_of(command: list[str]) -> str:
    """The module that the process runs."""
    modules = [word for word in command if word.startswith(OURS) and word != "midstream.core.child"]
    return modules[0].removeprefix("midstream.") if modules else command[0]


def is_python(pid: int) -> bool:
    """Whether it is a process of the server's, and no helper that multiprocessing started."""
    line = Path(f"/proc/{pid}/cmdline")
    return line.exists() and "midstream." in line.read_text()


def walked(seen: dict[str, set[str]], at_rest: dict[str, set[str]]) -> dict[str, list[str]]:
    """By process, the files whose functions ran for the walk alone."""
    files = {
        process: sorted({shown(one) for one in functions - at_rest.get(process, set())})
        for process, functions in seen.items()
    }
    return {process: passed for process, passed in sorted(files.items()) if passed}


def shown(function: str) -> str:
    return str(Path(function.rpartition(":")[0]).relative_to(SOURCE)).removeprefix("midstream/")


def publish(watched: Watched, model: Path) -> None:
    shutil.copytree(model, watched.place / "state" / "bucket" / "walk")
    path = f"{watched.url}/hot_load/v1/models/hot_load"
    httpx.post(path, json={"identity": "walk"}, timeout=60).raise_for_status()
    while not all(row["readiness"] for row in loaded(path)):
        time.sleep(0.1)


def loaded(path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(path, timeout=60).raise_for_status().json()["replicas"]
    return [
        row | {"readiness": row["current_snapshot_identity"] == "walk" and row["readiness"]} for row in rows
    ]


def sample(watched: Watched) -> None:
    """What the SDK asks for a sample."""
    with httpx.Client(
        base_url=f"{watched.url}/api/v1", headers={"x-api-key": "tml-walk"}, timeout=60
    ) as http:

        def posted(path: str, **body: Any) -> dict[str, Any]:
            made: dict[str, Any] = http.post(path, json=body).raise_for_status().json()
            return made

        session = posted("/create_session", tags=[], user_metadata=None, sdk_version="0.38")["session_id"]
        sampler = posted(
            "/create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model="tiny-moe",
        )["sampling_session_id"]
        asked = posted(
            "/asample",
            sampling_session_id=sampler,
            seq_id=0,
            num_samples=1,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [72, 105]}]},
            sampling_params={"max_tokens": 4},
        )
        wanted, accept = {"request_id": asked["request_id"]}, {"accept": "application/json"}
        while (answer := http.post("/retrieve_future", json=wanted, headers=accept)).status_code == 408:
            pass
        if "error" in answer.json():
            raise SystemExit(f"the sample failed: {answer.text}")


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="midstream-walk-") as folder:
        place = Path(folder)
        environment = os.environ | {"MIDSTREAM_WALK": folder, "PYTHONPATH": str(WALKING)}
        command = [
            sys.executable,
            "-m",
            "midstream.cli",
            "serve",
            "--port",
            "0",
            "--state-dir",
            str(place / "state"),
        ]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            watched = Watched(place, server)
            first_token(watched.url)
            rest = watched.seen("rest", lambda: time.sleep(REST_S))
            model = place / "state" / "models" / "tiny-moe"
            walks = {
                "chat": watched.seen("chat", lambda: first_token(watched.url)),
                "tinker sample": watched.seen("sample", lambda: sample(watched)),
                "hot load": watched.seen("load", lambda: publish(watched, model)),
            }
        finally:
            server.terminate()
            server.wait()
    found = {name: walked(seen, rest) for name, seen in walks.items()}
    return {name: {"files": len(set().union(*files.values())), "of": files} for name, files in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="also to benchmarks/results/walk.json")
    options = parser.parse_args()
    result = {**provenance(asked=ASKED), "walks": measure()}
    print(json.dumps(result, indent=1))
    if options.write:
        write_result("walk", result)


if __name__ == "__main__":
    main()
