"""Responses that were stored, for clients that name them later.

Owns: the stored responses of a replica, within one bound of bytes.
Always holds:
- A response is found by its own tenant only.
- A stored response keeps what it continues: all items of its conversation are there, or it is not.
- The least recently used one goes first. Bytes count until nothing continues from them any more.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from midstream.core.responses import PreviousNotFound, holder_of

#: Of all stored responses together.
BYTES_MAX = 128 * 2**20
#: What one takes beside its texts, roughly.
_NODE_BYTES = 1024

_Key = tuple[str, str]


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


_items = msgspec.json.Decoder(list[dict[str, Any]])
_output = msgspec.json.Decoder(_Output)


class Stored:
    """thread: what its turns are kept under, where no session is named. items: of its input, JSON. body: as it was answered."""

    __slots__ = ("body", "id", "items", "parent", "thread", "uses")

    def __init__(self, id: str, parent: Stored | None, thread: str | None, items: bytes, body: bytes) -> None:
        self.id, self.parent, self.thread, self.items, self.body = id, parent, thread, items, body
        #: The table, and those that continue it.
        self.uses = 1

    def __repr__(self) -> str:
        return f"Stored({self.id}, {self.size} bytes, {self.uses} uses)"

    @property
    def size(self) -> int:
        return _NODE_BYTES + len(self.items) + len(self.body)

    @property
    def line(self) -> list[Stored]:
        """From the first one of the conversation to this one."""
        found: list[Stored] = []
        node: Stored | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def output(self) -> list[dict[str, Any]]:
        return _output.decode(self.body).output

    @property
    def input(self) -> list[dict[str, Any]]:
        """The items that it was made from, those of the conversation before it included."""
        *before, own = self.line
        earlier = [item for node in before for item in _items.decode(node.items) + node.output]
        return earlier + _items.decode(own.items)


class StoredResponses:
    """replica: its name, for ids. on_gone: called with the tenant and the thread that is over."""

    def __init__(
        self,
        replica: str,
        on_gone: Callable[[_Key], None] = lambda _: None,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self.replica = replica
        self._on_gone = on_gone
        self._bytes_max = bytes_max
        self._held: OrderedDict[_Key, Stored] = OrderedDict()
        self.size = 0

    def __repr__(self) -> str:
        return f"StoredResponses({len(self._held)} responses, {self.size} bytes)"

    def __len__(self) -> int:
        return len(self._held)

    def find(self, tenant: str, id: str) -> Stored | None:
        """It and all that it continues count as used."""
        found = self._held.get((tenant, id))
        if found is not None:
            for node in found.line:
                # A long body is read in a thread: another one may go meanwhile.
                with contextlib.suppress(KeyError):
                    self._held.move_to_end((tenant, node.id))
        return found

    def keep(self, tenant: str, stored: Stored) -> None:
        self.delete(tenant, stored.id)
        self._held[tenant, stored.id] = stored
        self.size += stored.size
        node = stored.parent
        while node is not None:
            node.uses += 1
            if node.uses > 1:
                break
            # It was deleted while it was continued, and is held again by what continues it.
            self.size += node.size
            node = node.parent
        while self.size > self._bytes_max and self._held:
            # In one step: a thread that reads a body may move an entry meanwhile.
            (owner, _), oldest = self._held.popitem(last=False)
            self._let_go(owner, oldest)

    def delete(self, tenant: str, id: str) -> bool:
        """Whether it was there. What continues from it still does."""
        found = self._held.pop((tenant, id), None)
        if found is not None:
            self._let_go(tenant, found)
        return found is not None

    def _let_go(self, tenant: str, found: Stored) -> None:
        """The table has it no more."""
        node: Stored | None = found
        while node is not None:
            node.uses -= 1
            if node.uses:
                break
            self.size -= node.size
            if node.thread == node.id:
                self._on_gone((tenant, node.id))
            node = node.parent


class Shelf(NamedTuple):
    """The stored responses of one request's tenant. resumed: the request began on another replica, which had what it names."""

    store: StoredResponses
    tenant: str
    resumed: bool

    def previous(self, id: str) -> Stored | None:
        """None: only the other replica had it. Raises PreviousNotFound."""
        found = self.store.find(self.tenant, id)
        if found is None and not self.resumed:
            holder = holder_of(id)
            raise PreviousNotFound(id, "" if holder == self.store.replica else holder)
        return found
