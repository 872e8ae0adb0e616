"""Why a turn's numbers are not those of its snapshots: other claims are tried, and the one that fits is the likely cause.

Owns: the order in which causes are tried, from those that change least.
Always holds: a cause with a claim behind it fits every number of the turn. What fits nothing is said to be a moved number if
the tokens behind it fit, and unknown otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

import msgspec
import numpy as np

from midstream.verify.claims import Claim, KvPart
from midstream.verify.compare import WEIGHTS_WIDER, Compared, Computed, compare, weights_off
from midstream.verify.findings import Cause
from midstream.verify.jobs import Computer, PassJob, jobs_of

#: The engine's cache reuses whole blocks of so many positions.
BLOCK = 16
#: Trials that are computed together, and at most for one turn.
TOGETHER, TRIALS_MAX = 16, 4096
#: Other snapshots that are tried, the most recent first, and other turns that may be the parent or the sibling.
OTHERS_MAX, TURNS_MAX = 32, 64
#: Tokens behind a supposed fault that must fit before all are tried, ids that are tried where it is, and vocabularies that are
#: tried whole.
GLANCE, IDS_MAX, VOCAB_MAX = 4, 64, 1024


@dataclass(frozen=True)
class Trial:
    """A claim that may be the true one. tokens: all ids, where they are other ones than those recorded."""

    cause: Cause
    detail: str
    claim: Claim
    tokens: Sequence[int] | None = None


@dataclass(frozen=True)
class Explained:
    cause: Cause
    detail: str
    #: The tokens of the whole conversation as they truly were, where ids were at fault.
    tokens: Sequence[int] | None = None


@dataclass(frozen=True)
class Neighbourhood:
    """What a turn may be mistaken for. snapshots: by use, the oldest first. adapters: those that are adapters.

    others: turns of the same deployment, the nearest first. can: whether the snapshot can be used.
    """

    snapshots: Sequence[str]
    adapters: frozenset[str]
    others: Sequence[Claim]
    can: Callable[[str], bool]


def computable(computer: Computer, job: PassJob) -> bool:
    return len(job.ids) - 1 <= computer.longest and min(job.ids) >= 0 and max(job.ids) < computer.vocab


class Detective:
    def __init__(self, computer: Computer, tolerance: float) -> None:
        self._computer, self._tolerance = computer, tolerance

    def explain(self, claim: Claim, found: Compared, computed: Computed, around: Neighbourhood) -> Explained:
        """The likely cause of what differs."""
        if found.label and not found.logprob:
            at = found.label[0]
            return Explained(Cause.LABEL, f"the pass that gave token {at} was of its KV's snapshot")
        if found.route and not found.logprob:
            return _of_routes(claim, found, computed)
        if found.weights and not found.logprob:
            return _of_weights(claim, found, computed, self._tolerance)
        if found.mask and not found.logprob:
            detail = f"the mask of token {found.mask[0]} is not what its recorded sampling parameters leave"
            return Explained(Cause.MASK, detail)
        if found.sampling and not found.logprob:
            at = found.sampling[0]
            above = (claim.turn.sampling_logprobs or [0.0])[at] or 0.0
            detail = (
                "is above 0" if above > self._tolerance else "is not that of its recorded sampling parameters"
            )
            return Explained(Cause.LOGPROB, f"the sampling_logprob of token {at} {detail}")
        trials = self._trials(claim, found, around)
        for _ in range(TRIALS_MAX // TOGETHER):
            some = list(islice(trials, TOGETHER))
            if not some:
                break
            for trial, fits in zip(some, self._fit(some), strict=True):
                if fits:
                    return Explained(trial.cause, trial.detail, trial.tokens)
        if _later_fit(found, len(claim.labels)):
            detail = "the tokens behind it fit, so neither ids nor KV are at fault"
            return Explained(Cause.LOGPROB, detail)
        by_id = self._other_ids(claim, found.logprob[0])
        return by_id or Explained(Cause.UNKNOWN, "no other snapshot, KV, id or turn here fits")

    def explain_lengths(self, claim: Claim, around: Neighbourhood) -> Explained:
        """The likely cause of a problem in a turn's lengths."""
        trials = (*_siblings(claim, around), *_other_parents(claim, around))
        for trial, fits in zip(trials, self._fit(trials), strict=True):
            if fits:
                return Explained(trial.cause, trial.detail, trial.tokens)
        return Explained(Cause.TOKENS, claim.problem or "")

    def _trials(self, claim: Claim, found: Compared, around: Neighbourhood) -> Iterator[Trial]:
        yield from _kv_of_labels(claim, found)
        yield from _moved_borders(claim, found)
        yield from _other_snapshots(claim, around)
        yield from _other_kv(claim, around)
        yield from _siblings(claim, around)
        yield from _without_a_repeat(claim, found)
        yield from _other_parents(claim, around)

    def fits(self, claim: Claim, tokens: Sequence[int]) -> bool:
        """Whether the turn's numbers are those of these tokens."""
        return self._fit([Trial(Cause.UNKNOWN, "", claim, tokens)])[0]

    def _fit(self, trials: Sequence[Trial]) -> list[bool]:
        made = [[*jobs_of(trial.claim, trial.tokens)] for trial in trials]
        usable = [self._usable(trial.claim, jobs) for trial, jobs in zip(trials, made, strict=True)]
        numbers = iter(
            self._computer.compute(
                [job for jobs, use in zip(made, usable, strict=True) if use for _, _, job in jobs]
            )
        )
        fit = []
        for trial, jobs, use in zip(trials, made, usable, strict=True):
            if not use:
                fit.append(False)
                continue
            parts = [(first, until, next(numbers)) for first, until, _ in jobs]
            length = trial.claim.length if trial.tokens is None else len(trial.tokens)
            claim = replace(trial.claim, length=length)
            again = compare(claim, Computed(claim, parts), self._tolerance)
            fit.append(not again.logprob and not again.route)
        return fit

    def _usable(self, claim: Claim, jobs: Sequence[tuple[int, int, PassJob]]) -> bool:
        # A part whose KV is too short has no job.
        asked = sum(until - first for first, until, _ in jobs)
        counts = {len(claim.labels), len(claim.logprobs), asked}
        return bool(jobs) and len(counts) == 1 and all(computable(self._computer, job) for _, _, job in jobs)

    def _other_ids(self, claim: Claim, at: int) -> Explained | None:
        """A token that is missing before number `at`, or is another one than that before it."""
        if len(claim.parts) > 1:
            return None
        ids, last = claim.tokens, claim.length - len(claim.labels)
        place = last + at
        kv = list(claim.parts[0].kv)
        [near] = self._computer.compute([PassJob(ids[: place + 1], kv[:place], place - 1, top=IDS_MAX)])
        some = range(self._computer.vocab) if self._computer.vocab <= VOCAB_MAX else near.top
        for cause, detail, skip in (
            (Cause.TOKENS, "a token is missing", 0),
            (Cause.TOKEN_ID, "another token was sampled", 1),
        ):
            found = self._first_id(claim, ids, place, skip, some)
            if found is not None:
                why = f"{detail} before token {at}" if not skip else f"{detail} than token {at}"
                whole = [*ids[:place], found, *ids[place + skip :]]
                return Explained(cause, f"{why}: {found} fits", whole)
        return None

    def _first_id(
        self, claim: Claim, ids: Sequence[int], place: int, skip: int, some: Sequence[int]
    ) -> int | None:
        """The id that the tokens behind `place` fit, put there."""
        kv = list(claim.parts[0].kv)
        recorded = claim.logprobs[place - (claim.length - len(claim.labels)) + skip :]
        tail = list(ids[place + skip : place + skip + GLANCE])
        if not tail:
            return None
        under = kv[: place + 1] + [kv[min(place, len(kv) - 1)]] * GLANCE
        jobs = [
            PassJob([*ids[:place], one, *tail], under[: place + len(tail)], place)
            for one in some
            if one != ids[place]
        ]
        for job, numbers in zip(jobs, self._computer.compute(jobs), strict=True):
            if all(
                abs(made - said) <= self._tolerance
                for made, said in zip(numbers.logprobs.tolist(), recorded, strict=False)
            ):
                return job.ids[place]
        return None


def _of_routes(claim: Claim, found: Compared, computed: Computed) -> Explained:
    recorded, made = claim.routes, computed.routes
    assert recorded is not None
    if made is None:
        return Explained(Cause.ROUTE, "it has routes, and the model has no experts")
    if recorded.shape != made.shape:
        return Explained(
            Cause.ROUTE,
            f"its routes are of {recorded.shape[1:]} layers and experts, the model's of {made.shape[1:]}",
        )
    at = found.route[0]
    for other in found.route[1:]:
        if (
            sorted(recorded[at].ravel()) == sorted(made[other].ravel())
            and (recorded[other] == made[at]).all()
        ):
            return Explained(Cause.ROUTE, f"the rows of tokens {at} and {other} are exchanged")
    return Explained(Cause.ROUTE, f"the row of token {at} is of no pass over it")


def _of_weights(claim: Claim, found: Compared, computed: Computed, tolerance: float) -> Explained:
    recorded, made, routes = claim.router_weights, computed.weights, claim.routes
    assert recorded is not None
    assert made is not None
    assert routes is not None
    at = found.weights[0]
    off = weights_off(claim, computed, tolerance)[at]
    layer, place = (int(index) for index in np.argwhere(off)[0])
    like = np.abs(np.sort(made, -1) - np.sort(recorded[at], -1)).max((1, 2)) <= WEIGHTS_WIDER * tolerance
    if like[at]:
        detail = f"router weights of token {at}, layer {layer}: its experts have each other's"
    elif like.any():
        detail = f"router weights of token {at}: they are those of token {int(np.flatnonzero(like)[0])}"
    else:
        expert, value = int(routes[at, layer, place]), float(recorded[at, layer, place])
        detail = f"router weights of token {at}, layer {layer}: expert {expert} has {value:.6f}"
    return Explained(Cause.WEIGHTS, detail)


def _later_fit(found: Compared, count: int) -> bool:
    """Whether a token behind the first that differs does not: a wrong id or wrong KV would change all behind it."""
    return len(found.logprob) < count - found.logprob[0] or len(found.logprob) == 1


def _replaced(claim: Claim, labels: Sequence[str], parts: Sequence[KvPart]) -> Claim:
    return replace(claim, labels=tuple(labels), parts=tuple(parts))


def _renamed(names: Sequence[str], old: str, new: str, first: int = 0, last: int | None = None) -> list[str]:
    end = len(names) if last is None else last
    return [new if name == old and first <= at < end else name for at, name in enumerate(names)]


def _kv_of_labels(claim: Claim, found: Compared) -> Iterator[Trial]:
    """Labels and KV contradict each other, and the numbers are not those of the KV."""
    if not found.label:
        return
    last = claim.length - len(claim.labels) - 1
    parts, first = [], 0
    for until, names in claim.parts:
        kv = list(names)
        kv[last + first + 1 : last + until] = claim.labels[first + 1 : until]
        parts.append(KvPart(until, tuple(kv)))
        first = until
    yield Trial(
        Cause.STALE_KV, "its labels fit, and not its kv_snapshots", _replaced(claim, claim.labels, parts)
    )


def _moved_borders(claim: Claim, found: Compared) -> Iterator[Trial]:
    """The tokens at the border of two labels are of the other one."""
    if len(claim.parts) > 1 or not found.logprob:
        return
    last = claim.length - len(claim.labels) - 1
    ends = [sum(1 for _ in run) for _, run in groupby(claim.labels)]
    border = 0
    for size in ends[:-1]:
        border += size
        for first, until in _near(border, found.logprob[0], len(claim.labels)):
            name = claim.labels[border] if first < border else claim.labels[border - 1]
            labels, kv = list(claim.labels), list(claim.parts[0].kv)
            for token in range(first, until):
                labels[token] = name
                kv[last + token] = name
            detail = f"tokens {first} to {until - 1} are of {name}"
            yield Trial(Cause.LABEL, detail, _replaced(claim, labels, [KvPart(len(labels), tuple(kv))]))


def _near(border: int, first: int, count: int) -> Iterator[tuple[int, int]]:
    if first < border:
        yield first, border
    elif first == border:
        for size in (1, 2, 3, 4, 8):
            if border + size < count:
                yield border, border + size


def _other_snapshots(claim: Claim, around: Neighbourhood) -> Iterator[Trial]:
    """A snapshot that the turn names is another one, wherever it names it, or where it sampled."""
    start = claim.length - len(claim.labels) - 1
    for old in dict.fromkeys(claim.labels):
        for new in _others(around, old):
            cause = Cause.ADAPTER if new in around.adapters or old in around.adapters else Cause.LABEL
            labels = _renamed(claim.labels, old, new)
            everywhere = [KvPart(until, tuple(_renamed(kv, old, new))) for until, kv in claim.parts]
            detail = f"{new} made the tokens that are labelled {old}"
            yield Trial(cause, detail, _replaced(claim, labels, everywhere))
            sampled = [KvPart(until, tuple(_renamed(kv, old, new, start))) for until, kv in claim.parts]
            if sampled != everywhere:
                yield Trial(cause, detail, _replaced(claim, labels, sampled))


def _others(around: Neighbourhood, but: str) -> list[str]:
    return [name for name in reversed(around.snapshots) if name != but and around.can(name)][:OTHERS_MAX]


def _other_kv(claim: Claim, around: Neighbourhood) -> Iterator[Trial]:
    """The KV under the answer is not what the record says; the labels hold."""
    whole = claim.parts[-1].kv
    start = claim.length - len(claim.labels) - 1
    kept = _cached_ends(claim, start)
    own = claim.labels[0]
    parents = claim.parent.parts[-1].kv if claim.parent is not None and claim.parent.parts else ()

    def trial(kv: Sequence[str], detail: str) -> Trial:
        parts = [*claim.parts[:-1], KvPart(claim.parts[-1].until, tuple(kv))]
        return Trial(Cause.STALE_KV, detail, _replaced(claim, claim.labels, parts))

    if any(name != own for name in whole[: start + 1]):
        fresh = f"all KV of its prompt is of {own}, as nothing older was reused"
        yield trial([own] * (start + 1) + list(whole[start + 1 :]), fresh)
    for end in kept:
        for name in (*dict.fromkeys(parents), *_others(around, "")):
            kv = [name] * end + [own] * (start + 1 - end) + list(whole[start + 1 :])
            if tuple(kv) != whole:
                yield trial(kv, f"its positions 0 to {end - 1} are of {name}")
        if parents and len({*parents[:end]}) > 1:
            kv = [*parents[:end], *([own] * (start + 1 - min(end, len(parents)))), *whole[start + 1 :]]
            yield trial(kv[: len(whole)], f"its positions 0 to {end - 1} are as its parent turn left them")
    at = 0
    for old, run in groupby(whole[: start + 1]):
        first, at = at, at + sum(1 for _ in run)
        for new in _others(around, old):
            yield trial(
                _renamed(whole, old, new, first, at), f"its positions {first} to {at - 1} are of {new}"
            )


def _cached_ends(claim: Claim, start: int) -> list[int]:
    """Where cached KV may have ended: at the ends of earlier turns, in whole blocks, and at the whole prompt."""
    ends = [start // BLOCK * BLOCK, start, start + 1]
    turn = claim.parent
    while turn is not None and len(ends) < 12:
        ends += [turn.length // BLOCK * BLOCK, (turn.length - 1) // BLOCK * BLOCK, turn.length - 1]
        turn = turn.parent
    return [end for end in dict.fromkeys(ends) if 0 < end <= start + 1]


def _siblings(claim: Claim, around: Neighbourhood) -> Iterator[Trial]:
    """Choices of the same prompt."""
    prompt = claim.prompt
    alike = (
        one
        for one in around.others
        if one.parent is claim.parent and one.turn.added == claim.turn.added and one.turn.token_ids
    )
    for one in islice(alike, TURNS_MAX):
        ids = one.turn.token_ids
        length = len(prompt) + len(ids)
        if len(ids) != len(claim.labels) or length != claim.position_end + 1 or ids == claim.turn.token_ids:
            continue
        detail = f"the ids of turn {one.place.turn} fit, a choice of the same prompt"
        yield Trial(Cause.OTHER_CHOICE, detail, claim, prompt + ids)


def _without_a_repeat(claim: Claim, found: Compared) -> Iterator[Trial]:
    """A token stands twice, and its numbers do."""
    ids, count = claim.tokens, len(claim.labels)
    start, at = claim.length - count, found.logprob[0]
    if len(claim.parts) > 1 or (claim.routes is not None and len(claim.routes) != count):
        return
    for token in (at, at - 1, at - 2):
        # Its numbers stand twice, too. A sampled repetition has numbers of its own.
        if not 0 < token < count or ids[start + token] != ids[start + token - 1]:
            continue
        if claim.logprobs[token] != claim.logprobs[token - 1]:
            continue
        kept = [i for i in range(count) if i != token]
        kv = claim.parts[0].kv
        turn = replace_turn(claim, kept)
        shorter = replace(
            turn,
            labels=tuple(claim.labels[i] for i in kept),
            parts=(KvPart(count - 1, (*kv[: start + token - 1], *kv[start + token :])),),
            length=claim.length - 1,
        )
        whole = [*ids[: start + token], *ids[start + token + 1 :]]
        yield Trial(Cause.TOKENS, f"token {token} is there twice", shorter, whole)


def replace_turn(claim: Claim, kept: Sequence[int]) -> Claim:
    """The claim with these sampled tokens alone, in its columns; its labels and its KV are left."""
    turn = claim.turn
    fewer = msgspec.structs.replace(
        turn,
        token_ids=[turn.token_ids[i] for i in kept],
        logprobs=None if turn.logprobs is None else [turn.logprobs[i] for i in kept],
        sampling_logprobs=None
        if turn.sampling_logprobs is None
        else [turn.sampling_logprobs[i] for i in kept],
    )
    routes = None if claim.routes is None else claim.routes[list(kept)]
    return replace(claim, turn=fewer, routes=routes)


def _other_parents(claim: Claim, around: Neighbourhood) -> Iterator[Trial]:
    """The turn continues another conversation."""
    fitting = (
        one
        for one in around.others
        if one is not claim.parent
        and one.place.session != claim.place.session
        and one.length + len(claim.turn.added) + len(claim.labels) - 1 == claim.position_end
    )
    for one in islice(fitting, TURNS_MAX):
        detail = f"it continues turn {one.place.turn} of session {one.place.session!r}"
        yield Trial(Cause.OTHER_SESSION, detail, claim, one.tokens + claim.turn.added + claim.turn.token_ids)
