"""A client of the simulated Tinker front, as the SDK is one: it submits samples, polls for them, and checks what comes.

Always holds: a sample that was submitted ends with numbers that are right, or with an error that the Tinker front's own end
explains, or because two replicas died with it. Other lost replicas and gateways, swaps and refused turns are the front's
to bear.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from simclient import Answer, Broken, Oracle, Turn, Wrong, exchange
from simengine import BLOCK

from midstream_tinker.futures import PROTOBUF

API = "/api/v1/"
#: A connection that was lost, and an answer that says "not now", are tried again after so long.
PAUSE_S = 0.3
#: So long at most after calm has begun until a sample has ended.
ENDS_S = 40.0
LOST_REPLICAS = "replicas were lost while they worked on this request"


class FrontLost(Exception):
    """What the client had with the front is gone: the front was started anew."""


class TinkerClient:
    """starts: how often a front was started or ended. count: for the history's figures."""

    def __init__(
        self,
        name: str,
        port: int,
        rng: random.Random,
        oracle: Oracle,
        count: Callable[[str], None],
        starts: Callable[[], int],
    ) -> None:
        self.name, self._port, self._rng = name, port, rng
        self._oracle, self._count, self._starts = oracle, count, starts
        self.over = False

    async def run(self) -> None:
        while not self.over:
            begun = self._starts()
            try:
                sampler = await self._sampler()
                for seq_id in range(self._rng.randint(1, 6)):
                    if self.over:
                        return
                    await self._sample(sampler, seq_id)
                    await asyncio.sleep(self._rng.random())
            except FrontLost as error:
                if self._starts() == begun:
                    raise Wrong(f"{self.name}: the front has lost what it had: {error}") from error
                self._count("tinker: front lost")

    async def _sampler(self) -> str:
        session = (await self._call("create_session", {"tags": []}))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "sim"}
        made: str = (await self._call("create_sampling_session", body))["sampling_session_id"]
        return made

    async def _sample(self, sampler: str, seq_id: int) -> None:
        # Shorter than a block of KV: what it stands on is its own, so that its numbers follow from its labels.
        prompt = [self._rng.randint(1, 249) for _ in range(self._rng.randint(1, BLOCK - 1))]
        most = self._rng.randint(1, 16)
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": most, "temperature": 1.0, "stop": []},
            "num_samples": self._rng.randint(1, 2),
            "sampling_session_id": sampler,
            "seq_id": seq_id,
        }
        request = (await self._call("asample", body))["request_id"]
        result = await self._polled(request)
        if "error" in result:
            # A sample that two replicas died with is refused, as any request.
            if self._oracle.undisturbed() or LOST_REPLICAS not in str(result["error"]):
                raise Wrong(f"{self.name}: a sample failed: {result}")
            self._count("tinker: sample refused, its replicas died")
            return
        known = await self._call(f"midstream/requests/{request}")
        if len(result["sequences"]) != body["num_samples"]:
            raise Wrong(f"{self.name}: {len(result['sequences'])} sequences: {result}")
        for sequence, told in zip(result["sequences"], known["sequences"], strict=True):
            self._check(prompt, most, sequence, told["snapshots"])
        self._count("tinker: sample")

    def _check(
        self, prompt: list[int], most: int, sequence: dict[str, Any], spans: list[dict[str, Any]]
    ) -> None:
        turn = Turn(list(prompt), tokens=sequence["tokens"], logprobs=sequence["logprobs"])
        turn.labels = [span["snapshot"] for span in spans for _ in range(span["start"], span["end"])]
        turn.routes = [None] * len(turn.tokens)
        turn.finish = sequence["stop_reason"]
        if len(turn.labels) != len(turn.tokens):
            raise Wrong(f"{self.name}: {len(turn.labels)} labels for {len(turn.tokens)} tokens: {spans}")
        # The prompt and the first token are computed by the same step; each later position, by the step of the token behind it.
        turn.kv = [(turn.labels[0], 0, len(prompt))]
        last = len(prompt)
        turn.kv += [(label, last + at, last + at + 1) for at, label in enumerate(turn.labels[1:])]
        self._oracle.check(turn, most)

    async def _polled(self, request: str) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        calm_since: float | None = None
        while True:
            answer = await self._answer("POST", "retrieve_future", {"request_id": request})
            if answer.status == 200:
                found: dict[str, Any] = answer.json()
                return found
            if answer.status == 410:
                raise FrontLost(answer.body.decode())
            self._check_retryable(answer)
            if self.over:
                calm_since = calm_since or clock()
                if clock() - calm_since > ENDS_S:
                    raise Wrong(f"{self.name}: {request} does not end, {ENDS_S:g} s after all is calm")

    async def _call(self, path: str, body: Any = None) -> Any:
        """Until it is answered. Raises FrontLost when a session is not known any more."""
        while True:
            answer = await self._answer("GET" if body is None else "POST", path, body)
            if answer.status == 200:
                return answer.json()
            if answer.status in (404, 410):
                raise FrontLost(answer.body.decode())
            self._check_retryable(answer)
            await asyncio.sleep(PAUSE_S)

    def _check_retryable(self, answer: Answer) -> None:
        if answer.status < 500 and answer.status not in (408, 425, 429):
            raise Wrong(f"{self.name}: {answer}")

    async def _answer(self, method: str, path: str, body: Any) -> Answer:
        headers = [("accept", "application/json")]
        if isinstance(body, bytes):
            headers.append(("content-type", PROTOBUF))
        while True:
            try:
                return await exchange(self._port, method, API + path, body, headers)
            except Broken as error:
                self._count(f"tinker: {str(error)[:40]}")
                await asyncio.sleep(PAUSE_S)
