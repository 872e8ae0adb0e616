"""Rollouts of two turns: every token with its own records, nothing short or shifted gets through, and what is asked."""

import base64
import json

import httpx
import openai
import pytest
from two_turns import ALPHABETS, FOLLOW_UP, Sampler, follow_up, messages

from midstream.models.tiny_moe import TOKEN_ID, build_tokenizer

pytestmark = pytest.mark.fast

END = TOKEN_ID["<|im_end|>"]
FIRST = [10, 11, 12]


def entry(token: int, generated: bool = True, first: bool = False) -> dict:
    routes = base64.b64encode(bytes([token % 8, (token + 1) % 8, 3, 4])).decode()
    made = {"token_id": token, "logprob": -token / 10, "sampling_logprob": -token / 20 if generated else None}
    mask = {"sampling_mask": base64.b64encode(b"\0").decode()} if generated else {}
    return made if first else made | {"routing_matrix": routes} | mask


def answer(prompt: list[int], tokens: list[int], **changes) -> dict:
    """The last token is of the snapshot step-1, those before it of base."""
    echoed = [entry(token, generated=False, first=i == 0) for i, token in enumerate(prompt)]
    count = len(tokens)
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": tokens,
        "logprobs": {"content": [*echoed, *map(entry, tokens)]},
        "snapshots": [
            {"start": 0, "end": count - 1, "snapshot": "base"},
            {"start": count - 1, "end": count, "snapshot": "step-1"},
        ],
    }
    usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
    return {"choices": [choice | changes], "usage": usage}


class Server:
    """Answers a chat with `chat`, and a completion with two tokens after the prompt that it got, unless changed."""

    def __init__(self, chat: dict | None = None, headers: dict | None = None) -> None:
        self.chat = chat or answer(FIRST, [97, 98, END])
        self.headers = {"x-midstream-replica": "replica-1"} if headers is None else headers
        self.asked: list[tuple[dict, str]] = []
        self.other_prompt = False
        self.sampler = Sampler(
            openai.OpenAI(
                base_url="http://server/v1",
                api_key="demo",
                max_retries=0,
                http_client=httpx.Client(transport=httpx.MockTransport(self._answer)),
            ),
            "tiny-moe",
            build_tokenizer(),
            seed=0,
            budget=4,
            top_k=2,
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append((body, request.headers["x-multi-turn-session-id"]))
        if request.url.path.endswith("/chat/completions"):
            return httpx.Response(200, json=self.chat, headers=self.headers)
        prompt = body["prompt"][1:] if self.other_prompt else body["prompt"]
        return httpx.Response(200, json=answer(prompt, [120, 97]), headers=self.headers)


def test_an_answer_across_a_swap_keeps_each_token_with_its_own_records():
    first, second = Server().sampler.rollout(0, 0, 0).turns
    assert (first.prompt, first.tokens) == (FIRST, [97, 98, END])
    assert first.logprobs == [-97 / 20, -98 / 20, -END / 20]
    assert first.masks.ids.tolist() == [97, 98, END]
    assert first.snapshots == ["base", "base", "step-1"]
    assert first.pieces == [("base", 0), ("step-1", 4)]
    assert (first.cached_tokens, first.replica) == (2, "replica-1")
    expected = [[[t % 8, (t + 1) % 8], [3, 4]] for t in (11, 12, 97, 98, END)]
    assert first.routes.tolist() == expected
    # Of four tokens, two and one are letters of the alphabet.
    assert (first.reward, second.reward) == (2 / 4, 2 / 4)


@pytest.mark.parametrize("ended", [True, False])
def test_the_second_turn_continues_the_tokens_of_the_first_as_the_chat_template_renders_it(ended):
    server = Server(answer(FIRST, [97, END] if ended else [97, 98]))
    server.sampler.rollout(1, 2, 3)
    (chat, session), (plain, again) = server.asked
    assert session == again == "rollout-0-1-2-3"
    assert chat["messages"] == messages(ALPHABETS[0])
    assert (
        plain["prompt"]
        == FIRST + server.chat["choices"][0]["token_ids"] + (build_tokenizer()(follow_up(ended))["input_ids"])
    )
    assert chat["seed"] != plain["seed"]
    tokenizer, said = build_tokenizer(), "abc<|im_end|>" if ended else "abc"
    before = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, tokenize=False)
    turns = [{"role": "assistant", "content": "abc"}, {"role": "user", "content": FOLLOW_UP}]
    whole = tokenizer.apply_chat_template(
        [*chat["messages"], *turns], add_generation_prompt=True, tokenize=False
    )
    assert before + said + follow_up(ended) == whole


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": "abort"}, "the answer ended with 'abort'"),
        ({"token_ids": [97, 99, END]}, "different tokens"),
        ({"token_ids": [98, END]}, "different tokens"),
        ({"snapshots": [{"start": 0, "end": 2, "snapshot": "base"}]}, "snapshot spans cover 2 tokens"),
        ({"logprobs": {"content": [entry(t, first=True) for t in [*FIRST, 97, 98, END]]}}, "no routing"),
    ],
)
def test_an_answer_that_is_short_or_disagrees_with_itself_is_a_failed_request(changes, reason):
    server = Server(answer(FIRST, [97, 98, END], **changes))
    assert server.sampler.rollout(0, 0, 0) is None
    assert len(server.asked) == 1
    (error,) = server.sampler.errors
    assert error.startswith("rollout-0-0-0-0: ValueError: ")
    assert reason in error


def test_an_answer_to_another_prompt_or_of_no_replica_is_a_failed_request():
    other, nowhere = Server(), Server(headers={})
    other.other_prompt = True
    assert other.sampler.rollout(0, 0, 0) is None
    assert "continued another prompt" in other.sampler.errors[0]
    assert nowhere.sampler.rollout(0, 0, 0) is None
    assert "x-midstream-replica" in nowhere.sampler.errors[0]


def test_alphabets_overlap_so_that_answers_can_improve_before_they_differ_by_problem():
    assert set.intersection(*map(set, ALPHABETS)) == set("bcdf")
