"""The exchange in which a replica gives the KV of a session that moves to its next home.

Always holds: the policy that is asked for stays loaded until the answer is made.
"""

from __future__ import annotations

import contextlib

from midstream.replica.control import ControlExchange
from midstream.replica.kv_travel import KvAsked, KvHere


class KvExchange(ControlExchange):
    async def _answer(self) -> None:
        replica = self._replica
        with contextlib.ExitStack() as stack:

            def find(asked: KvAsked) -> KvHere | None:
                service = stack.enter_context(replica.serves(asked.policy))
                return service.kv_here((asked.tenant, asked.key), (asked.tenant, asked.isolation))

            rate = replica.budget.moves.pace.prefill_tokens_s
            data = await replica.travel.answer(self._request.body, find, rate)
        self._whole(200, data, {"content-type": "application/octet-stream"})
