"""How a Tinker call is refused. One that was accepted fails later, as the error of its future (trainer/types.py).

Always holds: no status has another meaning for the SDK: 402 (billing), 409 (retried for minutes), a 400 without a body (a
broken connection). A refusal that the SDK retries (408, 429, 503) says when to come again.
"""

from __future__ import annotations

from typing import Any

RETRIED = (408, 429, 503)
RETRY_AFTER_S = 5


class TinkerRefusal(Exception):
    """The request is answered with `status`; `param` names the field at fault."""

    def __init__(self, status: int, detail: str, param: str | None = None) -> None:
        super().__init__(detail)
        assert status not in (402, 409), f"the SDK has its own idea of {status}"
        self.status = status
        self.detail = detail
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"detail": self.detail, "param": self.param}

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in RETRIED else {}
