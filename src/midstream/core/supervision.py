"""What a supervisor and each of its child processes say to each other: settings one way, answers the other. Pure.

Owns: the messages that are the same for every kind of child, and the settings of the Tinker front. The front is a building of
its own, which the supervisor knows by these settings alone. Those of gateways and replicas are in launch/specs.py.
Always holds: each message is one JSON line.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from midstream.core.config import TinkerSettings
from midstream.core.key_settings import KeySettings
from midstream.core.logs import LogFormat


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a child process, its first line. name: of this one among its kind, for log lines."""

    name: str = ""
    log_level: str
    log_format: LogFormat = "text"


class TinkerSpec(ChildSpec, frozen=True, kw_only=True):
    """The Tinker front.

    path: of its socket. names: what clients may call the model, its own name first. deployment: accounts/A/deployments/D.
    threads: of the trainer. key: the server's own, which may publish to the deployment; None where keys are not in use.
    """

    path: str
    gateway_url: str
    names: tuple[str, ...]
    model_dir: str
    deployment: str
    bucket: str
    state_dir: str
    api_keys: tuple[str | KeySettings, ...]
    key: str | None = None
    threads: int
    settings: TinkerSettings


class SpareWaits(msgspec.Struct, frozen=True, kw_only=True, tag="waiting", forbid_unknown_fields=True):
    """What a spare child says first: it has imported all that it needs, and waits for its settings."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """A child's answer to its settings.

    port: 0 where it listens on no port. error: why it could not start; it then ends. offer: where it offers its listening
    sockets to a successor. A successor answers as soon as it can read messages, and says Accepting later.
    """

    port: int = 0
    error: str | None = None
    offer: str | None = None


class Stalled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A child's event loop stood still by its own doing."""

    stalled_s: float


class Accepting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A successor accepts connections from now on."""

    accepting: Literal[True] = True
