"""Records of turns whose responses were by reference: they leave their columns to the file, and are read as any others."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import MODEL, FakeEngine, Running, ascending, running

from midstream.cli import main
from midstream.client.errors import RecordFileError, RecordFileGone
from midstream.client.gone import GoneTurn
from midstream.client.journal import read_records, traces_of
from midstream.client.records import sequences_of
from midstream.core import extras
from midstream.replica.journal import Journal
from midstream.replica.record_files import RecordFiles

ALL: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 9,
    "seed": 1,
    "logprobs": True,
    "include_routing_matrix": True,
    "return_sampling_mask": True,
}
#: What differs between the turn of one session and the same turn of another, and what says that a file has columns.
OWN = ("created", "record_reference")


async def turns(here: Running, session: str, *, keeps: str = "routes", **more: Any) -> None:
    headers = {"x-session-id": session, "x-midstream-records": keeps}
    messages: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        body = {**ALL, "messages": messages, **more}
        answer = await here.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        messages = [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": "on"}]


def kept(tmp_path: Path, **more: Any) -> str:
    """The bucket of a replica with the turns of a session inline, and those of another by reference."""
    url = (tmp_path / "bucket").as_uri()

    async def main() -> None:
        journal = Journal(
            tmp_path / "waiting", f"{url}/records/default", "replica-0", {"deployment": "default"}
        )
        files = RecordFiles(url, "default")
        async with running(tmp_path, FakeEngine(), journal=journal, files=files) as here:
            journal.start()
            await turns(here, "inline", **more)
            await turns(here, "referenced", **more, return_record_reference=True)
            await asyncio.to_thread(journal.close)
        files.close()

    asyncio.run(main())
    return url


def by_session(url: str, **how: Any) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(url, **how):
        turn = {name: value for name, value in record["turn"].items() if name not in OWN}
        if turn["routing_matrix"] is not None and turn["router_weights"] is None:
            # Without weights that follow it, the order of experts says nothing.
            turn["routing_matrix"] = [
                ascending({"routing_matrix": route}) for route in turn["routing_matrix"]
            ]
        found.setdefault(record["session"], []).append(turn)
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"include_routing_matrix": False, "return_sampling_mask": False},
        {"return_router_weights": True},
    ],
)
def test_records_are_the_same_as_without_a_file(tmp_path: Path, more: dict[str, Any]) -> None:
    url = kept(tmp_path, **more)
    found = by_session(url)
    assert len(found["inline"]) == 2 * more.get("n", 1)
    assert found["referenced"] == found["inline"]
    assert found["inline"][0]["routing_matrix"] is not None
    weights = found["inline"][0]["router_weights"]
    assert (weights is not None) == more.get("return_router_weights", False)
    left = by_session(url, references="leave")
    assert left["inline"] == found["inline"]
    for turn in left["referenced"]:
        assert turn["logprobs"] is turn["sampling_logprobs"] is turn["sampling_masks"] is None
        assert turn["router_weights"] is None
        # Routes that only the record was to have are no part of the file.
        assert (turn["routing_matrix"] is None) == more.get("include_routing_matrix", True)
    sequences = [sequences_of(trace) for trace in traces_of(read_records(url))]
    assert [[s.logprobs for s in one] for one in sequences[:1]] == [
        [s.logprobs for s in one] for one in sequences[1:]
    ]


def test_a_record_gets_no_columns_that_it_was_not_to_have(tmp_path: Path) -> None:
    found = by_session(kept(tmp_path, keeps="logprobs"))
    assert found["referenced"] == found["inline"]
    assert found["inline"][0]["routing_matrix"] is found["inline"][0]["sampling_masks"] is None


def files_of(url: str, tmp_path: Path) -> list[Path]:
    """The record files of the turns by reference, in the order of the turns."""
    left = [record["turn"] for record in read_records(url, references="leave")]
    files = [turn["record_reference"]["reference"]["file"] for turn in left if turn["record_reference"]]
    return [tmp_path / "bucket" / file for file in files]


def test_a_file_of_other_tokens_is_named_and_one_that_is_gone_if_it_is_required(tmp_path: Path) -> None:
    url = kept(tmp_path)
    first, second = files_of(url, tmp_path)
    (segment,) = (tmp_path / "bucket" / "records" / "default").iterdir()
    text = segment.read_text()
    segment.write_text(text.replace('"token_ids":[', '"token_ids":[9,'))
    with pytest.raises(RecordFileError, match=r"line 3: choice 0 of .* has other tokens than the turn"):
        list(read_records(url))
    segment.write_text(text.replace('"choice":0', '"choice":-1'))
    with pytest.raises(RecordFileError, match="line 3: record_reference"):
        list(read_records(url))
    segment.write_text(text)
    first.unlink()
    second.unlink()
    with pytest.raises(RecordFileGone, match=r"line 3: record-files/default/.*is gone"):
        list(read_records(url, references="require"))
    assert len(list(read_records(url, references="leave"))) == 4


def test_a_file_that_is_gone_takes_its_own_turn_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = kept(tmp_path)
    gone, _ = files_of(url, tmp_path)
    gone.unlink()
    with caplog.at_level(logging.WARNING):
        records = list(read_records(url))
    first, second = (record["turn"] for record in records if record["session"] == "referenced")
    assert first["record_gone"] == f"record-files/default/{gone.name}"
    assert first["logprobs"] is first["routing_matrix"] is None
    assert "record_gone" not in second
    assert len(second["logprobs"]) == len(second["routing_matrix"]) == len(second["token_ids"])
    [said] = caplog.messages
    assert re.search(r"1 record file is gone, so 1 turns, [0-9.]+ s old, are without their columns", said)
    assert said.endswith(first["record_gone"])
    inline, cut = (sequences_of(trace)[0] for trace in traces_of(records))
    assert (inline.gone, cut.gone) == ([], [1])
    # The turn behind it is trained on, over the tokens of the one whose numbers are gone.
    assert cut.token_ids == inline.token_ids
    trained = [turn.turn for turn in cut.turns if cut.loss_mask[turn.start]]
    assert trained == [2]
    start, end = cut.turns[1].start, cut.turns[1].end
    assert cut.logprobs[start:end] == inline.logprobs[start:end]
    heard: list[GoneTurn] = []
    list(read_records(url, on_gone=heard.append))
    assert [(one.file, one.session, one.created) for one in heard] == [
        (first["record_gone"], "referenced", first["created"])
    ]


def test_an_export_with_a_gap_is_whole_but_for_it_and_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, out = kept(tmp_path), tmp_path / "out.jsonl"
    gone, torn = files_of(url, tmp_path)
    export = ["export", "--server", url, "--out", str(out)]
    assert main([*export, "--all"]) == 0
    gone.unlink()
    capsys.readouterr()
    assert main([*export, "--all"]) == 3
    said = capsys.readouterr().err
    assert "1 record file is gone, so 1 turns" in said
    assert gone.name in said
    lines = {one["session"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert {key: one["gone_turns"] for key, one in lines.items()} == {"inline": [], "referenced": [1]}
    assert main([*export, "--all", "--allow-gone"]) == 0
    # Of a session without a gap nothing is missing.
    assert main([*export, "--session", "inline"]) == 0
    # What is there and not what it was is an error, whatever is allowed.
    torn.write_bytes(torn.read_bytes()[:-1])
    out.unlink()
    assert main([*export, "--all", "--allow-gone"]) == 2
    said = capsys.readouterr().err
    assert "line 4: " in said
    assert torn.name in said
    assert not out.exists()


def test_without_pyarrow_a_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = kept(tmp_path)
    monkeypatch.setattr(extras, "missing", list)
    with pytest.raises(RecordFileError, match=r"line 3: .*pip install 'midstream\[parquet\]'"):
        list(read_records(url))
    assert main(["export", "--all", "--server", url, "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "line 3: reading a record file needs pyarrow" in capsys.readouterr().err


async def test_a_trace_has_the_columns_and_an_answer_without_a_file_is_no_turn(tmp_path: Path) -> None:
    def trace_of(here: Running, session: str) -> Any:
        found = here.replica.trace(("", session))
        assert found is not None
        return found.turns

    files = RecordFiles((tmp_path / "bucket").as_uri(), "default")
    async with running(tmp_path, FakeEngine(), files=files) as here:
        for session, ways in (("inline", {}), ("s", {"return_record_reference": True})):
            headers = {"x-session-id": session, "x-midstream-records": "masks"}
            body = {**ALL, "messages": [{"role": "user", "content": "hi"}], **ways}
            await here.http.post("/v1/chat/completions", json=body, headers=headers)
        inline, traced = (trace_of(here, session)[0] for session in ("inline", "s"))
        assert traced.record_reference.choice == 0
        assert traced.logprobs == inline.logprobs
        assert traced.routing_matrix == inline.routing_matrix
        assert traced.sampling_masks == inline.sampling_masks
        (tmp_path / "bucket").rename(tmp_path / "moved")
        (tmp_path / "bucket").write_text("no directory")
        answer = await here.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 507
        assert len(trace_of(here, "s")) == 1
    files.close()
