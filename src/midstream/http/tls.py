"""TLS contexts: of a port that speaks HTTPS, and of calls to one.

Always holds: TLS 1.2 at least, and HTTP/1.1 in it. A key with a password is refused, since nobody could type it.
"""

from __future__ import annotations

import functools
import ssl
from urllib.parse import urlsplit

from midstream.core.errors import ConfigError

#: How long a handshake may take, in seconds.
HANDSHAKE_S = 10.0


def server_tls(section: str, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """The context of a port. section: of the settings tls_cert and tls_key. None without a certificate. Raises ConfigError."""
    if cert is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:
        # An SSLError is an OSError.
        raise ConfigError(
            f"{section}.tls_cert {cert}, {section}.tls_key {key}: {error.strerror or error}"
            if isinstance(error, OSError)
            else f"{section}.tls_key {key}: {error}"
        ) from error
    return context


@functools.cache
def client_tls(ca: str | None) -> ssl.SSLContext:
    """For calls to replicas. ca: a file of the certificates that may sign theirs; None: those of the system.

    Raises ConfigError.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(f"replica.tls_ca {ca}: {error.strerror or error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def tls_for(url: str, ca: str | None) -> ssl.SSLContext | None:
    """The context of a call to this URL; None for plain HTTP, which needs none. ca: as of client_tls. Raises ConfigError."""
    return client_tls(ca) if urlsplit(url).scheme == "https" else None


def unverified_tls() -> ssl.SSLContext:
    """For the gateway of this server, whose certificate need not be for this address."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _no_password() -> str:
    raise ValueError("a key that needs a password cannot be used")
