"""Trainers' control calls, those of vLLM, prime-rl and SGLang: pauses, updates, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from midstream_conformance.answers import Answer, Json
from midstream_conformance.checks.asking import serving
from midstream_conformance.checks.paths import answered, call
from midstream_conformance.endpoint import Flight, error_of, refusal
from midstream_conformance.outcome import expect
from midstream_conformance.rows import Evidence, row
from midstream_conformance.session import Session
from midstream_conformance.snapshots import AT_REST

DOCUMENT = "docs/trainer-calls.md"
PAUSES, UPDATES, REST = (f"{DOCUMENT}: {section}" for section in ("Pauses", "Updates", "The rest"))
READS, CHANGES = ("midstream",), ("publish", "midstream")
# A request with it gets at once the answer that the endpoint is paused.
AT_ONCE = {"x-fireworks-hot-load-drain-timeout": "0"}
# New sessions that ask while the endpoint is paused: some on each replica.
NEWCOMERS = 6
PRIME_RL, SGLANG = "/update_weights", "/update_weights_from_disk"
# A call to what it belongs to, and what its refusal names.
TRANSFERS: Sequence[tuple[str, Json, str]] = (
    ("/init_weights_update_group", {"master_address": "trainer", "world_size": 2}, "/init_weights_update_group"),
    ("/update_weights_from_distributed", {"names": ["w"]}, "/update_weights_from_distributed"),
    ("/update_weights_from_tensor", {}, "/update_weights_from_tensor"),
    ("/init_communicator/", {"host": "trainer", "world_size": 2}, "/init_communicator/"),
    ("/update_named_param/", {"name": "w"}, "/update_named_param/"),
    (PRIME_RL, {"update_info": {"names": ["w"]}}, "update_info"),
)  # fmt: skip


async def _read(session: Session, path: str) -> Json:
    return await answered(session, path, method="GET")


async def _is_paused(session: Session, wanted: str | None, when: str) -> None:
    found = await _read(session, "/is_paused")
    expect(found.get("is_paused") is (wanted is not None) and found.get("mode") == wanted,
           f"/is_paused {when} should say {wanted or 'no'}", got=found)  # fmt: skip


async def _newcomers(session: Session) -> list[int]:
    """The statuses, each once, of requests of new sessions that wait for nothing."""
    body: Json = {"prompt": [20, 21], "max_tokens": 1}
    asked = (session.endpoint.post("/completions", body, AT_ONCE) for _ in range(NEWCOMERS))
    return sorted({response.status_code for response in await asyncio.gather(*asked)})


@row(
    "trainer.info",
    "/server_info, /get_world_size and /weight_info say the model, the replicas and what they serve",
    REST,
    READS,
)
async def info(session: Session) -> Evidence:
    told, world = await _read(session, "/server_info"), await _read(session, "/get_world_size")
    version = (await _read(session, "/weight_info"))["weight_version"]
    served = await serving(session)
    expect([version] == served == [told["weight_version"]], "weight_version is not what the replicas serve",
           weight_info=version, server_info=told["weight_version"], serving=served)  # fmt: skip
    model = session.target.model.partition("@")[0]
    expect(told["model_path"] == model, f"model_path: {model} was expected", got=told["model_path"])
    workers = world["world_size"]
    expect(workers == told["dp_size"] and workers >= (session.target.replicas or 1),
           "a replica should count as one worker", world_size=workers, dp_size=told["dp_size"])  # fmt: skip
    await _is_paused(session, None, "without a pause")
    return {"weight_version": version, "world_size": workers}


@row(
    "trainer.pause",
    "/is_paused says the pause. A newcomer waits for its end, or gets a 425 if it will not wait. Behind it all are served",
    PAUSES,
    CHANGES,
)
async def pause(session: Session) -> Evidence:
    ways: list[tuple[str, str, Json | None, str]] = [
        ("wait", "/pause?mode=wait&clear_cache=false", None, "/resume"),
        ("abort", "/pause_generation", {"mode": "abort"}, "/continue_generation"),
    ]
    for mode, begin, body, end in ways:
        async with session.paused(begin, body):
            await _is_paused(session, mode, f"after {begin}")
            async with _waiting(session) as newcomer:
                statuses = await _newcomers(session)
                expect(statuses == [425], f"after {begin}: 425 was expected of newcomers", statuses=statuses)
                expect(not newcomer.done(), f"after {begin}: a newcomer did not wait")
                await answered(session, end, {} if body is not None else None)
                await newcomer
            await _is_paused(session, None, f"after {end}")
            statuses = await _newcomers(session)
            expect(statuses == [200], f"after {end}: newcomers are not served", statuses=statuses)
    return {"pauses": len(ways)}


@contextlib.asynccontextmanager
async def _waiting(session: Session) -> AsyncIterator[asyncio.Task[Answer]]:
    """A newcomer that waits as long as it has to, or until the end."""
    asked = asyncio.create_task(session.turn([20, 21], session.key()))
    try:
        yield asked
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@row(
    "trainer.abort",
    "/pause?mode=abort ends streams in flight with what they have, and the reason abort",
    PAUSES,
    CHANGES,
)
async def abort(session: Session) -> Evidence:
    for asked in _lengths(session):
        async with (
            _stream(session, session.prompt(32), asked) as (flight, running),
            session.paused("/pause?mode=abort&clear_cache=false"),
        ):
            await running
        answer = flight.whole()
        # Else it may have ended just before the pause began.
        if answer.choice.finish != "length":
            break
    finish, got = answer.choice.finish, len(answer.choice.ids)
    expect(finish == "abort" and answer.done, "the reason abort, and then [DONE], were expected of a stream in flight",
           finish_reason=finish, tokens=got)  # fmt: skip
    expect(0 < got < asked, f"some of {asked} tokens were expected", got=got)
    return {"asked": asked, "tokens": got}


@row(
    "trainer.keep",
    "/pause?mode=keep lets streams stand still: they continue with the tokens of one that was not paused",
    PAUSES,
    (*CHANGES, "freeze"),
)
async def keep(session: Session) -> Evidence:
    prompt, stood = session.prompt(32), False
    async with session.transition("ASYNC"):
        for asked in _lengths(session):
            if stood:
                break
            async with _stream(session, prompt, asked) as (undisturbed, running):
                await running
            async with _stream(session, prompt, asked) as (flight, running):
                async with session.paused("/pause?mode=keep&clear_cache=false"):
                    await _is_paused(session, "keep", "after /pause?mode=keep")
                    statuses = await _newcomers(session)
                    expect(statuses == [425], "425 was expected of newcomers", statuses=statuses)
                    stood = not running.done()
                await running
            found, wanted = flight.whole().choice, undisturbed.whole().choice
            apart = [
                at for at, pair in enumerate(zip(found.ids, wanted.ids, strict=False)) if pair[0] != pair[1]
            ]
            expect((found.ids, found.finish) == (wanted.ids, wanted.finish),
                   "the paused stream differs from one that was not paused", first_difference=apart[:1],
                   got=(len(found.ids), found.finish), wanted=(len(wanted.ids), wanted.finish))  # fmt: skip
    expect(stood, "a stream in flight went on to its end in the pause", tokens=len(found.ids))
    return {"tokens": len(found.ids)}


def _lengths(session: Session) -> tuple[int, int]:
    """Tokens of a stream that a pause shall meet: of a fast engine, one of the first length may be over before."""
    return session.target.stream_tokens // 4, session.target.stream_tokens_max


@contextlib.asynccontextmanager
async def _stream(
    session: Session, prompt: Sequence[int], tokens: int
) -> AsyncIterator[tuple[Flight, asyncio.Task[None]]]:
    """A greedy stream in flight, without cached KV, from its first token on."""
    fields: Json = {"max_tokens": tokens, "temperature": 0, "prompt_cache_max_len": 0}
    body = {"prompt": list(prompt), "ignore_eos": True, "logprobs": True, **fields}
    flight = Flight(session.endpoint, body)
    running = asyncio.create_task(flight.run())
    try:
        await flight.begun.wait()
        yield flight, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@row(
    "trainer.update",
    "/update_weights and /update_weights_from_disk answer when every replica serves the directory, by the name they give",
    UPDATES,
    CHANGES,
)
async def update(session: Session) -> Evidence:
    async def sglang(identity: str, url: str) -> str:
        told = await answered(session, SGLANG, {"model_path": url, "weight_version": identity})
        expect(told.get("success") is True and told.get("weight_version") == identity,
               f"{SGLANG}: success and {identity} were expected", got=told)  # fmt: skip
        return identity

    async def prime_rl(identity: str, url: str) -> str:
        told = await answered(session, PRIME_RL, {"weight_dir": url})
        expect(told.get("status") == "ok" and told.get("weight_version"), f"{PRIME_RL}: odd answer", got=told)
        return str(told["weight_version"])

    names = []
    # The last one's name is its directory's, so that a signal of that name has it back.
    for path, send in ((PRIME_RL, prime_rl), (SGLANG, sglang)):
        name = await session.snapshots.update(session.snapshots.other(), send)
        known = {"labels": await session.labels(), "weight_info": await _read(session, "/weight_info")}
        expect(known == {"labels": [name], "weight_info": {"weight_version": name}},
               f"{path}: {name} should serve everywhere", **known)  # fmt: skip
        names.append(name)
    return {"names": names}


@row(
    "trainer.missing",
    "An update from a directory that is not there, or not allowed, is a 400 that says so; nothing changes",
    UPDATES,
    CHANGES,
)
async def missing(session: Session) -> Evidence:
    before = await _state(session)
    places = (session.snapshots.url_of(session.snapshots.name()), "/conformance/nowhere")
    for place in places:
        for path, field in ((PRIME_RL, "weight_dir"), (SGLANG, "model_path")):
            response = await call(session, path, {field: place})
            expect(response.status_code == 400, f"{path} {place}: 400 was expected, got {refusal(response)}")
            expect(error_of(response).get("message"), f"{path} {place}: there is no error message")
            if path == SGLANG:
                said = response.json()
                expect(
                    said.get("success") is False and said.get("message"),
                    f"{path}: it says no failure",
                    got=said,
                )
    after = await _state(session)
    expect(after == before, "a refused update changed something", before=before, after=after)
    return {"refused": 2 * len(places), "serving": before["labels"]}


async def _state(session: Session) -> dict[str, Any]:
    """What an update would change. Raises Failed while a replica loads."""
    status = await session.snapshots.status()
    busy = [f"{one.name}: {one.stage}" for one in status.replicas if one.stage not in AT_REST]
    expect(not busy, "a replica loads", stages=busy)
    about = await _read(session, "/server_info")
    return {
        "labels": await session.labels(),
        "weight_version": about["weight_version"],
        "targets": sorted({str(one.target) for one in status.replicas}),
    }


@row(
    "trainer.transfer",
    "A call of a transfer between processes is a 400 that names it; the weights stay",
    REST,
    READS,
)
async def transfer(session: Session) -> Evidence:
    before = await _read(session, "/weight_info")
    for path, body, named in TRANSFERS:
        response = await call(session, path, body)
        expect(response.status_code == 400, f"{path}: 400 was expected, got {refusal(response)}")
        message = str(error_of(response).get("message"))
        expect(named in message, f"{path}: the error does not name {named}", message=message)
    after = await _read(session, "/weight_info")
    expect(after == before, "a refused transfer changed the weights", before=before, after=after)
    return {"refused": len(TRANSFERS), **before}
