"""Names under which pushed weights may go into the bucket.

Always holds: a push replaces no files. A name under which the bucket has others is refused. A name that the ledger gives
(ledger/signals.py) has the content's digest, so the bucket is not asked. A bucket that does not answer holds up no update.
"""

from __future__ import annotations

import logging

from midstream.core.errors import SnapshotError, SnapshotRefused
from midstream.core.types import Content
from midstream.fleet.registry import Deployment
from midstream.ledger import Ledger
from midstream.snapshots.identity import snapshot_url
from midstream.snapshots.store.kept import check_place

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
