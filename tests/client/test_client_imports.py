"""What `import midstream.client` costs, and what it gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

import midstream.client


def test_every_name_is_there_and_comes_from_its_module() -> None:
    for name in midstream.client.__all__:
        value = getattr(midstream.client, name)
        assert value.__name__ == name
        assert value.__module__.startswith("midstream.client.")
    assert set(midstream.client.__all__) <= set(dir(midstream.client))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="SnapshotPublish"):
        midstream.client.SnapshotPublish  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        ("import midstream.client", {"numpy", "httpx", "msgspec", "obstore", "torch"}),
        ("from midstream.client.decode import routes_of", {"httpx", "obstore", "torch"}),
        ("from midstream.client import ServerClient", {"numpy", "obstore", "torch"}),
        ("from midstream.client import SnapshotPublisher", {"torch", "sqlalchemy", "starlette", "uvicorn"}),
    ],
)
def test_an_import_brings_only_what_it_needs(statement: str, without: set[str]) -> None:
    code = f"import sys; {statement}; print(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert without.isdisjoint(done.stdout.split())
