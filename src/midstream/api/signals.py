"""What a hot-load signal or a hint asks for, read strictly from its body and headers. Pure.

Always holds: a body is refused whole when any part of it is not understood, by a message that names the field in full. An
accepted source URL lies inside an allowed bucket, however it is spelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from midstream.core.decoding import fault
from midstream.core.endpoints import Parameter
from midstream.core.errors import InvalidRequest, SnapshotRefused, UnknownField
from midstream.core.headers import HEADER_OVERWRITE
from midstream.core.types import BASE_SNAPSHOT, CompressionFormat, PolicyFate, ResetPromptCache
from midstream.http.bodies import json_object
from midstream.snapshots.delta_formats import check_checksum_format, compression_format, is_arc
from midstream.snapshots.identity import check_identity
from midstream.snapshots.layout import is_snapshot_file

OVERWRITE = Parameter(
    HEADER_OVERWRITE,
    {"type": "string", "enum": ["1"]},
    "The files replace those that the identity meant before.",
)
SOURCE_URL_HEADER = "x-fireworks-hot-load-source-url"
HINT_FILES_MAX = 10_000
MAX_AGE_MAX = 2**31 - 1
URL_CHARS_MAX = 4096


class MaxAge(msgspec.Struct, frozen=True):
    """Cached KV may be reused for so many commits."""

    max_age: int


class Validation(msgspec.Struct, frozen=True):
    extra_fields_ignore: list[str] | None = None


class Metadata(msgspec.Struct, frozen=True):
    """What a signal says of an incremental snapshot."""

    previous_snapshot_identity: str
    compression_format: str
    checksum_format: str | None = None


class SignalBody(msgspec.Struct, frozen=True):
    identity: str
    reset_prompt_cache: Literal["all", "new_session", "none"] | bool | MaxAge | None = None
    incremental_snapshot_metadata: Metadata | None = None
    validation: Validation | None = None
    # Whose snapshot it is; None: the deployment's own.
    policy: str | None = None
    # What becomes of the deployment's policies; None: they keep their base, or the signal is refused while there are any.
    policies: PolicyFate | None = None

    @classmethod
    def read(cls, body: bytes) -> SignalBody:
        """See parse_signal."""
        return parse_signal(body)

    @property
    def reset(self) -> ResetPromptCache:
        """true is `all`, false is `none`, absent is `all`; an age limit alone resets nothing."""
        match self.reset_prompt_cache:
            case "new_session" | "none" as policy:
                return policy
            case False | MaxAge():
                return "none"
            case _:
                return "all"

    @property
    def max_cache_age(self) -> int | None:
        asked = self.reset_prompt_cache
        return asked.max_age if isinstance(asked, MaxAge) else None

    @property
    def previous(self) -> str | None:
        metadata = self.incremental_snapshot_metadata
        return metadata.previous_snapshot_identity if metadata else None

    @property
    def compression(self) -> CompressionFormat | None:
        metadata = self.incremental_snapshot_metadata
        return compression_format(metadata.compression_format) if metadata else None

    @property
    def checksum_format(self) -> str | None:
        """None for a format whose files say it."""
        return "adler32" if self.compression is not None and is_arc(self.compression) else None

    @property
    def ignore_config(self) -> tuple[str, ...]:
        """Each once, in order."""
        ignored = self.validation.extra_fields_ignore if self.validation else None
        return tuple(sorted(set(ignored or ())))


class NamedDirectory(NamedTuple):
    """A directory that a client names itself, by its URL. param: the field or header that names it."""

    url: str
    param: str = SOURCE_URL_HEADER


class HintBody(msgspec.Struct, frozen=True):
    identity: str | None = None
    files: list[str] | None = None
    file: str | None = None
    incremental_snapshot_metadata: Metadata | None = None
    # A policy that will be asked for; without an identity its own snapshot is meant.
    policy: str | None = None

    @classmethod
    def read(cls, body: bytes) -> HintBody:
        """See parse_hint."""
        return parse_hint(body)

    @property
    def names(self) -> tuple[str, ...]:
        """Each once, in order."""
        return tuple(dict.fromkeys([*(self.files or ()), *([self.file] if self.file is not None else ())]))


Body = TypeVar("Body", SignalBody, HintBody)

#: The objects inside a body that must have no other fields than these.
_INNER: dict[str, type[msgspec.Struct]] = {
    "incremental_snapshot_metadata": Metadata,
    "validation": Validation,
    "reset_prompt_cache": MaxAge,
}


def parse_signal(body: bytes) -> SignalBody:
    """The signal in a request body. Raises InvalidRequest, UnknownField or SnapshotRefused, naming the field."""
    signal = _decoded(body, SignalBody)
    check_identity(signal.identity)
    _check_metadata(signal.incremental_snapshot_metadata)
    age = signal.max_cache_age
    if age is not None and not 0 <= age <= MAX_AGE_MAX:
        raise _invalid("reset_prompt_cache.max_age", f"must be from 0 to {MAX_AGE_MAX}, got {age}")
    if signal.policy is not None and signal.policies is not None:
        raise _invalid("policies", "goes with full weights; a policy's snapshot changes nothing for others")
    if signal.validation is not None:
        for name in signal.validation.extra_fields_ignore or ():
            if not name or len(name) > 256 or not name.isprintable():
                raise _invalid(
                    "validation.extra_fields_ignore", f"{name[:80]!r} is no field's name of config.json"
                )
    return signal


def parse_hint(body: bytes) -> HintBody:
    """The hint in a request body. Raises InvalidRequest, UnknownField or SnapshotRefused, naming the field."""
    hint = _decoded(body, HintBody)
    _check_metadata(hint.incremental_snapshot_metadata)
    if hint.identity is None:
        if hint.policy is None or hint.names:
            raise InvalidRequest("Object missing required field `identity`", param="identity")
        return hint
    check_identity(hint.identity)
    if not hint.names:
        raise _invalid("files", "name the files that have landed, or one of them as `file`")
    if len(hint.names) > HINT_FILES_MAX:
        raise _invalid("files", f"at most {HINT_FILES_MAX} in one hint")
    for name in hint.names:
        if len(name) > 255 or not name.isprintable() or not is_snapshot_file(name):
            param = "file" if name == hint.file else "files"
            raise _invalid(
                param, f"{name[:80]!r} is not a file of a snapshot (config.json, *.safetensors, ...)"
            )
    return hint


def _decoded(body: bytes, kind: type[Body]) -> Body:
    """A body with no unknown field at any level. Raises InvalidRequest and UnknownField."""
    raw = json_object(body)
    _refuse_unknown(raw, kind, "")
    for name, inner in _INNER.items():
        if isinstance(raw.get(name), dict):
            _refuse_unknown(raw[name], inner, f"{name}.")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=fault(error).field or None) from error


def overwrites(headers: Mapping[str, str]) -> bool:
    """True if the signal's files replace those that were served under this identity. Raises InvalidRequest."""
    asked = headers.get(HEADER_OVERWRITE)
    if asked not in (None, "1"):
        raise InvalidRequest(f"{HEADER_OVERWRITE}: must be 1, or be left out", param=HEADER_OVERWRITE)
    return asked is not None


def source_url(source: str, buckets: Sequence[str], param: str = SOURCE_URL_HEADER) -> tuple[str, str]:
    """The URL of a snapshot's directory that a client names itself, spelled as midstream spells URLs, and its bucket.

    It must lie inside one of `buckets`. Every part of its path is decoded once and must then be a plain name. So no
    spelling of `..`, `/` or a host leads elsewhere. Raises InvalidRequest, which shows nothing of what was refused.
    """
    why = "is not a URL of a directory"
    if len(source) <= URL_CHARS_MAX and source.isprintable() and not set(source) & set(" \\?#"):
        for bucket in buckets:
            names = _below(source, bucket)
            if names is None:
                continue
            if all(_plain(name) for name in names):
                return f"{bucket.rstrip('/')}/{'/'.join(quote(name, safe='') for name in names)}", bucket
            why = "must be made of plain names separated by single slashes"
            break
        else:
            why = f"must lie inside {' or '.join(buckets)}"
    raise InvalidRequest(f"{param}: {why}", param=param)


def _below(source: str, bucket: str) -> list[str] | None:
    """The decoded names that lead from `bucket` to `source`; None when it is not below it."""
    try:
        theirs, ours = urlsplit(source), urlsplit(bucket)
    except ValueError:
        return None
    if (theirs.scheme, _host(theirs.scheme, theirs.netloc)) != (ours.scheme, _host(ours.scheme, ours.netloc)):
        return None
    path = theirs.path.rstrip("/").split("/")
    root = ours.path.rstrip("/").split("/")
    decoded = [unquote(name, errors="surrogateescape") for name in path]
    if len(path) <= len(root) or decoded[: len(root)] != [unquote(name) for name in root]:
        return None
    return decoded[len(root) :]


def _host(scheme: str, netloc: str) -> str:
    return "" if scheme == "file" and netloc == "localhost" else netloc


def _plain(name: str) -> bool:
    # The name as a server sees it that decodes once too often.
    again = unquote(name)
    return (
        name.isprintable()
        and not {"/", "\\"} & {*name, *again}
        and not {"", ".", ".."} & {name, again}
        and again.isprintable()
    )


def _check_metadata(metadata: Metadata | None) -> None:
    if metadata is None:
        return
    at = "incremental_snapshot_metadata."
    # The rules of chains give the reason for the base.
    if metadata.previous_snapshot_identity != BASE_SNAPSHOT:
        try:
            check_identity(metadata.previous_snapshot_identity)
        except SnapshotRefused as error:
            raise _invalid(f"{at}previous_snapshot_identity", error.message) from error
    try:
        compression = compression_format(metadata.compression_format)
    except ValueError as error:
        raise _invalid(f"{at}compression_format", str(error)) from error
    try:
        check_checksum_format(metadata.checksum_format, compression)
    except ValueError as error:
        raise _invalid(f"{at}checksum_format", str(error)) from error


def _invalid(param: str, why: str) -> SnapshotRefused:
    return SnapshotRefused(f"{param}: {why}", param=param)


def _refuse_unknown(raw: dict[str, Any], known: type[msgspec.Struct], at: str) -> None:
    for field in raw:
        if field not in known.__struct_fields__:
            raise UnknownField(at + field)
