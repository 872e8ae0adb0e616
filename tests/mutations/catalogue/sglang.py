"""Faults of SGLang's engine."""

from __future__ import annotations

from catalogue.mutation import Mutation

SGLANG = (
    Mutation(
        "sglang_lost_token_unseen",
        "engine/sglang/protocol.py",
        "if before + len(ids) != meta.completion_tokens:",
        "if before + len(ids) < 0:",
        "A stream of SGLang that loses a token ends with an error.",
        ("engine_sglang/test_sglang_engine.py",),
    ),
    Mutation(
        "sglang_other_ids",
        "engine/sglang/protocol.py",
        "if scored != ids:",
        "if len(scored) != len(ids):",
        "A log-probability of SGLang is of the token that it stands beside.",
        ("engine_sglang/test_sglang_engine.py",),
    ),
    Mutation(
        "sglang_kv_of_all",
        "engine/sglang/protocol.py",
        '"extra_key": salt,',
        '"extra_key": "",',
        "Namespaces share no KV in SGLang.",
        ("engine_sglang/test_sglang_engine.py",),
    ),
    Mutation(
        "sglang_overlap",
        "engine/sglang/arguments.py",
        '"disable_overlap_schedule": (\n        (True,),',
        '"disable_overlap_schedule": (\n        (True, False),',
        "An SGLang server whose pause leaves a token behind is not used.",
        ("engine_sglang/test_sglang_engine.py",),
    ),
    Mutation(
        "sglang_flushed_streams",
        "engine/sglang/control.py",
        '"flush_cache": False',
        '"flush_cache": True',
        "Streams of SGLang keep their KV over a swap.",
        ("engine_sglang/test_sglang_engine.py",),
    ),
    Mutation(
        "sglang_too_old_kv_for_waiting",
        "engine/servers/engine.py",
        "if bounded and self._salt(run)[0] != choice.salt:",
        "if False:",
        "What waits at a switch finds no KV that is too old.",
        ("engine_sglang/test_sglang_engine.py",),
    ),
)
