"""What rewards came to, by the snapshot that sampled the end of the rewarded turn: the reward of each training step.

Owns: the sums of at most SUMS_MAX snapshots, policies and names of rewards, the newest.
Always holds: a reward that replaces one is counted once, and the one before no more. What a session's end drops stays counted.
"""

from __future__ import annotations

from collections import OrderedDict

from midstream.core.measures import Rewarded
from midstream.core.traces import Reward

SUMS_MAX = 128


class Rewards:
    def __init__(self, sums_max: int = SUMS_MAX) -> None:
        self._sums_max = sums_max
        self._sums: OrderedDict[tuple[str, str, str], Rewarded] = OrderedDict()

    def __repr__(self) -> str:
        return f"Rewards({sum(one.count for one in self._sums.values())} rewards in {len(self._sums)} sums)"

    def give(self, policy: str, snapshot: str, reward: Reward) -> Rewarded:
        """Counts it. The answer is where, for `take_back`. policy: "" for the deployment's own weights."""
        at = (policy, snapshot, reward.name)
        found = self._sums.get(at)
        if found is None:
            found = self._sums[at] = Rewarded(
                policy=policy, snapshot=snapshot, name=reward.name, first_at=reward.created
            )
            if len(self._sums) > self._sums_max:
                self._sums.popitem(last=False)
        found.count += 1
        found.sum += reward.reward
        return found

    def take_back(self, counted: Rewarded, reward: Reward) -> None:
        """Counts it no more. counted: what `give` answered."""
        counted.count -= 1
        counted.sum -= reward.reward

    def report(self) -> list[Rewarded]:
        """The rewards, in the order of the first ones per turn. The list changes with later rewards."""
        return [one for one in self._sums.values() if one.count]
