"""What a trainer imports: publish snapshots, and read routes and snapshots off rollout responses. No server code."""

from midstream.client.decode import (
    decode_routing_matrix,
    near_ties_of,
    routes_of,
    snapshot_of,
    token_snapshots,
)
from midstream.client.publication import Publication, Published
from midstream.client.publish import SnapshotPublisher
from midstream.client.server import (
    HotLoadServer,
    NotReadyInTime,
    PublishError,
    ReplicaStatus,
    SignalRefused,
    SnapshotFailed,
    Status,
)

__all__ = [
    "HotLoadServer",
    "NotReadyInTime",
    "Publication",
    "PublishError",
    "Published",
    "ReplicaStatus",
    "SignalRefused",
    "SnapshotFailed",
    "SnapshotPublisher",
    "Status",
    "decode_routing_matrix",
    "near_ties_of",
    "routes_of",
    "snapshot_of",
    "token_snapshots",
]
