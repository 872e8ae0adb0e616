"""Names under which pushed weights may go into the bucket.

Always holds: a push replaces no files. A name under which the bucket has others is refused. One that is given before the
weights are known has to be new, unless it is desired now: that update may have failed, and come again. A name that the ledger
gives (ledger/signals.py) has the content's digest, so the bucket is not asked. A bucket that does not answer holds up no
update.
"""

from __future__ import annotations

import logging

from midstream.core.errors import SnapshotError, SnapshotMissing, SnapshotRefused
from midstream.core.types import Content
from midstream.fleet.registry import Deployment
from midstream.ledger import Ledger
from midstream.snapshots.identity import public_url, snapshot_url
from midstream.snapshots.store.kept import check_place
from midstream.snapshots.store.listing import list_snapshot

logger = logging.getLogger(__name__)


async def check_name(ledger: Ledger, deployment: Deployment, identity: str, content: Content) -> None:
    """Raises SnapshotRefused when other files lie where the pushed ones are to be written."""
    bucket = (await ledger.deployment(deployment.name)).bucket_url
    try:
        await check_place(snapshot_url(bucket, identity), content)
    except SnapshotRefused:
        raise
    except SnapshotError as error:
        # The replicas write them when the bucket is back.
        logger.warning("the bucket cannot be looked into for %s: %s", identity, error)


async def check_new_name(ledger: Ledger, deployment: Deployment, identity: str) -> None:
    """Raises SnapshotRefused for a name that is taken, as far as that can be known before the weights are."""
    if (await ledger.state(deployment.name)).snapshot == identity:
        return
    if await ledger.is_signalled(deployment.name, identity):
        raise _taken(identity, "was signalled before")
    url = snapshot_url((await ledger.deployment(deployment.name)).bucket_url, identity)
    try:
        await list_snapshot(url)
    except SnapshotMissing:
        return
    except SnapshotError as error:
        logger.warning("the bucket cannot be looked into for %s: %s", identity, error)
        return
    raise _taken(identity, f"has files at {public_url(url)}")


def _taken(identity: str, why: str) -> SnapshotRefused:
    return SnapshotRefused(
        f"weight_version: {identity!r} {why}; give a new name, or none before /finish_weight_update",
        param="weight_version",
    )
