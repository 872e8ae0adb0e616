"""How long a request waits for a policy: one that no replica serves, or that is still to be loaded where its session lives.

Always holds:
- A request waits only while a replica is heard that may load the policy, and for POLICY_WAIT_S at most.
- For its session's home it waits HOME_WAIT_S at most, while that loads the policy; then it goes to another one that serves it.
- Whatever it does, the demand is made known: a replica is asked to load what none serves.
"""

from __future__ import annotations

import asyncio

from midstream.fleet.registry import Deployment
from midstream.proxy.request_state import RequestEvent
from midstream.proxy.route import Judgement, Until

POLICY_WAIT_S = 30.0
HOME_WAIT_S = 5.0


class PolicyWait:
    """The wait of one request for its policy. Asked only where the deployment is a policy."""

    _ends: float | None = None
    _at_home_ends: float | None = None

    def before(self, deployment: Deployment, home: str | None, tried: frozenset[str]) -> Judgement | None:
        """NOT_YET, if the request is to wait for its session's home. home: its name; None: it has none, or cannot go there."""
        replicas, now = deployment.replicas, asyncio.get_running_loop().time()
        if home is not None and (home in tried or now >= (self._at_home_ends or now + 1)):
            home = None
        replicas.ask(home)
        if home is None or not replicas.is_loading(home):
            return None
        self._at_home_ends = self._at_home_ends or now + HOME_WAIT_S
        return Judgement(RequestEvent.NOT_YET, Until(replicas, at=self._at_home_ends))

    def judge(self, deployment: Deployment, tried: frozenset[str], lost: str = "") -> Judgement | None:
        """NOT_YET, with when to look again; None: there is nothing to wait for.

        tried: replicas that failed with the request. After the wait they may be others, and are to be tried again. lost: the
        replica that was lost with its stream, which is never asked again.
        """
        now = asyncio.get_running_loop().time()
        views = [view for view in deployment.replicas.views if view.name != lost]
        if any(view.usable and view.name not in tried for view in views):
            return None
        self._ends = now + POLICY_WAIT_S if self._ends is None else self._ends
        heard = any(view.report is not None for view in views)
        if not heard or now >= self._ends:
            return None
        return Judgement(RequestEvent.NOT_YET, Until(deployment.replicas, at=self._ends))
