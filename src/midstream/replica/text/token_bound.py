"""How many tokens a text has at least, computed from its bytes alone. Pure; imports no tokenizer.

Owns: the proof, from a tokenizer's own description, that no token stands for more than so many bytes of text.
Always holds: where the proof fails the answer is None, and only tokenizing the text can show it.

The proof, for a text of B bytes: the normalizer keeps at least B / S of them; the pre-tokenizer drops none; the model gives
every byte to some token, and the longest token of the vocabulary has L bytes. So there are at least B / (S x L) tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: A Unicode normal form never makes a text shorter than this share: 4 bytes of UTF-8 can become one ("𝐀" to "A").
NORMAL_FORM_SHRINKS = 4
#: The Kelvin sign has three bytes and becomes "k".
LOWERCASE_SHRINKS = 3
_NORMAL_FORMS = frozenset(("NFC", "NFD", "NFKC", "NFKD"))
#: Pre-tokenizers that drop nothing.
_KEEPING = frozenset(("ByteLevel", "Metaspace", "Digits"))
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def bytes_per_token_max(tokenizer: Mapping[str, Any], alphabet: Mapping[str, int]) -> int | None:
    """Bytes of text that one token stands for at most; None: not provable for this tokenizer.

    tokenizer: the contents of tokenizer.json. alphabet: the characters that byte-level tokenizers write for bytes.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    shrinks = _shrinks(tokenizer.get("normalizer"))
    if model.get("type") != "BPE" or shrinks is None or not _keeps_all(tokenizer.get("pre_tokenizer")):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        # Such a token takes any amount of white space with it.
        return None
    if any(model.get(prefix) for prefix in ("continuing_subword_prefix", "end_of_word_suffix")):
        return None
    vocabulary = model["vocab"]
    names = {token["content"] for token in added}
    if _has_step(tokenizer.get("pre_tokenizer"), "ByteLevel") and alphabet.keys() <= vocabulary.keys():
        sizes = [_byte_level_size(token, alphabet) for token in vocabulary if token not in names]
    elif model.get("byte_fallback") and vocabulary.keys() >= _BYTES:
        sizes = [len(token.encode()) for token in vocabulary]
    else:
        # Unknown characters may vanish, or be joined to one unknown token.
        return None
    return shrinks * max([*sizes, *(len(name.encode()) for name in names)])


def tokens_at_least(size: int, bytes_per_token: int) -> int:
    """The least number of tokens of a text of `size` bytes."""
    return math.ceil(size / bytes_per_token)


def utf8_size(text: str) -> int:
    """Bytes of the text in UTF-8; a lone surrogate counts as three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _byte_level_size(token: str, alphabet: Mapping[str, int]) -> int:
    return len(token) if all(character in alphabet for character in token) else len(token.encode())


def _steps(stage: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    if stage is None:
        return []
    if stage.get("type") == "Sequence":
        return [step for part in stage[parts] for step in _steps(part, parts)]
    return [stage]


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """The largest factor by which it shortens a text; None: not known."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step.get("type")
        if kind in _NORMAL_FORMS:
            factor *= NORMAL_FORM_SHRINKS
        elif kind == "Lowercase":
            factor *= LOWERCASE_SHRINKS
        elif kind == "Replace":
            pattern = step.get("pattern", {}).get("String")
            if pattern is None or len(step.get("content", "").encode()) < len(pattern.encode()):
                return None
        elif kind not in ("Prepend", "ByteLevel"):
            return None
    return factor


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return all(
        step.get("type") in _KEEPING
        or (step.get("type") in ("Split", "Punctuation") and step.get("behavior") != "Removed")
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _has_step(pre_tokenizer: Mapping[str, Any] | None, kind: str) -> bool:
    return any(step.get("type") == kind for step in _steps(pre_tokenizer, "pretokenizers"))
