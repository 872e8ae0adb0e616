"""Whose the gap between a trainer's log-probabilities and the server's is: what the trainer may have computed is computed, and
the gap is split along the way that leads there.

Owns: the ways in which a trainer's passes may differ from the server's, and which of them fits its numbers.
Always holds: a cause has a part only if its pass comes closer to the trainer's numbers by more than chance would have it. The
way from the server's numbers to the trainer's goes in the order of `GapCause`, one change after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from midstream.client.records import LogprobKind
from midstream.verify.claims import Claim, Tree
from midstream.verify.compare import LOGPROB_MIN
from midstream.verify.findings import Cause
from midstream.verify.gaps import GapCause, Split, telescoped
from midstream.verify.jobs import Computer, Numbers, PassJob
from midstream.verify.passes import LABELS, Case, Counterfactual, Routes, asked_of, routes_of
from midstream.verify.readings import (
    RAW,
    Reading,
    Way,
    drawn_otherwise,
    masks_of,
    sought_by,
    temperature_of,
)
from midstream.verify.trainer import Trainer, TrainerTurn, as_turn
from midstream.verify.verifier import Missing, Progress, Report, Verifier, drawn, groups, used

#: Numbers that are no further apart are equal, in nats.
FLOOR = 1e-5
#: Other snapshots that are tried for a turn, and turns that are tried together.
SNAPSHOTS_MAX, TURNS_AT_A_TIME = 32, 16
#: Turns for which none was found. Behind so many, only snapshots that were found before are tried.
LUCKLESS_MAX = 64
#: With fewer tokens a shift by one is not looked for.
SHIFT_TOKENS_MIN = 4

#: The numbers of a job with other experts of near ties, that fit; None: none do.
OtherTies = Callable[[PassJob, Callable[[Numbers], bool]], Numbers | None]


@dataclass
class GapReport:
    """not_split: turns, by the reason. unpaired: tokens that only one of the two has. positions: that were computed."""

    splits: list[Split] = field(default_factory=list)
    not_split: Counter[str] = field(default_factory=Counter)
    unpaired: int = 0
    positions: int = 0


@dataclass(frozen=True)
class _Guess:
    """What a trainer may have computed. shift: its number i is that of token i + shift. values: of its tokens."""

    asked: Counterfactual
    way: Way
    shift: int
    values: np.ndarray
    score: float

    def off(self, case: Case) -> float:
        return float(np.abs(case.recorded - self.values).max(initial=0.0))


class Explainer:
    """trainer: its numbers of a turn. against: which of the server's two log-probabilities they are compared with.

    tolerance: in nats, below which a number is as it was recorded; None: what the dtype of the weights has.
    """

    def __init__(
        self,
        computer: Computer,
        missing: Missing,
        trainer: Trainer,
        *,
        against: LogprobKind = "sampling_logprob",
        tolerance: float | None = None,
        other_ties: OtherTies | None = None,
    ) -> None:
        self._computer, self._missing, self._trainer, self._against = computer, missing, trainer, against
        self._verifier = Verifier(computer, missing, lambda _: False, tolerance=tolerance)
        self.tolerance = self._verifier.tolerance
        self._other_ties = other_ties if computer.experts else None
        #: Snapshots that a trainer was found to have computed by, the last one first.
        self._lucky: list[str] = []
        self._luckless = 0

    def explain(
        self,
        trees: Sequence[Tree],
        *,
        also: Sequence[str] = (),
        sample: int | None = None,
        seed: int = 0,
        progress: Progress = lambda done, total: None,
    ) -> GapReport:
        """also: snapshots that the trainer may have computed by, beside those of the records. sample: so many turns, drawn with
        this seed; None: all. Raises ValueError for numbers that are none."""
        report = GapReport()
        cases = [*self._cases(drawn(trees, sample, seed), report)]
        known = dict.fromkeys([*also, *reversed(used(trees))])
        names = [name for name in known if self._missing(name) is None]
        by_claim = {case.claim: case for case in cases}
        done, total = 0, sum(case.claim.length for case in cases)
        for group in groups([*by_claim]):
            some = [by_claim[claim] for claim in group]
            report.splits += self._split_group(some, names, report)
            done += sum(claim.length for claim in group)
            progress(done, total)
        return report

    # -- which turns

    def _cases(self, claims: Sequence[Claim], report: GapReport) -> Iterator[Case]:
        wanted = []
        for claim in claims:
            if claim.problem is not None:
                report.not_split["its record contradicts itself: midstream verify says how"] += 1
            else:
                wanted.append(claim)
        found = Report()
        usable = [*self._verifier.verifiable(wanted, found)]
        report.not_split += found.unverified
        if broken := sum(finding.cause is Cause.TOKEN_ID for finding in found.findings):
            report.not_split["its ids are no tokens of this model"] += broken
        for claim in usable:
            case = self._case(claim, report)
            if isinstance(case, str):
                report.not_split[case] += 1
            elif case is not None:
                yield case

    def _case(self, claim: Claim, report: GapReport) -> Case | str | None:
        """Why it is not split, if it is not."""
        given = as_turn(self._trainer(claim), str(claim.place))
        if given is None:
            return "the trainer has no numbers of it"
        if not given.logprobs:
            return "the trainer's numbers of it are empty"
        if given.token_ids is None and len(given.logprobs) != len(claim.labels):
            return "the trainer has more or fewer numbers than it has tokens, and no token_ids"
        sampled = claim.turn.sampling_logprobs
        if self._against == "sampling_logprob" and (sampled is None or None in sampled):
            return "it has no sampling_logprobs"
        if not self._computable(claim, given):
            return "the trainer's ids are too many, or no tokens of this model"
        try:
            kept = masks_of(claim, self._computer.vocab)
        except ValueError:
            return "its sampling masks are damaged: midstream verify says how"
        case = Case(claim, given, self._against, kept, routes_of(claim, self._computer))
        report.unpaired += abs(len(given.logprobs) - len(claim.labels))
        return case

    def _computable(self, claim: Claim, given: TrainerTurn) -> bool:
        ids = [*(given.prompt_ids or claim.prompt), *(given.token_ids or claim.turn.token_ids)]
        before = len(ids) - len(given.logprobs)
        return before > 0 and len(ids) - 1 <= self._computer.longest and max(ids) < self._computer.vocab

    # -- passes

    def _split_group(self, cases: list[Case], names: Sequence[str], report: GapReport) -> list[Split]:
        otherwise = [case for case in cases if case.knows_sampled and drawn_otherwise(case.claim)]
        # Their rows of the vocabulary are in memory meanwhile.
        for first in range(0, len(otherwise), TURNS_AT_A_TIME):
            self._seek_temperatures(otherwise[first : first + TURNS_AT_A_TIME], report)
        self._compute([(case, asked) for case in cases for asked in case.usual()], report)
        for case in cases:
            case.settle()
        left = [case for case in cases if not self._fits(case)]
        for first in range(0, len(left), TURNS_AT_A_TIME):
            self._try_snapshots(left[first : first + TURNS_AT_A_TIME], names, report)
        return [self._split(case) for case in cases]

    def _seek_temperatures(self, cases: Sequence[Case], report: GapReport) -> None:
        base = Counterfactual()
        soughts = {case: sought_by(case.sampled, case.kept) for case in cases}
        self._compute([(case, base) for case in cases], report, soughts)
        for case in cases:
            plain = case.rows.pop(base, {})
            rounding = case.rounding(plain, self.tolerance)
            rows = {at: case.shaped(at, row) for at, row in plain.items()}
            ids, recorded = case.claim.turn.token_ids, case.recorded_temperature
            case.temperature = temperature_of(rows, ids, case.kept, case.sampled, rounding, recorded)

    def _compute(
        self,
        wanted: Sequence[tuple[Case, Counterfactual]],
        report: GapReport,
        whole: dict[Case, list[int]] | None = None,
    ) -> None:
        made = [(case, asked, asked_of(case, asked, (whole or {}).get(case, ()))) for case, asked in wanted]
        jobs = [one.job for _, _, pieces in made for one in pieces]

        def done(count: int) -> None:
            report.positions += count

        numbers = iter(self._computer.compute(jobs, done))
        for case, asked, pieces in made:
            case.take(asked, pieces, [next(numbers) for _ in pieces])

    def _try_snapshots(self, cases: list[Case], names: Sequence[str], report: GapReport) -> None:
        """Snapshots that fitted before, and then all others, until each turn has one."""
        lucky = [name for name in self._lucky if name in names]
        others = [name for name in names if name not in lucky][:SNAPSHOTS_MAX]
        left = cases
        for name in lucky if self._luckless >= LUCKLESS_MAX else lucky + others:
            # The snapshot of all labels was computed.
            some = [case for case in left if {*case.claim.labels} != {name}]
            self._compute([(case, asked) for case in some for asked in case.by(name)], report)
            left = [case for case in left if not self._fits(case)]
        found = dict.fromkeys(fresh for case in cases if (fresh := self._best(case).asked.fresh))
        self._lucky = [*dict.fromkeys([*found, *self._lucky])]
        self._luckless = 0 if found else self._luckless + len(cases)

    def _fits(self, case: Case) -> bool:
        return self._is_close(case, self._best(case))

    def _is_close(self, case: Case, guess: _Guess) -> bool:
        return guess.off(case) <= self.tolerance * case.grown(guess.way)

    # -- which of them fits

    def _best(self, case: Case) -> _Guess:
        guesses = [*_guesses(case, (0,))]
        best = min(guesses, key=lambda guess: guess.score)
        if not self._is_close(case, best) and len(case.recorded) >= SHIFT_TOKENS_MIN:
            best = min((best, *_guesses(case, (1, -1))), key=lambda guess: guess.score)
        return best

    # -- the way to it

    def _split(self, case: Case) -> Split:
        best = self._best(case)
        base, raw = Counterfactual(), case.values(Counterfactual(), RAW)
        begin = case.values(base, case.start)
        numbers: list[tuple[GapCause, np.ndarray]] = []
        flipped = self._with_other_ties(case, base, case.start, case.rollout)
        if flipped is not None:
            numbers += [(GapCause.PRECISION, flipped), (GapCause.TIES, begin)]
        else:
            numbers.append((GapCause.PRECISION, begin))
        way = case.start
        for cause, after in _changes_of_way(case, best.way):
            way = after
            numbers.append((cause, case.values(base, way)))
        numbers += [(cause, case.values(asked, way)) for cause, asked in _changes_of_passes(best.asked)]
        if best.shift:
            numbers.append((GapCause.TOKENS, best.values))
        else:
            tied = self._with_other_ties(case, best.asked, way, case.recorded)
            if tied is not None:
                numbers.append((GapCause.TIES, tied))
        numbers.append((GapCause.PRECISION, case.recorded))
        off = np.abs(raw - np.maximum(np.array(case.claim.logprobs[: len(raw)]), LOGPROB_MIN))
        return Split(
            case.claim,
            case.rollout,
            case.recorded,
            case.ids(best.asked.theirs)[-len(case.given.logprobs) :][: len(case.recorded)],
            telescoped(numbers, case.rollout),
            _details(case, best),
            0.0 if flipped is not None else float(off.max(initial=0.0)),
        )

    def _with_other_ties(
        self, case: Case, asked: Counterfactual, way: Way, target: np.ndarray
    ) -> np.ndarray | None:
        """What a router's near ties make of the passes if that is the target, and they themselves are not it."""
        passes, tolerance = case.passes[asked], self.tolerance * case.grown(way)
        off = float(np.abs(passes.values[way] - target).max(initial=0.0))
        if self._other_ties is None or not passes.tied or off <= tolerance:
            return None
        pieces = asked_of(case, asked)
        if len(pieces) != 1:
            return None
        [piece] = pieces
        size = len(target)

        def now(reading: Reading = piece.reading) -> np.ndarray:
            return case.of_reading(reading.of, way)[:size]

        def fits(_: Numbers) -> bool:
            return bool((np.abs(now() - target) <= tolerance).all())

        return now().copy() if self._other_ties(piece.job, fits) is not None else None


def _guesses(case: Case, shifts: Sequence[int]) -> Iterator[_Guess]:
    tried = len({asked.fresh for asked in case.passes})
    for asked in case.passes:
        # A trainer computes its own tokens.
        if asked.theirs != case.theirs:
            continue
        for way in case.ways:
            for shift in shifts:
                values = _shifted(case.values(asked, way), shift, case.recorded)
                count = case.changes(asked, way) + abs(shift)
                luck = 2 * np.log(tried) if asked.fresh else 0.0
                yield _Guess(asked, way, shift, values, _score(case.recorded - values, count) + luck)


def _shifted(values: np.ndarray, shift: int, recorded: np.ndarray) -> np.ndarray:
    """Number i is that of i + shift. What the trainer has where there is none is of no token here."""
    if not shift:
        return values
    made = recorded.copy()
    if shift > 0:
        made[:-shift] = values[shift:]
    else:
        made[-shift:] = values[:shift]
    return made


def _score(off: np.ndarray, changes: int) -> float:
    """Of errors with heavy tails; a change has to earn its place."""
    return 2 * len(off) * float(np.log(np.abs(off).mean() + FLOOR)) + 3 * changes * float(
        np.log(len(off) + 1)
    )


def _changes_of_way(case: Case, end: Way) -> Iterator[tuple[GapCause, Way]]:
    start = case.start
    between = Way(end.tempered, start.masked)
    warm = start.tempered != end.tempered
    masked = start.masked != end.masked
    if warm and masked and between not in case.ways:
        yield GapCause.MASK, Way(start.tempered, end.masked)
        yield GapCause.TEMPERATURE, end
        return
    if warm:
        yield GapCause.TEMPERATURE, between
    if masked:
        yield GapCause.MASK, end


def _changes_of_passes(end: Counterfactual) -> Iterator[tuple[GapCause, Counterfactual]]:
    if end.theirs:
        yield GapCause.TOKENS, Counterfactual(theirs=True)
    if end.fresh is not None:
        yield GapCause.STALE_KV, Counterfactual(end.theirs, LABELS)
    if end.fresh:
        yield GapCause.SNAPSHOT, Counterfactual(end.theirs, end.fresh)
    if end.routes is not Routes.TURN:
        yield GapCause.ROUTE, end


def _details(case: Case, best: _Guess) -> dict[GapCause, str]:
    found = {}
    if case.start.tempered != best.way.tempered:
        at, recorded = case.temperature, case.claim.turn.sampling
        drawn_at = "with penalties, filters or a grammar" if at is None else f"at temperature {at:g}"
        if at is not None and recorded is not None and recorded.temperature != at:
            drawn_at += f", and not at {recorded.temperature:g} as its record says"
        elif at is not None and case.penalised:
            drawn_at += " with penalties"
        does = "" if best.way.tempered else "not "
        found[GapCause.TEMPERATURE] = (
            f"the turn was drawn {drawn_at}; the trainer's numbers are {does}of that"
        )
    if case.start.masked != best.way.masked:
        does = (
            "masks where the server's raw numbers do not" if best.way.masked else "does not apply the masks"
        )
        found[GapCause.MASK] = f"the trainer {does}"
    if case.theirs:
        found[GapCause.TOKENS] = case.other_ids()
    if best.shift:
        found[GapCause.TOKENS] = f"its numbers are those of the {'next' if best.shift > 0 else 'last'} token"
    if best.asked.fresh is not None and case.stale:
        found[GapCause.STALE_KV] = f"the server's KV was of {case.kv_snapshots()}; the trainer's is not"
    if best.asked.fresh:
        labels = ", ".join(dict.fromkeys(case.claim.labels))
        found[GapCause.SNAPSHOT] = f"the trainer computed by {best.asked.fresh}, the labels are {labels}"
    if best.asked.routes is Routes.OWN:
        found[GapCause.ROUTE] = "the trainer took its own routes"
    elif best.asked.routes is Routes.ALL:
        found[GapCause.ROUTE] = "the trainer replayed routes of earlier turns, which older weights chose"
    return found
