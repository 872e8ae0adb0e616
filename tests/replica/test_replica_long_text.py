"""Long text: refused unread when it cannot fit, read beside the loop when it may, and others do not wait for it."""

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from replica_fakes import MODEL, FakeEngine, Running, byte_tokenizer, running, write_tokenizer
from tokenizers import AddedToken

from midstream.core.errors import HEADER_ANOTHER_BOOT, AnotherBoot, InvalidRequest, Overloaded
from midstream.replica import prompting
from midstream.replica.request import schema
from midstream.replica.request.schema import VALUES_MAX, parse_chat, parse_completion
from midstream.replica.text import text_jobs
from midstream.replica.text.chat import PIECE_CHARACTERS, TextModel
from midstream.replica.text.text_jobs import Leave, Left, TextJobs


async def ask(here: Running, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return await here.http.post(path, json={"model": MODEL, "max_tokens": 1, **fields})


async def refused(here: Running, path: str = "/v1/completions", **fields: Any) -> tuple[str, str]:
    answer = await ask(here, path, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


def watch(here: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every text that is tokenized from now on."""
    seen: list[int] = []
    text = here.replica._text

    def watched(real: Callable[[str], tuple[int, ...]]) -> Callable[[str], tuple[int, ...]]:
        def call(prompt: str) -> tuple[int, ...]:
            seen.append(len(prompt))
            return real(prompt)

        return call

    monkeypatch.setattr(text, "encode", watched(text.encode))
    monkeypatch.setattr(text, "encode_rendered", watched(text.encode_rendered))
    return seen


def hold_long_texts(here: Running, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, threading.Event]:
    """Tokenizing a text of more than 20,000 characters sets the first event, and waits for the second."""
    text, begun, may_go_on = here.replica._text, asyncio.Event(), threading.Event()
    loop, real = asyncio.get_running_loop(), text.encode

    def slow(prompt: str) -> tuple[int, ...]:
        if len(prompt) > 20_000:
            loop.call_soon_threadsafe(begun.set)
            may_go_on.wait()
        return real(prompt)

    monkeypatch.setattr(text, "encode", slow)
    return begun, may_go_on


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = "this model's maximum context length is 128 tokens, and"
    why = "bytes of text are at least {} tokens, as a token of this model stands for at most 12 bytes"

    async with running(tmp_path, FakeEngine()) as here:
        tokenized = watch(here, monkeypatch)
        long = "\u00e4" * 1000
        assert await refused(here, prompt=long) == (f"prompt: {most} 2000 {why.format(167)}", "prompt")
        assert await refused(here, prompt=["a", long]) == (
            f"prompt[1]: {most} 2000 {why.format(167)}",
            "prompt",
        )
        chat = "/v1/chat/completions"
        user = [{"role": "user", "content": "a"}, {"role": "user", "content": "b" * 2000}]
        assert await refused(here, chat, messages=user) == (
            f"messages[1].content: {most} 2000 {why.format(167)}",
            "messages",
        )
        many = [{"role": "user", "content": "b" * 100}] * 20
        size = 20 * len("<|im_start|>user\n<|im_end|>" + "b" * 100) + len("<|im_start|>assistant\n")
        expected = f"messages: the rendered chat template: {most} {size} {why.format(-(-size // 12))}"
        assert await refused(here, chat, messages=many) == (expected, "messages")
        assert tokenized == []


async def test_messages_and_token_ids_are_counted_before_anything_is_done_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        rendered: list[Any] = []
        monkeypatch.setattr(here.replica._text, "render", lambda *given: rendered.append(given))
        many = [{"role": "user", "content": ""}] * 129
        assert await refused(here, "/v1/chat/completions", messages=many) == (
            "messages: this model's maximum context length is 128 tokens, and 129 messages have at least one token each",
            "messages",
        )
        why = "the prompt has 1000000 tokens, with at least one to generate"
        room = f"prompt: this model's maximum context length is 128 tokens, and {why}"
        assert await refused(here, prompt=[1] * 1_000_000) == (room, "prompt")
        assert await refused(here, prompt=[[1], [1] * 1_000_000]) == (room, "prompt")
        assert rendered == []


@pytest.mark.parametrize("field", ['"prompt": [%s]', '"prompt": ["%s"]'])
def test_a_body_of_too_many_values_is_refused_undecoded(field: str) -> None:
    body = ('{"model": "m", %s}' % (field % ("[]," * VALUES_MAX))).encode()
    with pytest.raises(InvalidRequest, match=rf"the body holds \d+ commas and .* at most {VALUES_MAX}"):
        parse_completion(body)
    text = "a" * 3 * VALUES_MAX
    assert parse_completion(b'{"model": "m", "prompt": "%b"}' % text.encode()).prompt == text
    chat = '{"model": "m", "messages": [%s{}]}' % ("{}," * 100_000)
    assert len(parse_chat(chat.encode()).messages) == 100_001


def unprovable(directory: Path) -> Path:
    """A tokenizer with a token that takes white space with it: its tokens may be as long as anything."""
    write_tokenizer(directory)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


async def test_where_bytes_prove_nothing_no_more_is_tokenized_than_shows_that_it_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(here: Running) -> None:
        tokenized = watch(here, monkeypatch)
        assert await refused(here, prompt=" " * 900_000 + "<mask>") == (
            "prompt: this model's maximum context length is 40000 tokens, and the text has over 80000 tokens",
            "prompt",
        )
        assert tokenized == [PIECE_CHARACTERS] * 2
        tokenized.clear()
        assert (await ask(here, prompt="he" * 30_000)).status_code == 200
        assert tokenized == [60_000]

    engine = FakeEngine()
    engine.info = replace(engine.info, max_model_len=40_000)
    async with running(tmp_path, engine, write=unprovable) as here:
        await scenario(here)


async def test_a_short_request_sent_after_a_long_one_is_answered_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(here: Running) -> None:
        begun, may_go_on = hold_long_texts(here, monkeypatch)
        long = asyncio.create_task(ask(here, prompt="a" * 30_000))
        await begun.wait()
        assert (await ask(here, prompt="a" * 100)).status_code == 200
        assert not long.done()
        may_go_on.set()
        assert (await long).status_code == 200

    engine = FakeEngine()
    engine.info = replace(engine.info, max_model_len=40_000)
    async with running(tmp_path, engine) as here:
        await scenario(here)


async def test_a_text_that_was_read_while_the_engine_began_anew_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(here: Running) -> None:
        begun, may_go_on = hold_long_texts(here, monkeypatch)
        asked = asyncio.create_task(ask(here, prompt="a" * 30_000))
        await begun.wait()
        await here.engine.die()
        await here.until(lambda: here.replica.ready)
        may_go_on.set()
        answer = await asked
        assert (answer.status_code, answer.headers[HEADER_ANOTHER_BOOT]) == (503, "1")
        assert here.engine.requests == []

    engine = FakeEngine()
    engine.info = replace(engine.info, max_model_len=40_000)
    async with running(tmp_path, engine) as here:
        await scenario(here)


@pytest.mark.parametrize("name", ["encode", "encode_rendered"])
def test_tokenizing_lets_other_threads_work(tmp_path: Path, name: str) -> None:
    """Threads change only where one lets go by itself: the waiting one is woken while the other still tokenizes.

    It may get no core until the other has ended, so a few tries count. A thread that does not let go is never overtaken.
    """
    text = TextModel.load(write_tokenizer(tmp_path))

    def lets_others_work() -> bool:
        begun, ended = threading.Event(), list[bool]()

        def tokenize() -> None:
            begun.set()
            getattr(text, name)("ab " * 100_000)
            ended.append(True)

        worker = threading.Thread(target=tokenize)
        worker.start()
        begun.wait()
        while_it_worked = not ended
        worker.join()
        assert ended == [True]
        return while_it_worked

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        assert any(lets_others_work() for _ in range(10))
    finally:
        sys.setswitchinterval(before)


# Whose turn it is


async def test_one_tenants_long_texts_are_read_one_after_another_and_another_tenants_beside_them() -> None:
    jobs, order = TextJobs(), list[str]()
    go_on = {name: threading.Event() for name in ("a1", "a2", "b1")}
    begun = {name: asyncio.Event() for name in go_on}
    loop = asyncio.get_running_loop()

    def job(name: str) -> Callable[[Leave], str]:
        def work(leave: Leave) -> str:
            loop.call_soon_threadsafe(begun[name].set)
            go_on[name].wait()
            order.append(name)
            return name

        return work

    a1 = asyncio.create_task(jobs.run("a", job("a1")))
    await begun["a1"].wait()
    a2 = asyncio.create_task(jobs.run("a", job("a2")))
    b1 = asyncio.create_task(jobs.run("b", job("b1")))
    await begun["b1"].wait()
    assert (jobs.jobs, begun["a2"].is_set()) == (3, False)
    go_on["b1"].set()
    assert await b1 == "b1"
    assert not begun["a2"].is_set()
    go_on["a2"].set()
    go_on["a1"].set()
    assert [await a1, await a2] == ["a1", "a2"]
    assert order == ["b1", "a1", "a2"]
    assert repr(jobs) == "TextJobs(0 jobs of 0 tenants)"
    jobs.close()


async def test_a_job_whose_client_left_stops_at_its_next_step_and_the_next_one_begins() -> None:
    jobs, loop = TextJobs(), asyncio.get_running_loop()
    begun, ended = asyncio.Event(), threading.Event()
    may_go_on, stopped = threading.Event(), list[str]()

    def job(leave: Leave) -> None:
        loop.call_soon_threadsafe(begun.set)
        may_go_on.wait()
        try:
            leave.check()
        except Left:
            stopped.append("left")
            raise
        finally:
            ended.set()

    task = asyncio.create_task(jobs.run("a", job))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert jobs.jobs == 1
    may_go_on.set()
    assert await jobs.run("a", lambda leave: "next") == "next"
    assert ended.is_set()
    assert jobs.jobs == 0
    assert stopped == ["left"]
    jobs.close()


async def test_jobs_whose_clients_left_take_no_more_than_their_tenants_turn() -> None:
    """A step may be long: whoever sends, leaves and sends again must not keep all threads."""

    jobs, loop = TextJobs(), asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), threading.Event()
    running: list[int] = []

    def job(leave: Leave) -> None:
        running.append(1)
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()

    try:
        for _ in range(3):
            task = asyncio.create_task(jobs.run("a", job))
            await begun.wait()
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.wait_for(jobs.run("b", lambda leave: "b"), 120) == "b"
        assert len(running) == 1
    finally:
        go_on.set()
    assert await jobs.run("a", lambda leave: "a") == "a"
    assert repr(jobs) == "TextJobs(0 jobs of 0 tenants)"
    jobs.close()


async def test_more_long_texts_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_jobs, "WAITING_MAX", 1)
    jobs, go_on = TextJobs(), threading.Event()
    first = asyncio.create_task(jobs.read("a", lambda leave: go_on.wait()))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 long texts wait to be tokenized; retry it later"):
        await jobs.read("b", lambda leave: None)
    assert await jobs.run("b", lambda leave: "no text") == "no text"
    go_on.set()
    await first
    jobs.close()


async def test_long_bodies_of_token_ids_are_no_long_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding them takes milliseconds. A burst of long prompts, as a trainer sends it after a hot load, was a 429."""
    monkeypatch.setattr(text_jobs, "WAITING_MAX", 1)
    monkeypatch.setattr(prompting, "LONG_BODY", 10)

    async with running(tmp_path, FakeEngine()) as here:
        asked = [ask(here, prompt=[1, 2, number]) for number in range(8)]
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 8


async def test_texts_that_wait_when_a_replica_ends_are_refused_and_their_requests_may_begin_elsewhere() -> (
    None
):
    """One that waits for a thread was never answered, one that waits for its tenant's turn was a 500."""

    jobs, go_on, run = TextJobs(), threading.Event(), threading.Barrier(text_jobs.THREADS + 1)

    def job(_: Leave) -> str:
        run.wait(60)
        go_on.wait()
        return "read"

    tenants = "abcab"
    tasks = [asyncio.create_task(jobs.run(tenant, job)) for tenant in tenants]
    # A thread that has been given a job runs it when it gets the interpreter.
    await asyncio.to_thread(run.wait, 60)
    jobs.close()
    go_on.set()
    done = await asyncio.gather(*tasks, jobs.run("d", job), return_exceptions=True)
    assert done[:2] == ["read", "read"], "those that ran have ended"
    assert [type(end) for end in done[2:]] == [AnotherBoot] * 4
    await asyncio.sleep(0)
    assert repr(jobs) == "TextJobs(0 jobs of 0 tenants)"


class Text:
    """What a job has of its request."""


@pytest.mark.parametrize("leaves", [False, True])
async def test_nothing_of_a_job_that_failed_waits_for_a_collection(leaves: bool) -> None:
    """A few refused bodies of 64 MiB, decoded, were hundreds of megabytes until the next collection of all generations."""

    gc.disable()
    try:
        jobs, begun, go_on = TextJobs(), asyncio.Event(), threading.Event()
        loop, text = asyncio.get_running_loop(), Text()

        def job(_: Leave, text: Text = text) -> None:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()
            raise InvalidRequest(f"{type(text).__name__} does not fit")

        task = asyncio.create_task(jobs.run("a", job))
        kept = weakref.ref(text)
        del text, job
        await begun.wait()
        if leaves:
            task.cancel()
        go_on.set()
        # `pytest.raises` would keep the error, and so all frames that it came through.
        try:
            await task
        except (InvalidRequest, asyncio.CancelledError) as error:
            assert isinstance(error, asyncio.CancelledError) is leaves  # noqa: PT017
        del task
        # The call that resumed this one holds the task.
        await asyncio.sleep(0)
        while jobs.jobs:  # noqa: ASYNC110
            await asyncio.sleep(0)
        jobs._threads.shutdown()
        # What the thread told the loop last has the error, too.
        await asyncio.sleep(0)
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a" * 300_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300_000}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a" * 300_000}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * 300_000}]}),
        ("/v1/responses", {"input": "a" * 300_000, "unknown": 1}),
        ("/tokenize", {"prompt": "a" * 300_000}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "a" * 300_000}]}),
    ],
)
async def test_a_long_body_is_decoded_beside_the_loop_on_every_wire(
    path: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    real = schema._check_values

    def spied(body: bytes) -> None:
        threads.append(threading.get_ident())
        real(body)

    monkeypatch.setattr(schema, "_check_values", spied)

    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.http.post(path, json={"model": MODEL, **fields})
        assert answer.status_code == 400, answer.text
        assert threads
        assert threading.get_ident() not in threads


@pytest.mark.parametrize(("sign", "what"), [("{},", "opening brackets"), ('"a":1,', "members of objects")])
def test_a_body_of_too_many_objects_or_members_is_refused_undecoded(sign: str, what: str) -> None:
    value = "[%s0]" if sign == "{}," else '{%s"b":1}'
    body = '{"model": "m", "prompt": %s}' % (value % (sign * schema.PARTS_MAX))
    with pytest.raises(InvalidRequest, match=rf"the body holds \d+ {what}, at most {schema.PARTS_MAX}"):
        parse_completion(body.encode())
