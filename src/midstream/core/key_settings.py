"""API keys as settings: what a key may be written as, and its digest.

Always holds: no message shows a key.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from midstream.core.errors import ConfigError
from midstream.core.scopes import parse_grant
from midstream.core.setting_types import Name


class KeySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key that may not do everything."""

    # The key itself, or "sha256:" and the 64 hexadecimal digits of its SHA-256.
    key: str
    # Of core/scopes.py: sample, publish, observe, operate; on one deployment only as "sample:NAME".
    scopes: tuple[str, ...]
    # The owner of the key. Keys of one tenant share sessions, caches and Tinker models.
    tenant: Name | None = None


_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


def key_digest(text: str) -> bytes:
    """The SHA-256 of a key that is written as itself or as its digest."""
    match = _HASHED.fullmatch(text)
    return bytes.fromhex(match[1]) if match else hashlib.sha256(text.encode()).digest()


def key_checks(keys: tuple[str | KeySettings, ...]) -> list[tuple[bool, str]]:
    """Never with a key in a message. Raises ConfigError on a scope that is none."""
    texts = [entry if isinstance(entry, str) else entry.key for entry in keys]
    checks = [
        (all(key.strip() == key != "" for key in texts), "gateway.api_keys must not hold an empty key"),
        (
            all(_HASHED.fullmatch(key) for key in texts if key.startswith("sha256:")),
            "gateway.api_keys: sha256: is followed by the 64 hexadecimal digits of a key's SHA-256",
        ),
        (len(set(map(key_digest, texts))) == len(texts), "gateway.api_keys holds a key twice"),
    ]
    for number, entry in enumerate(keys, 1):
        if isinstance(entry, str):
            continue
        checks.append((bool(entry.scopes), f"gateway.api_keys: number {number} has no scopes"))
        try:
            parse_grant(entry.scopes)
        except ConfigError as error:
            raise ConfigError(f"gateway.api_keys: number {number}: {error}") from error
    return checks
