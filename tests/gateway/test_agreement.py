"""Two gateways on the same replicas, as a state machine: what each was told late or never, restarts, closed sessions."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from midstream.core.sessions import SessionsReport
from midstream.core.types import Session
from midstream.fleet.placement import Candidate, Fleet
from midstream.fleet.sessions import SessionTable
from midstream.replica.sessions import Feed, Sessions

GATEWAYS, REPLICAS = range(2), [f"replica-{number}" for number in range(3)]
KEYS = [("", key) for key in "abcd"]
gateways, replicas, keys = st.sampled_from(GATEWAYS), st.sampled_from(REPLICAS), st.sampled_from(KEYS)


class Gateways(RuleBasedStateMachine):
    """Each gateway has its own view of who is usable; events reach it when `deliver` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.stack = ExitStack()
        self.held = {name: self._sessions() for name in REPLICAS}
        self.usable = [dict.fromkeys(REPLICAS, True) for _ in GATEWAYS]
        self.boots = dict.fromkeys(REPLICAS, 0)
        # Streams whose first line was told.
        self.begun: set[tuple[int, str]] = set()
        self.tables: list[SessionTable] = []
        self.feeds: list[dict[str, Feed]] = []
        for gateway in GATEWAYS:
            self.tables.append(self._table())
            self.feeds.append(self._listen())
            del gateway

    def _sessions(self) -> Sessions:
        return Sessions(idle_s=60, clock=lambda: self.now, monotonic=lambda: self.now)

    def _table(self) -> SessionTable:
        return SessionTable(100, clock=lambda: self.now)

    def _listen(self) -> dict[str, Feed]:
        return {name: self.stack.enter_context(held.feed()) for name, held in self.held.items()}

    def teardown(self) -> None:
        self.stack.close()

    def _told(self, gateway: int, replica: str) -> None:
        table = self.tables[gateway]
        if (gateway, replica) not in self.begun:
            self.begun.add((gateway, replica))
            table.begin(replica, str(self.boots[replica]))
        for line in self.held[replica].reports(self.feeds[gateway][replica]):
            told = msgspec.json.decode(line, type=SessionsReport)
            for session, stamp in told.held:
                table.learn(session, replica, stamp)
            for session in told.closed:
                table.forget(session, replica)

    def _request(self, gateway: int, session: Session) -> str | None:
        """As Proxy.place does it; where it went."""
        table, usable = self.tables[gateway], self.usable[gateway]
        lives = table.lives(session)
        home, stamp = lives[0] if lives else None, None
        if home is None or not usable[home]:
            up = Fleet(Candidate(name, 0) for name in REPLICAS if usable[name])
            found = up.place_session(session, 0.25, home)
            if found is None:
                return None
            home = found[0].name
            stamp = table.settle(session, home)
        elif lives is not None and lives[1] == 0:
            stamp = table.settle(session, home)
        with self.held[home].turn(session, stamp):
            return home

    @rule(gateway=gateways, session=keys)
    def request(self, gateway: int, session: Session) -> None:
        before = self.tables[gateway].home(session)
        went = self._request(gateway, session)
        if before is not None and self.usable[gateway][before]:
            assert went == before, "same session, same replica, while that replica lives"

    @rule(gateway=gateways, session=keys, other=replicas)
    def pass_over(self, gateway: int, session: Session, other: str) -> None:
        """Its replica failed this request alone."""
        self._told(gateway, other)
        home = self.tables[gateway].home(session)
        if home is not None and home != other and self.usable[gateway][home]:
            with self.held[other].turn(session, 0):
                pass
            # Else its home is one that served it in passing.
            placed = self.tables[gateway]._homes[session][1] > 0
            self._told(gateway, other)
            assert self.tables[gateway].home(session) == home or not placed

    @rule(gateway=gateways, replica=replicas)
    def lose_or_find(self, gateway: int, replica: str) -> None:
        self.usable[gateway][replica] ^= True

    @rule(gateway=gateways, replica=replicas)
    def deliver(self, gateway: int, replica: str) -> None:
        self._told(gateway, replica)

    @rule(session=keys, replica=replicas)
    def close(self, session: Session, replica: str) -> None:
        self.held[replica].close(session)
        # The replica forgets the stamp: a session that begins there again begins in a later millisecond.
        self.now += 0.001

    @rule(seconds=st.sampled_from([0.0005, 1.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for held in self.held.values():
            held.sweep()

    @rule(replica=replicas)
    def reboot(self, replica: str) -> None:
        """It dies and comes back, holding nothing."""
        self.held[replica] = self._sessions()
        self.boots[replica] += 1
        for gateway in GATEWAYS:
            self.feeds[gateway][replica] = self.stack.enter_context(self.held[replica].feed())
            self.begun.discard((gateway, replica))

    @rule(gateway=gateways)
    def restart(self, gateway: int) -> None:
        self.tables[gateway], self.feeds[gateway] = self._table(), self._listen()
        self.begun -= {(gateway, replica) for replica in REPLICAS}
        for replica in REPLICAS:
            self._told(gateway, replica)
        for session in KEYS:
            stamps = [
                (stats.stamp, name)
                for name, held in self.held.items()
                if (stats := held.one(session)) is not None
            ]
            assert self.tables[gateway].home(session) == (max(stamps)[1] if stamps else None)

    @rule()
    def fall_silent(self) -> None:
        """Everything is delivered, everybody usable: the next turn of every session goes to one place, whoever is asked."""
        for _ in range(2):
            for gateway, replica in itertools.product(GATEWAYS, REPLICAS):
                self._told(gateway, replica)
                self.usable[gateway][replica] = True
            for session in KEYS:
                if any(table.home(session) for table in self.tables):
                    for gateway in GATEWAYS:
                        self._request(gateway, session)
        for session in KEYS:
            homes = [table.home(session) for table in self.tables]
            assert homes[0] == homes[1]
            if homes[0] is not None:
                assert self.held[homes[0]].one(session) is not None

    @invariant()
    def tables_are_bounded(self) -> None:
        assert all(len(table) <= len(KEYS) for table in self.tables)


TestGateways = Gateways.TestCase
TestGateways.settings = settings(deadline=None, stateful_step_count=40)


def test_a_home_that_served_a_session_in_passing_is_settled_by_the_next_request() -> None:
    """The home dies; one gateway restarts and learns who served it in passing, the other one learns of another such replica."""
    state = Gateways()
    state.request(0, KEYS[2])
    [home] = [name for name, held in state.held.items() if held.one(KEYS[2]) is not None]
    one, other = [name for name in REPLICAS if name != home]
    state.pass_over(0, KEYS[2], other)
    state.fall_silent()
    state.reboot(home)
    state.fall_silent()
    state.restart(1)
    state.pass_over(1, KEYS[2], one)
    state.fall_silent()
    assert {table.home(KEYS[2]) for table in state.tables} in ({one}, {other})
    state.teardown()
