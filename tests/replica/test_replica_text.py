"""Detokenizing one token at a time against the tokenizer's own decode of the whole."""

from hypothesis import given
from hypothesis import strategies as st
from replica_fakes import HE, IM_END, IM_START, byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers

from midstream.replica.text.vocabulary import StopStrings, Vocabulary

TOKENIZER = byte_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
TOKENS = st.lists(st.integers(0, IM_END), max_size=40)
UTF8_TOKENS = st.text(max_size=20).map(lambda text: list(text.encode("utf-8", "replace")))


def pieces_of(vocabulary: Vocabulary, tokens: list[int]) -> list[str]:
    detokenizer = vocabulary.detokenizer()
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.one_of(TOKENS, UTF8_TOKENS))
def test_pieces_concatenate_to_the_full_decode(tokens: list[int]) -> None:
    assert "".join(pieces_of(VOCABULARY, tokens)) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(st.text(min_size=1, max_size=20).filter(lambda t: "\ufffd" not in t and t.isprintable()))
def test_no_piece_of_valid_text_holds_half_a_character(text: str) -> None:
    pieces = pieces_of(VOCABULARY, list(text.encode()))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_comes_with_the_token_that_completes_it() -> None:
    assert pieces_of(VOCABULARY, [*"é".encode(), HE]) == ["", "é", "he", ""]


def test_an_unfinished_character_comes_at_the_end_as_a_replacement() -> None:
    assert pieces_of(VOCABULARY, [65, 0xE2, 0x82]) == ["A", "", "", "\ufffd"]


def test_special_tokens_have_a_label_but_no_text() -> None:
    assert pieces_of(VOCABULARY, [IM_START, 65, IM_END]) == ["", "A", "", ""]
    token, raw = VOCABULARY.label(IM_END)
    assert token == "<|im_end|>"
    assert bytes(raw) == b"[60,124,105,109,95,101,110,100,124,62]"
    assert VOCABULARY.raw_text([65, IM_END]) == "A<|im_end|>"


def test_a_token_id_outside_the_tokenizer_has_no_text() -> None:
    assert pieces_of(VOCABULARY, [65, 9999]) == ["A", "", ""]


def sentencepiece_like() -> Tokenizer:
    words = ["<unk>", "\u2581the", "\u2581cat", "s", "\u2581"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@given(
    st.lists(
        st.one_of(
            st.sampled_from([[1], [2], [3], [4]]),
            st.sampled_from(["é", "€", "😀"]).map(lambda c: [5 + byte for byte in c.encode()]),
        ),
        max_size=12,
    )
)
def test_a_tokenizer_whose_decode_looks_at_neighbours_is_decoded_in_windows(parts: list[list[int]]) -> None:
    tokenizer = sentencepiece_like()
    tokens = [token for part in parts for token in part]
    pieces = pieces_of(Vocabulary(tokenizer), tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert all("\ufffd" not in piece for piece in pieces)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)
CUTS = st.lists(st.text("abc", max_size=5), max_size=10)


def cut_at_first_completed_stop(text: str, stops: tuple[str, ...]) -> str:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(len(stop) for stop in found)]
    return text


@given(STOPS, CUTS)
def test_stop_strings_cut_the_same_text_however_it_comes_in_pieces(
    stops: tuple[str, ...], cuts: list[str]
) -> None:
    filtered = StopStrings(stops)
    shown = "".join(filtered.push(cut) for cut in cuts)
    assert shown + filtered.flush() == cut_at_first_completed_stop("".join(cuts), stops)
    assert (filtered.matched is not None) == any(stop in "".join(cuts) for stop in stops)


def test_text_that_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    filtered = StopStrings(("END",))
    assert [filtered.push(text) for text in ("abE", "N", "Q", "EE", "ND!", "more")] == [
        "ab",
        "",
        "ENQ",
        "E",
        "",
        "",
    ]
    assert filtered.matched == "END"
