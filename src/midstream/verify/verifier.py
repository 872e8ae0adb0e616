"""Verifies the turns of one deployment: computes them in groups, compares, and says why what differs does.

Owns: the order of the work, what counts as verified, and what a difference of one turn means for others.
Always holds: a turn is verified only if every number in it was computed. A turn that differs is looked at once more with the
other choices of routers' near ties before it is a finding.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from midstream.core.errors import SnapshotCorrupt, SnapshotError
from midstream.verify.causes import Detective, Explained, Neighbourhood, computable
from midstream.verify.claims import Claim, Tree
from midstream.verify.compare import (
    LOGPROB_MIN,
    TOLERANCES,
    Compared,
    Computed,
    compare,
    differences,
    drawn_raw,
    wrong_masks,
)
from midstream.verify.drawing import Redrawn, heard, is_plain, redrawn
from midstream.verify.findings import TOKENS_LISTED, Cause, Finding, Place
from midstream.verify.jobs import Computer, Numbers, PassJob, jobs_of

#: Positions of turns that are computed as one group.
GROUP_POSITIONS = 2**16
#: Turns whose causes are looked for. Of all others it is said that they differ.
EXPLAINED_MAX = 1000

#: Of a snapshot, why it cannot be used.
Missing = Callable[[str], SnapshotError | None]
#: Numbers of a job with whichever expert of a near tie, that fit: the second look. routes: as recorded.
WithTies = Callable[[PassJob, np.ndarray, Callable[[Numbers], bool]], Numbers | None]
#: (positions that are done, of all).
Progress = Callable[[int, int], None]


@dataclass(eq=False)
class Suspect:
    claim: Claim
    computed: Computed
    found: Compared


@dataclass
class Report:
    """tokens: sampled tokens whose numbers were computed. positions: all that were computed for them. unverified: turns, by the
    reason. masks: that were looked at. weights: tokens with router weights, by whether these were computed. off, worst: the
    largest difference of a log-probability in turns that are clean, and in all."""

    findings: list[Finding] = field(default_factory=list)
    turns: int = 0
    tokens: int = 0
    positions: int = 0
    off: float = 0.0
    worst: float = 0.0
    ties: int = 0
    routes: int = 0
    masks: int = 0
    weights: Counter[str] = field(default_factory=Counter)
    sampling: Counter[str] = field(default_factory=Counter)
    unverified: Counter[str] = field(default_factory=Counter)

    @property
    def clean(self) -> bool:
        return not self.findings


class Verifier:
    """tolerance: in nats; None: what the dtype of the weights has."""

    def __init__(
        self,
        computer: Computer,
        missing: Missing,
        is_adapter: Callable[[str], bool],
        *,
        tolerance: float | None = None,
        with_ties: WithTies | None = None,
    ) -> None:
        self._computer, self._missing, self._is_adapter = computer, missing, is_adapter
        usual = TOLERANCES.get(computer.dtype, max(TOLERANCES.values()))
        self.tolerance = usual if tolerance is None else tolerance
        self._rounding = self.tolerance / usual
        self._with_ties = with_ties
        self._detective = Detective(computer, self.tolerance)
        #: The tokens that a turn truly had, where ids were at fault; None: they are not known.
        self._true: dict[Claim, Sequence[int] | None] = {}

    def verify(
        self,
        trees: Sequence[Tree],
        *,
        sample: int | None = None,
        seed: int = 0,
        progress: Progress = lambda done, total: None,
    ) -> Report:
        """sample: so many turns, drawn with this seed; None: all."""
        report = Report()
        chosen = drawn(trees, sample, seed)
        wanted = [*self.verifiable(chosen, report)]
        suspects = self._compute(wanted, report, progress)
        around = _Neighbours(trees, self._usable, self._is_adapter)
        broken = [claim for claim in chosen if claim.problem is not None]
        report.findings += self._explained(suspects, broken, wanted, around)
        report.findings += [*self._wrong_masks(chosen, report)]
        return report

    def _wrong_masks(self, claims: Iterable[Claim], report: Report) -> Iterator[Finding]:
        """Also of turns that are not computed. A turn that differs is reported once: wrong ids are not in their masks."""
        named = {finding.place for finding in report.findings}
        for claim in claims:
            report.masks += len(claim.turn.sampling_masks or ())
            wrong = [] if claim.place in named else [*wrong_masks(claim, self._computer.vocab)]
            if wrong:
                detail = f"the mask of token {wrong[0].token} is of no draw of it"
                yield Finding(Cause.MASK, claim.place, detail, tuple(wrong[:TOKENS_LISTED]), len(wrong))

    def _usable(self, snapshot: str) -> bool:
        return self._missing(snapshot) is None

    def verifiable(self, claims: Iterable[Claim], report: Report) -> Iterator[Claim]:
        """Counts what is not verified, and says which snapshots are missing."""
        users_of: dict[str, list[Claim]] = {}
        for claim in claims:
            if claim.problem is not None:
                continue
            if claim.unverified is not None:
                report.unverified[claim.unverified] += 1
                continue
            gone = sorted(name for name in claim.snapshots if not self._usable(name))
            if gone:
                report.unverified["a snapshot that it names cannot be used"] += 1
                users_of.setdefault(gone[0], []).append(claim)
            elif not claim.labels:
                report.turns += 1
            elif claim.length - 1 > self._computer.longest:
                report.unverified[f"it has more than {self._computer.longest} positions"] += 1
            elif not all(computable(self._computer, job) for _, _, job in jobs_of(claim)):
                why = f"it has ids that are no tokens of this model, which has {self._computer.vocab}"
                report.findings.append(Finding(Cause.TOKEN_ID, claim.place, why))
            else:
                yield claim
        for name, users in users_of.items():
            error = self._missing(name)
            cause = Cause.SNAPSHOT if isinstance(error, SnapshotCorrupt) else Cause.NO_SNAPSHOT
            detail = f"{name}, of this and {len(users) - 1} other turns: {error}"
            report.findings.append(Finding(cause, users[0].place, detail))

    def _compute(self, claims: Sequence[Claim], report: Report, progress: Progress) -> list[Suspect]:
        suspects: list[Suspect] = []
        total = sum(claim.length for claim in claims)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report.positions += count
            # Beginnings that turns share are computed once, and count for each.
            progress(min(max(done, passed), total), total)

        passed = 0
        for group in groups(claims):
            drawn = {claim: self._redrawn(claim) for claim in group}
            parts = [
                (claim, first, until, heard(drawn[claim], first, job))
                for claim in group
                for first, until, job in jobs_of(claim)
            ]
            numbers = self._computer.compute([job for _, _, _, job in parts], advance)
            made: dict[Claim, list[tuple[int, int, Numbers]]] = {}
            for (claim, first, until, _), found in zip(parts, numbers, strict=True):
                made.setdefault(claim, []).append((first, until, found))
            for claim, own in made.items():
                suspects += self._judged(Computed(claim, own), drawn[claim], report)
            passed += sum(claim.length for claim in group)
            done = passed
            progress(done, total)
        return suspects

    def _judged(
        self,
        computed: Computed,
        drawn: Redrawn | None,
        report: Report,
    ) -> Iterator[Suspect]:
        claim = computed.claim
        computed.draw(drawn)
        found = compare(claim, computed, self.tolerance)
        if not found.clean and computed.tied and not found.label:
            again = self._second_look(claim)
            if again is not None:
                computed, found = again, compare(claim, again, self.tolerance)
                report.ties += found.clean
        report.turns += 1
        report.tokens += len(claim.labels)
        report.routes += 0 if claim.routes is None else len(claim.routes)
        if claim.router_weights is not None:
            report.weights["not computed" if computed.weights is None else "computed"] += len(claim.labels)
        if claim.turn.sampling_logprobs is not None:
            raw = "equal to logprobs" if drawn_raw(claim) else "not computed"
            report.sampling[raw if computed.sampling is None else "computed"] += len(claim.labels)
        recorded = np.maximum(np.array(claim.logprobs), LOGPROB_MIN)
        off = float(np.abs(recorded - np.maximum(computed.logprobs, LOGPROB_MIN)).max())
        report.worst = max(report.worst, off)
        if not found.clean:
            yield Suspect(claim, computed, found)
            return
        report.off = max(report.off, off)

    def _second_look(self, claim: Claim) -> Computed | None:
        if self._with_ties is None or claim.routes is None or claim.routes.shape[1:] != self._computer.routes:
            return None
        parts = []
        drawn = self._redrawn(claim)
        for first, until, bare in jobs_of(claim):
            job = heard(drawn, first, bare)
            recorded = np.array(claim.logprobs[first:until])

            def fits(numbers: Numbers, recorded: np.ndarray = recorded) -> bool:
                return bool((np.abs(numbers.logprobs - recorded) <= self.tolerance).all())

            numbers = self._with_ties(job, claim.routes[first:until], fits)
            if numbers is None:
                return None
            parts.append((first, until, numbers))
        computed = Computed(claim, parts)
        computed.draw(drawn)
        return computed

    def _redrawn(self, claim: Claim) -> Redrawn | None:
        """None: there is nothing that it would need rows for."""
        return None if is_plain(claim.turn.sampling) else redrawn(claim, self._computer.dtype, self._rounding)

    # -- causes

    def _explained(
        self,
        suspects: Sequence[Suspect],
        broken: Sequence[Claim],
        verified: Sequence[Claim],
        around: _Neighbours,
    ) -> Iterator[Finding]:
        condemned = {*_condemned(suspects, verified)}
        for name, users in _by_snapshot(suspects, condemned).items():
            first = users[0]
            detail = f"{name}: none of the {len(users)} turns that name it was computed by these files"
            yield self._finding(first, Explained(Cause.SNAPSHOT, detail))
        left = [one for one in suspects if not condemned & one.claim.snapshots]
        by_claim = {one.claim: one for one in left}
        for number, claim in enumerate(_roots_first([*by_claim, *broken])):
            if number >= EXPLAINED_MAX:
                detail = f"its cause was not looked for: {EXPLAINED_MAX} turns differ before it"
                yield Finding(Cause.UNKNOWN, claim.place, detail)
            elif claim in by_claim:
                yield self._finding(by_claim[claim], self._cause(by_claim[claim], around))
            else:
                why = self._follows(claim) or self._detective.explain_lengths(claim, around.of(claim))
                self._remember(claim, why)
                yield Finding(why.cause, claim.place, _with_problem(why, claim))

    def _cause(self, suspect: Suspect, around: _Neighbours) -> Explained:
        claim = suspect.claim
        why = self._follows(claim)
        if why is None:
            why = self._sampling_cause(suspect) or self._detective.explain(
                claim, suspect.found, suspect.computed, around.of(claim)
            )
        self._remember(claim, why)
        return why

    def _sampling_cause(self, suspect: Suspect) -> Explained | None:
        """Only the sampling log-probabilities differ, and by more than one number."""
        found, given = suspect.found, suspect.claim.turn.sampling
        drawn = redrawn(suspect.claim, self._computer.dtype, self._rounding)
        if drawn is None or given is None or found.logprob or found.label or len(found.sampling) < 2:
            return None
        self._computer.compute([heard(drawn, first, job) for first, _, job in jobs_of(suspect.claim)])
        recorded = f"the record says temperature {given.temperature:g}"
        other = drawn.other_temperature(self.tolerance)
        if other is not None:
            return Explained(Cause.SAMPLING, f"temperature {other:g} gives every number, and {recorded}")
        if found.mask:
            return None
        return Explained(Cause.SAMPLING, f"no temperature gives its numbers, and {recorded}")

    def _remember(self, claim: Claim, why: Explained) -> None:
        if why.tokens is not None or why.cause in (Cause.TOKENS, Cause.FOLLOWS):
            self._true[claim] = why.tokens

    def _follows(self, claim: Claim) -> Explained | None:
        """Whether the fault is that of an earlier turn's ids."""
        if claim.parent is None or claim.parent not in self._true:
            return None
        detail = f"the ids of turn {claim.parent.place.turn} are not those that it saw"
        before = self._true[claim.parent]
        # What stands in a turn's place may be another session's, and its own elsewhere.
        elsewhere = [ids for one, ids in self._true.items() if one is not claim.parent]
        own = [*claim.turn.added, *claim.turn.token_ids]
        for ids in (before, *elsewhere):
            if ids is None or len(ids) + len(own) != claim.position_end + 1:
                continue
            if self._detective.fits(claim, [*ids, *own]):
                return Explained(Cause.FOLLOWS, detail, [*ids, *own])
        return Explained(Cause.FOLLOWS, detail) if before is None else None

    def _finding(self, suspect: Suspect, why: Explained) -> Finding:
        found = suspect.found
        listed = differences(suspect.claim, suspect.computed, found, TOKENS_LISTED)
        return Finding(why.cause, suspect.claim.place, why.detail, listed, len(found.tokens))


class _Neighbours:
    """What turns may be mistaken for one another."""

    def __init__(
        self, trees: Sequence[Tree], can: Callable[[str], bool], is_adapter: Callable[[str], bool]
    ) -> None:
        claims = [claim for tree in trees for claim in tree.claims.values()]
        self._claims = sorted(claims, key=_order)
        self._place = {claim: number for number, claim in enumerate(self._claims)}
        self._snapshots = used(trees)
        self._can = can
        self._adapters = frozenset(name for name in self._snapshots if can(name) and is_adapter(name))

    def of(self, claim: Claim) -> Neighbourhood:
        at = self._place[claim]
        nearest = sorted(range(len(self._claims)), key=lambda number: abs(number - at))
        others = [self._claims[number] for number in nearest if number != at]
        return Neighbourhood(self._snapshots, self._adapters, others, self._can)


def drawn(trees: Iterable[Tree], sample: int | None, seed: int) -> list[Claim]:
    """So many turns, drawn with this seed, in the order of the trees; None: all."""
    claims = [claim for tree in trees for claim in tree.claims.values()]
    if sample is None or sample >= len(claims):
        return claims
    return [claims[number] for number in sorted(random.Random(seed).sample(range(len(claims)), sample))]


def used(trees: Iterable[Tree]) -> list[str]:
    """The snapshots that turns name, in the order in which they came into use."""
    claims = sorted((claim for tree in trees for claim in tree.claims.values()), key=_order)
    found: dict[str, None] = {}
    for claim in claims:
        for part in claim.parts:
            found |= dict.fromkeys(part.kv)
        found |= dict.fromkeys(claim.labels)
    return [*found]


def _order(claim: Claim) -> tuple[float, Place]:
    return claim.turn.created, claim.place


def _roots_first(claims: Sequence[Claim]) -> list[Claim]:
    """Those first whose fault cannot be an earlier turn's."""
    depths: dict[Claim, int] = {}
    known = {*claims}
    for claim in claims:
        above = claim.parent
        depths[claim] = 0
        while above is not None:
            depths[claim] += above in known
            above = above.parent
    return sorted(claims, key=lambda claim: (depths[claim], *_order(claim)))


def _with_problem(why: Explained, claim: Claim) -> str:
    return why.detail if why.detail == claim.problem else f"{why.detail} ({claim.problem})"


def groups(claims: Sequence[Claim]) -> Iterator[list[Claim]]:
    group: list[Claim] = []
    positions = 0
    for claim in claims:
        if group and positions + claim.length > GROUP_POSITIONS:
            yield group
            group, positions = [], 0
        group.append(claim)
        positions += claim.length
    if group:
        yield group


def _condemned(suspects: Sequence[Suspect], verified: Sequence[Claim]) -> Iterator[str]:
    """Snapshots that no turn with their label was computed by: not the turns are wrong, but the files."""
    users = Counter(name for claim in verified for name in {*claim.labels})
    left = [*suspects]
    while left:
        off = Counter(name for one in left for name in {*one.claim.labels} if _all_off(one, name))
        whole = [name for name, count in off.items() if count >= 2 and count == users[name]]
        if not whole:
            return
        worst = max(whole, key=lambda name: off[name])
        yield worst
        left = [one for one in left if worst not in one.claim.snapshots]


def _all_off(suspect: Suspect, name: str) -> bool:
    own = {at for at, label in enumerate(suspect.claim.labels) if label == name}
    return own <= {*suspect.found.logprob}


def _by_snapshot(suspects: Sequence[Suspect], condemned: set[str]) -> dict[str, list[Suspect]]:
    found: dict[str, list[Suspect]] = {}
    for suspect in suspects:
        for name in sorted(condemned & suspect.claim.snapshots)[:1]:
            found.setdefault(name, []).append(suspect)
    return found
