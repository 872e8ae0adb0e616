"""Publish a checkpoint and wait until every replica serves it.

python examples/hot_load.py http://127.0.0.1:8080 file:///path/to/bucket CHECKPOINT_DIR IDENTITY
"""

from __future__ import annotations

import sys

from midstream.client import SnapshotPublisher
from midstream.client.status import Status

url, bucket, checkpoint, identity = sys.argv[1:]


def show(status: Status) -> None:
    print("  " + ", ".join(f"{r.name}: {r.stage} ({r.snapshot})" for r in status.replicas))


with SnapshotPublisher(url, bucket) as publisher:
    # Weights first, configuration last, renamed into place.
    publisher.write_full(identity, checkpoint)
    # Retried as long as a retry can help.
    publisher.snapshots.signal(identity, reset_prompt_cache="all")
    final = publisher.snapshots.wait_until_ready(identity, on_status=show)
for replica in final.replicas:
    swap = replica.last_swap or {}
    print(f"{replica.name} serves {replica.snapshot}; no step ran for {swap.get('pause_ms', 0.0):.2f} ms")
