"""Who calls, as which tenant, and with which scopes.

Always holds: keys are kept and compared as SHA-256 digests, and never logged or passed on. A tenant's name is the one that the
settings give. Without one, it is stable for its key and does not reveal it. Without configured keys everybody may do
everything and there is no tenant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from midstream.core.errors import Unauthorized
from midstream.core.key_settings import KeySettings, key_digest
from midstream.core.scopes import EVERYTHING, NOTHING, Grant, parse_grant

#: The headers that may hold a key.
CREDENTIALS = (b"authorization", b"x-api-key")
FINGERPRINT_CHARS = 12


class Caller(msgspec.Struct, frozen=True):
    """fingerprint: stands for the key in the audit log: how its SHA-256 begins; "unknown": not a valid key; "-": no keys."""

    tenant: str
    grant: Grant
    fingerprint: str = "-"


# Every caller, where keys are not in use.
ANYBODY = Caller("", EVERYTHING)
NOBODY = Caller("", NOTHING, "unknown")


class Authenticator:
    def __init__(self, api_keys: Iterable[str | KeySettings]) -> None:
        # By the key's digest: the time of a lookup reveals nothing about a key. Without a tenant: it is made of the
        # key, which is not known here before it is presented.
        self._callers: dict[bytes, Caller] = {}
        for entry in api_keys:
            if isinstance(entry, KeySettings):
                key, tenant, grant = entry.key, entry.tenant or "", parse_grant(entry.scopes)
            else:
                key, tenant, grant = entry, "", EVERYTHING
            digest = key_digest(key)
            self._callers[digest] = Caller(tenant, grant, digest.hex()[:FINGERPRINT_CHARS])
        #: Keys are in use. If not, every caller is ANYBODY.
        self.required = bool(self._callers)

    def __repr__(self) -> str:
        return f"Authenticator({len(self._callers)} keys)"

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller of a request with these headers (lower-case names).

        Raises Unauthorized. `Authorization: Bearer` and `X-Api-Key` both count; one that matches is enough.
        """
        if not self._callers:
            return ANYBODY
        for presented in (
            _bearer(headers.get(b"authorization", b"")),
            headers.get(b"x-api-key", b"").strip(),
        ):
            digest = hashlib.sha256(presented).digest()
            found = self._callers.get(digest) if presented else None
            if found is not None:
                if not found.tenant:
                    found = self._callers[digest] = msgspec.structs.replace(found, tenant=_tenant(presented))
                return found
        raise Unauthorized("a valid API key is needed, as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'")


def tenant_of(api_key: str) -> str:
    """A short name for the owner of the key: a one-way digest."""
    return _tenant(api_key.encode())


def _tenant(api_key: bytes) -> str:
    return hashlib.blake2b(api_key, digest_size=8, person=b"midstream tenant").hexdigest()


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
