"""Under which label KV is told whose snapshot was loaded again: the name stays that of the same bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from replica_fakes import FakeEngine, FakeSource, make_replica

from midstream.core.types import Content, Desired, FileContent, SnapshotContent, Stage
from midstream.replica.swap.meanings import Meanings
from midstream.replica.swap.table import SwapMachine

A: Content = (FileContent("model.safetensors", 8, "a" * 64),)
B: Content = (FileContent("model.safetensors", 8, "b" * 64),)


def wanted(snapshot: str, generation: int, content: Content | None = None, **more: object) -> Desired:
    url = f"file:///b/{snapshot}"
    return Desired(
        snapshot=snapshot,
        generation=generation,
        signalled=generation,
        url=url,
        fingerprint=f"print {generation}",
        content=content,
        **more,  # type: ignore[arg-type]
    )


def sound() -> SwapMachine:
    return SwapMachine(lambda: 0.0)


def commit(
    meanings: Meanings, desired: Desired, found: Sequence[SnapshotContent], machine: SwapMachine
) -> list[tuple[str, str]]:
    renamed = meanings.switching(desired, found, machine)
    meanings.switched()
    return renamed


def test_a_rollback_to_the_same_files_changes_no_label() -> None:
    meanings, machine = Meanings(), sound()
    loads = [("s2", 1, A), ("s1", 2, B), ("s2", 3, A), ("base", 4, None), ("s2", 5, A)]
    for name, generation, content in loads:
        desired = (
            wanted(name, generation, content)
            if content
            else Desired(snapshot="base", generation=generation, url=None)
        )
        assert commit(meanings, desired, (), machine) == []


def test_files_that_took_a_names_place_leave_the_earlier_ones_the_generation_they_came_with() -> None:
    meanings, machine = Meanings(), sound()
    assert commit(meanings, wanted("s2", 3, A), (), machine) == []
    assert commit(meanings, wanted("s2", 5, A), (), machine) == []
    assert commit(meanings, wanted("s2", 6, B), (), machine) == [("s2", "s2@3")]
    assert commit(meanings, wanted("s2", 9, A), (), machine) == [("s2", "s2@6")]
    assert commit(meanings, wanted("s2", 12, A), (), machine) == []


def test_files_are_the_same_whether_the_signal_said_so_or_the_replica_found_it() -> None:
    meanings, machine = Meanings(), sound()
    found = SnapshotContent(snapshot="s2", fingerprint="print 3", files=A)
    assert commit(meanings, wanted("s2", 3), [found], machine) == []
    assert commit(meanings, wanted("s2", 4, A), (), machine) == []
    assert commit(meanings, wanted("s2", 5, B), (), machine) == [("s2", "s2@3")]


def test_kv_of_weights_that_failed_their_check_is_of_nobody_knows_what() -> None:
    meanings, machine = Meanings(), sound()
    assert commit(meanings, wanted("s2", 3, A), (), machine) == []
    machine.serving, machine.distrusted = "s2", True
    assert commit(meanings, wanted("s2", 3, A, reload=1), (), machine) == [("s2", "?")]
    machine.distrusted = False
    assert commit(meanings, wanted("s2", 4, A), (), machine) == []


def test_what_a_name_means_changes_when_the_switch_is_made_and_is_the_same_on_every_replica() -> None:
    one, other, machine = Meanings(), Meanings(), sound()
    assert one.files("base") == other.files("base") != ""
    commit(one, wanted("s2", 3, A), (), machine)
    before = one.files("s2")
    found = SnapshotContent(snapshot="s2", fingerprint="print 5", files=A)
    commit(other, wanted("s2", 5), [found], machine)
    assert other.files("s2") == before
    one.switching(wanted("s2", 6, B), (), machine)
    assert one.files("s2") == before, "the engine may refuse to switch"
    assert one.coming("s2") not in ("", before)
    one.switched()
    assert one.files("s2") not in ("", before)
    assert one.files("s9") == ""


def test_an_engine_hears_of_an_overwritten_snapshot_right_before_it_commits_the_next(
    tmp_path: Path,
) -> None:
    async def main() -> list[str]:
        engine, source = FakeEngine("hello"), FakeSource()
        replica = make_replica(tmp_path, engine, source)
        await replica.start()
        for name, generation, content in (("s2", 1, A), ("s1", 2, B), ("s2", 3, A), ("s2", 4, B)):
            replica.desire(wanted(name, generation, content))
            while (
                report := replica.report()
            ).own.signalled != generation or report.own.stage is not Stage.IDLE:
                assert report.own.stage is not Stage.ERROR, report.own.error
                await replica.changed(5.0)
        await replica.close()
        return [call for call in engine.calls if call.startswith(("commit", "overwritten"))]

    assert asyncio.run(main()) == [
        "commit s2",
        "commit s1",
        "commit s2",
        "overwritten s2 s2@1",
        "commit s2",
    ]
