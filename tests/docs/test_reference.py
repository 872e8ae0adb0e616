"""The references are those of the code, and say something of every setting."""

from __future__ import annotations

import importlib
from types import FunctionType

import pytest
from client_reference import GROUPS, WHOLE, docstring, mentioned, methods_of, public
from reference_tables import DOCS, TABLES, comments_of, written

import midstream.client
from midstream.core import config, server_settings


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_are_those_of_the_code(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    assert written(page, text) == text, "python tests/docs/reference_tables.py writes them"


def test_every_setting_is_in_the_page_with_words() -> None:
    text = (DOCS / "configuration.md").read_text()
    structs = [
        one
        for module in (config, server_settings)
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__
    ]
    fields = [(one, name, words) for one in structs for name, words in comments_of(one).items()]
    told = [(one.__name__, name) for one, name, words in fields if f"| `{name}` |" not in text or not words]
    # They are sections of their own.
    assert {name for _, name in told} == {
        *("deployment", "gateway", "replica", "ledger", "records", "push", "log"),
        *("embedded", "tinker", "vllm", "sglang", "ray", "tracing"),
    }
    assert len(fields) > 80


def test_the_clients_page_has_every_public_name_once() -> None:
    paths = [path for group in GROUPS.values() for path in group.split()]
    assert sorted(path for path in paths if "." not in path) == sorted(midstream.client.__all__)
    assert len(public()) == len(paths)


@pytest.mark.parametrize("module", WHOLE)
def test_the_clients_page_has_all_of_a_module(module: str) -> None:
    """Also what the top of the client has."""
    home = importlib.import_module(f"midstream.client.{module}")
    names = {
        name
        for name, value in vars(home).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == home.__name__
    }
    assert {name for name in names if isinstance(getattr(home, name), type | FunctionType)} <= public().keys()


def test_every_public_name_of_the_client_says_what_it_is() -> None:
    """So does each method, and each class that a signature names."""
    told = public()
    told |= {name: getattr(module, name) for name, module in mentioned(told)}
    told = {name: one for name, one in told.items() if callable(one) and hasattr(one, "__module__")}
    told = {name: one for name, one in told.items() if one.__module__.startswith("midstream.")}
    told |= {f"{name}.{method}": one for name, value in [*told.items()] for method, one in methods_of(value)}
    assert [name for name, one in told.items() if not docstring(one)] == []
    assert {"RolloutClient.sample", "How", "Published.replicas", "fresh"} <= told.keys()
