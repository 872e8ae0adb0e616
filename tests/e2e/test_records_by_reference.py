"""Records by reference through a whole server: what the file has is what the same request gets inline."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from s3server import S3Server
from serving import command, serve

from midstream.client.decode import routes_of, sampling_masks_of
from midstream.client.journal import read_records
from midstream.client.references import ChoiceColumns, read_reference
from midstream.client.shared_references import read_masks, read_routes

MATRICES = ("include_routing_matrix", "return_sampling_mask")
ASKED: dict[str, Any] = {
    "max_tokens": 40,
    "temperature": 0.9,
    "top_p": 0.9,
    "n": 2,
    "logprobs": True,
    "include_routing_matrix": True,
    "return_sampling_mask": True,
    "return_token_ids": True,
    "perf_metrics_in_response": True,
    "ignore_eos": True,
}


def same(choice: dict[str, Any], found: ChoiceColumns) -> None:
    entries = choice["logprobs"]["content"]
    assert found.token_ids.tolist() == choice["token_ids"] == [entry["token_id"] for entry in entries]
    assert found.logprobs.tolist() == [entry["logprob"] for entry in entries]
    assert found.sampling_logprobs.tolist() == [entry["sampling_logprob"] for entry in entries]
    assert found.routes is not None
    layers, top_k = found.routes.shape[1:]
    inline = routes_of(choice, top_k=top_k, moe_layers=layers)
    # The order of a layer's experts is no part of a route.
    assert np.array_equal(found.routes, np.sort(inline, axis=-1))
    masks, expected = found.sampling_masks(), sampling_masks_of(choice)
    assert (masks.ids.tolist(), masks.offsets.tolist()) == (expected.ids.tolist(), expected.offsets.tolist())
    assert [[span.snapshot, span.start, span.end] for span in found.snapshots] == [
        [span["snapshot"], span["start"], span["end"]] for span in choice["snapshots"]
    ]
    assert [[span.snapshot, span.start, span.end] for span in found.kv_snapshots] == [
        [span["snapshot"], span["start"], span["end"]] for span in choice["kv_snapshots"]
    ]


def test_turns_have_by_reference_what_they_have_inline(tmp_path: Path) -> None:
    url = (tmp_path / "kept").as_uri()
    with serve(tmp_path / "state", "--replicas", "1", "--records", url) as server:
        said: dict[str, list[Any]] = {"inline": [], "referenced": []}
        with httpx.Client(base_url=server.url, timeout=120) as http:
            for way, more in (("inline", {}), ("referenced", {"return_record_reference": True})):
                messages: list[Any] = [{"role": "user", "content": "Begin."}]
                for turn in range(2):
                    body = {"model": server.model, "messages": messages, "seed": 5 + turn, **ASKED, **more}
                    answer = http.post("/v1/chat/completions", json=body, headers={"x-session-id": way})
                    assert answer.status_code == 200, answer.text
                    said[way].append(answer.json())
                    content = answer.json()["choices"][0]["message"]["content"]
                    messages += [
                        {"role": "assistant", "content": content},
                        {"role": "user", "content": "On."},
                    ]
            shown = http.get("/metrics").text
        for inline, referenced in zip(said["inline"], said["referenced"], strict=True):
            found = read_reference(url, referenced["record_reference"])
            assert [choice["logprobs"] for choice in referenced["choices"]] == [None, None]
            for choice, columns in zip(inline["choices"], found, strict=True):
                same(choice, columns)
                assert columns.prompt_tokens == len(inline["prompt_token_ids"])
        assert "midstream_replica_record_files_written_total" in shown
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
            stream = client.completions.create(
                model=server.model,
                prompt="Go on",
                stream=True,
                logprobs=True,  # type: ignore[call-overload]
                extra_body={"return_record_reference": True, "return_token_ids": True},
            )
            chunks = [chunk.model_dump() for chunk in stream]
        (found_stream,) = read_reference(url, chunks[-1]["record_reference"])
        streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
        assert found_stream.token_ids.tolist() == streamed


@pytest.mark.variant
def test_records_in_an_s3_bucket_are_verified_and_a_lost_file_is_named(
    s3: S3Server, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    s3.make_bucket("records")
    url, model = "s3://records/kept", tiny_model()
    forms: list[dict[str, Any]] = [{"return_record_reference": True, **dict.fromkeys(MATRICES, True)}]
    forms.append({"routing_matrix_format": "parquet_v1", "sampling_mask": "parquet_v1", "echo": True})
    files, prompt = list[str](), [5] * 40
    with serve(
        tmp_path / "state", "--model", str(model), "--replicas", "1", "--records", url, "--no-tinker"
    ) as server:
        for turn in range(4):
            body = {"model": server.model, "prompt": prompt, "max_tokens": 20, "top_p": 0.9, "logprobs": True}
            body |= {"ignore_eos": True, "return_token_ids": True, **forms[turn % 2]}
            headers = {"x-session-id": "turns", "x-fireworks-r3-store-id": url}
            headers["x-midstream-records"] = "masks"
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            prompt = [*prompt, *choice["token_ids"], 7]
            if turn % 2:
                assert read_routes(choice["routing_references"]).known[1:].all()
                assert len(read_masks(choice["sampling_mask_references"]).known) == 20
                files.append(choice["routing_references"]["files"][-1]["file"])
            else:
                files.append(answer.json()["record_reference"]["file"])
        assert server.stop() == 0
    (tmp_path / "snapshots").mkdir()
    arguments = [url, "--bucket", (tmp_path / "snapshots").as_uri(), "--base", str(model)]
    done = subprocess.run(command("verify", *arguments), capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(read_records(url))) == 4
    s3.delete("records", f"kept/{files[2]}")
    done = subprocess.run(command("verify", *arguments), capture_output=True, text=True, timeout=170)
    assert done.returncode != 0
    assert files[2] in done.stdout + done.stderr
