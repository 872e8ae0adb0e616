"""The production code in simulated histories (simulate.py says how). Each block of seeds runs in processes of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted import PLANTED
from tiers import slow, variant

SIMULATE = Path(__file__).with_name("simulate.py")
#: First and last of each block: 2 histories in the fast tier, 9 in `test`, 200 in all. `make simulate` has any number of them.
BLOCKS = [
    (0, 2),
    slow((2, 9)),
    variant((9, 25)),
    *(variant((first, first + 35)) for first in range(25, 200, 35)),
]
#: Likewise of histories in which somebody is struck in each phase of a push.
PUSHES = [slow((0, 4)), variant((4, 46))]
#: Likewise of histories with long chains of deltas.
REBASES = [slow((2, 4)), variant((4, 44))]
#: Likewise of histories with agents, whose sessions wait for room in KV caches.
AGENTS = [slow((2, 4)), variant((4, 30))]
#: Likewise of histories in which replicas are asked to leave.
LEAVES = [slow((0, 3)), variant((3, 40))]
#: Likewise of histories with records by reference.
RECORDS = [slow((0, 3)), variant((3, 60))]
#: Histories that failed once, and why. A change of the simulation makes other histories of these seeds: planted.py keeps the
#: faults themselves.
FOUND = {
    # A clock that jumped back let a new boot on the base weights pass for an old one.
    14: "base weights after a clock jump",
    # A stale connection was opened again to a new boot at the same address, which served the base weights.
    188: "base weights over a stale connection",
    # A gateway that was killed while it started ended the whole server.
    1775: "killed at the start",
    # A replica switched while a connection to it was opened, and was asked for its new snapshot instead of the pinned one.
    2687: "pinned to another snapshot",
    # A snapshot whose check was given up for a newer one served, and the ledger had none to fall back to when that one failed.
    2535: "base weights behind a check that was given up",
    4589: "base weights behind a check that was given up",
    # The simulation's own fault: what a stall held up came seconds after it, so calm weather was not calm for a gateway.
    3470: "a stall behind its end",
    # A policy that was ended between two reads of the call that makes it was a 404, or a 200 and then gone.
    1503: "made while it is ended",
    # The simulation's own fault: a replica that fell back to an older snapshot passed for one that had served the newest.
    1897: "fell back meanwhile",
    # The simulation's own fault: two policies that each waited to begin as the other one made its oracle go round.
    1107: "forks of each other",
    # A target that a stalled gateway had sent before came behind the newer one of another gateway, and was loaded.
    5746: "an older target comes late",
    # The simulation's own fault: a replica that had left before a group was formed passed for one that joined after it.
    40170: "left before the group was formed",
}
#: Likewise of `--pushes`.
FOUND_IN_PUSHES = {
    # A call that ended its group waited 20 s for a replica that was stopped.
    133: "a call behind its deadline",
    137: "a call behind its deadline",
    # The simulation's own fault: the ledger's outage ended an update in place, and the engine that it killed was a surprise.
    200008: "an engine that is fenced while the ledger is out",
}
#: Found by one of the first histories, whatever changes in them. The others are for the tier `all`.
FOUND_AT_ONCE = frozenset(
    {
        "new_sessions_only",
        "turns_are_never_over",
        "gate_is_not_drained",
        "sessions_are_forgotten",
        "everybody_is_admitted",
        "ends_free_nothing",
        "who_waits_is_never_woken",
        "nothing_is_started_again",
        "two_replicas_have_one_rank",
        "received_weights_serve_at_once",
        "lost_commits_are_dropped",
        "engines_compute_between_start_and_commit",
        "references_come_before_their_files",
        "half_the_time_is_enough",
    }
)


#: Processes that look for the other ones.
PARTS = 4


@pytest.fixture(scope="module")
def bed() -> Iterator[Path]:
    """Checkpoints for all runs: making them takes 7 s of a core, twice as long as a history."""
    # Not tmp_path: the length of a path must not depend on the test, since messages have it.
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def simulate(bed: Path, *arguments: str) -> str:
    command = [sys.executable, str(SIMULATE), "--bed", str(bed), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_the_process_of_the_tests_keeps_its_clocks() -> None:
    """A module that another test imports after this one would bind simulated clocks as its defaults."""
    assert "simclock" not in sys.modules


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_nothing_is_wrong_in_a_block_of_histories(block: tuple[int, int], bed: Path) -> None:
    first, last = block
    said = simulate(bed, "--seeds", f"{first}:{last}", "--processes", "1", "--keep-going")
    assert f"{last - first:8} end: well" in said
    assert "turn: whole" in said
    assert "left the base weights" in said
    assert "end: push well" in said


@pytest.mark.variant
@pytest.mark.timeout(1800)
def test_what_was_found_once_stays_mended(bed: Path) -> None:
    simulate(bed, "--seeds", ",".join(map(str, FOUND)), "--processes", "1", "--keep-going")


@pytest.mark.parametrize("block", PUSHES, ids=str)
def test_nothing_is_wrong_when_somebody_is_struck_in_a_phase_of_a_push(
    block: tuple[int, int], bed: Path
) -> None:
    first, last = block
    said = simulate(bed, "--pushes", "--seeds", f"{first}:{last}", "--processes", "1", "--keep-going")
    assert f"{last - first:8} end: all serve the newest commit" in said
    assert "strike: " in said
    assert "\n0 kills and stalls struck" not in said


@pytest.mark.parametrize("block", REBASES, ids=str)
def test_nothing_is_wrong_when_chains_begin_again_at_whole_files(block: tuple[int, int], bed: Path) -> None:
    first, last = block
    said = simulate(bed, "--rebases", "--seeds", f"{first}:{last}", "--processes", "1", "--keep-going")
    assert f"{last - first:8} end: well" in said
    assert "end: rebased" in said


@pytest.mark.parametrize("block", AGENTS, ids=str)
def test_no_kv_is_claimed_for_nothing_and_nothing_waits_where_there_is_room(
    block: tuple[int, int], bed: Path
) -> None:
    first, last = block
    said = simulate(bed, "--agents", "--seeds", f"{first}:{last}", "--processes", "1", "--keep-going")
    assert f"{last - first:8} end: well" in said
    for seen in ("agent: 200, waited", "agent: 200, at once", "agent: close 200", "agent: reward 200"):
        assert seen in said


@pytest.mark.parametrize("block", LEAVES, ids=str)
def test_no_turn_is_lost_when_machines_are_taken_away_on_a_notice(block: tuple[int, int], bed: Path) -> None:
    first, last = block
    said = simulate(bed, "--leaves", "--seeds", f"{first}:{last}", "--processes", "1", "--keep-going")
    assert f"{last - first:8} end: well" in said
    assert "a replica was asked to leave" in said


@pytest.mark.parametrize("block", RECORDS, ids=str)
def test_a_reference_is_of_a_file_that_is_whole_and_stays_as_long_as_was_said(
    block: tuple[int, int], bed: Path
) -> None:
    first, last = block
    said = simulate(bed, "--records", "--seeds", f"{first}:{last}", "--processes", "1", "--keep-going")
    assert f"{last - first:8} end: record files are well" in said
    for seen in ("records: a reference", "records: shared references", "was killed when its put was"):
        assert seen in said


@pytest.mark.variant
def test_what_was_found_in_pushes_stays_mended(bed: Path) -> None:
    seeds = ",".join(map(str, FOUND_IN_PUSHES))
    simulate(bed, "--pushes", "--seeds", seeds, "--processes", "1", "--keep-going")


@pytest.mark.slow
def test_a_seed_is_one_history(bed: Path) -> None:
    one, again = simulate(bed, "--seed", "1"), simulate(bed, "--seed", "1")
    assert one == again
    assert "all serve" in one


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_fault_that_is_found_at_once_is_found(bed: Path) -> None:
    """In one process: to start one takes as long as to find a fault."""
    assert finds(bed, *sorted(FOUND_AT_ONCE)).keys() == FOUND_AT_ONCE


@pytest.mark.variant
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_planted_faults_are_found(bed: Path, part: int) -> None:
    """The seed that found it last is tried first. A change of the histories may move a find to another seed."""
    faults = [name for name in PLANTED if name not in FOUND_AT_ONCE][part::PARTS]
    assert finds(bed, *faults).keys() == set(faults)


def finds(bed: Path, *faults: str) -> dict[str, str]:
    """For each fault, which seed found it, and what it found."""
    said = simulate(bed, "--plant", ",".join(faults), "--seeds", "0:200", "--processes", "1", "--prove")
    lines = [line.partition(" (") for line in said.splitlines()]
    found = {fault: told.partition("): ")[2] for fault, _, told in lines}
    assert all(told.startswith("seed ") for told in found.values()), said
    return found
