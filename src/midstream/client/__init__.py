"""What a trainer imports: publish snapshots, read routes and snapshots off rollout responses, and make training records of
sessions. No server code.

Always holds: a name's module is imported when the name is first used, so `import midstream.client` costs next to nothing and
a trainer that only reads responses never imports an HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream.client.decode import (
        decode_routing_matrix,
        near_ties_of,
        routes_of,
        snapshot_of,
        token_snapshots,
    )
    from midstream.client.errors import (
        NotReadyInTime,
        PublishError,
        ReplicasSilent,
        SignalRefused,
        SnapshotFailed,
        Unanswered,
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
    from midstream.client.rollouts import Rollout, RolloutClient, fresh, importance_ratios, staleness
    from midstream.client.run import TrainingRun
    from midstream.client.server import HotLoadServer
    from midstream.client.status import ReplicaStatus, Status

_NAMES = {  # module: what it has of __all__
    "decode": "decode_routing_matrix near_ties_of routes_of snapshot_of token_snapshots",
    "errors": "NotReadyInTime PublishError ReplicasSilent SignalRefused SnapshotFailed Unanswered",
    "journal": "gaps_in read_records traces_of",
    "publication": "Publication Published",
    "publish": "SnapshotPublisher",
    "records": "TrainingSequence jsonl_records nemo_gym_records sequences_of "
    "tinker_data tinker_datum verifiers_rollouts verl_batch verl_rows",
    "rollouts": "Rollout RolloutClient fresh importance_ratios staleness",
    "run": "TrainingRun",
    "server": "HotLoadServer",
    "status": "ReplicaStatus Status",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "HotLoadServer",
    "NotReadyInTime",
    "Publication",
    "PublishError",
    "Published",
    "ReplicaStatus",
    "ReplicasSilent",
    "Rollout",
    "RolloutClient",
    "SignalRefused",
    "SnapshotFailed",
    "SnapshotPublisher",
    "Status",
    "TrainingRun",
    "TrainingSequence",
    "Unanswered",
    "decode_routing_matrix",
    "fresh",
    "gaps_in",
    "importance_ratios",
    "jsonl_records",
    "near_ties_of",
    "nemo_gym_records",
    "read_records",
    "routes_of",
    "sequences_of",
    "snapshot_of",
    "staleness",
    "tinker_data",
    "tinker_datum",
    "token_snapshots",
    "traces_of",
    "verifiers_rollouts",
    "verl_batch",
    "verl_rows",
]

if not TYPE_CHECKING:  # so that a wrong name stays an error of the type checker

    def __getattr__(name: str) -> Any:
        """The name, which is kept here from then on. Raises AttributeError."""
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
