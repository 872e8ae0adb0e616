"""How many tokens the KV cache of a vLLM server holds, as its metrics say.

Always holds: a server that does not say so, or says nonsense, has an unknown cache. Nothing then waits for room in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from midstream.core.kv import KvStats
from midstream.http.call import CallFailed, call

PATH = "/metrics"
#: One line, whose labels are the settings of the cache.
_CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')
TOKENS_MAX = 2**40


async def kv_of_server(url: str, headers: str, timeout_s: float) -> KvStats:
    """Nothing of it is used yet."""
    try:
        answer = await call(url, "GET", PATH, None, timeout_s, headers)
    except CallFailed:
        return KvStats()
    return read_capacity(answer.body) if answer.status == 200 else KvStats()


def read_capacity(metrics: bytes) -> KvStats:
    """Of several engines, the blocks together."""
    total = size = 0
    for line in _CACHE.finditer(metrics):
        labels = dict(_LABEL.findall(line[1]))
        blocks, tokens = (_number(labels.get(name, b"")) for name in (b"num_gpu_blocks", b"block_size"))
        total, size = total + blocks, tokens
    if not 0 < total * size <= TOKENS_MAX:
        return KvStats()
    # One block of vLLM is never given out.
    return KvStats(block_tokens=size, total=max(1, total - 1))


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < 12 else 0


def used_by(kv: KvStats, contexts: Iterable[int]) -> KvStats:
    """With requests of so many tokens each running."""
    if not kv.total:
        return kv
    blocks = sum(-(-tokens // kv.block_tokens) for tokens in contexts)
    return msgspec.structs.replace(kv, used=min(blocks, kv.total))
