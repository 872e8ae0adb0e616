"""The task: what is asked, what it is worth, and that everything follows from the seed."""

from collections import Counter

import pytest

from midstream.demo.records import ALPHABETS, FOLLOW_UP, Problem, problems, request_seed
from midstream.models.tiny_moe import TOKEN_ID, build_tokenizer

pytestmark = pytest.mark.fast


def test_the_reward_is_the_share_of_the_budget_spent_on_the_alphabet():
    problem = Problem("hexadecimal")
    assert problem.reward(list(b"0af9"), 4) == 1.0
    assert problem.reward(list(b"0aXg"), 4) == 0.5
    assert problem.reward([300, TOKEN_ID["<|im_end|>"]], 4) == 0.0


def test_stopping_early_gains_nothing():
    problem = Problem("lowercase")
    assert problem.reward([*b"a", TOKEN_ID["<|im_end|>"]], 8) == 1 / 8
    assert problem.reward(list(b"abcdefgh"), 8) == 1.0


def test_alphabets_overlap_so_that_answers_can_improve_before_they_differ_by_problem():
    shared = set.intersection(*map(set, ALPHABETS.values()))
    assert shared == set("bcdf")


def test_the_first_request_names_the_alphabet_and_the_second_only_refers_to_it():
    problem = Problem("consonants")
    assert ALPHABETS["consonants"] in problem.first_messages()[-1]["content"]
    assert ALPHABETS["consonants"] not in FOLLOW_UP
    assert len({len(Problem(kind).follow_up_text(True)) for kind in ALPHABETS}) == 1


@pytest.mark.parametrize("ended", [True, False])
def test_the_follow_up_continues_the_conversation_as_the_chat_template_renders_it(ended):
    tokenizer = build_tokenizer()
    problem = Problem("lowercase")
    messages = problem.first_messages()
    first = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = "abc<|im_end|>" if ended else "abc"
    whole = [*messages, {"role": "assistant", "content": "abc"}, {"role": "user", "content": FOLLOW_UP}]
    expected = tokenizer.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
    assert first + answer + problem.follow_up_text(ended) == expected


def test_each_step_has_every_kind_equally_often_in_an_order_of_its_own():
    steps = [tuple(p.kind for p in problems(0, step, 6)) for step in range(20)]
    assert all(Counter(kinds) == dict.fromkeys(ALPHABETS, 2) for kinds in steps)
    assert len(set(steps)) > 1
    assert steps == [tuple(p.kind for p in problems(0, step, 6)) for step in range(20)]


def test_every_request_of_a_run_has_a_sampling_seed_of_its_own():
    keys = [(0, s, g, i, t) for s in range(5) for g in range(6) for i in range(6) for t in (1, 2)]
    seeds = [request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [request_seed(*key) for key in keys]
    assert request_seed(1, 0, 0, 0, 1) != request_seed(0, 0, 0, 0, 1)
    assert all(0 <= seed < 2**31 for seed in seeds)
