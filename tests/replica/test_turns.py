"""Exact sessions: whatever the chat template does, a turn that continues another begins with its very tokens.

And whatever befalls the replicas: sessions of several agents at a time move between replicas that are lost, short of memory, or
hold some of the turns; answers are cut and go on elsewhere; weights change. A request that its replica cannot continue is a
branch, for the right reason and from the right turn.
"""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from typing import Any, NamedTuple

import pytest
from chat_client import SESSION, Client, Reply
from chat_templates import STYLES
from tiers import of_tier

from midstream.core.errors import InvalidRequest
from midstream.core.types import TokenRecord
from midstream.replica.request.checked import Prompt
from midstream.replica.turns.history import Branch, History, policy_of
from midstream.replica.turns.message_keys import key_of_answer, keys_of
from midstream.replica.turns.trace import trace_of
from midstream.replica.turns.tree import Trees, Turn, TurnKeys

SESSIONS = of_tier(fast=200, test=1000, all=10_000)
#: Bytes of a replica's trees: one session fits, two do not.
ROOM = 2**18
FILLER = array("I", bytes(ROOM - 1024))


class Known(NamedTuple):
    """A turn as its client was told it. at: of its answer in the messages. place: a replica, and how often its turns went."""

    at: int
    place: tuple[int, int]
    tokens: tuple[int, ...]


class Replicas:
    """Where the turns of a session are, and what befalls them. label: of the weights that serve."""

    def __init__(self, rng: random.Random, *, troubled: bool) -> None:
        self._rng, self._troubled = rng, troubled
        self.trees = [self._started() for _ in range(3)]
        #: How often the turns of each were lost, or dropped for want of memory.
        self._gone, self._dropped = [0, 0, 0], [False] * 3
        self.home, self.label, self._swaps = 0, "base", 0
        #: Of each tree that lives, all that its turns must tell: tokens in all, records, whether they were replayed, branch.
        self.turns: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
        self.journal: list[tuple[Trees, int, Turn]] = []

    def _started(self) -> Trees:
        trees = Trees(ROOM)
        trees.on_turn = lambda _, tree, turn: self.journal.append((trees, tree, turn))
        return trees

    def _chance(self, share: float) -> bool:
        return self._troubled and self._rng.random() < share

    def place(self, replica: int) -> tuple[int, int]:
        return replica, self._gone[replica]

    def next(self) -> int:
        """Where the next request goes: home, unless it is lost, or passed over this once."""
        if self._chance(0.1):
            self.lose()
        if self._chance(0.05):
            self._fill(self.home)
        return (self.home + 1) % 3 if self._chance(0.15) else self.home

    def lose(self, replica: int | None = None) -> None:
        lost = self.home if replica is None else replica
        self.trees[lost] = self._started()
        self._forget(lost, dropped=False)
        self.home = (lost + self._rng.choice((1, 2))) % 3

    def _fill(self, replica: int) -> None:
        """Another session takes the room of this one."""
        self.trees[replica].add(("", "other"), None, FILLER, (), TurnKeys())
        self._forget(replica, dropped=self.place(replica) in self.turns or self._dropped[replica])

    def _forget(self, replica: int, *, dropped: bool) -> None:
        self.turns.pop(self.place(replica), None)
        self._gone[replica] += 1
        self._dropped[replica] = dropped

    def records(self, tokens: tuple[int, ...], first: int) -> list[TokenRecord]:
        """Their numbers follow from place and label. Weights change between two tokens."""
        made = []
        for at, token in enumerate(tokens, first):
            if self._chance(0.03):
                self._swaps += 1
                self.label = f"step-{self._swaps}"
            made.append(TokenRecord(token, -at - self._swaps / 64, -at / 2, self.label, bytes([at % 256])))
        return made

    def expected(self, replica: int, client: Client, turns: list[Known]) -> tuple[str | None, Known | None]:
        """What a request must say that has these turns of a client: why it is a branch, and the turn that it begins with."""
        here = self.place(replica)
        last = next((turn for turn in reversed(turns) if turn.place == here), None)
        answers = [at for at, message in enumerate(client.messages) if message["role"] == "assistant"]
        if last is not None:
            return None if last.at == answers[-1] else "edited", last
        if here in self.turns:
            return "edited" if answers else "new", None
        return ("forgotten" if self._dropped[replica] else "unknown") if answers else None, None

    def sampled(self, replica: int, client: Client, prompt: Prompt, history: History) -> Known | None:
        """The answer, which another replica may have to end; None: nobody can."""
        finished, tokens = client.finish, client.draw()
        records = self.records(tokens, len(prompt.token_ids))
        reply, replayed = Reply(client, history), 0
        if self._chance(0.12):
            replayed = self._rng.randrange(len(records))
            reply.take(records[:replayed])
            self.lose(replica)
            replica = self.home
            if len({record.snapshot for record in records[: replayed + 1]}) > 1:
                client.finish = finished
                return None
            client.trees = self.trees[replica]
            history = client.resume(prompt, history)
            reply = Reply(client, history)
            reply.take(records[:replayed], replayed=True)
        if self._chance(0.05):
            self._fill(replica)
        client.told(reply, records[replayed:])
        whole = prompt.token_ids + tokens
        branch = None if history.branch is None else history.branch.why
        self.turns.setdefault(self.place(replica), []).append((whole, records, replayed, branch))
        return Known(client.last_answer(), self.place(replica), whole)

    def check_traces(self) -> None:
        """Each replica's trace has the very turns that clients were told, and parents come before their children."""
        for replica, trees in enumerate(self.trees):
            told = self.turns.get(self.place(replica), [])
            trace = trace_of(trees, SESSION, "m", top_k=1, wide_routes=False)
            turns, tokens = [] if trace is None else trace.turns, {0: ()}
            for turn, (whole, records, replayed, branch) in zip(turns, told, strict=True):
                tokens[turn.turn] = (*tokens[turn.parent], *turn.added, *turn.token_ids)
                assert tokens[turn.turn] == whole
                assert (turn.branch and turn.branch["why"]) == branch
                labels = [span.snapshot for span in turn.snapshots for _ in range(span.start, span.end)]
                assert labels == [record.snapshot for record in records]
                logprobs = None if replayed else [record.logprob for record in records]
                assert turn.logprobs == logprobs
                assert (turn.routing_matrix is None) == bool(replayed)
        had: dict[tuple[Trees, int], list[Turn | None]] = {}
        for trees, tree, turn in self.journal:
            before = had.setdefault((trees, tree), [None])
            assert turn.parent in before
            before.append(turn)


@pytest.mark.parametrize("name", STYLES)
def test_a_turn_begins_with_its_parents_tokens_or_is_a_branch(name: str) -> None:
    seen = Counter[str | None]()
    for seed in range(SESSIONS // len(STYLES) + 1):
        rng = random.Random(f"{name} session {seed}")
        replicas = Replicas(rng, troubled=rng.random() < 0.7)
        agents = [(Client(name, 3 * seed + agent), list[Known]()) for agent in range(rng.choice((1, 1, 3)))]
        for agent, (client, _) in enumerate(agents):
            client.messages[0]["content"] = f"agent {agent}: {client.messages[0]['content']}"
        for _ in range(5):
            client, turns = rng.choice(agents)
            if turns and rng.random() < 0.08:
                edited = rng.randrange(len(turns))
                client.messages[turns[edited].at]["content"] += "!"
                del turns[edited:]
            replica = replicas.next()
            client.trees = replicas.trees[replica]
            why, parent = replicas.expected(replica, client, turns)
            prompt, history = client.ask()
            branch = history.branch
            seen[branch and branch.why] += 1
            assert (branch and branch.why) == why
            if parent is not None:
                # Of the styles here every turn can be continued exactly.
                assert prompt.token_ids[: len(parent.tokens)] == parent.tokens
            if branch is not None and parent is not None:
                (turn,) = (t for t in client.trees.of(SESSION).turns if t.number == branch.turn)
                assert turn.tokens == parent.tokens
                assert parent.at < branch.messages <= len(client.messages)
            elif branch is None and parent is not None:
                client.check_added(prompt.token_ids[len(parent.tokens) :])
            known = replicas.sampled(replica, client, prompt, history)
            if known is not None:
                turns.append(known)
        replicas.check_traces()
    assert seen[None] > seen.total() / 2
    assert {"edited", "unknown"} <= {*seen}


def talk(client: Client) -> tuple[int, ...]:
    prompt, history = client.ask()
    return prompt.token_ids + client.answer(history)


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
    before = prompt.token_ids + client.answer(history)
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
    sub = prompt.token_ids + client.answer(history)
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
        trees.add(("", f"other {number}"), None, range(100), range(100), TurnKeys([b"%d" % number]))
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
    client.trees.add(("", "other"), None, range(100), range(100), TurnKeys([b"k"]))
    client.trees._bytes_max = 10_000
    tokens = prompt.token_ids + client.answer(history)
    tree = client.trees.of(SESSION)
    assert tree is not None
    (turn,) = tree.turns
    assert (turn.parent, turn.tokens) == (None, tokens)


def test_a_session_that_was_closed_and_began_anew_gets_nothing_of_the_old_one() -> None:
    client = client_of("phi")
    talk(client)
    _, history = client.ask()
    client.trees.close(SESSION)
    client.trees.add(SESSION, None, [1], [2], TurnKeys([b"k"]))
    client.answer(history)
    tree = client.trees.of(SESSION)
    assert tree is not None
    assert len(tree) == 1
