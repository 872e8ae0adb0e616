"""Adapters on their way to a real server: from PEFT's model, from a directory, from a shell."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest
from policy_helpers import Adapters, checked, ready, sample
from serving import Server, command

from midstream.client import SnapshotFailed, SnapshotPublisher
from midstream.snapshots.content import MANIFEST_FILE


@pytest.fixture
def server(adapter_server: Server) -> Server:
    return adapter_server


def run(server: Server, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(*arguments, "--server", server.url), capture_output=True, text=True, timeout=170
    )
    return done.returncode, done.stdout, done.stderr


def test_a_peft_model_is_published_again_and_again_and_sampled(server: Server, adapters: Adapters) -> None:
    prompt = list(range(5, 25))
    adapters.make("step-1", 1)
    adapters.make("step-2", 2)
    with SnapshotPublisher(server.url, server.bucket.as_uri(), policy="trained") as publisher:
        done = publisher.publish("step-1", adapter=adapters.made["step-1"])
        assert [(r.snapshot, r.ready) for r in done.replicas] == [("step-1", True)] * 2
        checked(adapters, sample(server, "trained", prompt), "step-1", prompt)
        publisher.begin("step-2", adapter=adapters.made["step-2"]).wait(60)
        checked(adapters, sample(server, "trained", prompt), "step-2", prompt)
        # Another configuration than the file's is the replica's error, in the publisher's own words.
        directory = server.bucket.parent / "broken"
        adapters.write("step-2", directory)
        config = directory / "adapter_config.json"
        config.write_text(config.read_text().replace('"r": 8', '"r": 4'))
        with pytest.raises(SnapshotFailed, match=r"has rank 8, adapter_config\.json says 4"):
            publisher.publish("step-3", directory)
        checked(adapters, sample(server, "trained", prompt), "step-2", prompt)
        # The next one is taken all the same.
        publisher.publish("step-4", adapter=adapters.made["step-1"])
    adapters.made["step-4"] = adapters.made["step-1"]
    checked(adapters, sample(server, "trained", prompt), "step-4", prompt)
    assert sorted(file.name for file in (server.bucket / "step-4").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        MANIFEST_FILE,
    ]


def test_an_adapter_that_changed_a_little_is_sent_as_a_delta(server: Server, adapters: Adapters) -> None:
    prompt = list(range(5, 25))
    for identity in ("sparse-1", "sparse-2", "sparse-3"):
        adapters.make(identity, 7)
    for model, step in (("sparse-2", 0.25), ("sparse-3", 0.5)):
        for name, weights in adapters.made[model].named_parameters():
            if "lora_" in name:
                weights.data.view(-1)[::100] += step
    found = []
    with SnapshotPublisher(server.url, server.bucket.as_uri(), policy="sparse") as publisher:
        for identity in ("sparse-1", "sparse-2", "sparse-3"):
            done = publisher.publish(identity, adapter=adapters.made[identity])
            found.append((done.kind, done.previous))
            assert done.kind == "full" or done.bytes_sent < done.bytes_whole / 4
            checked(adapters, sample(server, "sparse", prompt), identity, prompt)
    assert found == [("full", None), ("delta", "sparse-1"), ("delta", "sparse-2")]
    # A fork of it stands on the same files.
    made = {"policy": "sparse-fork", "from": "sparse"}
    assert httpx.post(f"{server.url}/v1/{server.deployment}/policies", json=made).status_code == 200
    ready(server, "sparse-3", "sparse-fork")
    checked(adapters, sample(server, "sparse-fork", prompt), "sparse-3", prompt)


def test_an_adapter_is_published_from_a_shell_and_status_shows_it(
    server: Server, adapters: Adapters, tmp_path: Path
) -> None:
    adapters.make("shell-1", 3)
    adapters.write("shell-1", tmp_path / "shell-1")
    code, out, err = run(server, "publish", "--adapter", str(tmp_path / "shell-1"), "--policy", "shell")
    assert (code, "published shell-1: full" in out) == (0, True), err
    checked(adapters, sample(server, "shell", [1, 2, 3]), "shell-1", [1, 2, 3])
    code, out, err = run(server, "status", "--json")
    assert code == 0, err
    (shell,) = [policy for policy in json.loads(out)["policies"] if policy["policy"] == "shell"]
    assert [(r["name"], r["snapshot"], r["stage"]) for r in shell["replicas"]] == [
        ("replica-0", "shell-1", "done"),
        ("replica-1", "shell-1", "done"),
    ]
    code, out, err = run(server, "status")
    assert ["shell", "shell-1", "done", "replica-0,", "replica-1"] in [
        line.split() for line in out.splitlines()
    ]
    adapter = ("--adapter", str(tmp_path / "shell-1"), "--identity", "shell-2")
    code, out, err = run(server, "publish", *adapter, "--policy", "no/name")
    assert (code, "a name has at most 128 letters" in err) == (1, True), err


def test_a_request_asks_for_a_snapshot_of_its_policy_by_name_or_header(
    server: Server, adapters: Adapters
) -> None:
    with SnapshotPublisher(server.url, server.bucket.as_uri(), policy="versioned") as publisher:
        for seed, identity in enumerate(("v/1", "v/2")):
            adapters.make(identity, 50 + seed)
            publisher.publish(identity, adapter=adapters.made[identity])
    asked = {"prompt": [1, 2, 3], "max_tokens": 2}

    def answer(model: str | None, **headers: str) -> httpx.Response:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        body = asked if model is None else {**asked, "model": model}
        wait = {"x-midstream-snapshot-wait": "0"}
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=told | wait, timeout=60)

    full = server.model.rpartition("/")[0] + "/versioned"
    for served in (
        answer("versioned@v/2"),
        answer(f"{full}@v/2"),
        answer(f"versioned#{server.deployment}@v/2"),
        answer("versioned", x_midstream_min_snapshot="v/1"),
        answer("versioned", x_midstream_max_staleness="0"),
        answer(None, fireworks_model="versioned"),
    ):
        assert (served.status_code, served.json().get("model")) == (200, f"{full}@v/2"), served.text
    # The deployment's own snapshot, and another policy's, mean nothing here.
    for refused in (answer("versioned@v/1"), answer("versioned@base"), answer("versioned@shell-1")):
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "snapshot_not_served")
