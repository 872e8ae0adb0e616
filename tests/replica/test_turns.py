"""Exact sessions: whatever the chat template does, a turn that continues another begins with its very tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from chat_templates import STYLES, call_text, text_model, tools_of
from tiers import of_tier

from midstream.core.errors import InvalidRequest
from midstream.core.types import TokenRecord
from midstream.replica.request.checked import Prompt
from midstream.replica.response.choice import CallStage, Choice, Piece, id_maker
from midstream.replica.text.tools import prepare_history
from midstream.replica.turns.history import Branch, History, Policy, policy_of
from midstream.replica.turns.tree import Told, Trees, key_of_answer, keys_of

SESSION = ("", "s")
SESSIONS = of_tier(fast=200, test=1000, all=10_000)
WORDS = ("hello", "there", "an answer", "in 1100", "ünder", "<b>", " ", "\n", "ring", "{}", "x")


class Client:
    """A harness that talks for several turns, drops thinking, spaces arguments anew, and sometimes edits what was said."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.name, self.style, self.text = name, STYLES[name], text_model(name)
        self.tools = tools_of(name) if self.rng.random() < 0.6 else None
        self.trees = Trees()
        self.ends = self.text.encode_rendered(self.style.end)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self._words()}]
        self.policy: Policy = "exact"
        #: Of the last answer.
        self.finish = ""

    def _words(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.randrange(1, 6))) or "x"

    def _render(self, messages: list[dict[str, Any]], prompted: bool) -> str:
        return self.text.render(messages, self.tools, generation_prompt=prompted)

    def ask(self) -> tuple[Prompt, History]:
        messages = [message | {"content": message["content"] or ""} for message in self.messages]
        if any("tool_calls" in message for message in messages):
            messages = prepare_history(messages, self.text.tools.arguments)
        history = History(self.trees, SESSION, self.ends, self.policy)
        prompt = history.prompt(self.text, self._render, messages, self.tools, lambda _: None)
        if prompt is None:
            prompt = Prompt(self.text.encode_rendered(self._render(messages, True)))
        history.settled(prompt)
        return prompt, history

    def check_added(self, added: tuple[int, ...]) -> None:
        """Behind the parent's tokens stands what the template writes behind the answer, all of it and nothing twice."""
        text = self.text.vocabulary.raw_text(list(added))
        messages = prepare_history(self.messages, self.text.tools.arguments)
        rendered = self._render(messages, True)
        assert rendered.endswith(text)
        behind = len(self.messages) - 1 - self._last_answer()
        for message in self.messages[-behind:]:
            said = message["content"]
            assert said.strip() in text or any(
                json.dumps(said, ensure_ascii=a) in text for a in (True, False)
            )
        # Each answer ends once.
        end = self.style.end
        if end in rendered and self.name != "gpt-oss":
            before = rendered.removesuffix(text).rstrip()
            assert before.endswith(end) == (self.finish == "stop")

    def _last_answer(self) -> int:
        return max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")

    def answer(self, prompt: Prompt, history: History) -> tuple[int, ...]:
        """Samples an answer, tokenized in some way, and tells the client what a server would tell."""
        calls = self.tools is not None and self.rng.random() < 0.5
        said = "" if self.name == "llama3" and calls else self._words()
        if self.style.thinks and self.rng.random() < 0.7:
            said = f"<think>\n{self._words()}\n</think>\n\n{said}"
        if calls:
            said += call_text(self.name, {"x": self.rng.randrange(9)}, spaced=self.rng.random() < 0.5)
        tokens = self._tokenized(said)
        self.finish = finish = "length" if self.rng.random() < 0.15 else "stop"
        if finish == "stop":
            tokens += self.ends
        pieces = self._pieces(tokens, frozenset(self.ends), finish)
        history.take(0, pieces)
        history.end(self.choice, 0.0)
        self._told(pieces)
        return tokens

    def say(self, history: History, text: str) -> None:
        self.say_tokens(history, self.text.encode_rendered(text) + self.ends)

    def say_tokens(self, history: History, tokens: tuple[int, ...]) -> None:
        pieces = self._pieces(tokens, frozenset(self.ends), "stop")
        history.take(0, pieces)
        history.end(self.choice, 0.0)
        self._told(pieces)

    def _tokenized(self, text: str) -> tuple[int, ...]:
        """Cut at random: the tokens of the pieces are seldom those of the whole."""
        ids: list[int] = []
        while text:
            at = self.rng.randrange(1, 6)
            ids += self.text.encode_rendered(text[:at])
            text = text[at:]
        return tuple(ids)

    def _pieces(self, tokens: tuple[int, ...], silent: frozenset[int], finish: str) -> list[Piece]:
        shown, stage = frozenset[int](), None
        if self.tools is not None and (found := self.text.tools.format) is not None:
            shown = self.text.marker_ids(found.dialect.markers)
            stage = CallStage(found.dialect.parser({"look": {}}), True, id_maker(None, "s"))
        choice = self.choice = Choice(0, self.text.vocabulary, (), silent, shown)
        pieces = [p for t in tokens for p in choice.feed(TokenRecord(t, 0.0, 0.0, "base"))]
        pieces += choice.end("stop" if finish == "stop" else "length")
        return pieces if stage is None else [*stage.feed(pieces), *stage.end()]

    def _told(self, pieces: list[Piece]) -> None:
        content = "".join(piece.text for piece in pieces)
        if "</think>" in content and self.rng.random() < 0.5:
            content = content.rpartition("</think>")[2].lstrip()
        message: dict[str, Any] = {"role": "assistant", "content": content}
        calls = [call for piece in pieces for call in piece.calls]
        if calls:
            spacing = self.rng.choice([None, (", ", ": "), (",", ":")])
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(json.loads(call.arguments), separators=spacing),
                    },
                }
                for call in calls
            ]
        self.messages.append(message)
        for call in calls:
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": self._words()})
        if not calls or self.rng.random() < 0.2:
            self.messages.append({"role": "user", "content": self._words()})


@pytest.mark.parametrize("name", STYLES)
def test_a_turn_begins_with_its_parents_tokens_or_is_a_branch(name: str) -> None:
    turns = 0
    for seed in range(SESSIONS // len(STYLES) + 1):
        client, before = Client(name, seed), tuple[int, ...]()
        for turn in range(5):
            prompt, history = client.ask()
            if turn:
                turns += 1
                # Of the styles here every turn can be continued exactly.
                assert history.branch is None
                assert prompt.token_ids[: len(before)] == before
                client.check_added(prompt.token_ids[len(before) :])
            else:
                assert history.branch is None
            before = prompt.token_ids + client.answer(prompt, history)
    assert turns


def talk(client: Client) -> tuple[int, ...]:
    prompt, history = client.ask()
    return prompt.token_ids + client.answer(prompt, history)


def client_of(name: str, seed: int = 0) -> Client:
    client = Client(name, seed)
    client.tools = None
    return client


@pytest.mark.parametrize("name", ["qwen2.5", "gemma"])
def test_an_edited_answer_is_a_branch_that_begins_with_the_turn_before_it(name: str) -> None:
    client = client_of(name)
    first = talk(client)
    talk(client)
    answers = [i for i, message in enumerate(client.messages) if message["role"] == "assistant"]
    client.messages[answers[1]]["content"] += "!"
    prompt, history = client.ask()
    assert history.branch == Branch("edited", answers[1], 1)
    assert prompt.token_ids[: len(first)] == first
    client.messages[0]["content"] += "!"
    prompt, history = client.ask()
    assert history.branch == Branch("edited", 0)
    # And both go on as turns of their own.
    before = prompt.token_ids + client.answer(prompt, history)
    prompt, history = client.ask()
    assert history.branch is None
    assert prompt.token_ids[: len(before)] == before


def test_a_sub_agent_and_a_compacted_conversation_are_branches_of_their_own() -> None:
    client = client_of("qwen3")
    main = talk(client)
    rest = client.messages
    client.messages = [{"role": "system", "content": "a sub-agent"}, {"role": "user", "content": "do it"}]
    prompt, history = client.ask()
    assert history.branch == Branch("new", 0)
    sub = prompt.token_ids + client.answer(prompt, history)
    prompt, history = client.ask()
    assert history.branch is None
    assert prompt.token_ids[: len(sub)] == sub
    # Meanwhile the main conversation goes on.
    client.messages = rest
    prompt, history = client.ask()
    assert history.branch is None
    assert prompt.token_ids[: len(main)] == main


def test_what_this_replica_never_sampled_is_said() -> None:
    client = client_of("llama3")
    client.messages += [{"role": "assistant", "content": "of another"}, {"role": "user", "content": "go on"}]
    _, history = client.ask()
    assert history.branch == Branch("unknown", 0)


def test_the_templates_way_is_a_branch_where_it_differs_and_none_where_it_does_not() -> None:
    branches = []
    for name in ("qwen3", "chatml-newline"):
        client = client_of(name)
        client.policy = "template"
        prompt, history = client.ask()
        thought = "<think>\nhm\n</think>\n\n" if name == "qwen3" else ""
        client.say(history, thought + "hello")
        before = prompt.token_ids
        prompt, history = client.ask()
        assert prompt.token_ids[: len(before)] == before
        branches.append(history.branch)
    # The second one writes a line feed that was not sampled.
    assert [branch and branch.why for branch in branches] == ["template", "template"]
    client = client_of("qwen2.5")
    client.policy = "template"
    _, history = client.ask()
    client.say(history, "hello")
    _, history = client.ask()
    assert history.branch is None


def test_equal_words_of_other_tokens_continue_the_youngest_turn_and_say_so() -> None:
    client = client_of("zephyr")
    _, history = client.ask()
    first = list(client.messages)
    client.say(history, "hello")
    client.messages = first
    prompt, history = client.ask()
    assert history.branch == Branch("new", 1)
    tokens = tuple(t for letter in "hello" for t in client.text.encode_rendered(letter)) + client.ends
    client.say_tokens(history, tokens)
    again, history = client.ask()
    assert history.branch == Branch("ambiguous", 2, 2)
    assert again.token_ids[: len(prompt.token_ids + tokens)] == prompt.token_ids + tokens


def test_samples_of_equal_answers_are_told_apart_by_their_thinking() -> None:
    client = client_of("deepseek")
    prompt, history = client.ask()
    answers = [f"<think>\nthought {number}\n</think>\n\n42" for number in range(3)]
    first = list(client.messages)
    for answer in answers:
        client.messages = list(first)
        client.say(history, answer)
    for answer in answers:
        thought, _, said = answer.partition("</think>")
        for message in (
            {"role": "assistant", "content": answer},
            {"role": "assistant", "content": said, "reasoning_content": thought.removeprefix("<think>")},
        ):
            client.messages = [*first, message, {"role": "user", "content": "go on"}]
            again, history = client.ask()
            assert history.branch is None
            tokens = prompt.token_ids + client.text.encode_rendered(answer)
            assert again.token_ids[: len(tokens)] == tokens
    client.messages = [*first, {"role": "assistant", "content": "42"}, {"role": "user", "content": "go on"}]
    _, history = client.ask()
    assert history.branch == Branch("ambiguous", 2, 3)


def test_trees_are_bounded_and_say_what_they_dropped() -> None:
    client = client_of("phi")
    client.trees = trees = Trees(bytes_max=3000)
    talk(client)
    for number in range(40):
        trees.add(("", f"other {number}"), None, range(100), range(100), Told([b"%d" % number]))
        assert trees.size <= 3000
    assert trees.of(SESSION) is None
    _, history = client.ask()
    assert history.branch == Branch("forgotten", 0)
    trees.close(("", "other 39"))
    held = [trees.of(("", f"other {number}")) for number in range(40)]
    assert trees.size == sum(tree.size for tree in held if tree is not None)
    assert not trees.forgot(("", "other 39"))


def test_a_policy_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="x-midstream-history: expected exact or template, got 'no'"):
        policy_of("no")


def test_arguments_that_hold_half_a_surrogate_pair_are_a_turn_like_any_other() -> None:
    given = '{"x": "\\ud83d"}'
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": given}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    user = {"role": "user", "content": "x"}
    before, after = keys_of([user, said], None)
    assert key_of_answer(before, "", [("look", '{"x":"\\ud83d"}')]) == after
    # As a template gets it that takes objects.
    call["function"] = {"name": "look", "arguments": json.loads(given)}
    assert keys_of([user, said], None)[1] == after


def test_a_client_that_stops_a_base_model_at_its_templates_end_token_has_it_once() -> None:
    client = client_of("qwen2.5")
    client.ends = client.text.encode_rendered("<|endoftext|>")
    prompt, history = client.ask()
    end = client.text.encode_rendered("<|im_end|>")
    client.say_tokens(history, client.text.encode_rendered("hello") + end)
    again, history = client.ask()
    assert history.branch is None
    assert again.token_ids[len(prompt.token_ids) :].count(end[0]) == 2


def test_a_turn_whose_parent_was_dropped_stands_by_itself() -> None:
    client = client_of("phi")
    first = talk(client)
    prompt, history = client.ask()
    assert prompt.token_ids[: len(first)] == first
    # Meanwhile other sessions take the room.
    client.trees._bytes_max = 10
    client.trees.add(("", "other"), None, range(100), range(100), Told([b"k"]))
    client.trees._bytes_max = 10_000
    tokens = prompt.token_ids + client.answer(prompt, history)
    tree = client.trees.of(SESSION)
    assert tree is not None
    (turn,) = tree.turns
    assert (turn.parent, turn.tokens) == (None, tokens)


def test_a_session_that_was_closed_and_began_anew_gets_nothing_of_the_old_one() -> None:
    client = client_of("phi")
    talk(client)
    prompt, history = client.ask()
    client.trees.close(SESSION)
    client.trees.add(SESSION, None, [1], [2], Told([b"k"]))
    client.answer(prompt, history)
    tree = client.trees.of(SESSION)
    assert tree is not None
    assert len(tree) == 1
