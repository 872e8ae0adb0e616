"""What a message of a conversation is known by: keys of beginnings of a conversation, and digests of thinking.

Always holds: messages with the same meaning have the same key. White space at the ends of an answer and in its calls' arguments
does not count, and neither do the ids of its calls, nor thinking.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from midstream.replica.text import reasoning_tags

_OPEN = "<think>"

#: Of a beginning of a conversation: its messages, and the tools.
Key = bytes


def keys_of(messages: Iterable[dict[str, Any]], tools: Any, options: Any = None) -> list[Key]:
    """The key of each beginning of a conversation, the one with the first message alone first.

    messages: as a chat template takes them (checked.check_messages). tools, options: what else the template gets.
    """
    key = key_before(tools, options)
    keys = []
    for message in messages:
        key = digest(key, _identity_of(message))
        keys.append(key)
    return keys


def key_before(tools: Any, options: Any = None) -> Key:
    """The key of a conversation without messages."""
    return digest(b"", [tools, options])


def key_of_answer(before: Key, content: str, calls: Iterable[tuple[str, Any]]) -> Key:
    """The key behind an answer. calls: name and arguments, as JSON text or as what it says, of each."""
    return digest(before, _answer(content, [[name, _arguments(given)] for name, given in calls]))


def thought_of(content: str, beside: str) -> str:
    """A digest of the thinking in an answer, which stands beside the content or within it; empty without any."""
    within, _ = _parted(content)
    text = "\0".join(part for part in (beside.strip(), within) if part)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if text else ""


def thoughts_of(messages: Iterable[dict[str, Any]]) -> list[str]:
    """The thinking of each message."""
    return [
        thought_of(message.get("content") or "", reasoning_tags.of_message(message))
        if message.get("role") == "assistant"
        else ""
        for message in messages
    ]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and arguments of each call of an earlier answer."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function.get("name"), function.get("arguments", "")) for function in functions]


def _parted(content: str) -> tuple[str, str]:
    """The thinking within an answer, without its tags, and what the answer says behind it."""
    within, closed, answer = content.rpartition("</think>")
    if not closed and content.lstrip().startswith(_OPEN):
        within, answer = content, ""
    return within.strip().removeprefix(_OPEN).strip(), answer.strip()


def digest(before: bytes, value: Any) -> Key:
    """The key of what follows `before`. value: JSON."""
    return hashlib.blake2b(before + _encode(value), digest_size=16).digest()


_encode = msgspec.json.Encoder(order="deterministic").encode


def _answer(content: str, calls: list[list[Any]]) -> list[Any]:
    # Clients may send thinking back within the content, or leave it out.
    return ["assistant", _parted(content)[1], calls]


def _identity_of(message: dict[str, Any]) -> Any:
    if message.get("role") != "assistant":
        return {name: value for name, value in message.items() if value is not None}
    calls = [[name, _arguments(given)] for name, given in calls_of(message)]
    return _answer(message.get("content") or "", calls)


def _arguments(given: Any) -> Any:
    """What they say, however they are spaced, as text: they may hold half a surrogate pair."""
    try:
        arguments = (json.loads(given) if given.strip() else {}) if isinstance(given, str) else given or {}
        return json.dumps(arguments, sort_keys=True)
    except (ValueError, RecursionError):
        return str(given)
