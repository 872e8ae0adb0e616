"""transformers' own continuous batching behind the smallest HTTP server that streams.

`transformers serve` takes no token ids and gives no logprobs, so the benchmark cannot use it. This server does less work per
token than any real one (no schema, no incremental text, one write per token), which favours transformers.

    python transformers_server.py MODEL_DIR PORT KV_CACHE_BYTES THREADS
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
import uvloop
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# The library's default.
PAGE = 256


class Request(asyncio.Protocol):
    """One request per connection: its body, then an event per token."""

    def __init__(self, manager: Any, tokenizer: Any) -> None:
        self.manager, self.tokenizer, self.buffer, self.sent = manager, tokenizer, b"", 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(
            int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        )
        if len(body) < length:
            return
        request = json.loads(body)
        self.transport.write(HEAD)
        name = f"request-{id(self)}-{len(self.buffer)}"
        self.manager.register_result_handler(name, self.on_output)
        self.manager.add_request(
            request["prompt"],
            request_id=name,
            max_new_tokens=request["max_tokens"],
            streaming=True,
            eos_token_id=-1,
        )

    def on_output(self, output: Any) -> None:
        if output.error is not None:
            self.event({"error": str(output.error)})
            self.transport.write(b"0\r\n\r\n")
            return
        tokens, logprobs = output.generated_tokens[self.sent :], output.logprobs[self.sent :]
        self.sent += len(tokens)
        if tokens:
            listed = {"token_logprobs": logprobs, "token_ids": tokens}
            text = self.tokenizer.decode(tokens)
            self.event({"choices": [{"index": 0, "text": text, "logprobs": listed}]})
        if output.is_finished():
            self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, value: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * dtype.itemsize)


async def serve(manager: Any, tokenizer: Any, port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Request(manager, tokenizer), "127.0.0.1", port, backlog=1024)
    cache = manager.batch_processor.cache
    print(f"ready {cache.num_blocks} blocks of {PAGE} in {cache.cache_tensor.nbytes} bytes", flush=True)
    await asyncio.Event().wait()


def main() -> int:
    directory, port, kv_bytes, threads = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="sdpa")
    generation = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1)
    blocks = kv_bytes // (PAGE * kv_bytes_per_token(model.config, model.dtype))
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=blocks,
        max_batch_tokens=2048,
        return_logprobs=True,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(generation, batching)
    manager.start()
    while manager.batch_processor is None:
        if not manager.is_running():
            return 1
    uvloop.run(serve(manager, AutoTokenizer.from_pretrained(directory), port))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
