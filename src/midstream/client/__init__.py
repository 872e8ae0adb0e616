"""What a trainer imports: publish snapshots, read routes and snapshots off rollout responses, and make training records of
sessions. No server code."""

from midstream.client.decode import (
    decode_routing_matrix,
    near_ties_of,
    routes_of,
    snapshot_of,
    token_snapshots,
)
from midstream.client.journal import gaps_in, read_records, traces_of
from midstream.client.publication import Publication, Published
from midstream.client.publish import SnapshotPublisher
from midstream.client.records import (
    TrainingSequence,
    jsonl_records,
    nemo_gym_records,
    sequences_of,
    tinker_data,
    tinker_datum,
    verifiers_rollouts,
    verl_batch,
    verl_rows,
)
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
    "TrainingSequence",
    "decode_routing_matrix",
    "gaps_in",
    "jsonl_records",
    "near_ties_of",
    "nemo_gym_records",
    "read_records",
    "routes_of",
    "sequences_of",
    "snapshot_of",
    "tinker_data",
    "tinker_datum",
    "token_snapshots",
    "traces_of",
    "verifiers_rollouts",
    "verl_batch",
    "verl_rows",
]
