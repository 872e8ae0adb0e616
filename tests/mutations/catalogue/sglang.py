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
        "sglang_numbers_behind_a_bias",
        "engine/sglang/features_proof.py",
        "if not abs(one - other) <= TOLERANCE:",
        "if not abs(one - other) <= 1e9:",
        "A server of SGLang whose log-probabilities are of biased logits is asked for no bias.",
        ("engine_sglang/test_sglang_features.py",),
    ),
    Mutation(
        "sglang_penalties_of_prompts",
        "engine/sglang/features_proof.py",
        "if token.token_id not in pair or (abs(ahead) > MARGIN and token.token_id != best):",
        "if token.token_id not in pair:",
        "A server of SGLang whose penalties count something else is asked for none.",
        ("engine_sglang/test_sglang_features.py",),
    ),
    Mutation(
        "sglang_logits_of_the_pass_before",
        "engine/sglang/plugin/midstream_sglang_plugin.py",
        "output.next_token_logits.clone() if changed else None",
        "output.next_token_logits.clone() if changed else getattr(output, RAW, None)",
        "A log-probability of SGLang is of the logits of its own pass.",
        ("engine_sglang/test_sglang_plugin.py",),
    ),
    Mutation(
        "sglang_counts_forgotten",
        "engine/sglang/plugin/midstream_sglang_plugin.py",
        "for token in request.output_ids:\n            penalizer.cumulated_frequency",
        "for token in ():\n            penalizer.cumulated_frequency",
        "A penalty of SGLang counts what a request had generated before it was retracted.",
        ("engine_sglang/test_sglang_plugin.py",),
    ),
    Mutation(
        "sglang_answers_behind_their_grammar",
        "engine/sglang/protocol.py",
        '"ignore_eos": not s.stop_token_ids and request.grammar is None,',
        '"ignore_eos": not s.stop_token_ids,',
        "An answer of SGLang ends where its grammar ends.",
        ("engine_sglang/test_sglang_features.py",),
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
