"""The endpoint under test, over HTTP: completions plain and streamed, and everything else as raw requests.

Always holds: a request is sent once, never retried: what a retry would hide is what is looked for. A key is sent to the
endpoint only, and is in no message. A request of the hot-load API names the model and the deployment, so that it is for
them also where the endpoint has several.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from midstream.core.errors import ConfigError
from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.answers import Answer, Json, Odd, data_of, plain_answer
from midstream_conformance.outcome import Failed

TIMEOUT_S = 120.0
ISOLATION_HEADER = "x-prompt-cache-isolation-key"
TRAJECTORY_HEADER = "x-multi-turn-session-id"
AFFINITY_HEADER = "x-session-affinity"
NO_KEY = ""
# Characters that a header can have, without blanks.
_KEY = re.compile(r"[\x21-\x7e]+")


class Endpoint:
    """`url`: with or without /v1 or /inference/v1. Also an asynchronous context manager."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        deployment: str | None,
        model: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Raises ConfigError on an address or a key that cannot be one; the key is not in its message."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"URL {url!r}: write http://HOST:PORT: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"URL {url!r}: write http://HOST:PORT")
        if parsed.userinfo or parsed.query or parsed.fragment:
            raise ConfigError("URL: must not hold a user, password or query; give a key as --api-key")
        # The HTTP library would show the key in an error.
        if api_key is not None and not _KEY.fullmatch(api_key):
            raise ConfigError(
                "--api-key: holds characters that a header cannot have, or blanks (a line's end?)"
            )
        plain = url.rstrip("/").removesuffix("/v1")
        self.root = plain.removesuffix("/inference")
        self.prefix = "/inference/v1" if plain.endswith("/inference") else "/v1"
        self.model = model
        self.deployment = deployment
        # They name the model and the deployment that a signal is for.
        self.hot_load_headers: dict[str, str] = {}
        self._key = api_key
        headers = {"fireworks-deployment": deployment} if deployment else {}
        limits = httpx.Limits(max_connections=256)
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers, limits=limits, transport=transport)

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    @property
    def has_key(self) -> bool:
        return self._key is not None

    async def request(
        self,
        method: str,
        path: str,
        body: Json | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        x_api_key: bool = False,
    ) -> httpx.Response:
        """The response, whatever its status. path: from the root.

        key: instead of the endpoint's own; NO_KEY for none. x_api_key: in that header instead of as a Bearer token.
        """
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = self.hot_load_headers if path.startswith(HOT_LOAD_PATH) else {}
        sent = self._headers({**named, **(headers or {})}, key, x_api_key)
        return await self._http.request(method, self.root + path, content=content, headers=sent)

    def _headers(
        self, headers: Mapping[str, str] | None, key: str | None = None, x_api_key: bool = False
    ) -> dict[str, str]:
        own = {"content-type": "application/json"}
        sent = self._key if key is None else key
        if sent:
            own |= {"x-api-key": sent} if x_api_key else {"authorization": f"Bearer {sent}"}
        return own | dict(headers or {})

    async def post(
        self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """An inference request: `path` below the prefix, `fields` on top of the model."""
        return await self.request("POST", self.prefix + path, {"model": self.model, **fields}, headers)

    async def complete(
        self,
        prompt: str | Sequence[Any],
        *,
        headers: Mapping[str, str] | None = None,
        path: str = "/completions",
        **fields: Any,
    ) -> Answer:
        """A completion of `prompt`, or a chat whose messages it is. Raises Failed unless it is a 200."""
        body = {"messages" if path.startswith("/chat") else "prompt": _listed(prompt), **fields}
        if fields.get("stream"):
            flight = Flight(self, body, headers, path)
            await flight.run()
            return flight.whole()
        response = await self.post(path, body, headers)
        if response.status_code != 200:
            raise Failed(f"{path}: {refusal(response)}")
        return plain_answer(response.headers, response.json())

    async def chat(self, text: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": text}]
        return await self.complete(messages, headers=headers, path="/chat/completions", **fields)

    async def score(self, ids: Sequence[int], headers: Mapping[str, str] | None = None) -> list[float]:
        """The logprob of each token of `ids` under what serves now, computed without cached KV; nats."""
        return (await self.scored(ids, headers)).choice.logprobs

    async def scored(self, ids: Sequence[int], headers: Mapping[str, str] | None = None) -> Answer:
        """The answer that has the scores, as `choice.logprobs`. Raises Failed unless its tokens are `ids`."""
        apart = {ISOLATION_HEADER: f"score-{secrets.token_hex(8)}", **(headers or {})}
        fields: Json = {"max_tokens": 0, "echo": True, "logprobs": True, "prompt_cache_max_len": 0}
        answer = await self.complete(ids, headers=apart, **fields)
        content = answer.choice.tokens
        if [token.id for token in content] != list(ids):
            raise Failed(f"echo gave {len(content)} tokens that are not the {len(ids)} of the prompt")
        return answer

    def streaming(self) -> httpx.AsyncClient:
        return self._http


class Flight:
    """One streamed completion. `begun` is set at its first generated token and at its end."""

    def __init__(
        self,
        endpoint: Endpoint,
        body: Json,
        headers: Mapping[str, str] | None = None,
        path: str = "/completions",
    ) -> None:
        self._endpoint, self._path = endpoint, path
        self.body = {"model": endpoint.model, **body, "stream": True}
        self._sent = endpoint._headers(headers)
        self.begun = asyncio.Event()
        self.status = 0
        # The reason of a status that is not 200, or of a broken connection.
        self.why = ""
        self.retry_after: str | None = None
        self.answer: Answer | None = None
        # When each event came, in seconds of the loop's clock.
        self.at: list[float] = []

    async def run(self) -> None:
        """To the end; what breaks the connection is kept in `why`."""
        url = self._endpoint.root + self._endpoint.prefix + self._path
        try:
            async with self._endpoint.streaming().stream(
                "POST", url, content=json.dumps(self.body).encode(), headers=self._sent
            ) as response:
                self.status = response.status_code
                self.retry_after = response.headers.get("retry-after")
                if response.status_code != 200:
                    await response.aread()
                    self.why = refusal(response)
                    return
                self.answer = Answer(response.headers)
                await self._read(response, self.answer)
        except httpx.HTTPError as error:
            self.why = f"the connection broke: {type(error).__name__} {error}"
        finally:
            self.begun.set()

    async def _read(self, response: httpx.Response, answer: Answer) -> None:
        now = asyncio.get_running_loop().time
        rest = b""
        # Bytes, not lines: texts may hold characters that some libraries take for a line's end.
        async for received in response.aiter_bytes():
            *events, rest = (rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in map(data_of, events):
                if event is None:
                    continue
                answer.events.append(event)
                self.at.append(now())
                if isinstance(event, dict):
                    answer.take(event)
                    if any(choice.text or choice.tokens for choice in answer.choices.values()):
                        self.begun.set()
        if rest.strip():
            raise Odd(f"the stream ends inside an event: {rest[:80]!r}")

    def whole(self) -> Answer:
        """Raises Failed unless it came to its end."""
        if self.answer is None or self.why:
            raise Failed(f"{self._path} (stream): {self.why or 'no answer'}")
        if self.answer.error is not None:
            raise Failed(f"{self._path} (stream): ended with the error {self.answer.error}")
        return self.answer


def refusal(response: httpx.Response) -> str:
    """A response that is not a 200, in a line."""
    error = error_of(response)
    return f"{response.status_code} {error.get('message') or response.text[:200]}"


def error_of(response: httpx.Response) -> Json:
    """The `error` object of a response; empty when it has none."""
    try:
        body = response.json()
    except ValueError:
        return {}
    found = body.get("error") if isinstance(body, dict) else None
    return found if isinstance(found, dict) else {}


def _listed(prompt: str | Sequence[Any]) -> Any:
    return prompt if isinstance(prompt, str) else list(prompt)
