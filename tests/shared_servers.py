"""Ends a server that the tests of a folder share as soon as its worker has no more test for it.

Owns: which fixtures are such servers, and those that run.
Always holds: a server runs for each test that asks for it. One that was ended is started again for a later test, since a worker
may get tests that stand before its last one.

A server that rests takes 2 or 3 hundredths of a core. A worker would have up to six of them to its end.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

#: Fixtures of the scope `session`.
SERVERS = frozenset({"server", "published", "trained", "adapter_server", "endpoint", "sdk_server"})


class SharedServers:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self._running: list[tuple[pytest.FixtureDef[Any], Any]] = []
        self._places: dict[pytest.Item, int] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        value = yield
        if fixturedef.scope == "session" and fixturedef.argname in SERVERS:
            self._running.append((fixturedef, request))
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        result = yield
        # After the last test, the session ends them.
        if self._running and nextitem is not None:
            self._places = self._places or {each: place for place, each in enumerate(item.session.items)}
            rest = item.session.items[self._places[nextitem] :]
            unused = [each for each in self._running if not any(uses(test, each[0]) for test in rest)]
            for ended in unused:
                self._running.remove(ended)
                fixture, request = ended
                fixture.finish(request)
        return result


def uses(test: pytest.Item, fixture: pytest.FixtureDef[Any]) -> bool:
    """True if the test, or another fixture that it asks for, asks for this one."""
    assert isinstance(test, pytest.Function)
    # Of the folder that all tests are in, it is empty.
    inside = not fixture.baseid or test.nodeid.startswith(f"{fixture.baseid}/")
    return inside and fixture.argname in test.fixturenames and fixture.argname not in vars(test.module)
