"""Token records to labelled pieces: nothing lost, nothing repeated, nothing under the wrong snapshot."""

from hypothesis import given
from hypothesis import strategies as st
from replica_fakes import IM_END, byte_tokenizer

from midstream.core.types import TokenRecord
from midstream.replica.response.choice import Choice, Piece
from midstream.replica.text.vocabulary import StopStrings, Vocabulary

VOCABULARY = Vocabulary(byte_tokenizer())


def token(token_id: int, snapshot: str) -> TokenRecord:
    return TokenRecord(token_id, -1.0, -1.0, snapshot)


def run(tokens: list[tuple[int, str]], stops: tuple[str, ...] = ()) -> tuple[Choice, list[Piece]]:
    choice, pieces = Choice(0, VOCABULARY, stops, {IM_END}), list[Piece]()
    for token_id, snapshot in tokens:
        pieces += choice.feed(token(token_id, snapshot))
        if choice.finish is not None:
            return choice, pieces
    return choice, pieces + choice.end("length")


@given(
    st.lists(st.tuples(st.sampled_from([97, 98, 99]), st.sampled_from(["v1", "v2", "v3"])), max_size=20),
    st.lists(st.text("abc", min_size=2, max_size=4), max_size=2).map(tuple),
)
def test_every_character_and_record_is_labelled_with_its_own_snapshot(
    tokens: list[tuple[int, str]], stops: tuple[str, ...]
) -> None:
    choice, pieces = run(tokens, stops)
    fed = tokens[: choice.generated]
    assert [(s.record.token_id, s.record.snapshot) for p in pieces for s in p.tokens] == fed
    assert all(s.record.snapshot == piece.snapshot for piece in pieces for s in piece.tokens)
    shown = [(character, piece.snapshot) for piece in pieces for character in piece.text]
    assert shown == [(chr(token_id), snapshot) for token_id, snapshot in fed][: len(shown)]
    reference = StopStrings(stops)
    whole = reference.push("".join(chr(token_id) for token_id, _ in tokens)) + reference.flush()
    assert "".join(character for character, _ in shown) == whole
    assert (choice.finish == "stop") == (reference.matched is not None)


def test_held_text_released_after_a_swap_keeps_its_old_label() -> None:
    _, pieces = run([(ord("E"), "v1"), (ord("x"), "v2")], ("EN",))
    assert [(piece.snapshot, piece.text, len(piece.tokens)) for piece in pieces] == [
        ("v1", "", 1),
        ("v1", "E", 0),
        ("v2", "x", 1),
    ]


def test_spans_cover_the_generated_tokens_without_gaps() -> None:
    choice, _ = run([(97, "v1"), (97, "v1"), (97, "v2"), (97, "v3")])
    assert choice.spans == [("v1", 0, 2), ("v2", 2, 3), ("v3", 3, 4)]


def test_the_token_that_completes_a_stop_string_is_the_last_record() -> None:
    choice, pieces = run([(ord(c), "v1") for c in "abSTOPcd"], ("STOP",))
    assert choice.finish == "stop"
    assert "".join(piece.text for piece in pieces) == "ab"
    assert [scored.record.token_id for piece in pieces for scored in piece.tokens] == list(b"abSTOP")


def test_text_offsets_count_characters_from_the_echoed_prompt_on() -> None:
    choice = Choice(0, VOCABULARY, (), {IM_END})
    pieces = choice.echo(tuple(token(b, "v1") for b in "é€".encode()))
    pieces += [piece for b in b"ab" for piece in choice.feed(token(b, "v1"))]
    shown = [scored for piece in pieces for scored in piece.echoed + piece.tokens]
    assert [scored.text_offset for scored in shown] == [0, 0, 1, 1, 1, 2, 3]
    assert "".join(piece.text for piece in pieces) == "é€ab"


def test_an_echoed_prompt_computed_under_two_snapshots_comes_in_two_pieces() -> None:
    choice = Choice(0, VOCABULARY, (), ())
    pieces = choice.echo((token(97, "v1"), token(98, "v1"), token(99, "v2")))
    assert [(p.snapshot, p.text, len(p.tokens), len(p.echoed)) for p in pieces] == [
        ("v1", "ab", 0, 2),
        ("v2", "c", 0, 1),
    ]


def test_the_end_token_has_a_record_but_no_text_even_if_it_is_an_ordinary_token() -> None:
    choice = Choice(0, VOCABULARY, (), {ord("!")})
    pieces = choice.feed(token(ord("a"), "v1")) + choice.feed(token(ord("!"), "v1")) + choice.end("stop")
    assert "".join(piece.text for piece in pieces) == "a"
    assert choice.generated == 2
