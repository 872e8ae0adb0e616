"""What SGLang loads of midstream, by its plug-in interface (`sglang.srt.plugins`): hooks on functions of SGLang 0.5.23.

They make a log-probability the raw model's where a bias, a penalty or a grammar changes the logits, keep the count of a
penalty over a retraction, and let a server without a tokenizer of its own take grammars.

Always holds: where a hook does not fit a version, SGLang logs that and serves without it. The proofs at the start of a server
(shaping_proof.py) see what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

#: On the output of a pass, from where its logits are changed to where they are drawn from.
RAW = "midstream_raw_logits"
PENALTIES = "sglang.srt.sampling.penaltylib"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in (
        ("sglang.srt.model_executor.model_runner.ModelRunner._preprocess_logits", keep_raw, HookType.AROUND),
        ("sglang.srt.layers.sampler.Sampler.forward", say_raw, HookType.AROUND),
        (f"{PENALTIES}.frequency_penalty.BatchedFrequencyPenalizer._prepare", count, HookType.AFTER),
        (f"{PENALTIES}.presence_penalty.BatchedPresencePenalizer._prepare", mark, HookType.AFTER),
        ("sglang.srt.constrained.grammar_manager.GrammarManager.__init__", take_grammars, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)


def keep_raw(
    original: Callable[..., Any], runner: Any, output: Any, sampling: Any, *args: Any, **named: Any
) -> Any:
    """Before bias, penalties and grammars change the logits, in place."""
    penalties = sampling.penalizer_orchestrator
    changed = sampling.grammars or sampling.logit_bias is not None or (penalties and penalties.is_required)
    # None, too: a graph may give its output object again.
    setattr(output, RAW, output.next_token_logits.clone() if changed else None)
    return original(runner, output, sampling, *args, **named)


def say_raw(
    original: Callable[..., Any],
    sampler: Any,
    output: Any,
    sampling: Any,
    return_logprob: bool,
    *args: Any,
    **named: Any,
) -> Any:
    """`logprob_logits` is SGLang's own name for logits that log-probabilities are of, and tokens are not drawn from."""
    raw = getattr(output, RAW, None)
    if raw is not None and return_logprob:
        named.setdefault("logprob_logits", raw)
    setattr(output, RAW, None)
    return original(sampler, output, sampling, return_logprob, *args, **named)


def count(result: Any, penalizer: Any) -> None:
    """What a retracted request has generated. SGLang begins to count again when it computes it again."""
    for row, request in enumerate(penalizer.orchestrator.reqs()):
        for token in request.output_ids:
            penalizer.cumulated_frequency_penalties[row, token] += request.sampling_params.frequency_penalty


def mark(result: Any, penalizer: Any) -> None:
    for row, request in enumerate(penalizer.orchestrator.reqs()):
        for token in request.output_ids:
            penalizer.cumulated_presence_penalties[row, token] = request.sampling_params.presence_penalty


def take_grammars(result: Any, manager: Any, scheduler: Any) -> None:
    """With --skip-tokenizer-init SGLang has no tokenizer to make a grammar's masks with."""
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend
    from sglang.srt.managers.scheduler import get_tokenizer
    from sglang.srt.runtime_context import get_model, get_serving

    if manager.grammar_backend is not None:
        return
    serving, model, config = get_serving(), get_model(), scheduler.model_config
    try:
        tokenizer = get_tokenizer(
            serving.tokenizer_path,
            tokenizer_mode=serving.tokenizer_mode,
            revision=model.revision,
        )
        manager.grammar_backend = create_grammar_backend(
            scheduler.server_args, tokenizer, config.vocab_size, config.hf_eos_token_id
        )
    except (ImportError, OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
        logger.warning("no grammars: the model's tokenizer cannot be used: %s", error)
