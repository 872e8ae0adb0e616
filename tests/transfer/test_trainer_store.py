"""The store of a trainer, as a replica looks for it without torch: torch's own, others, and what is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import torch

from midstream.core.transfer import TrainerState
from midstream.transfer.trainer_store import TrainerStore

HERE = "127.0.0.1"
#: Of an answer that comes. Nothing waits for it to pass.
SOON_S = 60.0
#: Of one that does not.
SILENT_S = 0.2


def torch_store(port: int = 0, *, libuv: bool = True) -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore(HERE, port, None, True, wait_for_workers=False, use_libuv=libuv)


@pytest.mark.parametrize("libuv", [True, False])
async def test_a_store_of_torch_is_known_again(libuv: bool) -> None:
    opened = torch_store(libuv=libuv)
    store = TrainerStore(HERE, opened.port)
    assert await store.mark(SOON_S)
    assert await store.look(SOON_S) is TrainerState.ALIVE
    # What torch's clients set is as it was.
    opened.set("key", "value")
    assert opened.get("key") == b"value"
    assert await store.look(SOON_S) is TrainerState.ALIVE
    port = opened.port
    del opened
    assert await store.look(SOON_S) is TrainerState.GONE
    # Another trainer's.
    opened = torch_store(port, libuv=libuv)
    assert await store.look(SOON_S) is TrainerState.GONE
    del opened


async def at_once_closed(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def answer_as_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("answer", [at_once_closed, answer_as_http])
async def test_what_answers_something_else_is_no_trainer(answer: Callable[..., object]) -> None:
    opened = torch_store()
    store = TrainerStore(HERE, opened.port)
    assert await store.mark(SOON_S)
    port = opened.port
    del opened
    server = await asyncio.start_server(answer, HERE, port)
    assert await store.look(SOON_S) is TrainerState.GONE
    server.close()
    await server.wait_closed()


async def test_silence_at_the_port_is_unknown() -> None:
    opened = torch_store()
    store = TrainerStore(HERE, opened.port)
    assert await store.mark(SOON_S)
    port = opened.port
    del opened
    with socket.create_server((HERE, port)):
        assert await store.look(SILENT_S) is TrainerState.UNKNOWN


async def test_a_trainer_without_a_store_of_torch_is_whatever_listens() -> None:
    with socket.create_server((HERE, 0)) as listener:
        store = TrainerStore(HERE, listener.getsockname()[1])
        assert not await store.mark(SILENT_S)
        assert await store.look(SILENT_S) is TrainerState.ALIVE
    assert await store.look(SOON_S) is TrainerState.GONE
