"""How many tokens the KV cache of a vLLM server holds, as its metrics say.

Always holds: a server that does not say so, or says nonsense, has an unknown cache. Nothing then waits for room in it.
"""

from __future__ import annotations

import re

from midstream.core.kv import KvStats
from midstream.http.call import CallFailed, call

PATH = "/metrics"
#: One line, whose labels are the settings of the cache.
_CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')
TOKENS_MAX = 2**40


async def kv_of_server(url: str, headers: str, timeout_s: float, least: int) -> KvStats:
    """Nothing of it is used yet. least: as of read_capacity."""
    try:
        answer = await call(url, "GET", PATH, None, timeout_s, headers)
    except CallFailed:
        return KvStats()
    return read_capacity(answer.body, least) if answer.status == 200 else KvStats()


def read_capacity(metrics: bytes, least: int = 1) -> KvStats:
    """Of several engines, the blocks together. least: tokens that vLLM would not have started without.

    Models with several kinds of blocks show the size of the smallest kind, and newer servers the tokens besides."""
    total = size = 0
    for line in _CACHE.finditer(metrics):
        labels = dict(_LABEL.findall(line[1]))
        blocks, tokens = (_number(labels.get(name, b"")) for name in (b"num_gpu_blocks", b"block_size"))
        held = _number(labels.get(b"kv_cache_size_tokens", b""))
        if tokens and held and held != blocks * tokens:
            blocks = held // tokens + 1
        total, size = total + blocks, tokens
    # One block of vLLM is never given out.
    kv = KvStats(block_tokens=size, total=max(0, total - 1))
    return kv if kv.total and least <= total * size <= TOKENS_MAX else KvStats()


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < 12 else 0
