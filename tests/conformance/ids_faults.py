"""Promises about token ids in and out, broken one at a time."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from tampering import Fault, Json

VLLM, SGLANG = "/inference/v1/generate", "/generate"
RENDER = "/v1/chat/completions/render"


class OtherIds(Fault):
    """The last id is another one."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == VLLM:
            body["choices"][0]["token_ids"][-1] ^= 1
        elif path == SGLANG:
            body["output_ids"][-1] ^= 1
            body["meta_info"]["output_token_logprobs"][-1][1] ^= 1


class OtherNumbers(Fault):
    """Log-probabilities are half a nat too small."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == VLLM:
            for entry in body["choices"][0]["logprobs"]["content"]:
                entry["logprob"] -= 0.5
        elif path == SGLANG:
            for row in body["meta_info"]["output_token_logprobs"]:
                row[0] -= 0.5


class LostIds(Fault):
    """Each choice of a stream lacks its first token."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        if "output_ids" in chunk:
            del chunk["output_ids"][:1], chunk["meta_info"]["output_token_logprobs"][:1]
        elif not memory.get("begun"):
            memory["begun"] = True
            chunk["choices"][0]["token_ids"] = []


class TwoEnds(Fault):
    """Every chunk and event ends its choice."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        for choice in chunk.get("choices", ()):
            choice["finish_reason"] = "length"


class NoIncrements(Fault):
    """Events tell all so far, whatever is asked."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        body.pop("incremental_streaming_output", None)
        return None


class NewEvents(Fault):
    """Events tell what is new, though nobody asked for it."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path == SGLANG:
            body["incremental_streaming_output"] = True
        return None


class OtherRendering(Fault):
    def other(self, method: str, path: str, body: Json) -> None:
        if path == RENDER:
            body["token_ids"] = body["token_ids"][1:]


class HotRendering(Fault):
    """What is rendered leaves the temperature out."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == RENDER:
            del body["sampling_params"]["temperature"]


class LostText(Fault):
    def other(self, method: str, path: str, body: Json) -> None:
        if path == "/detokenize":
            body["prompt"] = body["prompt"].strip()


class OtherTokens(Fault):
    """A text has one token less than its completion."""

    def other(self, method: str, path: str, body: Json) -> None:
        if path == "/tokenize":
            del body["tokens"][0]
            body["count"] -= 1


class OtherFields(Fault):
    """Refusals name fields as completions do."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        sampling = body.get("sampling_params", {})
        if path in (VLLM, SGLANG) and -1 in sampling.values():
            error = {
                "message": "max_tokens: expected int >= 0",
                "code": "invalid_request_error",
                "param": "max_tokens",
            }
            return JSONResponse({"error": error}, 400)
        return None


class WrongVersions(Fault):
    """Spans and versions are of another snapshot."""

    def other(self, method: str, path: str, body: Json) -> None:
        for place in (*body.get("choices", ()), body.get("meta_info", {})):
            for span in place.get("weight_versions") or ():
                span["version"] = "another"


class LateVersions(Fault):
    """Chunks name another snapshot."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        for place in (*chunk.get("choices", ()), chunk):
            if "midstream" in place:
                place["midstream"]["snapshot"] = "another"


class NotThere(Fault):
    """An endpoint of others that has none of these paths."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path in (VLLM, SGLANG, RENDER, "/tokenize", "/detokenize"):
            return JSONResponse({"detail": "Not Found"}, 404)
        return None

    def other(self, method: str, path: str, body: Json) -> None:
        for entry in body.get("data", ()) if path.endswith("/models") else ():
            for own in ("midstream", "snapshots"):
                entry.pop(own, None)


FAULTS: list[tuple[Fault, list[str]]] = [
    (OtherIds(), ["ids.vllm", "ids.sglang", "ids.vllm_stream", "ids.sglang_stream", "ids.render"]),
    (OtherNumbers(), ["ids.vllm", "ids.sglang", "ids.vllm_stream", "ids.sglang_stream"]),
    (LostIds(), ["ids.vllm_stream", "ids.sglang_stream"]),
    (TwoEnds(), ["ids.vllm_stream"]),
    (NoIncrements(), ["ids.sglang_stream"]),
    (NewEvents(), ["ids.sglang_stream"]),
    (OtherRendering(), ["ids.render"]),
    (HotRendering(), ["ids.render"]),
    (LostText(), ["ids.tokenize"]),
    (OtherTokens(), ["ids.tokenize"]),
    (OtherFields(), ["ids.errors"]),
    (WrongVersions(), ["ids.labels"]),
    (LateVersions(), ["ids.labels"]),
]
