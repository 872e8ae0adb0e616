"""What a snapshot may be called, and where its files lie. Pure.

Always holds: two accepted identities never name the same directory, and no accepted identity names a place
outside its bucket: every segment between slashes is a plain name.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from midstream.errors import ConfigError, SnapshotRefused
from midstream.types import BASE_SNAPSHOT

MAX_IDENTITY_CHARS = 512


def check_identity(identity: str) -> None:
    """Raise SnapshotRefused unless `identity` can name a snapshot.

    Refused: the empty string, more than 512 characters, `base` (the weights the server started with), control
    characters, backslashes, text that is not valid Unicode, and any segment between slashes that is empty,
    `.` or `..`; that covers a leading or trailing slash. `@` is refused because responses are labelled
    `model@identity`: with it out, splitting a label at the first or at the last `@` gives the same identity.
    """
    reason = _why_refused(identity)
    if reason is not None:
        shown = identity if len(identity) <= 80 else identity[:80] + "..."
        raise SnapshotRefused(f"identity {shown!r} {reason}", param="identity")


def _why_refused(identity: str) -> str | None:
    if not identity:
        return "must not be empty"
    if len(identity) > MAX_IDENTITY_CHARS:
        return f"must be at most {MAX_IDENTITY_CHARS} characters, got {len(identity)}"
    if identity == BASE_SNAPSHOT:
        return "is reserved: it names the weights the server started with"
    if any(ord(c) < 32 or ord(c) == 127 for c in identity):
        return "must not contain control characters"
    if any(0xD800 <= ord(c) <= 0xDFFF for c in identity):
        return "must be valid Unicode"
    for char, why in (("\\", "a backslash"), ("@", "'@', which separates model and snapshot in responses")):
        if char in identity:
            return f"must not contain {why}"
    if any(segment in ("", ".", "..") for segment in identity.split("/")):
        return "must be made of names separated by single slashes, none of them empty, '.' or '..'"
    return None


def check_bucket(bucket: str) -> None:
    """Raise ConfigError unless `bucket` is a URL snapshots can be fetched from."""
    parts = urlsplit(bucket)
    if parts.scheme != "file":
        raise ConfigError(f"bucket {bucket!r}: only file:///absolute/path is supported so far")
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"bucket {bucket!r}: a file URL cannot name a host; write file:///absolute/path")
    if not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ConfigError(f"bucket {bucket!r}: write file:///absolute/path, with '?' and '#' percent-encoded")


def snapshot_url(bucket: str, identity: str) -> str:
    """The URL of the directory that holds `identity`'s files. Raises SnapshotRefused (see check_identity)."""
    check_identity(identity)
    return f"{bucket.rstrip('/')}/{quote(identity, safe='/')}"


def file_url_path(url: str) -> Path:
    """The local path a file:// URL names. Raises ConfigError on any other URL."""
    check_bucket(url)
    return Path(unquote(urlsplit(url).path))
