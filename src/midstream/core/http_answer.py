"""The answer to one HTTP request, as the client, the Tinker front and the supervisor read it.

Always holds: whatever the body is, reading it gives the value that was asked for, or raises NotThatAnswer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.retry import Outcome, asked_pause_s, outcome_of

#: Of a server's words, in characters: in its own error, and in a body that is none.
MESSAGE_CHARS_MAX = 1000
TEXT_CHARS_MAX = 200

_Kind = TypeVar("_Kind")


class NotThatAnswer(ValueError):
    """The body is not JSON, or holds something else. The message says what was expected."""


class HttpAnswer(NamedTuple):
    """headers: by lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.status)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @property
    def message(self) -> str:
        """The words of the error in the body; without one, the beginning of the body. May be empty."""
        try:
            return str(msgspec.json.decode(self.body)["error"]["message"])[:MESSAGE_CHARS_MAX]
        except (*NOT_JSON, KeyError, TypeError):
            return self.text[:TEXT_CHARS_MAX]

    @property
    def param(self) -> str | None:
        """The field at fault, as the error in the body names it."""
        return self._of_error("param")

    @property
    def code(self) -> str | None:
        """Of the error in the body."""
        return self._of_error("code")

    def _of_error(self, field: str) -> str | None:
        try:
            found = msgspec.json.decode(self.body)["error"][field]
        except (*NOT_JSON, KeyError, TypeError):
            return None
        return found if isinstance(found, str) else None

    @property
    def problem(self) -> str:
        """The same words, or the status where there are none."""
        return self.message or f"the server answered {self.status}"

    def asked_pause_s(self, now: float) -> float | None:
        """The pause that the server asks for before the next attempt, in seconds. now: seconds since the epoch."""
        return asked_pause_s(self.headers.get("retry-after", ""), now)

    def read(self, kind: type[_Kind]) -> _Kind:
        """The JSON of the body. Raises NotThatAnswer."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except NOT_JSON as error:
            raise NotThatAnswer(str(error)) from error

    def json(self) -> Any:
        """The JSON of the body, whatever it holds. Raises NotThatAnswer."""
        try:
            return msgspec.json.decode(self.body)
        except NOT_JSON as error:
            raise NotThatAnswer(f"answered {self.status} without JSON") from error


def read(value: Any, kind: type[_Kind]) -> _Kind:
    """`value`, which is JSON that was decoded before, as `kind`. Raises NotThatAnswer."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise NotThatAnswer(str(error)) from error
