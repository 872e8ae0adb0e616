"""Which weights a sequence runs under, step after step. Pure; imports no torch.

An engine counts its commits: commit 0 is the base snapshot of the start, and each switch of any policy is the next one. A
track is what one policy serves: its newest commit, and those before. A fixed track is one commit for ever, for a request that
is pinned to a resident snapshot.

Always holds: the commits of a track grow. Two policies never share a commit, so a commit identifies the weights of one policy.
"""

from __future__ import annotations

from bisect import bisect_right


class Track:
    """epoch: the commit that serves. fixed: it never changes."""

    __slots__ = ("_commits", "epoch", "fixed")

    def __init__(self, *commits: int, fixed: bool = False) -> None:
        """commits: those so far, the newest last; at least one."""
        self._commits = [*commits]
        self.epoch = commits[-1]
        self.fixed = fixed

    def __repr__(self) -> str:
        return f"Track({self._commits}{', fixed' if self.fixed else ''})"

    def commit(self, epoch: int) -> None:
        assert not self.fixed, f"commit {epoch} of {self!r}"
        assert epoch > self.epoch, f"commit {epoch} of {self!r}"
        self.epoch = epoch
        self._commits.append(epoch)

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._commits

    def fixed_at(self, epoch: int) -> Track:
        """The track of a request that stays with this one of its commits."""
        assert epoch in self._commits, f"{epoch} is no commit of {self!r}"
        return Track(*self._commits[: self._commits.index(epoch) + 1], fixed=True)

    def age(self, epoch: int) -> int:
        """How many commits of this track came after `epoch`."""
        return len(self._commits) - bisect_right(self._commits, epoch)

    def last(self, count: int) -> list[int]:
        """So many of its commits, or all that there are, the newest last."""
        return self._commits[-count:]
