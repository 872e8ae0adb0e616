"""Names under which pushed weights may go into the bucket.

Always holds: a push replaces no files. A name under which the bucket has others is refused if the trainer gave it, and is not
chosen otherwise. A bucket that does not answer holds up no update.
"""

from __future__ import annotations

import logging

from midstream.core.errors import SnapshotError, SnapshotRefused
from midstream.core.types import Content
from midstream.fleet.registry import Deployment
from midstream.ledger import Ledger
from midstream.ledger.signals import pushed_name
from midstream.snapshots.content import content_fingerprint
from midstream.snapshots.identity import snapshot_url
from midstream.snapshots.store.kept import check_place

logger = logging.getLogger(__name__)

#: Of the content's digest, in a name that has it.
_DIGITS = 12


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


async def free_name(ledger: Ledger, deployment: Deployment, content: Content) -> str:
    """Empty where the ledger may name it: nothing else is in the bucket under the name that comes next."""
    row = await ledger.deployment(deployment.name)
    reports = [view.report for view in deployment.replicas.views if view.report]
    coming = pushed_name(max((row.generation, *(report.own.generation for report in reports))) + 1)
    try:
        await check_name(ledger, deployment, coming, content)
    except SnapshotRefused:
        # They are of a ledger that was reset, or of another server.
        return f"{coming}-{content_fingerprint(content).rpartition(':')[2][:_DIGITS]}"
    return ""
