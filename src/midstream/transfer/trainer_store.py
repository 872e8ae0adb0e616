"""Looks for a group's trainer, at the store that it opened: torch's TCPStore. Imports no torch.

Owns: a key in that store which no other store has.
Always holds: a look ends in time, whatever listens there. torch's own client has no time limit where a listener is silent, and
a replica of vLLM has no torch. Of the store's protocol three messages are used, which are the same in all releases since 2.1.
"""

from __future__ import annotations

import asyncio
import secrets
import struct

from midstream.core.transfer import STORE_PREFIX, TrainerState

#: A client's first message: the kind of message, and a number that torch's clients say.
_HELLO = struct.pack("=BI", 0, 0x3C85F7CE)
_SET, _CHECK = 1, 5
#: A store answers within so long, since a member of its group was just there.
_MARK_S = 5.0
#: The answer to _CHECK: the key is there.
_THERE = b"\0"


class TrainerStore:
    """The store at this address. A look before `mark` takes whatever listens there for it."""

    def __init__(self, address: str, port: int) -> None:
        self._address, self._port = address, port
        self._key: bytes | None = None

    def __repr__(self) -> str:
        return f"TrainerStore({self._address}:{self._port}, {'unmarked' if self._key is None else 'marked'})"

    async def mark(self, within_s: float) -> bool:
        """Put the key there. False if no store answers: later looks then only find a listener, as before."""
        # torch's clients begin each key with a slash.
        key = f"/{STORE_PREFIX}/member/{secrets.token_hex(16)}".encode()
        put = _HELLO + bytes([_SET]) + _sized(key) + _sized(b"1")
        if await self._ask(put + _check(key), min(within_s, _MARK_S)) is not TrainerState.ALIVE:
            return False
        self._key = key
        return True

    async def look(self, within_s: float) -> TrainerState:
        return await self._ask(None if self._key is None else _HELLO + _check(self._key), within_s)

    async def _ask(self, message: bytes | None, within_s: float) -> TrainerState:
        """message: ends with a check of the key. None: whoever accepts is the trainer."""
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection(self._address, self._port)
        except OSError:
            return TrainerState.GONE
        try:
            if message is None:
                return TrainerState.ALIVE
            writer.write(message)
            async with asyncio.timeout(within_s):
                answer = await reader.read(1)
        except TimeoutError:
            return TrainerState.UNKNOWN
        except OSError:
            return TrainerState.GONE
        finally:
            writer.close()
        return TrainerState.ALIVE if answer == _THERE else TrainerState.GONE


def _check(key: bytes) -> bytes:
    """Whether one key is there."""
    return struct.pack("=BQ", _CHECK, 1) + _sized(key)


def _sized(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data
