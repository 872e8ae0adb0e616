"""Which names a snapshot may have, and where its files lie. Pure.

Always holds: two accepted identities never name the same directory. No accepted identity names a place outside its bucket.
An accepted bucket URL holds no secret. Messages about a refused URL leave out the parts that may hold one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from midstream.core.errors import ConfigError, SnapshotRefused
from midstream.core.types import BASE_SNAPSHOT
from midstream.snapshots.messages import shown

MAX_IDENTITY_CHARS = 512
#: Characters of a URL in a message.
URL_CHARS = 400
#: Ends the name of the directory that has the whole files of an incremental snapshot, beside its own.
WHOLE_SUFFIX = ".full"

_SCHEMES: Mapping[str, Literal["file", "s3", "gs", "az"]] = {
    "file": "file",
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
}
_AZURE_HOSTS = (
    ".dfs.core.windows.net",
    ".blob.core.windows.net",
    ".dfs.fabric.microsoft.com",
    ".blob.fabric.microsoft.com",
)
# What some reader of a log takes for the end of a line is among them.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CONTAINER = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{1,254}")


def check_identity(identity: str, param: str = "identity") -> None:
    """Raise SnapshotRefused unless `identity` can name a snapshot. param: the field that it came in.

    Refused: the empty string, more than 512 characters, `base` (the weights the server started with), control
    characters, backslashes, invalid Unicode, and any segment between slashes that is empty, `.` or `..`. So a leading or
    trailing slash is refused, too. `@` is refused because labels of responses are `model@identity`: without it, a label
    splits the same way at its first and at its last `@`.
    """
    reason = _why_refused(identity)
    if reason is not None:
        shown = identity if len(identity) <= 80 else identity[:80] + "..."
        raise SnapshotRefused(f"{param} {shown!r} {reason}", param=param)


def _why_refused(identity: str) -> str | None:
    if not identity:
        return "must not be empty"
    if len(identity) > MAX_IDENTITY_CHARS:
        return f"must be at most {MAX_IDENTITY_CHARS} characters, got {len(identity)}"
    if identity == BASE_SNAPSHOT:
        return "is reserved: it names the weights the server started with"
    if _CONTROL_CHARACTERS.search(identity):
        return "must not contain control characters"
    if any(0xD800 <= ord(c) <= 0xDFFF for c in identity):
        return "must be valid Unicode"
    for char, why in (("\\", "a backslash"), ("@", "'@', which separates model and snapshot in responses")):
        if char in identity:
            return f"must not contain {why}"
    if any(segment in ("", ".", "..") for segment in identity.split("/")):
        return "must be made of names separated by single slashes, none of them empty, '.' or '..'"
    return None


@dataclass(frozen=True)
class BucketPlace:
    """What a bucket URL names.

    container: the bucket's name; empty for a file. path: of the directory; absolute for a file, else without a slash at
    either end. account, host: Azure's storage account and its host, if the URL names them.
    """

    kind: Literal["file", "s3", "gs", "az"]
    container: str
    path: str
    account: str | None = None
    host: str | None = None


def parse_bucket(bucket: str) -> BucketPlace:
    """The place that the URL of a bucket, or of a directory in it, names. Raises ConfigError on any other text.

    file:///absolute/path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, and for Azure also
    abfss://container@account.dfs.core.windows.net/prefix. Special characters are percent-encoded. Credentials come from the
    environment, never from the URL.
    """
    place = _parsed(bucket)
    if isinstance(place, str):
        raise ConfigError(f"bucket {public_url(bucket)!r}: {place}")
    return place


def _parsed(bucket: str) -> BucketPlace | str:
    """The place, or the reason why there is none."""
    try:
        parts = urlsplit(bucket)
    except ValueError:
        return "is not a URL"
    userinfo, _, host = parts.netloc.rpartition("@")
    kind = _SCHEMES.get(parts.scheme)
    if kind is None:
        return "write file:///absolute/path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
    azure_host = kind == "az" and userinfo and host.endswith(_AZURE_HOSTS)
    if (userinfo and not azure_host) or ":" in userinfo:
        return "no user or password belongs into the URL; credentials are taken from the environment"
    if "?" in bucket or "#" in bucket:
        return "write it with '?' and '#' percent-encoded"
    # Bytes that are not UTF-8 become surrogates, which are refused; U+FFFD itself is a character like any other.
    path = unquote(parts.path, errors="surrogateescape")
    if why := _why_no_path(kind, path):
        return why
    if kind == "file":
        if host not in ("", "localhost"):
            return "a file URL cannot name a host; write file:///absolute/path"
        return BucketPlace(kind, "", path)
    container = userinfo if azure_host else host
    if not _CONTAINER.fullmatch(container):
        return f"{shown(container)!r} is not a bucket's name"
    if not azure_host:
        return BucketPlace(kind, container, path.strip("/"))
    return BucketPlace(kind, container, path.strip("/"), account=host.partition(".")[0], host=host)


def _why_no_path(kind: str, path: str) -> str | None:
    if kind == "file" and not path.startswith("/"):
        return "write file:///absolute/path"
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in path):
        return "the path must be valid Unicode without control characters"
    segments = path.strip("/").split("/") if kind != "file" else path.split("/")
    if any(s in (".", "..") for s in segments) or (kind != "file" and path.strip("/") and "" in segments):
        return "the path must be made of names separated by single slashes, none of them '.' or '..'"
    return None


def public_url(url: str) -> str:
    """`url` without user, password, query and fragment, which may hold secrets."""
    start = re.split(r"[?#]", url, maxsplit=1)[0]
    scheme, separator, rest = start.partition("://")
    netloc, slash, path = rest.partition("/")
    userinfo, at, host = netloc.rpartition("@")
    shown_user = userinfo.partition(":")[0] + at if host.endswith(_AZURE_HOSTS) else ""
    return shown(f"{scheme}{separator}{shown_user}{host}{slash}{path}" if separator else start, URL_CHARS)


def check_bucket(bucket: str) -> None:
    """Raise ConfigError unless `bucket` is a URL snapshots can be fetched from (see parse_bucket)."""
    parse_bucket(bucket)


def snapshot_url(bucket: str, identity: str) -> str:
    """The URL of the directory that holds `identity`'s files. Raises SnapshotRefused (see check_identity)."""
    check_identity(identity)
    return f"{bucket.rstrip('/')}/{quote(identity, safe='/')}"


def directory_name(url: str) -> str:
    """The last name in the path of `url`, decoded."""
    return unquote(urlsplit(url).path.rstrip("/").rpartition("/")[2])


def file_url_path(url: str) -> Path:
    """The local path a file:// URL names. Raises ConfigError on any other URL."""
    place = parse_bucket(url)
    if place.kind != "file":
        raise ConfigError(f"bucket {public_url(url)!r}: is not a file:// URL")
    return Path(place.path)
