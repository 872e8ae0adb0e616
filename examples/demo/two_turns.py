"""The demo's task, and rollouts of it through the OpenAI SDK, with the server's record of every token.

Turn 1 names an alphabet. Turn 2 asks for more of the same one, so its answer depends on the history. The reward of a turn is
the share of its token budget that is characters of the alphabet. Random weights get a few percent.

Always holds: turn 2 continues the token ids of turn 1, so no answer is tokenised again. An answer whose records do not line up
is a failed request. Failed requests are counted, and never sent again.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai

from midstream.client.decode import SamplingMasks, routes_of, sampling_masks_of, token_snapshots

SYSTEM = (
    "Each conversation names an alphabet. Answer every request with characters of it only, without spaces."
)
FOLLOW_UP = "Good. Now more from the same alphabet."
ALPHABETS = ["abcdefghijklmnopqrstuvwxyz", "bcdfghjklmnpqrstvwxyz", "0123456789abcdef"]
RECORDS = {
    "logprobs": True,
    "echo": True,
    "return_token_ids": True,
    "include_routing_matrix": True,
    "return_sampling_mask": True,
}
#: Tokens are drawn from those that make up this share of the probability.
TOP_P = 0.95


def messages(alphabet: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Alphabet: {alphabet}"}]


def follow_up(ended: bool) -> str:
    """What the chat template renders between the two answers. ended: the first one's tokens end with <|im_end|>."""
    end = "" if ended else "<|im_end|>"
    return f"{end}\n<|im_start|>user\n{FOLLOW_UP}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Turn:
    """One request and its answer. logprobs, snapshots: of each of `tokens`; a logprob is among those that the token was drawn
    from, which `masks` has. routes: [positions, MoE layers, experts], of the pass at each input position, which are those of
    `sequence` but the last."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    snapshots: list[str]
    routes: np.ndarray
    masks: SamplingMasks
    replica: str
    cached_tokens: int
    reward: float

    def __post_init__(self) -> None:
        inputs, count = len(self.sequence) - 1, len(self.tokens)
        counts = {len(self.logprobs), len(self.snapshots), len(self.masks.offsets) - 1}
        if not count or counts != {count} or len(self.routes) != inputs:
            raise ValueError(f"the records of {inputs} positions and {count} tokens do not line up")

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def span(self) -> slice:
        """The input positions whose passes gave the tokens."""
        return slice(len(self.prompt) - 1, len(self.sequence) - 1)

    @property
    def pieces(self) -> list[tuple[str, int]]:
        """The snapshots that computed the sequence, each with its first input position. The first token's snapshot computed
        the prompt: a swap changes the prompt-cache namespace, so no older KV is reused."""
        found = [(self.snapshots[0], 0)]
        for position, snapshot in enumerate(self.snapshots, self.span.start):
            if snapshot != found[-1][0]:
                found.append((snapshot, position))
        return found


@dataclass(frozen=True)
class Rollout:
    """Both turns of a session. group: the number of its problem within the step."""

    session: str
    group: int
    turns: tuple[Turn, ...]

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns) / len(self.turns)


class Sampler:
    """Runs rollouts; any thread may. errors: why rollouts failed. budget: tokens of a turn. top_k: experts of a token."""

    def __init__(self, client: openai.OpenAI, model: str, tokenizer: Any, seed: int, budget: int, top_k: int):
        self.errors: list[str] = []
        self._client, self._model, self._tokenizer = client, model, tokenizer
        self._seed, self._budget, self._top_k = seed, budget, top_k

    def rollout(self, step: int, group: int, sample: int) -> Rollout | None:
        """None if a request of it failed."""
        session = f"rollout-{self._seed}-{step}-{group}-{sample}"
        alphabet = ALPHABETS[(step + group) % len(ALPHABETS)]
        chat, plain = self._client.chat.completions, self._client.completions
        try:
            asked = messages(alphabet)
            answer = chat.with_raw_response.create(messages=asked, **self._fields(session, 1))
            first = self._turn(answer, alphabet)
            ended = first.tokens[-1] == self._tokenizer.convert_tokens_to_ids("<|im_end|>")
            prompt = first.sequence + self._tokenizer(follow_up(ended))["input_ids"]
            answer = plain.with_raw_response.create(prompt=prompt, **self._fields(session, 2))
            second = self._turn(answer, alphabet)
            if second.prompt != prompt:
                raise ValueError("the server continued another prompt than the one sent")
        except (openai.OpenAIError, ValueError, KeyError) as error:
            self.errors.append(f"{session}: {type(error).__name__}: {error}")
            return None
        return Rollout(session, group, (first, second))

    def _fields(self, session: str, turn: int) -> dict[str, Any]:
        seed = random.Random(f"{session}/{turn}").getrandbits(31)
        headers = {"x-multi-turn-session-id": session}
        sent = {
            "model": self._model,
            "max_tokens": self._budget,
            "temperature": 1.0,
            "top_p": TOP_P,
            "seed": seed,
        }
        return {**sent, "extra_headers": headers, "extra_body": RECORDS}

    def _turn(self, response: Any, alphabet: str) -> Turn:
        answer = json.loads(response.text)
        choice, usage = answer["choices"][0], answer["usage"]
        records, tokens = choice["logprobs"]["content"], choice["token_ids"]
        ids, begin = [record["token_id"] for record in records], len(records) - len(tokens)
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"the answer ended with {choice['finish_reason']!r}")
        if usage["completion_tokens"] != len(tokens) or ids[begin:] != tokens:
            raise ValueError("usage, token ids and records are of different tokens")
        return Turn(
            prompt=ids[:begin],
            tokens=tokens,
            logprobs=[record["sampling_logprob"] for record in records[begin:]],
            snapshots=token_snapshots(answer),
            routes=routes_of(records, top_k=self._top_k).astype(np.int64),
            masks=sampling_masks_of(records),
            replica=response.headers["x-midstream-replica"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            # A token below 256 is a byte.
            reward=sum(token in map(ord, alphabet) for token in tokens) / self._budget,
        )
