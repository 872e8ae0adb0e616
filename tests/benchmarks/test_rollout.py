"""The rollout's figures: what the ideal is, what is counted, and that the published ones are those of their JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import document
import msgspec
import pytest
import rollout
import rollout_table
from hardware import RESULTS
from reports import replica_report
from rollout_filter import Filter, cleaned
from rollout_fleet import Work, read_work
from rollout_load import (
    Connections,
    Driven,
    Turn,
    TurnFailed,
    TurnPlan,
    Workload,
    drive,
    ideal_prefill,
    plans,
    read_answer,
)

from midstream.core.measures import TURN_MEASURES, Distribution, Trajectories
from midstream.core.sessions import SessionsReport
from midstream.core.types import EngineStats

PLANS = [[TurnPlan(added=100, answer=10, pause_s=0.0), TurnPlan(added=50, answer=5, pause_s=0.0)]]


def test_the_document_holds_what_the_results_render_to() -> None:
    result = json.loads((RESULTS / "rollout.json").read_text())
    text = document.DOCUMENT.read_text()
    assert document.replaced(text, "rollout", rollout_table.render(result)) == text


def test_the_ideal_computes_every_token_of_a_trajectory_once() -> None:
    # 100; then 160 of which 109 were inputs before, since the last of the answer was drawn only
    assert ideal_prefill(PLANS) == 100 + 51
    assert ideal_prefill(PLANS, block=16) == 100 + (160 - 96)
    assert ideal_prefill(PLANS * 2) == 2 * 151


def test_every_run_has_the_same_lengths_in_the_given_ranges() -> None:
    workload = Workload(trajectories=20, turns=3, first=(10, 12), answer=(3, 4), observation=(5, 5))
    drawn = plans(workload)
    assert drawn == plans(workload)
    assert {turn.added for plan in drawn for turn in plan[:1]} == {10, 11, 12}
    assert {turn.added for plan in drawn for turn in plan[1:]} == {5}
    assert {turn.answer for plan in drawn for turn in plan} == {3, 4}
    assert [len(plan) for plan in drawn] == [3] * 20


class Replica(asyncio.Protocol):
    """Answers each request with as many 7s as it asks for; keeps what came."""

    def __init__(self, came: list[tuple[dict[str, str], dict[str, Any]]], chunked: bool) -> None:
        self._came, self._chunked = came, chunked
        self._data = b""
        self.gone = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        if not found or len(body) < int(headers["content-length"]):
            return
        self._data = b""
        asked = json.loads(body)
        self._came.append((headers, asked))
        usage = {"prompt_tokens": len(asked["prompt"]), "prompt_tokens_details": {"cached_tokens": 3}}
        answer = json.dumps({"choices": [{"token_ids": [7] * asked["max_tokens"]}], "usage": usage}).encode()
        if self._chunked:
            parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (answer[:9], answer[9:]))
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"
            )
        else:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)


async def _driven(chunked: bool) -> tuple[Driven, list[tuple[dict[str, str], dict[str, Any]]]]:
    came: list[tuple[dict[str, str], dict[str, Any]]] = []
    replica = Replica(came, chunked)
    server = await asyncio.get_running_loop().create_server(lambda: replica, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        driven = await drive(PLANS, "run", lambda place, key: (port, {"x-session-id": key}))
        await replica.gone.wait()
    return driven, came


@pytest.mark.parametrize("chunked", [False, True])
def test_a_turns_prompt_is_the_last_one_its_answer_and_what_was_added(chunked: bool) -> None:
    driven, came = asyncio.run(_driven(chunked))
    first, second = (body["prompt"] for _, body in came)
    assert (len(first), len(second)) == (100, 160)
    assert second[:110] == first + [7] * 10
    assert [body["max_tokens"] for _, body in came] == [10, 5]
    assert {headers["x-session-id"] for headers, _ in came} == {"run-trajectory-0"}
    assert [(turn.prompt, turn.cached, turn.answer) for turn in driven.turns] == [(100, 3, 10), (160, 3, 5)]


def test_a_request_passes_the_filter_with_what_the_client_sent_alone() -> None:
    sent = {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 3,
        "temperature": 1.0,
        "seed": 4,
        "ignore_eos": True,
    }
    rewritten = json.dumps({**sent, "no_stop_trim": False, "best_of": None}).encode()
    assert json.loads(cleaned(rewritten)) == {**sent, "return_token_ids": True}


def test_turns_go_through_the_filter() -> None:
    async def through() -> tuple[Driven, list[tuple[dict[str, str], dict[str, Any]]]]:
        came: list[tuple[dict[str, str], dict[str, Any]]] = []
        replica = Replica(came, chunked=False)
        server = await asyncio.get_running_loop().create_server(lambda: replica, "127.0.0.1", 0)
        async with server:
            between = Filter(server.sockets[0].getsockname()[1])
            await between.start()
            try:
                driven = await drive(PLANS, "run", lambda place, key: (between.port, {}))
                await replica.gone.wait()
            finally:
                await between.stop()
        return driven, came

    driven, came = asyncio.run(through())
    assert [(turn.prompt, turn.cached, turn.answer) for turn in driven.turns] == [(100, 3, 10), (160, 3, 5)]
    assert [len(body["prompt"]) for _, body in came] == [100, 160]


def test_a_lost_connection_fails_the_turn() -> None:
    async def lost() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            connections = Connections()
            try:
                await connections.post(server.sockets[0].getsockname()[1], "/", {}, b"")
            finally:
                await connections.close()

    with pytest.raises(TurnFailed, match="connection was lost"):
        asyncio.run(lost())


@pytest.mark.parametrize(
    ("status", "choice", "match"),
    [
        (503, {"token_ids": [1, 2]}, "answered 503"),
        (200, {"text": "ab"}, "return_token_ids did not reach"),
        (200, {"token_ids": [1]}, "got 1 on 9"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_fails(
    status: int, choice: dict[str, Any], match: str
) -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
    body = json.dumps({"choices": [choice], "usage": usage}).encode()
    with pytest.raises(TurnFailed, match=match):
        read_answer(status, body, 9, 2, 0.1)


def test_a_replicas_work_is_read_from_its_event_stream() -> None:
    stats = EngineStats(prompt_tokens=1000, cached_prompt_tokens=600, generated_tokens=80)
    report = replica_report("replica-0", engine=stats)
    measures = {name: Distribution([0] * (len(bounds) + 1)) for name, bounds in TURN_MEASURES.items()}
    for name, counts, total in (
        ("time_to_first_token_seconds", [2, 1], 0.5),
        ("generation_seconds", [0, 3], 2.25),
    ):
        measures[name] = Distribution([*counts, *measures[name].counts[2:]], total)
    lines = [msgspec.json.encode(one) for one in (SessionsReport(), report, Trajectories(measures=measures))]
    assert read_work(lines[:2]) is None
    work = read_work(lines)
    assert work == Work(turns=3, prompt=1000, cached=600, answer=80, busy_s=2.75)
    assert work.computed == 480
    idle = replica_report("replica-1")
    # It tells no measures before its first turn.
    assert read_work([msgspec.json.encode(idle)]) == Work()


TURNS = [Turn(100, 0, 10, 0.2), Turn(160, 96, 5, 0.1)]


def test_figures_of_a_run() -> None:
    work = [Work(1, 100, 0, 10, 0.3), Work(1, 160, 96, 5, 0.1)]
    found = rollout.figures(PLANS, Driven(TURNS, 1.5), work)
    assert (found["prefill_tokens"], found["over_block_ideal"]) == (164, 1.0)
    assert found["over_ideal"] == round(164 / 151, 4)
    assert (found["turn_ms_p50"], found["turn_ms_p99"], found["wall_s"]) == (100.0, 200.0, 1.5)
    assert (found["load_turns"], found["load_in_flight"]) == (1.0, 1.5)
    assert found["load_tokens"] == round(110 / ((110 + 69) / 2), 3)


def test_a_client_and_replicas_that_disagree_about_the_prefill_fail_the_run() -> None:
    with pytest.raises(
        RuntimeError, match="by the usage 164 prompt tokens were computed, by the replicas 260"
    ):
        rollout.figures(PLANS, Driven(TURNS, 1.5), [Work(2, 260, 0, 15, 0.4)])


def test_a_summary_has_medians_and_ranges() -> None:
    found = rollout.summary([{"wall_s": wall, "turns": [1]} for wall in (3.0, 1.0, 2.0)])
    assert (found["wall_s"], found["range"]["wall_s"], len(found["rounds"])) == (2.0, [1.0, 3.0], 3)


def _way(**more: float) -> dict[str, Any]:
    figures = {"over_ideal": 1.02, "turn_ms_p50": 1234.0, "turn_ms_p99": 5678.0, "load_turns": 1.125}
    figures |= {"load_tokens": 1.2, "load_in_flight": 1.2, "wall_s": 12.5, "cpu_s": 20.0, "others": 0.25}
    figures |= more
    return {**figures, "range": {name: [value, value * 1.1] for name, value in figures.items()}}


def test_goals_are_judged_by_the_worst_round() -> None:
    text = rollout_table.render(
        {
            "at": "2026-01-02T03:04:05Z",
            "commit": "0123456789" + "a" * 30,
            "hardware": {"cpu": "CPU", "cores": 2},
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "configuration": {"rounds": 3, "trajectories": 64, "turns": 8, "replicas": 4, "block": 16},
            "ways": {"affinity": _way(), "round robin": _way(over_ideal=4.0)},
            "absent": {"vllm-router": "0.1.17 is not installed\nhere"},
            "vllm_router": {},
            "ideal_prefill_tokens": 1000,
            "ideal_prefill_tokens_in_blocks": 1020,
        }
    )
    assert (
        "2026-01-02, commit 0123456789; 2 cores of an CPU, Python 3.11.7, torch 2.13.0; 64 trajectories"
        in text
    )
    assert "| affinity | 1.020 (1.020 - 1.122) | 1,234 (1,234 - 1,357) |" in text
    assert "| round robin | 4.000 (4.000 - 4.400) |" in text
    assert "- vllm-router is absent: 0.1.17 is not installed." in text
    assert "The ideal is 1,000 prompt tokens; 1.020 of it" in text
    assert "prefill 1.122 x the ideal; goal at most 1.05: not met." in text
    assert "max/mean of turns 1.24; goal at most 1.25: met." in text
    assert "max/mean of requests in flight 1.32; goal at most 1.25: not met." in text
