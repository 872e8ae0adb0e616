"""The ledger's rows as the values that the rest of midstream sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from midstream.ledger.records import Death, Disagreement, SnapshotRow, TransitionRow
from midstream.types import BASE_SNAPSHOT, Content, Desired, SnapshotFiles, Stage

Contents = Mapping[str, Content]


def as_desired(snapshot: Any, deployment: Any, contents: Contents) -> Desired:
    """A snapshot as it may be sent.

    It carries the deployment's generation, also as a fallback: a replica takes (snapshot, generation) pairs, and an
    older generation could be mistaken for a late message.
    """
    return Desired(
        snapshot=snapshot.identity,
        generation=deployment.generation,
        url=snapshot.url,
        reset_prompt_cache=snapshot.reset_prompt_cache,
        transition=deployment.transition,
        fingerprint=snapshot.fingerprint,
        compression=snapshot.compression,
        content=contents.get(snapshot.identity),
        parents=tuple(
            msgspec.structs.replace(link, content=contents.get(link.snapshot))
            for link in _files(snapshot.parents)
        ),
        max_cache_age=snapshot.max_cache_age,
        ignore_config=tuple(snapshot.ignore_config),
    )


def base_desired(deployment: Any) -> Desired:
    """Back to the weights of the start, after the ledger was reset."""
    return Desired(snapshot=BASE_SNAPSHOT, generation=deployment.generation, transition=deployment.transition)


def chain_identities(snapshots: Sequence[Any]) -> set[str]:
    """Of these rows and of all they stand on."""
    links = (link.snapshot for row in snapshots for link in _files(row.parents))
    return {row.identity for row in snapshots}.union(links)


def as_snapshot(row: Any, contents: Contents | None = None) -> SnapshotRow:
    return SnapshotRow(
        identity=row.identity,
        kind=row.kind,
        url=row.url,
        reset_prompt_cache=row.reset_prompt_cache,
        first_signalled_at=row.first_signalled_at,
        signalled_at=row.signalled_at,
        generation=row.generation,
        fingerprint=row.fingerprint,
        ready_at=row.ready_at,
        previous=row.previous,
        compression=row.compression,
        checksum_format=row.checksum_format,
        parents=_files(row.parents),
        max_cache_age=row.max_cache_age,
        ignore_config=tuple(row.ignore_config),
        content=(contents or {}).get(row.identity),
    )


def as_transition(row: Any) -> TransitionRow:
    return TransitionRow(
        replica=row.replica,
        boot=row.boot,
        seq=row.seq,
        identity=row.identity,
        generation=row.generation,
        stage=Stage(row.stage),
        at=row.at,
        detail=row.detail,
    )


def as_death(row: Any) -> Death:
    return Death(row.replica, row.identity, row.generation, row.detail)


def as_disagreement(row: Any) -> Disagreement:
    return Disagreement(
        row.replica, row.boot, row.identity, row.generation, row.retry_generation, row.detail, row.verdict
    )


def _files(parents: Any) -> tuple[SnapshotFiles, ...]:
    return msgspec.convert(parents, tuple[SnapshotFiles, ...])
