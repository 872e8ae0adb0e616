"""Agents' traces: the format, what a run of one is counted as, and that the published figures are those of their JSON."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import document
import pytest
from agentic import bench, load, table, trace
from agentic.books import Books, Served, split, total
from agentic.trace import Trace, TraceError, Trajectory
from hardware import RESULTS
from rollout_filter import Filter
from rollout_load import TurnFailed
from vllm_turns import Progress

# Two streams of group 0 and one of group 1, which share 32 tokens.
LONG = Trajectory(0, 0, 64, (10, 6), (20,), (0.5,))
SHORT = Trajectory(0, 1, 64, (10,), (), ())
OTHER = Trajectory(1, 0, 48, (4, 4), (12,), (0.0,))
TRACE = Trace(32, (LONG, SHORT, OTHER), {"source": "a test"})


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace.write(tmp_path / "t.jsonl", TRACE)
    assert trace.read(tmp_path / "t.jsonl") == TRACE


def test_what_follows_the_last_answer_is_left_out(tmp_path: Path) -> None:
    line = {
        "group": 0,
        "stream": 0,
        "prompt_len": 64,
        "out_lens": [10, 6],
        "obs_lens": [20, 9],
        "tool_times": [0.5, 3],
    }
    path = tmp_path / "t.jsonl"
    path.write_text('{"shared_len": 32}\n' + json.dumps(line) + "\n")
    assert trace.read(path).trajectories == (LONG,)
    del line["tool_times"]
    path.write_text('{"shared_len": 32}\n' + json.dumps(line) + "\n")
    assert trace.read(path).trajectories[0].tool_times == (0.0,)


GOOD = {"group": 0, "stream": 1, "prompt_len": 64, "out_lens": [10, 6], "obs_lens": [20]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"group": -1}, "line 3: group: expected a whole number of at least 0, got -1"),
        ({"prompt_len": "64"}, "line 3: prompt_len: expected a whole number of at least 1, got '64'"),
        ({"prompt_len": 20}, "line 3: prompt_len: expected at least shared_len, which is 32"),
        ({"prompt_len": 65}, "line 3: prompt_len: expected 64, as in group 0 before"),
        ({"stream": 0}, "line 3: stream: 0 of group 0 was there before"),
        ({"out_lens": []}, r"line 3: out_lens: expected a list of a turn or more, got \[\]"),
        ({"out_lens": [10, True]}, "line 3: out_lens: expected a whole number of at least 1, got True"),
        ({"obs_lens": []}, r"line 3: obs_lens: expected a list of 2 or 1, got \[\]"),
        ({"tool_times": [float("nan")]}, "line 3: tool_times: expected seconds, 0 or more, got nan"),
    ],
)
def test_a_wrong_line_is_refused_with_its_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "t.jsonl"
    lines = [{"shared_len": 32}, {**GOOD, "stream": 0}, {**GOOD, **change}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError, match=said):
        trace.read(path)


@pytest.mark.parametrize("line", ["[]", "{", "1"])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(f'{{"shared_len": 32}}\n{line}\n')
    with pytest.raises(TraceError, match="line 2: expected a JSON object"):
        trace.read(tmp_path / "t.jsonl")


@pytest.mark.parametrize("path", sorted(bench.TRACES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_published_traces_are_of_the_format_and_fit_the_model(path: Path) -> None:
    published = trace.read(path)
    assert {"source", "version", "licence"} <= published.about.keys()
    small = trace.scaled(published, bench.TOKENS_SCALE, 0.0)
    assert max(one.lengths[-1] for one in small.trajectories) <= 8192
    waits = [wait for one in published.trajectories for wait in one.tool_times]
    assert 0.7 < sum(wait <= 1 for wait in waits) / len(waits) < 0.95


def test_the_ideal_computes_every_token_of_the_fleet_once() -> None:
    # The prompts: 32 that all share, 32 of group 0, 16 of group 1. Then what was added, and the last token of the answer.
    assert trace.ideal_prefill(TRACE) == 32 + 32 + 16 + (20 + 1) + (12 + 1)


def test_live_tokens_are_the_most_of_all_turns() -> None:
    # In the second turn the short one is over: 80 of prompts, 36 and 20 of their own.
    assert trace.live_tokens(TRACE) == 80 + (10 + 20 + 6) + (4 + 12 + 4)


def test_a_scaled_trace_keeps_its_groups() -> None:
    small = trace.scaled(TRACE, 0.25, 0.1)
    assert (small.shared_len, [one.prompt_len for one in small.trajectories]) == (8, [16, 16, 12])
    assert (small.trajectories[0].out_lens, small.trajectories[0].obs_lens) == ((2, 2), (5,))
    assert small.trajectories[0].tool_times == (0.05,)
    assert trace.scaled(TRACE, 0.001, 1.0).trajectories[2].out_lens == (1, 1)


def test_groups_and_streams_can_be_fewer() -> None:
    assert trace.first_groups(TRACE, 2, 1).trajectories == (LONG, OTHER)
    assert trace.first_groups(TRACE, 1, 8).trajectories == (LONG, SHORT)


def _turns(cached_at_last: int = 32) -> list[Served]:
    return [
        Served(0, "r0", 0.0, 1.0, prompt=64, cached=0, answer=10),
        Served(1, "r1", 0.5, 2.0, prompt=64, cached=0, answer=10),
        Served(2, "r0", 3.0, 3.2, prompt=48, cached=32, answer=4),
        Served(0, "r0", 4.0, 4.5, prompt=94, cached=cached_at_last, answer=6),
        Served(2, "r1", 5.0, 5.5, prompt=64, cached=32, answer=4),
    ]


def test_computed_tokens_are_split_by_who_had_them() -> None:
    found = split(TRACE, _turns(), block=16)
    assert found[0] == Books(64, 0, first=64)
    # The prompt is being computed elsewhere: 48 of it in whole blocks that a request may find.
    assert found[1] == Books(64, 0, first=16, again=48)
    # What all share was found.
    assert found[2] == Books(48, 32, first=16)
    # Its replica had computed 73 tokens of it, 64 in whole blocks, and had dropped half of them.
    assert found[3] == Books(94, 32, first=30, evicted=32)
    # Moved: 48 of it are on the other replica, this one had what all share.
    assert found[4] == Books(64, 32, first=16, again=16)
    whole = total(found)
    assert whole.computed == whole.prompt - whole.cached == 238
    assert (whole.first, whole.again, whole.evicted) == (142, 64, 32)


def test_a_dead_replica_has_evicted_nothing() -> None:
    found = split(TRACE, _turns(cached_at_last=0), block=16, lost=[("r0", 3.5)])
    assert found[3] == Books(94, 0, first=30, again=64)
    assert split(TRACE, _turns(cached_at_last=0), block=16)[3] == Books(94, 0, first=30, evicted=64)


def test_figures_of_a_run() -> None:
    run = load.Run(0.0, _turns(), {0: 5.0, 1: 2.5, 2: 6.0}, {"503": 2})
    found = bench.figures(TRACE, run)
    assert (found["wall_s"], found["trajectory_s_p50"], found["trajectory_s_max"]) == (6.0, 5.0, 6.0)
    assert (found["prefill_tokens"], found["over_ideal"]) == (238, round(238 / 114, 3))
    assert (found["moves"], found["sent_again"], found["replicas"]) == (1, 2, {"r0": 3, "r1": 2})
    # Two replicas got no turn.
    computed = {"r0": 64 + 10 + 16 + 4 + 62 + 6, "r1": 64 + 10 + 32 + 4}
    assert found["load_tokens"] == round(computed["r0"] / (sum(computed.values()) / 4), 3)


def test_prompts_share_what_the_trace_says_and_no_run_shares_anything() -> None:
    content, later = load.Content(TRACE, "run"), load.Content(TRACE, "later")
    long, short, other = (content.prompt(place) for place in range(3))
    assert long == short
    assert len(long) == 64
    assert long[:32] == other[:32]
    assert long[32:48] != other[32:]
    assert content.prompt(0) == load.Content(TRACE, "run").prompt(0) != later.prompt(0)
    assert content.observation(0, 1, 20) != content.observation(1, 1, 20)


async def _served(refusals: int) -> tuple[load.Run, list[dict[str, Any]], list[str]]:
    """A run of TRACE through a filter before a replica that first refuses so many requests."""
    came: list[dict[str, Any]] = []
    closed: list[str] = []
    connections: list[Any] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refusals
        connections.append(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lines = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
                asked = json.loads(await reader.readexactly(int(lines["content-length"])))
                if refusals:
                    refusals -= 1
                    writer.write(b"HTTP/1.1 503 -\r\nretry-after: 0\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                came.append(asked | {"key": lines["x-session-id"]})
                usage = {
                    "prompt_tokens": len(asked["prompt"]),
                    "prompt_tokens_details": {"cached_tokens": 16},
                }
                choice = {"token_ids": [263] * asked["max_tokens"]}
                answer = json.dumps({"choices": [choice], "usage": usage}).encode()
                writer.write(b"HTTP/1.1 200 -\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
        except asyncio.IncompleteReadError:
            writer.close()

    async def ended(key: str) -> None:
        closed.append(key)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        between = Filter(
            server.sockets[0].getsockname()[1],
            asked=load.asked,
            answered=lambda headers, body: load.answered(headers, body, "replica-0"),
            passed=("x-session-id",),
        )
        await between.start()
        quick = trace.scaled(TRACE, 1.0, 0.0)
        client = load.Client(quick, load.Content(quick, "run"), between.port, "keys", Progress(5), ended)
        try:
            run = await client.drive()
        finally:
            await between.stop()
        await asyncio.gather(*connections)
    return run, came, closed


def test_a_replica_gets_ids_with_all_that_was_said_before() -> None:
    run, came, closed = asyncio.run(_served(refusals=0))
    content = load.Content(TRACE, "run")
    asked = [one["prompt"] for one in came if one["key"] == "keys-trajectory-0"]
    assert asked == [
        content.prompt(0),
        [*content.prompt(0), *[263] * 10, *content.observation(0, 1, 20)],
    ]
    assert [one["max_tokens"] for one in came if one["key"] == "keys-trajectory-0"] == [10, 6]
    assert all(one["ignore_eos"] and one["return_token_ids"] for one in came)
    assert sorted(closed) == [f"keys-trajectory-{place}" for place in range(3)]
    assert sorted((turn.place, turn.prompt, turn.cached, turn.answer) for turn in run.turns) == [
        (0, 64, 16, 10),
        (0, 94, 16, 6),
        (1, 64, 16, 10),
        (2, 48, 16, 4),
        (2, 64, 16, 4),
    ]
    assert {turn.replica for turn in run.turns} == {"replica-0"}
    assert run.over_s.keys() == {0, 1, 2}
    assert run.again == {}


def test_a_refused_turn_is_sent_again_and_counted() -> None:
    run, came, _ = asyncio.run(_served(refusals=2))
    assert run.again == {"503": 2}
    assert len(came) == len(run.turns) == 5


class Runs:
    """A bench of one figure: the wall time is the number of runs so far."""

    def __init__(self, fails: str) -> None:
        self.asked: list[str] = []
        self._fails = fails

    async def measure(self, way: str, work: bench.Work, name: str) -> dict[str, Any]:
        self.asked.append(way)
        if way == self._fails and len(self.asked) > 3:
            raise TurnFailed("a turn was answered 500")
        return {"wall_s": float(len(self.asked))}


def test_a_router_that_fails_in_a_round_is_left_out_from_then_on() -> None:
    runs, ways = Runs(fails="smg"), ["midstream", "smg", "sglang-router"]
    benches: Any = {True: runs, False: runs}
    found, absent = asyncio.run(bench.rounds_of(benches, bench.Work(TRACE), ways, 3, "0.6"))
    assert absent == {"smg": "0.6: a turn was answered 500"}
    assert runs.asked == [*ways, *ways, "sglang-router", "midstream", "sglang-router", "midstream"]
    assert {way: one["wall_s"] for way, one in found.items()} == {"midstream": 8.0, "sglang-router": 7.0}


def test_midstream_itself_may_not_fail() -> None:
    benches: Any = dict.fromkeys((True, False), Runs("midstream"))
    with pytest.raises(TurnFailed, match="answered 500"):
        asyncio.run(bench.rounds_of(benches, bench.Work(TRACE), ["midstream", "smg"], 2, "0.6"))


def test_only_the_way_with_the_budget_takes_the_server_that_has_it() -> None:
    with_budget, without = Runs(""), Runs("")
    ways = ["midstream", "midstream, kv_budget 0", "smg"]
    benches: Any = {True: with_budget, False: without}
    asyncio.run(bench.rounds_of(benches, bench.Work(TRACE), ways, 1, "0.6"))
    assert {*with_budget.asked} == {"midstream"}
    assert {*without.asked} == {*ways[1:]}


def test_the_documents_hold_what_the_results_render_to() -> None:
    result = json.loads((RESULTS / "agents.json").read_text())
    text = document.DOCUMENT.read_text()
    assert document.replaced(text, "agents", table.render(result)) == text
    assert table.PICTURE.read_text() == table.picture(result)
