"""What the names of tensors say of how they were taken, where they are not a checkpoint's names. Pure.

Owns: the prefixes and parts of names that wrappers of trainers add, and what to do about each.
Always holds: a hint is given for a name that does not fit alone. It quotes the part of the name and names a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Trace:
    """part: as it stands in the name. maker: what writes such names. remedy: what to publish instead. sure: no checkpoint that
    is served has such a name."""

    pattern: re.Pattern[str]
    part: str
    maker: str
    remedy: str
    sure: bool = True


_PEFT = "merge the adapter (merge_and_unload) and publish the model, or publish the adapter for a policy"
_GATHER = "gather the state dict with accelerator.get_state_dict(model), and publish it"
_MODEL = "publish with model=, or the state dict of that model with the served model's config_dir"
#: The first match is reported, so the outermost wrapper comes first.
_TRACES = (
    _Trace(
        re.compile(r"(^|\.)_orig_mod\."),
        "_orig_mod.",
        "torch.compile",
        "publish the state dict of the model inside (model._orig_mod)",
    ),
    _Trace(re.compile(r"(^|\.)_fsdp_wrapped_module\."), "_fsdp_wrapped_module.", "FSDP", _GATHER),
    _Trace(
        re.compile(r"(^|\.)_checkpoint_wrapped_module\."),
        "_checkpoint_wrapped_module.",
        "activation checkpointing",
        _GATHER,
    ),
    _Trace(
        re.compile(r"^module\."),
        "module.",
        "DistributedDataParallel",
        "publish the state dict of the model inside (model.module)",
    ),
    _Trace(re.compile(r"^base_model\.model\."), "base_model.model.", "PEFT", _PEFT),
    _Trace(re.compile(r"\.base_layer\."), ".base_layer", "PEFT", _PEFT),
    _Trace(re.compile(r"\.lora_[A-Za-z_]+(\.|$)"), ".lora_", "PEFT", _PEFT),
    _Trace(
        re.compile(r"^(model\.)?language_model\."),
        "language_model.",
        "a model of text and images",
        "publish the text model's state dict, under the names of the served checkpoint",
        sure=False,
    ),
    _Trace(
        re.compile(r"\.experts\.gate_up_proj(_bias)?$"),
        ".experts.gate_up_proj",
        "transformers 5, which keeps the experts of a layer in one tensor",
        _MODEL,
        sure=False,
    ),
    _Trace(
        re.compile(r"\.experts\.down_proj(_bias)?$"),
        ".experts.down_proj",
        "transformers 5, which keeps the experts of a layer in one tensor",
        _MODEL,
        sure=False,
    ),
)


def hint(names: Iterable[str], known: Collection[str] = (), *, sure: bool = False) -> str | None:
    """Why one of `names` is not a checkpoint's, and what to do; None if no name shows it.

    known: names of the served checkpoint, which prove nothing. sure: only of names that no served checkpoint has.
    """
    strange = [name for name in names if name not in known]
    for trace in _TRACES:
        if sure and not trace.sure:
            continue
        if any(trace.pattern.search(name) for name in strange):
            return f"names with {trace.part!r} come from {trace.maker}; {trace.remedy}"
    return None
