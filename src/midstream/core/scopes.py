"""What an API key may do: how its scopes are written, and what an endpoint may ask of a key. Pure.

    SCOPE                the scope on every deployment
    SCOPE:DEPLOYMENT     on this one alone, by the last part of its name

A scope on a deployment is one on all of its policies. SCOPE:DEPLOYMENT/POLICY is kept for single ones, and refused.
Always holds:
- `operate` contains all other scopes, on the same deployments. No other scope contains one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from midstream.core.errors import ConfigError, Forbidden

SAMPLE, PUBLISH, OBSERVE, OPERATE = "sample", "publish", "observe", "operate"
SCOPES = (SAMPLE, PUBLISH, OBSERVE, OPERATE)

_SCOPE = re.compile(r"([a-z]+)(?::([A-Za-z0-9][A-Za-z0-9._-]{0,127})(/[A-Za-z0-9][A-Za-z0-9._-]{0,127})?)?")


@dataclass(frozen=True)
class Grant:
    """The scopes of one key. given: (scope, the deployment's last name), None for every deployment."""

    given: frozenset[tuple[str, str | None]] = frozenset()

    def __str__(self) -> str:
        """The scopes as they are written, separated by blanks."""
        return " ".join(sorted(scope if name is None else f"{scope}:{name}" for scope, name in self.given))

    def everywhere(self, scopes: Iterable[str]) -> bool:
        """One of `scopes`, on every deployment, also on those that are not there yet."""
        return any((scope, None) in self.given for scope in (*scopes, OPERATE))

    def anywhere(self, scopes: Iterable[str]) -> bool:
        """One of `scopes`, on some deployment."""
        wanted = {*scopes, OPERATE}
        return any(scope in wanted for scope, _ in self.given)

    def allows(self, scopes: Iterable[str], deployment: str) -> bool:
        """One of `scopes`, on the deployment of this name, in full or its last part."""
        scopes, name = (*scopes, OPERATE), deployment.rpartition("/")[2]
        return any((scope, None) in self.given or (scope, name) in self.given for scope in scopes)


NOTHING = Grant()
EVERYTHING = Grant(frozenset({(OPERATE, None)}))


def parse_scope(text: str) -> tuple[str, str | None]:
    """(scope, deployment or None for all) of one scope as it is written. Raises ConfigError."""
    match = _SCOPE.fullmatch(text)
    if match is None or match[1] not in SCOPES:
        raise ConfigError(
            f"scope {text!r}: expected one of {', '.join(SCOPES)}, alone or as SCOPE:DEPLOYMENT"
        )
    if match[3] is not None:
        raise ConfigError(f"scope {text!r}: a scope is for a whole deployment; name the deployment alone")
    return match[1], match[2]


def parse_grant(scopes: Iterable[str]) -> Grant:
    """Raises ConfigError."""
    return Grant(frozenset(parse_scope(text) for text in scopes))


class ScopeNeed(NamedTuple):
    """What an endpoint asks of a key.

    scopes: one of them is enough, the least first.
    on: where a key must have it.

    - named: on the deployment in the path.
    - meant: on the deployment that the headers mean, else the default one.
    - every: on every deployment, as it shows or changes the whole server.
    - some: on any deployment. It shows and changes what belongs to those alone.
    """

    scopes: tuple[str, ...]
    on: Literal["named", "meant", "every", "some"]


def forbidden(scopes: tuple[str, ...], resource: str) -> Forbidden:
    """resource: as the request names it; the answer does not show whether it exists."""
    wanted = " or ".join(repr(scope) for scope in scopes)
    return Forbidden(f"this API key lacks the scope {wanted} on {resource}")


#: What most endpoints need.
ANY = ScopeNeed(SCOPES, "some")
SAMPLE_MEANT = ScopeNeed((SAMPLE,), "meant")
SIGNAL, READ_SIGNALS = ScopeNeed((PUBLISH,), "meant"), ScopeNeed((PUBLISH, OBSERVE), "meant")
READ_ONE, PUBLISH_ONE, CHANGE_ONE = (
    ScopeNeed((PUBLISH, OBSERVE), "named"),
    ScopeNeed((PUBLISH,), "named"),
    ScopeNeed((OPERATE,), "named"),
)
