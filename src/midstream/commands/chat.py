"""`midstream chat`: talk to a served model, for a first try. One session, streamed answers, and after each what served it.

Always holds: every turn has the session's key. On a terminal nothing that the model writes acts on it. Elsewhere each line of
standard input is a prompt, standard output has the answers alone, and the first failure ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from midstream.client import PublishError
from midstream.commands.common import add_server_arguments, address, connect, guarded, request_headers
from midstream.core.errors import ConfigError
from midstream.core.http_answer import HttpAnswer
from midstream.core.session_keys import SESSION_HEADERS
from midstream.core.text import plain

PATH = "/v1/chat/completions"
TIMEOUT = httpx.Timeout(10.0, read=600.0)
EXITS, RESET, SHOW_HELP = ("/exit", "/quit"), "/reset", "/help"
HELP = f"{' or '.join(EXITS)} or Ctrl-D ends, {RESET} begins a new session, {SHOW_HELP} shows this line, Ctrl-C ends an answer"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class TurnRefused(PublishError):
    """The server refused a turn, or did not answer. The message is for the person who asked."""


@dataclass
class ChatAnswer:
    """One answer. prompt_tokens, cached_tokens, tokens: None where the server did not say, as for one that was ended early."""

    text: str = ""
    snapshots: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    asked_at: float = 0.0
    first_at: float | None = None
    last_at: float | None = None

    def summary(self) -> str:
        served = " then ".join(self.snapshots) or "a snapshot that it did not name"
        parts = [f"served by {plain(served)}"]
        if self.prompt_tokens is not None:
            parts.append(f"{self.prompt_tokens} prompt tokens, {self.cached_tokens or 0} of them cached")
        if self.tokens is not None:
            speed = self._speed()
            parts.append(f"{self.tokens} tokens" + ("" if speed is None else f", {speed:.0f} tokens/s"))
        if self.first_at is not None:
            parts.append(f"the first after {(self.first_at - self.asked_at) * 1000:.0f} ms")
        if self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {plain(str(self.finish_reason))}")
        return "; ".join(parts)

    def numbers(self, prompt: str, session: str) -> dict[str, Any]:
        """The numbers that --json prints. Speeds in tokens per second of the client's clock, times in seconds."""
        first = None if self.first_at is None else self.first_at - self.asked_at
        return {
            "session": session,
            "prompt": prompt,
            "answer": self.text,
            "snapshots": self.snapshots,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "tokens_per_s": self._speed(),
            "first_token_s": first,
            "finish_reason": self.finish_reason,
        }

    def _speed(self) -> float | None:
        """Between the first token and the last one; None when there are no two, or they came at once."""
        if self.tokens is None or self.tokens < 2 or self.first_at is None or self.last_at is None:
            return None
        took = self.last_at - self.first_at
        return (self.tokens - 1) / took if took > 0 else None


class Conversation:
    """The messages so far and the session's key. model, options: of every request."""

    def __init__(self, http: httpx.Client, model: str, system: str | None, options: dict[str, Any]) -> None:
        self.model = model
        self._http = http
        self._system = system
        self._options = options
        self.reset()

    def reset(self) -> None:
        self.session = f"chat-{secrets.token_hex(6)}"
        self._messages: list[dict[str, str]] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def ask(self, prompt: str, on_text: Callable[[str], None]) -> ChatAnswer:
        """Stream one answer, each piece to `on_text`. An interrupt ends it; what there is of it stays part of the conversation.

        Raises TurnRefused; the conversation is then as it was.
        """
        answer = ChatAnswer(asked_at=time.monotonic())
        messages = [*self._messages, {"role": "user", "content": prompt}]
        body = self._options | {"model": self.model, "messages": messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        try:
            headers = {SESSION_HEADERS[0]: self.session}
            with self._http.stream("POST", PATH, json=body, headers=headers) as response:
                if not response.is_success:
                    refusal = HttpAnswer(response.status_code, response.headers, response.read())
                    raise TurnRefused(f"{refusal.status} {refusal.message}")
                for event in events(response.iter_lines()):
                    _take(answer, event, on_text)
        except httpx.HTTPError as error:
            raise TurnRefused(f"{self._http.base_url}: {error or type(error).__name__}") from error
        except KeyboardInterrupt:
            answer.finish_reason = "you"
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, to [DONE]. Raises TurnRefused for an error's event, and for one that is not JSON."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise TurnRefused(f"the stream has an event that is not JSON: {data[:200]!r}") from error
        if "error" in event:
            raise TurnRefused(str(event["error"].get("message", event["error"])))
        yield event
    raise TurnRefused("the stream ended before the answer did")


def _take(answer: ChatAnswer, event: dict[str, Any], on_text: Callable[[str], None]) -> None:
    # A snapshot may name an adapter and its base: ADAPTER@BASE.
    _, at, snapshot = event.get("model", "").partition("@")
    if at and snapshot not in answer.snapshots[-1:]:
        answer.snapshots.append(snapshot)
    if (usage := event.get("usage")) is not None:
        answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in event.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if text := choice.get("delta", {}).get("content"):
            answer.last_at = time.monotonic()
            answer.first_at = answer.first_at or answer.last_at
            answer.text += text
            on_text(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=guarded(_chat))
    add_server_arguments(parser)
    parser.add_argument(
        "--model", metavar="NAME", help="as clients name it (default: the first one that is served)"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of each answer")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of the sampling (default: the model's own)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object per answer, on a terminal too; a line is a prompt",
    )


def _chat(options: argparse.Namespace) -> int:
    if options.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1, got {options.max_tokens}")
    if options.temperature is not None and not options.temperature >= 0:
        raise ConfigError(f"--temperature must be at least 0, got {options.temperature:g}")
    sampling: dict[str, Any] = {"max_tokens": options.max_tokens}
    if options.temperature is not None:
        sampling["temperature"] = options.temperature
    model = options.model or _first_model(options)
    root = address(options).rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=root, headers=request_headers(options), timeout=TIMEOUT) as http:
        conversation = Conversation(http, model, options.system, sampling)
        if sys.stdin.isatty() and not options.json:
            return _talk(conversation, root)
        return _answer_lines(conversation, sys.stdin, options.json)


def _first_model(options: argparse.Namespace) -> str:
    """Raises ConfigError when nothing is served; PublishError."""
    with connect(options) as server:
        models = server.get("/v1/models", retry_s=0)["data"]
    asked = options.deployment
    names = [
        str(row["id"])
        for row in models
        if asked is None or asked in (row.get("deployment"), str(row.get("deployment")).rpartition("/")[2])
    ]
    if not names:
        raise ConfigError(f"{address(options)}: serves no model{f' of deployment {asked}' if asked else ''}")
    return names[0]


def _answer_lines(conversation: Conversation, lines: TextIO, as_json: bool) -> int:
    show = _shown if sys.stdout.isatty() else str
    for line in lines:
        prompt = line.strip()
        if prompt in EXITS:
            return 0
        if prompt == SHOW_HELP:
            print(HELP, file=sys.stderr)
        elif prompt == RESET:
            conversation.reset()
        elif prompt:
            if as_json:
                answer = conversation.ask(prompt, lambda text: None)
                print(json.dumps(answer.numbers(prompt, conversation.session)), flush=True)
            else:
                answer = conversation.ask(prompt, lambda text: print(show(text), end="", flush=True))
                print(flush=True)
                print(answer.summary(), file=sys.stderr)
            if answer.finish_reason == "you":
                raise KeyboardInterrupt
    return 0


def _talk(conversation: Conversation, root: str) -> int:
    with contextlib.suppress(ImportError):
        # Gives `input` history and the keys of a line editor, where the interpreter has it.
        import readline  # noqa: F401
    print(f"{plain(conversation.model)} at {root}, session {conversation.session}\n{HELP}")
    while True:
        try:
            prompt = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        if prompt in EXITS:
            return 0
        if prompt == SHOW_HELP:
            print(HELP)
        elif prompt == RESET:
            conversation.reset()
            print(f"session {conversation.session}")
        elif prompt:
            _answer(conversation, prompt)


def _answer(conversation: Conversation, prompt: str) -> None:
    try:
        answer = conversation.ask(prompt, lambda text: print(_shown(text), end="", flush=True))
    except TurnRefused as error:
        print(f"\nmidstream chat: {plain(str(error))}", file=sys.stderr)
        return
    summary = f"[{answer.summary()}]"
    print(f"\n{_DIM}{summary}{_PLAIN}" if sys.stdout.isatty() else f"\n{summary}")


def _shown(text: str) -> str:
    """The text with its line breaks and tabs, and nothing else that acts on a terminal."""
    return "".join(part if part in "\n\t" else plain(part) for part in text)
