"""verifiers itself, unmodified, against a running server: tool loops over text and over tokens, and its traces of our own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from exact_traces import exact_turns
from serving import Server, built_in_model, command, serve

from midstream.client.export import expert_rows
from midstream.client.records import sequences_of

pytestmark = pytest.mark.variant

VENV = Path(__file__).parents[2] / ".venv-harness"
HERE = Path(__file__).parent
#: The end tokens of Llama 3 by the ids of the built-in model, two of which only Llama's renderer knows.
NAMES = {
    "<|endoftext|>": "<|end_of_text|>",
    "<|im_start|>": "<|start_header_id|>",
    "<|im_end|>": "<|eot_id|>",
    "<tool_call>": "<|end_header_id|>",
    "<think>": "<|begin_of_text|>",
    "</think>": "<|eom_id|>",
}
ENDS = [256, 258, 262]
RUN = "import sys, verifiers_rollout; verifiers_rollout.main(*sys.argv[1:])"
#: verifiers prepares its chat program by uv. This one finds the program's packages already there.
UV = """#!/bin/sh
case "$*" in *--help*) echo --script ;; *"python find"*) echo "{python}" ;; esac
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model with several end tokens, as Llama 3 and Qwen 3 have."""
    place = tmp_path_factory.mktemp("served")
    model = shutil.copytree(built_in_model(), place / "tiny-moe")
    generation = model / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": ENDS}))
    with serve(place / "state", "--model", str(model)) as running:
        yield running


def verifiers(home: Path, *arguments: str) -> Any:
    if not (VENV / ".installed").exists():
        pytest.fail("verifiers is not installed in .venv-harness: run `make setup-harness`")
    uv = home / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True, exist_ok=True)
    uv.write_text(UV.format(python=VENV / "bin" / "python"))
    uv.chmod(0o755)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [VENV / "bin" / "python", "-c", RUN, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=env | {"HOME": str(home), "PYTHONPATH": f"{VENV / 'verifiers'}:{HERE}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def looked(said: dict[str, Any]) -> None:
    """The rollout went through all rounds of its tool loop, and each call reached the tool."""
    assert (said["ok"], said["errors"], said["stop"], said["turns"]) == (True, [], "max_turns", 3)
    assert len(said["tools"]) == 2
    assert all(text.startswith("At the ") for text in said["tools"])
    assert said["reward"] == 2.0


def test_verifiers_chat_rollout_leaves_an_exact_trace(server: Server, tmp_path: Path) -> None:
    [said] = verifiers(tmp_path, "chat", server.url, server.model)
    looked(said)
    turns, _ = exact_turns(server, said["id"])
    assert [turn["finish_reason"] for turn in turns] == ["tool_calls"] * 3
    assert said["output_tokens"] == sum(len(turn["token_ids"]) for turn in turns)


def test_verifiers_token_rollout_is_the_servers_trace_and_so_is_its_trace_of_our_records(
    server: Server, tmp_path: Path
) -> None:
    tokenizer = shutil.copytree(built_in_model(), tmp_path / "llama-like")
    for file in (*tokenizer.glob("*.json"), *tokenizer.glob("*.jinja")):
        text = file.read_text()
        for name, other in NAMES.items():
            text = text.replace(name, other)
        file.write_text(text)
    [said] = verifiers(tmp_path / "home", "tokens", server.url, server.model, str(tokenizer))
    looked(said)
    session = said["id"]
    turns, tokens = exact_turns(server, session)
    assert len(turns) == 3
    [own] = said["branches"]
    [sequence] = sequences_of(httpx.get(f"{server.url}/sessions/{session}/trace").json())
    assert own["token_ids"] == tokens == sequence.token_ids
    assert own["mask"] == [bool(counts) for counts in sequence.loss_mask]
    assert np.allclose(own["logprobs"], sequence.logprobs, atol=1e-6)
    # verifiers has the routes of prompts, too; a trace has those of the passes that gave sampled tokens.
    assert len(own["routes"]) == len(tokens)
    known = [(at, row) for at, row in enumerate(expert_rows(sequence)) if row is not None]
    assert len(known) == sum(sequence.loss_mask)
    assert [own["routes"][at] for at, _ in known] == [row for _, row in known]

    for body in ({"reward": 0.5}, {"reward": 2.0, "turn": 2}, {"reward": 9.0, "name": "style"}):
        assert httpx.post(f"{server.url}/sessions/{session}/reward", json=body).status_code == 200
    out = tmp_path / "rollouts.jsonl"
    arguments = ("export", server.url, "--session", session, "--format", "verifiers", "--out", str(out))
    assert subprocess.run(command(*arguments)).returncode == 0
    [made] = verifiers(tmp_path / "home", "records", str(out))
    [branch] = made["branches"]
    assert {name: branch[name] for name in ("token_ids", "mask")} == {
        name: own[name] for name in ("token_ids", "mask")
    }
    assert np.allclose(branch["logprobs"], own["logprobs"], atol=1e-6)
    assert branch["routes"] is None
    assert (made["ok"], made["turns"], made["truncated"]) == (True, 3, False)
    assert (made["reward"], made["metrics"]) == (2.5, {"style": 9.0})
    assert made["output_tokens"] == said["output_tokens"]


def test_verifiers_reads_the_same_of_an_answer_and_of_its_stream_in_each_api(
    server: Server, tmp_path: Path
) -> None:
    said = verifiers(tmp_path, "relayed", server.url, server.model)
    status, message = said["refused"]
    assert (status, "x-session-id" in message.lower()) == (400, True)
    for told in said["answers"]:
        whole, streamed = told["answers"]
        assert whole == streamed, told["path"]
        assert (whole["finish"], whole["usage"][1]) == ("length", 20)
        assert whole["message"]["content"]
        assert [counted["input_tokens"] for counted in told["counted"]] in ([], [whole["usage"][0]])
