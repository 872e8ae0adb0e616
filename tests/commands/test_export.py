"""`midstream export --all` beside a replica that restarts: it waits for it, and leaves out what stays silent, with a line."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from midstream.client.errors import ReplicasSilent
from midstream.commands.export import SILENT_POLL_S, SILENT_S_MAX, _Patient
from midstream.commands.progress import ProgressLine


class Fleet:
    """Replicas that hold a session each, named after them. The silent ones answer again after so many seconds."""

    def __init__(self, **silent_s: float) -> None:
        self.time = 0.0
        self._silent_s = silent_s

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def sessions(self, without: Collection[str]) -> list[str]:
        silent = [name for name, until in self._silent_s.items() if self.time < until]
        if missed := [name for name in silent if name not in without]:
            raise ReplicasSilent(f"no answer of {missed}", missed)
        return [name for name in self._silent_s if name not in silent]

    def asking(self, *, leave_out: bool) -> _Patient:
        line = ProgressLine(False)
        return _Patient(leave_out=leave_out, line=line, sleep=self.sleep, monotonic=lambda: self.time)


def test_a_replica_that_restarts_is_waited_for_and_nothing_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = Fleet(r0=0.0, r1=SILENT_S_MAX / 2)
    assert fleet.asking(leave_out=True).heard(fleet.sessions) == ["r0", "r1"]
    assert capsys.readouterr().err == ""


def test_one_that_stays_silent_is_left_out_with_one_line_and_waited_for_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = Fleet(r0=0.0, r1=float("inf"))
    asking = fleet.asking(leave_out=True)
    assert asking.heard(fleet.sessions) == ["r0"]
    waited = fleet.time
    assert SILENT_S_MAX <= waited < SILENT_S_MAX + 2 * SILENT_POLL_S
    assert [asking.heard(fleet.sessions) for _ in range(3)] == [["r0"]] * 3
    assert fleet.time == waited
    assert capsys.readouterr().err == "r1 did not answer for 30 s: sessions of it are left out\n"


def test_a_session_that_was_asked_for_by_name_is_never_left_out_in_silence() -> None:
    fleet = Fleet(r1=float("inf"))
    with pytest.raises(ReplicasSilent, match="r1"):
        fleet.asking(leave_out=False).heard(fleet.sessions)
