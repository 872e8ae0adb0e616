"""Records of turns whose responses were by reference: they leave their columns to the file, and are read as any others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import MODEL, FakeEngine, Running, running

from midstream.cli import main
from midstream.client.errors import RecordFileError
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
        found.setdefault(record["session"], []).append(turn)
    return found


@pytest.mark.parametrize(
    "more", [{}, {"n": 3}, {"include_routing_matrix": False, "return_sampling_mask": False}]
)
def test_records_are_the_same_as_without_a_file(tmp_path: Path, more: dict[str, Any]) -> None:
    url = kept(tmp_path, **more)
    found = by_session(url)
    assert len(found["inline"]) == 2 * more.get("n", 1)
    assert found["referenced"] == found["inline"]
    assert found["inline"][0]["routing_matrix"] is not None
    left = by_session(url, references="leave")
    assert left["inline"] == found["inline"]
    for turn in left["referenced"]:
        assert turn["logprobs"] is turn["sampling_logprobs"] is turn["sampling_masks"] is None
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


def test_a_file_that_is_gone_or_of_other_tokens_is_named(tmp_path: Path) -> None:
    url = kept(tmp_path)
    first, second = sorted((tmp_path / "bucket" / "record-files" / "default").iterdir())
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
    with pytest.raises(RecordFileError, match=r"record-files/default/.*is gone or cannot be read"):
        list(read_records(url))
    assert len(list(read_records(url, references="leave"))) == 4


def test_without_pyarrow_a_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = kept(tmp_path)
    monkeypatch.setattr(extras, "missing", list)
    with pytest.raises(RecordFileError, match=r"line 3: .*pip install 'midstream\[parquet\]'"):
        list(read_records(url))
    assert main(["export", "--all", "--server", url, "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "line 3: reading a record file needs pyarrow" in capsys.readouterr().err


def test_a_trace_has_the_columns_and_an_answer_without_a_file_is_no_turn(tmp_path: Path) -> None:
    async def main() -> None:
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

    def trace_of(here: Running, session: str) -> Any:
        found = here.replica.trace(("", session))
        assert found is not None
        return found.turns

    asyncio.run(main())
