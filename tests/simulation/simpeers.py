"""What another replica gives of a pushed snapshot: the store that obstore makes of its port, over the simulated network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

from obstore.exceptions import GenericError

from midstream.core.headers import HEADER_TOKEN
from midstream.core.http_answer import HttpAnswer
from midstream.http.call import CallFailed, call

ANSWER_S = 10.0


class PeerStore:
    """url: of the directory. token: what the replica asks for."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    async def head_async(self, name: str) -> dict[str, Any]:
        return _meta(name, await self._answer(name, 0, 1))

    async def get_async(self, name: str, *, options: dict[str, Any]) -> Any:
        answer = await self._answer(name, *options["range"])

        async def read() -> bytes:
            return answer.body

        return SimpleNamespace(meta=_meta(name, answer), bytes_async=read)

    async def _answer(self, name: str, begin: int, end: int) -> HttpAnswer:
        path = f"{urlsplit(self._url).path}/{quote(name)}"
        headers = f"{HEADER_TOKEN}: {self._token}\r\nrange: bytes={begin}-{end - 1}\r\n"
        try:
            answer = await call(self._url, "GET", path, None, ANSWER_S, headers)
        except CallFailed as error:
            raise GenericError(f"Generic HTTP error: {error}") from error
        if answer.status == 404:
            raise FileNotFoundError(name)
        if answer.status != 206:
            raise GenericError(f"Generic HTTP error: status {answer.status}")
        return answer


def _meta(name: str, answer: HttpAnswer) -> dict[str, Any]:
    size = int(answer.headers["content-range"].rpartition("/")[2])
    return {"path": name, "size": size, "e_tag": answer.headers["etag"], "last_modified": None}
