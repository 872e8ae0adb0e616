"""Records as claims: what each turn says of its tokens, in the tree that it stands in. Pure but for reading the bucket.

Owns: which records are one tree, the tokens before a turn, and what contradicts itself before anything is computed.
Always holds: the spans of a turn make no lists of more than POSITIONS_MAX together. A claim whose lengths contradict each other
has a `problem`, and is not computed as it stands.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from midstream.client.gone import GoneFiles
from midstream.client.journal import read_records
from midstream.core.traces import Span, TracedTurn
from midstream.verify.findings import Cause, Finding, Place

#: What the engine says where it does not know what computed the KV, and what a name whose files were overwritten becomes.
UNKNOWN_KV, GENERATION = "?", "@"
ORPHAN = "a turn before it is not in the records"
GONE = "file gone"
#: Of one turn's spans, and how many more than it has tokens. Few bytes say it, so it is bounded before a list is made.
POSITIONS_MAX, BEYOND_MAX = 2**22, 2**18


class Segment(NamedTuple):
    """One file of records, as it was read."""

    path: str
    sha256: str
    size: int


class KvPart(NamedTuple):
    """Sampled tokens up to number `until` stood on this KV. kv: the snapshot of each position, prompt first."""

    until: int
    kv: tuple[str, ...]


@dataclass(eq=False)
class Claim:
    """One turn. parent: None at the beginning of a conversation. labels: of each sampled token.

    routes: [tokens, layers, top_k]. router_weights: of the same shape, float32.
    parts: which KV its tokens stood on, the last part being that of its end. position_end: the positions with KV at the end.
    length: of all tokens, from the first of the conversation on.
    """

    place: Place
    parent: Claim | None
    turn: TracedTurn
    labels: tuple[str, ...] = ()
    routes: np.ndarray | None = None
    router_weights: np.ndarray | None = None
    parts: tuple[KvPart, ...] = ()
    position_end: int = 0
    length: int = 0
    #: What contradicts itself in its lengths.
    problem: str | None = None
    #: Why nothing is computed for it.
    unverified: str | None = None

    def __repr__(self) -> str:
        return f"Claim({self.place}, {len(self.turn.token_ids)} tokens)"

    @property
    def before(self) -> list[int]:
        """The tokens before those of its request."""
        return [] if self.parent is None else self.parent.tokens

    @property
    def prompt(self) -> list[int]:
        return self.before + self.turn.added

    @property
    def tokens(self) -> list[int]:
        """All of them, from the first of the conversation on."""
        turn: Claim | None = self
        pieces: list[list[int]] = []
        while turn is not None:
            pieces += (turn.turn.token_ids, turn.turn.added)
            turn = turn.parent
        return [token for piece in reversed(pieces) for token in piece]

    @property
    def logprobs(self) -> list[float]:
        return self.turn.logprobs or []

    @property
    def snapshots(self) -> set[str]:
        """All that its numbers need."""
        return {*self.labels, *(name for part in self.parts for name in part.kv)}


@dataclass(eq=False)
class Tree:
    """The turns of one session on one replica, each behind its parent."""

    deployment: str
    tenant: str
    session: str
    replica: str
    boot: str
    number: int
    claims: dict[int, Claim] = field(default_factory=dict)


class ClaimedRecords(NamedTuple):
    """deployments: all that were found. others: records that are no turns, by kind. gone: record files that are not there."""

    trees: list[Tree]
    segments: list[Segment]
    findings: list[Finding]
    deployments: list[str]
    others: dict[str, int]
    gone: GoneFiles


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class _Record(msgspec.Struct):
    n: int
    replica: str
    boot: str
    kind: str
    segment: str
    line: int


class _Turn(TracedTurn, frozen=True, kw_only=True):
    """record_gone: the file with its columns, which is not there."""

    record_gone: str | None = None


class _TurnRecord(_Record):
    deployment: str
    tenant: str
    session: str
    tree: int
    turn: _Turn


def read_claims(url: str, deployment: str | None = None) -> ClaimedRecords:
    """All turns below `url`. deployment: of this one alone.

    Raises SnapshotMissing without records, SnapshotError, and ValueError that names file and line of what is no record.
    """
    segments: list[Segment] = []

    def note(path: str, data: bytes) -> None:
        segments.append(Segment(path, hashlib.sha256(data).hexdigest(), len(data)))

    gone = GoneFiles()
    records = read_records(url, deployment=deployment, on_segment=note, on_gone=gone.add)
    return gather(records, segments, gone)


def gather(
    records: Iterable[dict[str, Any]], segments: list[Segment], gone: GoneFiles | None = None
) -> ClaimedRecords:
    """The trees of records as `read_records` gives them. gone: is filled meanwhile. Raises ValueError."""
    trees: dict[tuple[str, str, str, str, str, int], Tree] = {}
    #: Of each tree of a replica's boot, the session it was first said to be of.
    owners: dict[tuple[str, str, int], tuple[str, str, str]] = {}
    found: list[Finding] = []
    others: dict[str, int] = {}
    deployments: dict[str, None] = {}
    last: dict[tuple[str, str], tuple[int, str]] = {}
    for record in records:
        head = _read(record, _Record)
        found += _holes(head, last)
        if head.kind != "turn":
            others[head.kind] = others.get(head.kind, 0) + 1
            continue
        read = _read(record, _TurnRecord)
        deployments[read.deployment] = None
        place = Place(read.segment, read.line, read.session, read.replica, read.turn.turn)
        whose = (read.deployment, read.tenant, read.session)
        owner = owners.setdefault((read.replica, read.boot, read.tree), whose)
        if owner != whose:
            detail = f"tree {read.tree} of this replica is session {owner[2]!r}"
            found.append(Finding(Cause.OTHER_SESSION, place, detail))
            continue
        key = (*whose, read.replica, read.boot, read.tree)
        tree = trees.setdefault(key, Tree(*whose, read.replica, read.boot, read.tree))
        found += _add(tree, place, read.turn)
    return ClaimedRecords([*trees.values()], segments, found, [*deployments], others, gone or GoneFiles())


def _holes(head: _Record, last: dict[tuple[str, str], tuple[int, str]]) -> Iterator[Finding]:
    """A replica numbers its records without a hole, and says with a gap record what it lost."""
    number, _ = last.get((head.replica, head.boot), (head.n - 1, ""))
    last[head.replica, head.boot] = head.n, head.kind
    if head.n != number + 1 and head.kind != "gap":
        place = Place(head.segment, head.line, "", head.replica, 0)
        yield Finding(
            Cause.MISSING_RECORD, place, f"records {number + 1} to {head.n - 1} of this replica are not there"
        )


def _add(tree: Tree, place: Place, turn: _Turn) -> Iterator[Finding]:
    if turn.turn in tree.claims:
        yield Finding(Cause.REPEATED_TURN, place, f"turn {turn.turn} of the session comes twice")
        return
    parent = tree.claims.get(turn.parent)
    length = (parent.length if parent else 0) + len(turn.added) + len(turn.token_ids)
    claim = Claim(place, parent, turn, length=length)
    tree.claims[turn.turn] = claim
    if turn.parent and (parent is None or parent.unverified == ORPHAN):
        claim.unverified = ORPHAN
        return
    if turn.token_ids and not turn.kv_snapshots:
        claim.unverified = "its engine says nothing of its KV"
        return
    claim.problem = _filled(claim)
    if turn.resumed:
        # Another replica computed a part of it.
        claim.problem, claim.unverified = None, "another replica sampled its first tokens"
    elif turn.record_gone is not None:
        claim.unverified = GONE
    elif turn.logprobs is None:
        claim.unverified = "it has no log-probabilities"
    elif turn.logprob_of is not None:
        claim.unverified = "its log-probabilities are of the tokens that a grammar allowed"
    elif any(name == UNKNOWN_KV for name in claim.snapshots):
        claim.unverified = "its engine does not say what computed its KV"
    elif any(GENERATION in label for label in claim.labels):
        claim.unverified = "it is of adapters on swapped full weights, which are not computed"
    elif any(GENERATION in name for name in claim.snapshots):
        claim.unverified = "files that it names were overwritten"


def _filled(claim: Claim) -> str | None:
    """Fill the claim from its turn. Returns what contradicts itself in its lengths."""
    turn = claim.turn
    claim.position_end = turn.kv_snapshots[-1].end if turn.kv_snapshots else 0
    columns = {
        "token_ids": len(turn.token_ids),
        "logprobs": None if turn.logprobs is None else len(turn.logprobs),
        "sampling_logprobs": None if turn.sampling_logprobs is None else len(turn.sampling_logprobs),
        "sampling_masks": None if turn.sampling_masks is None else len(turn.sampling_masks),
        "routing_matrix": None if turn.routing_matrix is None else len(turn.routing_matrix),
        "router_weights": None if turn.router_weights is None else len(turn.router_weights),
        "snapshots": turn.snapshots[-1].end if turn.snapshots else 0,
    }
    sizes = {name: size for name, size in columns.items() if size is not None}
    problem = None
    if len({*sizes.values()}) > 1:
        problem = ", ".join(f"{size} {name}" for name, size in sizes.items())
    labels = _spread(turn.snapshots, 2 * max(sizes["token_ids"], len(turn.logprobs or ())) + 64)
    if labels is None:
        return (
            f"its snapshots leave a gap, overlap, or go on behind its tokens: {_shown_spans(turn.snapshots)}"
        )
    claim.labels = labels
    if turn.routing_matrix is not None:
        claim.routes = _routes(turn)
        if claim.routes is None:
            return problem or "its routes do not fill [tokens, layers, top_k]"
    if turn.router_weights is not None:
        claim.router_weights = _of_experts(turn, turn.router_weights, np.dtype("<f4"))
        if claim.router_weights is None or claim.routes is None:
            return problem or "its router weights are not those of its routes"
    parts, first, left = [], 0, POSITIONS_MAX
    earlier = [(one.tokens, one.kv_snapshots) for one in turn.earlier_kv_snapshots]
    for until, spans in (*earlier, (len(labels), turn.kv_snapshots)):
        kv = _spread(spans, min(left, claim.length + BEYOND_MAX))
        if kv is None or not first <= until <= len(labels):
            gap = f"its kv_snapshots leave a gap, overlap, or go on behind its tokens: {_shown_spans(spans)}"
            return problem or gap
        left -= len(kv)
        parts.append(KvPart(until, kv))
        first = until
    claim.parts = tuple(parts)
    return problem or _kv_problem(claim)


def _kv_problem(claim: Claim) -> str | None:
    """The KV of the last token is never computed."""
    needed = claim.length - 1
    if not claim.labels:
        return None
    if claim.length == len(claim.labels):
        return "its first sampled token has no token before it"
    if claim.position_end != needed:
        off = claim.position_end - needed
        more = f"{abs(off)} {'more' if off > 0 else 'fewer'}"
        return f"its KV has {claim.position_end} positions, {more} than its {claim.length} tokens need"
    begin = claim.length - len(claim.labels)
    short = next((part for part in claim.parts if len(part.kv) < begin + part.until - 1), None)
    return None if short is None else f"its earlier KV ends at position {len(short.kv)}"


def _shown_spans(spans: Sequence[Span]) -> str:
    return f"{[[span.snapshot, span.start, span.end] for span in spans[:4]]}"


def _spread(spans: Sequence[Span], most: int) -> tuple[str, ...] | None:
    """The snapshot of each position; None unless the spans stand one behind the other, for `most` positions at most."""
    found: list[str] = []
    for span in spans:
        if span.start != len(found) or not span.start < span.end <= most:
            return None
        found += [span.snapshot] * (span.end - span.start)
    return tuple(found)


def _routes(turn: TracedTurn) -> np.ndarray | None:
    assert turn.routing_matrix is not None
    dtype = np.dtype("<u2" if turn.routing_matrix_dtype == "uint16" else "u1")
    routes = _of_experts(turn, turn.routing_matrix, dtype)
    return None if routes is None else routes.astype(np.int64)


def _of_experts(turn: TracedTurn, given: Sequence[str], dtype: np.dtype[Any]) -> np.ndarray | None:
    """[tokens, layers, top_k]; None: they do not fill it."""
    shape = turn.routing_matrix_shape or []
    if len(shape) != 2 or min(shape) < 1:
        return None
    size = dtype.itemsize * shape[0] * shape[1]
    try:
        rows = [base64.b64decode(one, validate=True) for one in given]
    except (binascii.Error, ValueError):
        return None
    if any(len(row) != size for row in rows):
        return None
    return np.frombuffer(b"".join(rows), dtype).reshape(len(rows), *shape)


def _read(record: dict[str, Any], kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.convert(record, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{record.get('segment')}, line {record.get('line')}: {error}") from error
