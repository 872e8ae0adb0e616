"""The proof that no token stands for more than so many bytes of text: where it holds, and where it says that it does not."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_fakes import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from midstream.models.tiny_moe import build_tokenizer
from midstream.replica.text.token_bound import (
    NORMAL_FORM_SHRINKS,
    bytes_per_token_max,
    tokens_at_least,
    utf8_size,
)
from midstream.replica.text.vocabulary import BYTE_ALPHABET

FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def longest(tokenizer: Tokenizer) -> int | None:
    return bytes_per_token_max(json.loads(tokenizer.to_str()), BYTE_ALPHABET)


def sentencepiece(**options: Any) -> Tokenizer:
    vocabulary = {**FALLBACK, "\u2581": 256, "a": 257, "aa": 258, "\u2581aa": 259}
    merges = [("a", "a"), ("\u2581", "aa")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, **options))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer


def with_added(token: AddedToken) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([token])
    return tokenizer


def changed(**parts: Any) -> Tokenizer:
    tokenizer = byte_tokenizer()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def test_the_longest_token_counts_in_bytes_of_text() -> None:
    assert longest(byte_tokenizer()) == len("<|im_start|>")
    assert longest(build_tokenizer().backend_tokenizer) == len("<|endoftext|>")
    # A byte's own token is the longest name here.
    assert longest(sentencepiece()) == len("<0x00>")
    assert longest(with_added(AddedToken("\u00e4" * 40))) == 80


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_a_normal_form_that_may_shorten_a_text_is_allowed_for(form: str) -> None:
    tokenizer = changed(normalizer=normalizers.Sequence([getattr(normalizers, form)()]))
    assert longest(tokenizer) == NORMAL_FORM_SHRINKS * len("<|im_start|>")


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.Replace("aa", "a")),
        changed(normalizer=normalizers.BertNormalizer()),
        changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        changed(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        with_added(AddedToken("<mask>", lstrip=True)),
        with_added(AddedToken("<|end|>", rstrip=True, special=True)),
        Tokenizer(models.BPE(vocab={"a": 0, "[UNK]": 1}, merges=[], unk_token="[UNK]", fuse_unk=True)),
        Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("a", 0.0), ("[UNK]", -1.0)], unk_id=1)),
        Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    ],
    ids=lambda tokenizer: json.loads(tokenizer.to_str())["model"]["type"],
)
def test_a_tokenizer_that_may_drop_text_proves_nothing(tokenizer: Tokenizer) -> None:
    assert longest(tokenizer) is None


TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from("he a\u2581")), max_size=60
)
PROVEN = [byte_tokenizer(), sentencepiece(), changed(normalizer=normalizers.NFKC())]


@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_are_proved(text: str) -> None:
    for tokenizer in PROVEN:
        per_token = longest(tokenizer)
        assert per_token is not None
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert tokens >= tokens_at_least(utf8_size(text), per_token)


def test_no_character_becomes_shorter_than_a_quarter_in_a_normal_form() -> None:
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            for form in ("NFC", "NFD", "NFKC", "NFKD"):
                normal = unicodedata.normalize(form, chr(code))  # type: ignore[arg-type]
                assert NORMAL_FORM_SHRINKS * utf8_size(normal) >= utf8_size(chr(code))


@given(
    text=st.text(
        st.one_of(
            st.characters(categories=("Mn", "Mc")),
            st.characters(exclude_categories=("Cs",), min_codepoint=128),
        )
    )
)
def test_nor_do_characters_that_are_composed(text: str) -> None:
    for form in ("NFC", "NFKC"):
        assert NORMAL_FORM_SHRINKS * utf8_size(unicodedata.normalize(form, text)) >= utf8_size(text)  # type: ignore[arg-type]
