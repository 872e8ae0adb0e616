"""A vLLM server whose engine core or worker stands still, while its API process and /health go on answering."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_vllm import LOAD, FakeVllm, until, write_adapter, write_weights
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.core.server_settings import VllmSettings
from midstream.engine.base import EngineDied
from midstream.engine.servers import keeper
from midstream.engine.servers.control import LOAD_BYTES_PER_S, LOAD_S, load_s
from midstream.engine.servers.watch import CPU_PROMPT_TOKENS_PER_S, STALLED, PendingWork, Silence

# Each waits for a silence of the real clock.
pytestmark = pytest.mark.slow

DUE, PAUSED = PendingWork(due=True, prompt_tokens=0), PendingWork(due=False, prompt_tokens=0)
IDLE = PendingWork(due=False, prompt_tokens=0, idle=True)
STOPPED = PendingWork(due=False, prompt_tokens=0, stopped=True)
MAX_S = 8.0


def listen(silence: Silence, begin: int, end: int, work: PendingWork = PAUSED) -> list[int]:
    """The seconds between `begin` and `end` at which something is wrong."""
    return [now for now in range(begin, end + 1) if silence.update(float(now), work) is not None]


class TestSilence:
    def test_a_server_that_says_nothing_is_given_up_in_time(self) -> None:
        assert VllmSettings().silence_s_max == MAX_S
        assert listen(Silence(MAX_S, 0.0), 1, 9) == [8, 9]

    def test_a_server_with_nothing_to_do_is_asked_seldom_and_is_silent_from_then_on(self) -> None:
        silence, asked = Silence(MAX_S, 0.0), []
        for now in range(1, 40):
            assert silence.update(float(now), IDLE) is None
            if silence.to_be_asked:
                asked.append(now)
                silence.heard()
        assert asked == [10, 20, 30]
        assert listen(silence, 40, 47, IDLE) == [47], "it was to answer at 40"

    def test_a_request_of_an_idle_server_has_the_whole_time(self) -> None:
        silence = Silence(MAX_S, 0.0)
        assert listen(silence, 1, 9, IDLE) == []
        assert not silence.to_be_asked
        assert listen(silence, 10, 17, DUE) == [17]

    def test_every_sign_of_life_begins_anew(self) -> None:
        silence = Silence(MAX_S, 0.0)
        for start in (0, 7, 14):
            assert listen(silence, start + 1, start + 7) == []
            if start:
                silence.token(start + 7.0)
            else:
                silence.heard()
        assert listen(silence, 22, 29) == [29]

    def test_a_core_that_talks_is_not_asked_and_one_that_has_been_silent_for_a_second_is(self) -> None:
        silence = Silence(MAX_S, 0.0)
        for poll in range(1, 20):
            silence.token(poll - 0.1)
            assert silence.update(float(poll), DUE) is None
            assert not silence.to_be_asked, "tokens came since it was looked at"
        assert silence.update(20.0, DUE) is None
        assert silence.to_be_asked
        silence.hold_up(100)
        assert not silence.to_be_asked
        silence.hold_up(-100)
        assert listen(silence, 21, 27) == [27], "the last token came at 18.9"

    def test_what_holds_it_up_gives_it_more_time_while_it_lasts(self) -> None:
        silence = Silence(MAX_S, 0.0)
        silence.hold_up(100)
        assert silence.held_up
        assert listen(silence, 1, 107) == []
        silence.hold_up(-100)
        assert listen(silence, 108, 108) == [108]

    def test_a_prompt_in_one_piece_takes_its_time_on_a_cpu(self) -> None:
        prompt = PendingWork(due=False, prompt_tokens=int(10 * CPU_PROMPT_TOKENS_PER_S))
        slow, fast = Silence(MAX_S, 0.0, CPU_PROMPT_TOKENS_PER_S), Silence(MAX_S, 0.0)
        assert listen(slow, 1, 18, prompt) == [18]
        assert listen(fast, 1, 8, prompt) == [8]

    def test_prompts_that_come_to_a_silent_server_give_it_no_time(self) -> None:
        silence = Silence(MAX_S, 0.0, CPU_PROMPT_TOKENS_PER_S)
        assert listen(silence, 1, 2) == []
        assert listen(silence, 3, 8, PendingWork(due=False, prompt_tokens=10**6)) == [8]

    def test_a_server_that_answers_and_samples_nothing_is_given_up_later(self) -> None:
        silence, wrong = Silence(MAX_S, 0.0), []
        for now in range(1, int(STALLED * MAX_S) + 1):
            silence.heard()
            if (problem := silence.update(float(now), DUE)) is not None:
                wrong.append((now, problem))
        assert wrong == [(48, "vLLM's engine answers, and has sampled no token for 48 s")]

    def test_a_stopped_process_gets_no_time_for_what_holds_the_server_up(self) -> None:
        silence = Silence(MAX_S, 0.0)
        silence.hold_up(600)
        assert listen(silence, 1, 100, PAUSED) == [], "a trainer may be slow"
        assert listen(silence, 101, 108, STOPPED) == [108]

    def test_a_stop_that_ends_in_time_is_none(self) -> None:
        silence = Silence(MAX_S, 0.0)
        silence.hold_up(600)
        for start in (0, 8, 16):
            assert listen(silence, start + 1, start + 7, STOPPED) == []
            assert listen(silence, start + 8, start + 8, PAUSED) == []

    def test_nothing_is_due_while_nothing_runs(self) -> None:
        silence = Silence(MAX_S, 0.0)
        for now in range(1, 200):
            silence.heard()
            assert silence.update(float(now), IDLE) is None


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many open files"), PermissionError("hidepid")])
def test_a_process_that_cannot_be_looked_at_is_not_taken_for_stopped(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """An error would end the watch without a word, and no hang would be noticed any more."""
    own, start = os.getpid(), keeper.started_at(os.getpid())
    assert start is not None

    def refuse(path: Path) -> bytes:
        raise error

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert not keeper.is_stopped(own, start)


def test_processes_of_others_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid=1, /proc lists them and shows no more, and a server of ours starts and ends beside them."""
    read = Path.read_bytes

    def own(path: Path) -> bytes:
        if path == Path("/proc/1/stat"):
            raise PermissionError(errno.EPERM, "hidepid")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", own)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in keeper.descendants(os.getpid())
        child.communicate(b"\n")


def test_the_time_for_files_is_that_of_their_size(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(int(60 * LOAD_BYTES_PER_S))
    assert load_s(tmp_path, 1800.0) == pytest.approx(LOAD_S + 60)
    assert load_s(tmp_path, 5.0) == 5.0


def hung(fake: FakeVllm) -> None:
    fake.hung = True


@pytest.fixture
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is well has most of a short `silence_s_max` to answer in, and not the third that a second leaves."""
    for name in ("POLL_S", "IDLE_POLL_S"):
        monkeypatch.setattr(f"midstream.engine.servers.watch.{name}", 0.1)


@pytest.mark.parametrize("busy", ["idle", "decoding", "waiting", "scoring"])
@pytest.mark.usefixtures("asked_often")
async def test_a_hung_engine_ends_the_boot_and_every_request(tmp_path: Path, busy: str) -> None:
    async with attached(tmp_path, silence_s_max=1.5) as (engine, fake):
        reasons: list[str] = []

        async def died(reason: str) -> None:
            reasons.append(reason)

        engine.on_death(died)
        fake.hold_scores = True
        reading = None
        if busy == "scoring":
            reading = Reading(engine, asking(prompt_records=3))
            await until(lambda: fake.scores)
        elif busy != "idle":
            reading, (request,) = await begun(engine, fake, asking(max_tokens=9))
            if busy == "decoding":
                request.step(2)
                await until(lambda: len(reading.records()) == 2)
        hung(fake)
        await until(lambda: engine.silent_s() > 0.5, "its silence is told")
        await until(lambda: reasons, "its end is told")
        assert "silent for" in reasons[0]
        assert "vllm.silence_s_max" in reasons[0]
        if reading is not None:
            assert (await reading.ended()).died is not None
            assert reading.finishes == {}
        with pytest.raises(EngineDied):
            await anext(engine.generate(asking("late")))
        assert engine.silent_s() == 0
        fake.hung = fake.hold_scores = False
        await engine.start()
        again, (request,) = await begun(engine, fake, asking("again"))
        request.to_the_end()
        assert len((await again.ended()).records()) == 4


@pytest.mark.usefixtures("asked_often")
@pytest.mark.parametrize("step", ["pause", "check", "load", "resume"])
async def test_a_swap_of_a_hung_engine_ends(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"pause": "/pause", "check": "/is_paused", "load": "/collective_rpc", "resume": "/resume"}

    async with attached(tmp_path, silence_s_max=1.5) as (engine, fake):
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        fake.before[paths[step]] = lambda: hung(fake)
        fake.fault(paths[step], "hang")
        monkeypatch.setattr("midstream.engine.servers.control.LOAD_S", 0.5)
        with pytest.raises(EngineDied):
            await engine.commit("step-1")
        fake.hung = False


async def test_a_silent_core_is_asked_and_tokens_end_its_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[float] = []
    token = Silence.token

    def told(silence: Silence, now: float) -> None:
        token(silence, now)
        heard.append(silence.silent_s)

    monkeypatch.setattr(Silence, "token", told)

    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=9))
        before = fake.probes
        await until(lambda: fake.probes >= before + 2)
        heard.clear()
        request.step(4)
        await until(lambda: len(reading.records()) == 4)
        assert heard
        assert set(heard) == {0.0}
        request.to_the_end()
        assert len((await reading.ended()).records()) == 9


@pytest.mark.usefixtures("asked_often")
async def test_a_load_that_takes_long_is_no_silence(tmp_path: Path) -> None:
    async with attached(tmp_path, silence_s_max=1.5) as (engine, fake):
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        fake.gates["/collective_rpc"] = gate = asyncio.Event()
        committing = asyncio.create_task(engine.commit("step-1"))
        await until(lambda: engine.silent_s() > 2.0, "longer than it may be silent")
        gate.set()
        assert (await committing).snapshot == "step-1"
        await swap(engine, tmp_path, 2)


async def test_a_long_prompt_that_is_scored_on_a_cpu_takes_its_time(tmp_path: Path) -> None:
    def set_up(fake: FakeVllm) -> None:
        fake.cpu = True

    async with attached(tmp_path, set_up=set_up, silence_s_max=4.0) as (engine, fake):
        reasons: list[str] = []

        async def died(reason: str) -> None:
            reasons.append(reason)

        engine.on_death(died)
        fake.hold_scores = True
        prompt = [5] * int(10 * CPU_PROMPT_TOKENS_PER_S)
        scored = Reading(engine, asking("echo", prompt, max_tokens=0, prompt_records=3))
        await until(lambda: fake.scores)
        hung(fake)
        await until(lambda: reasons or engine.silent_s() > 4.5, "longer than it may be silent")
        assert reasons == []
        fake.hung = False
        fake.scores[0].gate.set()
        assert (await scored.ended()).finishes == {0: "length"}


async def test_an_adapter_is_loaded_behind_a_step_that_takes_longer_than_the_load_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(tmp_path, places=4, silence_s_max=4.0) as (engine, fake):
        monkeypatch.setattr("midstream.engine.servers.control.LOAD_S", 0.1)
        fake.gates[LOAD] = step = asyncio.Event()
        staging = asyncio.create_task(engine.slot("p").stage("a", write_adapter(tmp_path / "a", 3)))
        await until(lambda: staging.done() or engine.silent_s() > 0.5, "longer than a load may take")
        step.set()
        await staging
        assert (await engine.slot("p").commit("a")).snapshot == "a"


async def test_an_attached_server_that_was_restarted_is_noticed_without_a_request(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reasons: list[str] = []

        async def died(reason: str) -> None:
            reasons.append(reason)

        engine.on_death(died)
        await swap(engine, tmp_path, 1)
        await fake.restart()
        await until(lambda: reasons, "its restart is noticed")
        assert "vLLM was restarted" in reasons[0] or "nothing listens" in reasons[0]
