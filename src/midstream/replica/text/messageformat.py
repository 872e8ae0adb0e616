"""What a chat template shows of messages, found out by rendering probes. Pure, given a way to render.

Owns: which roles and fields a template leaves out without a word, what stands in for them, and the refusal of the rest.
Always holds:
- Text that a client sends is in the prompt, or the request is refused with the place of the text. Excepted is what a template
  leaves out of old answers: their thinking.
- A template is probed once for requests with tools and once for those without. A refused probe proves nothing: the
  template refuses the request, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.core.errors import InvalidRequest
from midstream.replica.text import reasoning_tags
from midstream.replica.text.toolformat import Arguments

#: Raises InvalidRequest where the template refuses.
Render = Callable[[list[dict[str, Any]]], str]
Message = dict[str, Any]

_PROBE = "zprobez"
_USER = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": "y"}
_SYSTEM = ("system", "developer")
#: Begins with the words of Anthropic's API: Claude Code sends the request again without such messages (colibri#725).
NO_LATER_SYSTEM = "role 'system' is not supported on this model behind other messages"
_NAMED = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class MessageFormat:
    """What a template shows.

    developer: it has the role; else such messages are system messages. system: it shows one at the beginning. second: it shows
    another one behind that; else they are one message. later: the roles of those that it shows behind other messages, or
    refuses there. results: of tools. beside_calls: the content of an answer that has calls. thinking: of answers. names: the
    roles that it shows with their names.
    """

    developer: bool
    system: bool
    second: bool
    later: frozenset[str]
    results: bool
    beside_calls: bool
    thinking: bool
    names: frozenset[str]

    def check(self, messages: Sequence[Message], first: int = 0) -> None:
        """Raises InvalidRequest for a text that the template leaves out of messages[first:]."""
        for index, message in enumerate(messages[first:], first):
            field = self._left_out(message, all(one["role"] in _SYSTEM for one in messages[:index]))
            if field is not None:
                place, what = field
                raise InvalidRequest(
                    f"messages[{index}].{place}: this model's chat template leaves out {what}; send it otherwise",
                    param="messages",
                )

    def _left_out(self, message: Message, begins: bool) -> tuple[str, str] | None:
        """The field, and what the template leaves out. begins: nothing but system messages stands before it."""
        role, content = message["role"], str(message.get("content") or "").strip()
        if role in _NAMED and message.get("name") and role not in self.names:
            return "name", f"the names of {role} messages"
        if role in _SYSTEM and content:
            if begins and self._role(role) == "system" and not self.system:
                return "role", "system messages"
            if not begins and self._role(role) not in self.later:
                return "role", f"system messages that stand behind others ({NO_LATER_SYSTEM})"
        if role == "tool" and content and not self.results:
            return "role", "the results of tools"
        if role != "assistant":
            return None
        if content and message.get("tool_calls") and not self.beside_calls:
            return "content", "the text of a message that has tool calls"
        if reasoning_tags.of_message(message) and not self.thinking:
            return "reasoning_content", "the reasoning of answers"
        return None

    def _role(self, role: str) -> str:
        return "system" if role == "developer" and not self.developer else role

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template shows all of their texts."""
        made = [self._mapped(message) for message in messages]
        leading = next((at for at, one in enumerate(made) if one["role"] not in _SYSTEM), len(made))
        if leading < 2 or self.second:
            return made
        texts = [one["content"] for one in made[:leading] if one["content"]]
        return [made[0] | {"content": "\n\n".join(texts)}, *made[leading:]]

    def _mapped(self, message: Message) -> Message:
        role = self._role(message["role"])
        if role != message["role"]:
            message = message | {"role": role}
        thought = reasoning_tags.of_message(message) if role == "assistant" else ""
        # Templates read one of these names.
        return {**dict.fromkeys(reasoning_tags.FIELDS, thought), **message} if thought else message


def without_later_system(messages: Sequence[Message]) -> list[Message]:
    """The messages but for system messages that stand behind others."""
    leading = next((at for at, one in enumerate(messages) if one["role"] not in _SYSTEM), len(messages))
    return [*messages[:leading], *(one for one in messages[leading:] if one["role"] not in _SYSTEM)]


def examine(render: Render, arguments: Arguments | None, *, thinks: bool) -> MessageFormat:
    """arguments: how the template takes those of calls. thinks: it has tags for thinking, and its way with that of old
    answers."""

    def shows(*conversations: list[Message]) -> bool:
        """False: it leaves the probe out of all that it renders."""
        texts = [text for given in conversations if (text := _try(render, given)) is not None]
        return not texts or any(_PROBE in text for text in texts)

    def has(role: str) -> bool:
        return _PROBE in (_try(render, [{"role": role, "content": _PROBE}, _USER]) or "")

    system = {"role": "system", "content": "x"}
    developer = has("developer")
    later = {"role": "system", "content": _PROBE}
    result = {"role": "tool", "tool_call_id": "probe0001", "name": "probe", "content": _PROBE}
    function = {"name": "probe", "arguments": "{}" if arguments == "text" else {}}
    calls = [{"id": "probe0001", "type": "function", "function": function}]
    call = _ANSWER | ({} if arguments is None else {"content": "", "tool_calls": calls})
    thinking = _ANSWER | dict.fromkeys(reasoning_tags.FIELDS, _PROBE)
    return MessageFormat(
        developer=developer,
        system=shows([later, _USER]),
        second=_PROBE in (_try(render, [system, later, _USER]) or "")
        and (not developer or _PROBE in (_try(render, [system, later | {"role": "developer"}, _USER]) or "")),
        later=frozenset(
            role
            for role in _SYSTEM
            if shows([_USER, _ANSWER, {"role": role, "content": _PROBE}, _USER])
            and shows([_USER, _ANSWER, _USER, {"role": role, "content": _PROBE}])
        ),
        results=shows([_USER, call, result]),
        beside_calls=shows([_USER, call | {"content": _PROBE}, result | {"content": "x"}]),
        thinking=thinks or shows([_USER, thinking], [_USER, thinking | call, result | {"content": "x"}]),
        names=frozenset(role for role in _NAMED if _shows_name(render, role)),
    )


def _shows_name(render: Render, role: str) -> bool:
    named = {"role": role, "content": "x", "name": _PROBE}
    given = [_USER, named, _USER] if role == "assistant" else [named, _ANSWER, _USER]
    return _PROBE in (_try(render, given) or "")


def _try(render: Render, messages: list[Message]) -> str | None:
    try:
        return render(messages)
    except InvalidRequest:
        return None
