"""Opens a bucket by its URL: a local directory, S3, Google Cloud Storage or Azure; and what another replica has.

Only this module makes obstore's stores.

Always holds: credentials come from the usual environment variables alone (AWS_*, GOOGLE_*, AZURE_*), not from profiles in
~/.aws. No message shows one, whatever a store or its server answered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, S3Store

from midstream.core.errors import ConfigError, SnapshotError, SnapshotMissing
from midstream.core.headers import HEADER_TOKEN
from midstream.snapshots.identity import BucketPlace, parse_bucket, public_url
from midstream.snapshots.messages import TEXT_CHARS, shown

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

Store = LocalStore | S3Store | GCSStore | AzureStore | HTTPStore

#: A call to a store that does not answer fails after about this time.
RETRY_S = 20.0
_RETRY: RetryConfig = {"max_retries": 6, "retry_timeout": timedelta(seconds=RETRY_S)}
#: There are others to ask.
_PEER_RETRY: RetryConfig = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}
_CONNECT_TIMEOUT = timedelta(seconds=5)
#: The time without a byte.
_READ_TIMEOUT = timedelta(seconds=20)
#: The time for one part.
_REQUEST_TIMEOUT = timedelta(minutes=15)

#: Where nothing listens.
_NO_PROXY = "http://127.0.0.1:9"
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_SECRET = re.compile(r"^(AWS|AZURE|GOOGLE)_.*(KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL|SERVICE_ACCOUNT)")
#: Shorter values, such as "true" or "1", stay in messages.
_NOT_SECRET_CHARS = 6


def open_bucket(url: str) -> Store:
    """A store for the directory that `url` names. Makes no call over the network.

    Raises SnapshotMissing when `url` is not a bucket's or a local directory is not there, SnapshotError when the environment
    cannot be used.
    """
    try:
        place = parse_bucket(url)
    except ConfigError as error:
        raise SnapshotMissing(shown(str(error), TEXT_CHARS)) from error
    if place.kind == "file":
        # Path.is_dir raises an error for a name that no file system takes.
        if not os.path.isdir(place.path):
            raise SnapshotMissing(f"{public_url(url)}: there is no such snapshot")
        return LocalStore(place.path)
    try:
        return _open_remote(place)
    except (BaseError, ValueError) as error:
        raise SnapshotError(f"{public_url(url)}: cannot be opened: {describe(error)}") from None


def check_settings(url: str) -> None:
    """Raise ConfigError when the environment lacks what opening `url` needs. Makes no call over the network."""
    place = parse_bucket(url)
    if place.kind == "file":
        return
    try:
        _open_remote(place)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"bucket {public_url(url)!r}: {describe(error)}") from None


def _open_remote(place: BucketPlace) -> Store:
    """The stores themselves read credentials, region and endpoint from the environment. They refuse plain HTTP by default."""
    client: ClientConfig = {
        "connect_timeout": _CONNECT_TIMEOUT,
        "read_timeout": _READ_TIMEOUT,
        "timeout": _REQUEST_TIMEOUT,
    }
    if any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS[place.kind]):
        client["allow_http"] = True
    options: dict[str, Any] = {
        "prefix": place.path or None,
        "client_options": client,
        "retry_config": _RETRY,
    }
    if place.kind == "s3":
        return S3Store(place.container, **options)
    if place.kind == "gs":
        return GCSStore(place.container, **options)
    if place.account is not None:
        options["account_name"] = place.account
        options["use_fabric_endpoint"] = (place.host or "").endswith(".fabric.microsoft.com")
    return AzureStore(place.container, **options)


def open_peer(url: str, token: str) -> HTTPStore:
    """A store for what a replica has at `url`. token: what it asks for; "" for nothing. Makes no call over the network.

    Raises obstore's BaseError.
    """
    client: ClientConfig = {
        "allow_http": True,
        # A proxy of the environment would get the token. One that is given replaces it, and is excluded for every host.
        "proxy_url": _NO_PROXY,
        "proxy_excludes": "*,0.0.0.0/0,::/0",
        "connect_timeout": _CONNECT_TIMEOUT,
        "read_timeout": _READ_TIMEOUT,
        "timeout": _REQUEST_TIMEOUT,
    }
    if token:
        client["default_headers"] = {HEADER_TOKEN: token}
    return HTTPStore.from_url(url, client_options=client, retry_config=_PEER_RETRY)


def describe(error: Exception, environment: Mapping[str, str] = os.environ) -> str:
    """Why a store failed, in one line without secrets."""
    text = str(error).strip()
    head = text.split("\n\n", 1)[0].replace("\n", " ")
    code = re.search(r"<Code>([A-Za-z0-9_.-]{1,60})</Code>", head)
    # The server's answer may quote the request, with a token that is in no environment variable.
    head = re.sub(r"(status code: \d{3}[^:]*):.*$", r"\1", head)
    head = re.sub(r"\s*(<\?xml|<Error|<!DOCTYPE|<html|\{).*$", "", head, flags=re.IGNORECASE)
    # A query may hold a signature.
    head = re.sub(r"\?[^\s\"')]*", "", head)
    head = re.sub(r"//[^/@\s]*@", "//", head)
    head = re.sub(
        r"\s+in \d+(\.\d+)?[nµm]?s\b(, after \d+ retries)?(, max_retries: \d+, retry_timeout: \S+)?", "", head
    )
    if code is not None:
        head = f"{head.rstrip(' :')} ({code[1]})"
    # Without credentials in the environment, a store asks this service of the cloud's machines.
    if "//169.254.169.254" in head:
        unread = " (profiles in ~/.aws are not read)" if "S3" in head else ""
        head = f"no credentials in the environment{unread}, and none from the machine's cloud: {head}"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        head = f"the credentials are not accepted: {head}"
    return shown(_without_secrets(head, environment), TEXT_CHARS)


def _without_secrets(text: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        if _SECRET.match(name.upper()) and len(value) >= _NOT_SECRET_CHARS:
            for form in {value, quote(value), quote(value, safe="")}:
                text = text.replace(form, f"<{name}>")
    return text
