"""How long a request waits for a policy that no replica serves: one that was just made, or whose replicas began anew.

Always holds: a request waits only while a replica is heard that may load the policy, and for POLICY_WAIT_S at most.
"""

from __future__ import annotations

import asyncio

from midstream.fleet.registry import Deployment
from midstream.proxy.request_state import Event
from midstream.proxy.route import Judgement, Until

POLICY_WAIT_S = 30.0


class PolicyWait:
    """Of one request."""

    def __init__(self) -> None:
        self._ends: float | None = None

    def judge(self, deployment: Deployment, tried: set[str]) -> Judgement | None:
        """NOT_YET, with when to look again; None: there is nothing to wait for.

        tried: replicas that failed with the request. After the wait they may be others, and are tried again.
        """
        now = asyncio.get_running_loop().time()
        views = deployment.replicas.views
        if not deployment.policy or any(view.usable and view.name not in tried for view in views):
            return None
        self._ends = now + POLICY_WAIT_S if self._ends is None else self._ends
        heard = any(view.report is not None for view in views)
        if not heard or now >= self._ends:
            return None
        tried.clear()
        return Judgement(Event.NOT_YET, until=Until(deployment.replicas, at=self._ends))
