"""What a trainer imports: publish snapshots, and read routes and snapshots off rollout responses. No server code."""

from midstream.client.decode import decode_routing_matrix, routes_of, snapshot_of, token_snapshots
from midstream.client.errors import NotReadyInTime, PublishError, SignalRefused, SnapshotFailed
from midstream.client.publish import ReplicaStatus, SnapshotPublisher, Status

__all__ = [
    "NotReadyInTime",
    "PublishError",
    "ReplicaStatus",
    "SignalRefused",
    "SnapshotFailed",
    "SnapshotPublisher",
    "Status",
    "decode_routing_matrix",
    "routes_of",
    "snapshot_of",
    "token_snapshots",
]
