"""A body's prompts: checked, rendered and tokenized, on the thread that their size asks for.

Always holds: short bodies are read at once, so that their mistakes are found before the request waits. Long bodies and texts
are read beside the event loop, one of a tenant at a time (text/text_jobs.py). Text that is far too long for the context is
never tokenized whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from midstream.core.errors import InvalidRequest
from midstream.core.headers import HEADER_TENANT
from midstream.core.types import ModelInfo
from midstream.replica.request.checked import Checked, Prompt, check_messages, split_prompts
from midstream.replica.request.fields import PromptOptions, template_variables
from midstream.replica.request.schema import LONG_BODY, ChatBody, CompletionBody
from midstream.replica.text.chat import PLAIN_ROLES, TextModel
from midstream.replica.text.text_jobs import Leave, TextJobs
from midstream.replica.text.tools import prepare_history
from midstream.replica.turns.history import History

#: Longer prompts, in characters of all together, are tokenized beside the event loop.
_LONG_TEXT = 16_384

_Made = TypeVar("_Made")


class Unread(NamedTuple):
    """Prompts that are not tokenized yet. characters: about how many to tokenize. read: does it; any thread may call it. Its
    argument is None where it is called at once."""

    characters: int
    body_size: int
    read: Callable[[Leave | None], list[Prompt]]


@dataclass(frozen=True, repr=False)
class PromptReader:
    """Of one boot's model."""

    text: TextModel
    info: ModelInfo
    jobs: TextJobs

    async def beside(self, body: bytes, read: Callable[[bytes], _Made], headers: Mapping[str, str]) -> _Made:
        """`read(body)`: of a long body in a thread. Raises what it raises."""
        if len(body) <= LONG_BODY:
            return read(body)
        return await self.jobs.run(headers.get(HEADER_TENANT, ""), lambda leave: read(body))

    def unread(
        self,
        body: CompletionBody | ChatBody,
        checked: Checked,
        body_size: int,
        histories: Sequence[History] = (),
    ) -> Unread:
        """body_size: in bytes. histories: one for each prompt of a session's request. Raises InvalidRequest."""
        if isinstance(body, ChatBody):
            options = checked.template
            if body.reasoning_effort is not None:
                knows = self.text.template_names("reasoning_effort")
                variables = template_variables(options, body.reasoning_effort, knows)
                options = replace(options, variables=variables)
            # Mistakes in a short body are found before the request waits.
            messages = None if body_size > LONG_BODY else self._messages(body)
            history = histories[0] if histories else None
            read = partial(self._read_chat, body, messages, checked.listed_tools, options, history)
            return Unread(body_size, body_size, read)
        split = _now_if_short(partial(split_prompts, body.prompt, self.info.vocab_size), body_size)
        special = checked.template.special_tokens is not False
        return Unread(
            _characters(body.prompt), body_size, partial(self._read_prompts, split, special, histories)
        )

    async def prompts(self, unread: Unread, headers: Mapping[str, str]) -> list[Prompt]:
        """Many token ids take a thread, too, but never long. Raises MidstreamError."""
        tenant = headers.get(HEADER_TENANT, "")
        if unread.characters >= _LONG_TEXT:
            return await self.jobs.read(tenant, unread.read)
        if unread.body_size <= LONG_BODY:
            return unread.read(None)
        return await self.jobs.run(tenant, unread.read)

    def _messages(self, body: ChatBody) -> list[dict[str, Any]]:
        messages = check_messages(body.messages)
        for message in messages:
            if "tool_calls" in message or "function_call" in message:
                return prepare_history(messages, self.text.tools.arguments)
        return messages

    def _read_chat(
        self,
        body: ChatBody,
        messages: list[dict[str, Any]] | None,
        tools: list[dict[str, Any]] | None,
        options: PromptOptions,
        history: History | None,
        leave: Leave | None,
    ) -> list[Prompt]:
        """messages: None where they are not checked yet."""
        given = self._messages(body) if messages is None else messages
        if leave is not None:
            leave.check()
        # The template shows such messages as they are.
        plain = history is None
        for message in given if plain else ():
            plain = plain and len(message) == 2 and message["role"] in PLAIN_ROLES

        def render(part: list[dict[str, Any]], prompted: bool) -> str:
            return self.text.render(
                part,
                tools,
                generation_prompt=prompted and options.generation_prompt,
                continued=prompted and options.continued,
                variables=options.variables,
                plain=plain,
            )

        def check(text: str) -> None:
            where, context = "messages: the rendered chat template", self.info.max_model_len
            if len(text) > context:
                self.text.check_size(text, where, "messages", context)
                self.text.check_pieces(text, where, "messages", context, leave)
            if leave is not None:
                leave.check()

        special = bool(options.special_tokens)
        prompt, others = None, [tools, options.variables, special]
        if history is not None:
            behind = partial(self.text.encode_behind, special=special)
            own = (self.text, render, given, others, check, behind)
            prompt = history.prompt(*own, goes_on=options.continued)
        sampled = 0 if history is None or prompt is None else history.sampled
        if not plain:
            self.text.message_format(tools=tools is not None).check(given, sampled)
        if prompt is None:
            text = render(given, True)
            check(text)
            encode = self.text.encode if special else self.text.encode_rendered
            prompt = Prompt(encode(text), text)
        return [_not_empty(prompt)]

    def _read_prompts(
        self,
        split: Callable[[], list[str | tuple[int, ...]]],
        special: bool,
        histories: Sequence[History],
        leave: Leave | None,
    ) -> list[Prompt]:
        encode = self.text.encode if special else self.text.encode_rendered
        prompts, context = [], self.info.max_model_len
        for number, prompt in enumerate(split()):
            if leave is not None:
                leave.check()
            if isinstance(prompt, str) and len(prompt) > context:
                self.text.check_pieces(prompt, "prompt", "prompt", context, leave)
            if histories:
                prompts.append(histories[number].raw(self.text, encode, prompt, special))
            elif isinstance(prompt, str):
                prompts.append(Prompt(encode(prompt), prompt))
            else:
                prompts.append(Prompt(prompt))
        return [_not_empty(prompt) for prompt in prompts]


def _now_if_short(make: Callable[[], _Made], body_size: int) -> Callable[[], _Made]:
    """`make`, called at once for a short body: it takes no time, and mistakes are found before the request waits."""
    if body_size > LONG_BODY:
        return make
    made = make()
    return lambda: made


def _characters(prompt: str | list[str | int | list[int]]) -> int:
    """Of a completions body's texts."""
    if isinstance(prompt, str):
        return len(prompt)
    if prompt and isinstance(prompt[0], int):
        return 0
    return sum(len(one) for one in prompt if isinstance(one, str))


def _not_empty(prompt: Prompt) -> Prompt:
    if not prompt.token_ids:
        raise InvalidRequest("prompt: must hold at least one token", param="prompt")
    return prompt
