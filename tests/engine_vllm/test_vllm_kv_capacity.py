"""What a vLLM server's metrics say of its KV cache, and what they must not do."""

from __future__ import annotations

import pytest

from midstream.core.kv import KvStats
from midstream.engine.servers.engine import used_by
from midstream.engine.vllm.kv_capacity import read_capacity

LINE = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",'
    'engine="0",num_gpu_blocks="1025"} 1.0'
)


def test_the_blocks_of_a_server_are_read_from_its_metrics() -> None:
    text = f"# HELP vllm:cache_config_info x\n# TYPE vllm:cache_config_info gauge\n{LINE}\nother 1\n"
    kv = read_capacity(text.encode())
    assert (kv.total, kv.block_tokens, kv.capacity_tokens) == (1024, 16, 16384)
    # The tokens of all blocks are there, too, with the one that vLLM gives to nobody.
    assert read_capacity(text.replace('"1025"', '"1025",kv_cache_size_tokens="16400"').encode()) == kv
    assert used_by(kv, [1, 16, 17]) == KvStats(total=1024, block_tokens=16, used=4)
    # More than there is cannot be used.
    assert used_by(kv, [10**9]).used == 1024


def test_a_model_with_several_kinds_of_blocks_is_read_in_tokens() -> None:
    """The block size is that of the smallest kind, so blocks times size is far too little (vllm#51163)."""
    text = 'vllm:cache_config_info{block_size="4",kv_cache_size_tokens="1553140",num_gpu_blocks="643"} 1.0'
    assert read_capacity(text.encode()).capacity_tokens == 1553140
    text = text.replace("1553140", "None")
    assert read_capacity(text.encode()).capacity_tokens == 642 * 4


def test_a_cache_that_could_not_hold_one_whole_context_is_unknown() -> None:
    """vLLM does not start with one. Believing it would let one session run at a time."""
    text = 'vllm:cache_config_info{block_size="4",num_gpu_blocks="643"} 1.0'
    assert read_capacity(text.encode(), least=4096) == KvStats()
    assert read_capacity(LINE.encode(), least=16384).capacity_tokens == 16384


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm:num_requests_running 3\n",
        LINE.replace("1025", "None"),
        LINE.replace("1025", "-4"),
        LINE.replace("1025", "9" * 11),
        LINE.replace('"16"', '"0"'),
    ],
)
def test_a_server_that_says_nothing_or_nonsense_has_an_unknown_cache(text: str) -> None:
    assert read_capacity(text.encode()) == KvStats()
    assert used_by(KvStats(), [5]) == KvStats()
