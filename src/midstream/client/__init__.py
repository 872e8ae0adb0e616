"""What a trainer imports first: publish snapshots, sample rollouts, run a loop, ask a server. No server code.

The rest is in modules of its own: `decode` reads routes and snapshots off responses, `records` and `export` make training
records of sessions, `journal` reads the records that a server keeps; `errors`, `publication` and `status` have what calls
raise and return.

Always holds: a name's module is imported when the name is first used, so `import midstream.client` costs next to nothing and
a trainer that only reads responses never imports an HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream.client.decode import snapshot_of
    from midstream.client.errors import NotReadyInTime, PublishError, SnapshotFailed
    from midstream.client.publish import SnapshotPublisher
    from midstream.client.rollouts import Rollout, RolloutClient, fresh, importance_ratios, staleness
    from midstream.client.run import TrainingRun
    from midstream.client.server import ServerClient

__all__ = [
    "NotReadyInTime",
    "PublishError",
    "Rollout",
    "RolloutClient",
    "ServerClient",
    "SnapshotFailed",
    "SnapshotPublisher",
    "TrainingRun",
    "fresh",
    "importance_ratios",
    "snapshot_of",
    "staleness",
]

_NAMES = {  # module: what it has of __all__
    "decode": "snapshot_of",
    "errors": "NotReadyInTime PublishError SnapshotFailed",
    "publish": "SnapshotPublisher",
    "rollouts": "Rollout RolloutClient fresh importance_ratios staleness",
    "run": "TrainingRun",
    "server": "ServerClient",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

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
