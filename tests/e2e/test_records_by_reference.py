"""Records by reference through a whole server: what the file has is what the same request gets inline."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import openai
from serving import serve

from midstream.client.decode import routes_of, sampling_masks_of
from midstream.client.references import ChoiceColumns, read_reference

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
    assert (found.routes == routes_of(choice, top_k=top_k, moe_layers=layers)).all()
    assert found.routes.tobytes() == b"".join(base64.b64decode(entry["routing_matrix"]) for entry in entries)
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
