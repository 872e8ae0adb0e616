"""A chat client at the ports: it talks with the trees of a replica, and samples its answers itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from chat_templates import STYLES, call_text, text_model, tools_of

from midstream.core.types import TokenRecord
from midstream.replica.request.checked import Prompt
from midstream.replica.response.choice import CallStage, Choice, Piece, id_maker
from midstream.replica.text.tools import prepare_history
from midstream.replica.turns.history import History, Policy
from midstream.replica.turns.tree import Trees

SESSION = ("", "s")
WORDS = ("hello", "there", "an answer", "in 1100", "ünder", "<b>", " ", "\n", "ring", "{}", "x")


class Client:
    """A harness that talks for several turns, drops thinking, spaces arguments refetch, and sometimes edits what was said."""

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

    def ask(self, *, goes_on: bool = False) -> tuple[Prompt, History]:
        """goes_on: the last message is an answer that goes on."""
        history = History(self.trees, SESSION, self.ends, self.policy, "routes")
        prompt = self._prompt(history, goes_on=goes_on)
        history.settled(prompt)
        return prompt, history

    def resume(self, prompt: Prompt, lost: History) -> History:
        """The request as a replica reads it that goes on with its stream. lost: its history on the replica that was lost."""
        history = History(self.trees, SESSION, self.ends, "template", "routes")
        rendered = self._prompt(history)
        assert lost.continues or rendered.token_ids == prompt.token_ids, "the stream cannot go on"
        history.settled(prompt)
        return history

    def _prompt(self, history: History, *, goes_on: bool = False) -> Prompt:
        messages = [message | {"content": message["content"] or ""} for message in self.messages]
        if any("tool_calls" in message for message in messages):
            messages = prepare_history(messages, self.text.tools.arguments)
        own = (self.text, self._render, messages, self.tools, lambda _: None, self.text.encode_rendered)
        prompt = history.prompt(*own, goes_on=goes_on)
        return prompt or Prompt(self.text.encode_rendered(self._render(messages, True)))

    def check_added(self, added: tuple[int, ...]) -> None:
        """Behind the parent's tokens stands what the template writes behind the answer, all of it and nothing twice."""
        text = self.text.vocabulary.raw_text(list(added))
        messages = prepare_history(self.messages, self.text.tools.arguments)
        rendered = self._render(messages, True)
        assert rendered.endswith(text)
        behind = len(self.messages) - 1 - self.last_answer()
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

    def last_answer(self) -> int:
        return max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")

    def draw(self) -> tuple[int, ...]:
        """An answer, tokenized in some way, which ends with `finish`."""
        calls = self.tools is not None and self.rng.random() < 0.5
        said = "" if self.name == "llama3" and calls else self._words()
        if self.style.thinks and self.rng.random() < 0.7:
            said = f"<think>\n{self._words()}\n</think>\n\n{said}"
        if calls:
            said += call_text(self.name, {"x": self.rng.randrange(9)}, spaced=self.rng.random() < 0.5)
        tokens = self._tokenized(said)
        self.finish = "length" if self.rng.random() < 0.15 else "stop"
        return tokens + self.ends if self.finish == "stop" else tokens

    def answer(self, history: History) -> tuple[int, ...]:
        """Samples an answer, and tells the client what a server would tell."""
        tokens = self.draw()
        self.told(Reply(self, history), records_of(tokens))
        return tokens

    def say(self, history: History, text: str) -> None:
        self.say_tokens(history, self.text.encode_rendered(text) + self.ends)

    def say_tokens(self, history: History, tokens: tuple[int, ...]) -> None:
        self.finish = "stop"
        self.told(Reply(self, history), records_of(tokens))

    def told(self, reply: Reply, records: Sequence[TokenRecord]) -> None:
        """The reply has these records, and ends."""
        reply.take(records)
        self._take_answer(reply.end())

    def _tokenized(self, text: str) -> tuple[int, ...]:
        """Cut at random: the tokens of the pieces are seldom those of the whole."""
        ids: list[int] = []
        while text:
            at = self.rng.randrange(1, 6)
            ids += self.text.encode_rendered(text[:at])
            text = text[at:]
        return tuple(ids)

    def _take_answer(self, pieces: list[Piece]) -> None:
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


class Reply:
    """One answer on its way through a replica."""

    def __init__(self, client: Client, history: History) -> None:
        self._history, self._finish = history, client.finish
        shown, self._stage = frozenset[int](), None
        if client.tools is not None and (found := client.text.tools.format) is not None:
            shown = client.text.marker_ids(found.dialect.markers)
            parser = found.dialect.parser({"look": {}})
            self._stage = CallStage(parser, True, id_maker(None, "s"))
        self._choice = Choice(0, client.text.vocabulary, (), frozenset(client.ends), shown)
        self._pieces: list[Piece] = []

    def take(self, records: Sequence[TokenRecord], *, replayed: bool = False) -> None:
        for record in records:
            self._release(self._choice.feed(record), replayed=replayed)

    def end(self) -> list[Piece]:
        """All pieces. The answer is a turn."""
        self._release(self._choice.end("stop" if self._finish == "stop" else "length"))
        if self._stage is not None:
            self._keep(self._stage.end())
        self._history.end(self._choice, 0.0)
        return self._pieces

    def _release(self, pieces: list[Piece], *, replayed: bool = False) -> None:
        self._keep(pieces if self._stage is None else self._stage.feed(pieces), replayed=replayed)

    def _keep(self, pieces: list[Piece], *, replayed: bool = False) -> None:
        self._pieces += pieces
        self._history.take(0, pieces, replayed=replayed)


def records_of(tokens: Sequence[int]) -> list[TokenRecord]:
    return [TokenRecord(token, 0.0, 0.0, "base") for token in tokens]
