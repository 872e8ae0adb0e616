"""Who may call, and as which tenant.

Always holds: keys are compared in constant time and never logged or passed on; a tenant's name is stable for its key
and does not reveal it. Without configured keys everybody may call and there is no tenant.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from midstream.errors import Unauthorized


class Authenticator:
    def __init__(self, api_keys: Iterable[str]) -> None:
        self._tenants = [(key.encode(), tenant_of(key)) for key in api_keys]

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def tenant(self, headers: Mapping[bytes, bytes]) -> str:
        """The tenant of a request with these headers (lower-case names), "" when keys are not in use.

        Raises Unauthorized. `Authorization: Bearer` and `X-Api-Key` both count; one that matches is enough.
        """
        if not self._tenants:
            return ""
        for presented in (
            _bearer(headers.get(b"authorization", b"")),
            headers.get(b"x-api-key", b"").strip(),
        ):
            matches = [tenant for key, tenant in self._tenants if hmac.compare_digest(key, presented)]
            if matches:
                return matches[0]
        raise Unauthorized("a valid API key is needed, as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'")


def tenant_of(api_key: str) -> str:
    """A short name for whoever holds the key; a one-way digest."""
    return hashlib.blake2b(api_key.encode(), digest_size=8, person=b"midstream tenant").hexdigest()


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
