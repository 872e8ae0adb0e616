"""Prompts of text and of token ids in a session's tree: what goes on with a turn's very tokens, and what is a branch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import MODEL, FakeEngine, Running, ids, running
from test_resume_pipeline import RESUMABLE, play, resume, units

from midstream.core.types import GenerateRequest
from midstream.replica.turns.tree import Trees, TurnKeys, TurnTree

PATH = "/v1/completions"
SESSION = {"x-midstream-session": "s"}
#: As a tokenizer would not cut it: it has a token for "he".
LETTERS = tuple(b"hello ")
ROOT = ("", "s")


def an_engine() -> FakeEngine:
    engine = FakeEngine()
    engine.reply = LETTERS
    return engine


async def complete(here: Running, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "return_token_ids": True, **more}
    answer = await here.http.post(PATH, json=body, headers=SESSION)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def tell(here: Running) -> list[tuple[int, list[int], list[int]]]:
    """(parent, added, sampled) of each turn."""
    trace = here.replica.trace(ROOT)
    assert trace is not None
    return [(turn.parent, turn.added, turn.token_ids) for turn in trace.turns]


async def test_text_goes_on_with_the_sampled_tokens(tmp_path: Path) -> None:
    engine = an_engine()

    async with running(tmp_path, engine) as here:
        answer = await complete(here, "he said ")
        assert "midstream" not in answer
        text = "he said " + answer["choices"][0]["text"]
        answer = await complete(here, text + "he")
        assert "midstream" not in answer
        edited = await complete(here, "she said hello he")
        assert edited["midstream"] == {"branch": {"why": "new", "messages": 0}}
        assert [parent for parent, _, _ in tell(here)] == [0, 1, 0]
    first, second, third = (request.prompt for request in engine.requests)
    assert second == first + LETTERS + ids("he")
    assert third == ids("she said hello he")


def test_texts_of_other_tokens_continue_the_youngest_and_say_so() -> None:
    trees = Trees()
    for sampled in ((10,), (11, 12)):
        trees.add(ROOT, None, [1], sampled, TurnKeys(text="Q ab"))
    tree = trees.of(ROOT)
    assert tree is not None
    found = tree.find_text("Q ab c")
    assert found is not None
    assert (found.turn and found.turn.number, found.messages, found.ambiguous) == (2, 4, True)
    # Begun without the tokenizer's special tokens, it is another prompt.
    assert tree.find_text("Q ab c", special=False).turn is None


async def test_an_ambiguous_text_is_said_in_the_response(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        await complete(here, "he said ")
        # The same words in letters.
        await complete(here, list(b"he said "))
        turn = here.replica.trees.of(ROOT).turns[1]  # type: ignore[union-attr]
        here.replica.trees.of(ROOT).add(  # type: ignore[union-attr]
            type(turn)(3, None, turn.added, turn.sampled, turn.record), TurnKeys(text="he said hello ")
        )
        answer = await complete(here, "he said hello he")
        assert answer["midstream"] == {"branch": {"why": "ambiguous", "messages": 0, "turn": 3}}


async def test_the_template_policy_tokenizes_text_anew_and_says_what_that_is(tmp_path: Path) -> None:
    engine = an_engine()

    async with running(tmp_path, engine) as here:
        await complete(here, "he said ")
        headers = {**SESSION, "x-midstream-history": "template"}
        body = {"model": MODEL, "prompt": "he said hello he", "max_tokens": 6}
        answer = await here.http.post(PATH, json=body, headers=headers)
        assert answer.json()["midstream"]["branch"]["why"] == "template"
    assert engine.requests[1].prompt == ids("he said hello he")


async def test_token_ids_find_the_longest_turn_they_begin_with(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        one = [1, 2, 3, *LETTERS]
        for prompt, branch in (
            ([1, 2, 3], None),
            ([*one, 9], None),
            ([*one, 9, *LETTERS, 8], None),
            # It leaves the second turn in the middle of its answer.
            ([*one, 9, *LETTERS[:3], 8], None),
            ([1, 2, 3, *LETTERS[:5]], "new"),
        ):
            answer = await complete(here, prompt)
            said = answer.get("midstream", {"branch": {"why": None}})["branch"]["why"]
            assert said == branch, prompt
        sampled = list(LETTERS)
        assert tell(here) == [
            (0, [1, 2, 3], sampled),
            (1, [9], sampled),
            (2, [8], sampled),
            (1, [9, *LETTERS[:3], 8], sampled),
            (0, [1, 2, 3, *LETTERS[:5]], sampled),
        ]


async def test_several_prompts_are_tokenized_anew_and_scoring_is_no_turn(tmp_path: Path) -> None:
    engine = an_engine()

    async with running(tmp_path, engine) as here:
        assert (await complete(here, "he", max_tokens=0, echo=True))["choices"][0]["text"] == "he"
        assert here.replica.trace(ROOT) is None
        answer = await complete(here, ["he said ", "he said hello he"])
        assert "midstream" not in answer
        assert len(tell(here)) == 2
    assert engine.requests[2].prompt == ids("he said hello he")


async def test_choices_of_one_prompt_are_turns_of_their_own(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        await complete(here, [1, 2], n=3)
        assert tell(here) == [(0, [1, 2], list(LETTERS))] * 3
        await complete(here, [1, 2, *LETTERS, 5])
        assert tell(here)[3] == (3, [5], list(LETTERS))


async def test_a_stream_goes_on_elsewhere_with_the_tokens_of_its_text(tmp_path: Path) -> None:
    body = {"prompt": "he said hello he", "max_tokens": 6, "temperature": 0}
    requests: list[GenerateRequest] = []

    async with play(tmp_path) as (here, there):
        here.engine.reply = there.engine.reply = LETTERS
        await complete(here, "he said ")
        asked = {"model": MODEL, "stream": True, **body}
        async with here.http.stream("POST", PATH, json=asked, headers={**RESUMABLE, **SESSION}) as answer:
            writes = units((await answer.aread()).decode())
        await resume(there, PATH, body, writes[:2])
        requests.extend((here.engine.requests[-1], there.engine.requests[-1]))
    one, other = requests
    assert one.prompt == ids("he said ") + LETTERS + ids("he")
    assert other.prompt[: len(one.prompt)] == one.prompt


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_finds_what_a_plain_search_finds(seed: int) -> None:
    """Few different tokens, so that many turns begin alike."""
    rng = random.Random(seed)
    trees = Trees()
    tree = TurnTree()
    for _ in range(60):
        prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 12)))
        if tree.turns and rng.random() < 0.6:
            prompt = rng.choice(tree.turns).tokens + prompt
        expected = max(
            (turn for turn in tree.turns if prompt[: len(turn.tokens)] == turn.tokens),
            key=lambda turn: (len(turn.tokens), turn.number),
            default=None,
        )
        found = tree.find_tokens(prompt)
        assert found is expected
        text = "".join("aé"[token] for token in prompt)
        told = tree.find_text(text)
        assert (told.turn and (len(told.turn.tokens), told.messages)) == (
            expected and (len(expected.tokens), len(expected.tokens))
        )
        sampled = [rng.randrange(2) for _ in range(rng.randrange(1, 4))]
        added = prompt[0 if found is None else len(found.tokens) :]
        whole = "".join("aé"[token] for token in (*prompt, *sampled))
        trees.add(ROOT, found, added, sampled, TurnKeys(text=whole))
        tree = trees.of(ROOT) or tree
        assert trees.size == tree.size
