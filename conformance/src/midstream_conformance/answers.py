"""What an endpoint answers to a completion: its tokens, read the same from plain responses and from streams. Pure.

Always holds: nothing is guessed: what an answer lacks is an Odd error that says what was expected where.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.client import snapshot_of

Json = dict[str, Any]

# A smaller count is no hit: two prompts may begin alike by chance, and some caches count single tokens.
MISS_TOKENS = 16


class Odd(ValueError):
    """An answer that is not of the API's form."""


@dataclass(frozen=True)
class Token:
    """One entry of logprobs.content. label: the snapshot in the `model` field beside it; None: it names none."""

    id: int
    logprob: float
    sampling_logprob: float | None
    label: str | None
    entry: Mapping[str, Any] = field(repr=False)

    @property
    def echoed(self) -> bool:
        """A prompt token: its sampling_logprob is null. On a generated one it may be absent, where the engine does not know
        it."""
        return "sampling_logprob" in self.entry and self.sampling_logprob is None

    @property
    def route(self) -> str | None:
        return self.entry.get("routing_matrix")


@dataclass
class Choice:
    """One choice, of a plain response or joined over the chunks of a stream."""

    index: int
    text: str = ""
    finish: str | None = None
    tokens: list[Token] = field(default_factory=list)
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    # All other fields.
    extra: Json = field(default_factory=dict)

    def add(self, raw: Mapping[str, Any], label: str | None) -> None:
        """Take a choice of a plain response, or the next one of a stream."""
        message = raw.get("message") or raw.get("delta") or {}
        self.text += (raw.get("text") if "text" in raw else message.get("content")) or ""
        self.finish = raw.get("finish_reason") or self.finish
        content = (raw.get("logprobs") or {}).get("content")
        self.tokens += [_token(entry, label, position) for position, entry in enumerate(content or ())]
        if raw.get("token_ids") is not None:
            self.token_ids = (self.token_ids or []) + list(raw["token_ids"])
        if raw.get("prompt_token_ids") is not None:
            self.prompt_token_ids = list(raw["prompt_token_ids"])
        known = ("index", "text", "message", "delta", "finish_reason", "token_ids", "prompt_token_ids")
        self.extra |= {name: value for name, value in raw.items() if name not in known and value is not None}

    @property
    def generated(self) -> list[Token]:
        """Without the prompt tokens that were echoed."""
        return [token for token in self.tokens if not token.echoed]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [token.logprob for token in self.tokens]


@dataclass
class Answer:
    """A 200 answer. events: of a stream, its data events in order, [DONE] as "[DONE]"; of a plain one, the body."""

    headers: Mapping[str, str]
    # The last model that was named.
    model: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Json | None = None
    events: list[Json | str] = field(default_factory=list, repr=False)
    # The body of a plain answer, or the last chunk of a stream.
    body: Json = field(default_factory=dict, repr=False)
    error: Json | None = None

    @property
    def choice(self) -> Choice:
        """The only one."""
        if len(self.choices) != 1:
            raise Odd(f"one choice was expected, there are {len(self.choices)}")
        return next(iter(self.choices.values()))

    @property
    def label(self) -> str | None:
        return snapshot_of(self.model)

    @property
    def cached(self) -> int:
        """Prompt tokens that came from the cache."""
        details = (self.usage or {}).get("prompt_tokens_details")
        if not isinstance(details, dict) or not isinstance(details.get("cached_tokens"), int):
            raise Odd(f"usage has no prompt_tokens_details.cached_tokens: {self.usage}")
        return int(details["cached_tokens"])

    @property
    def replica(self) -> str | None:
        """Which replica answered, if a header says so."""
        return self.headers.get("x-midstream-replica") or self.headers.get("fireworks-backend-host")

    @property
    def done(self) -> bool:
        """Of a stream: its last event is [DONE]."""
        return bool(self.events) and self.events[-1] == "[DONE]"

    def take(self, event: Json) -> None:
        """Read a chunk, or the body of a plain response."""
        if event.get("error"):
            self.error = event["error"]
            return
        self.body = event
        self.model = event.get("model") or self.model
        if not isinstance(event.get("choices"), list):
            raise Odd(f"choices is {event.get('choices')!r}, not a list")
        for raw in event["choices"]:
            index = raw.get("index", 0)
            self.choices.setdefault(index, Choice(index)).add(raw, self.label)
        self.usage = event.get("usage") or self.usage


def plain_answer(headers: Mapping[str, str], body: Json) -> Answer:
    answer = Answer(headers, events=[body])
    answer.take(body)
    return answer


def data_of(event: bytes) -> Json | str | None:
    """The data of one server-sent event; None: a comment."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    if not lines:
        return None
    data = b"\n".join(lines)
    if data == b"[DONE]":
        return "[DONE]"
    decoded = json.loads(data)
    if not isinstance(decoded, dict):
        raise Odd(f"an event's data is {data[:80]!r}, not an object")
    return decoded


def _token(entry: Mapping[str, Any], label: str | None, position: int) -> Token:
    token, logprob = entry.get("token_id"), entry.get("logprob")
    if not isinstance(token, int) or not isinstance(logprob, int | float):
        shown = {name: entry.get(name) for name in ("token_id", "logprob")}
        raise Odd(
            f"logprobs.content[{position}]: a whole token_id and a number as logprob were expected, got {shown}"
        )
    return Token(token, float(logprob), entry.get("sampling_logprob"), label, entry)


def is_hit(found: int, length: int) -> bool:
    """Whether `found` cached tokens of a prompt's `length` are its prefix: half of it at least, as caches keep whole blocks."""
    return found * 2 >= length


def is_miss(found: int, length: int) -> bool:
    """Whether nothing was cached, but for a few tokens that are equal by chance; never together with is_hit."""
    return found < MISS_TOKENS and not is_hit(found, length)


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """max |a - b|; infinite when they are not equally many, when there are none, and when one is no number."""
    if len(first) != len(second) or not first:
        return math.inf
    apart = [abs(a - b) for a, b in zip(first, second, strict=True)]
    return math.inf if any(map(math.isnan, apart)) else max(apart)
