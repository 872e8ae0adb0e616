"""Where processes of a server reach its gateway."""

from __future__ import annotations

import pytest

from midstream.core.config import GatewaySettings, Settings
from midstream.launch.local import gateway_url, own_address


@pytest.mark.parametrize(
    ("host", "cert", "url"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:80"),
        ("0.0.0.0", None, "http://127.0.0.1:80"),
        ("::", "cert", "https://[::1]:80"),
        ("10.0.0.7", "cert", "https://10.0.0.7:80"),
    ],
)
def test_the_front_reaches_the_gateway_where_this_machine_can(host: str, cert: str | None, url: str) -> None:
    settings = Settings(gateway=GatewaySettings(host=host, tls_cert=cert, tls_key=cert))
    assert gateway_url(settings, own_address(host), 80) == url
