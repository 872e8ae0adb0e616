"""How a training call fails after it was accepted."""

from __future__ import annotations

from typing import Literal

Category = Literal["user", "server", "unknown"]


class Failed(Exception):
    """What was accepted cannot be done: the future ends with this error. The SDK shows it once and does not try again."""

    def __init__(self, message: str, category: Category = "user") -> None:
        super().__init__(message)
        self.message = message
        self.category: Category = category
