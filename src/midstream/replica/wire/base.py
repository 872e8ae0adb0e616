"""The port between a generation and the wire that its client speaks.

A wire reads a body into the fields of OpenAI's API (request/schema.py), so that one set of rules holds on all of them. Its
encoder (response/records.py) tells what comes of it: events of a stream, or one whole response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from midstream.core.errors import InvalidRequest
from midstream.core.served_names import ServedNames
from midstream.core.types import ModelInfo
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.request.schema import ChatBody, CompletionBody
from midstream.replica.response.answer import ResponseHead
from midstream.replica.response.records import RecordEncoder
from midstream.replica.stored import Shelf
from midstream.replica.text.chat import TextModel
from midstream.replica.text.vocabulary import Vocabulary

_Made = TypeVar("_Made")


class Read(NamedTuple):
    """A body that was read. details: what the wire's responses say of the request. ignored: fields that were passed over.
    prompt_from, cumulative: as in Checked. thread: what its turns are kept under where it names no session. whole: the body
    alone gives the prompt. resumable: what the end of a stream repeats follows from token ids."""

    body: ChatBody | CompletionBody
    details: Any = None
    ignored: Sequence[str] = ()
    prompt_from: int | None = None
    cumulative: bool = False
    thread: str | None = None
    whole: bool = True
    resumable: bool = True


class Wire(NamedTuple):
    """name: as in core/wires.py. id_prefix: of response ids. read: raises InvalidRequest. encoder: called with the request's
    Checked, the head, the vocabulary, and the details that `read` gave. rename: has an error, and those details; it makes the
    error name the fields as this wire does."""

    name: str
    id_prefix: str
    read: Callable[[bytes, Shelf], Read]
    encoder: Callable[[Checked, ResponseHead, Vocabulary, Any], RecordEncoder]
    rename: Callable[[InvalidRequest, Any], None] = lambda error, details: None
    #: By the details, the response's id (None before there is one), n and the number of a choice: names of it alone, or of
    #: all choices of its prompt. None: only the response has names.
    choice_names: Callable[[Any, str | None, int, int], Collection[str]] | None = None


class Texts(Protocol):
    """What answers text calls (service.Service is one)."""

    info: ModelInfo
    text: TextModel
    names: ServedNames

    async def beside(self, body: bytes, read: Callable[[bytes], _Made], headers: Mapping[str, str]) -> _Made:
        """`read(body)`: of a long body in a thread. Raises what it raises."""

    async def prompts(
        self, parsed: CompletionBody | ChatBody, size: int, headers: Mapping[str, str]
    ) -> list[Prompt]:
        """The prompts of a body as a request with it would have them. size: of the body, in bytes. Raises MidstreamError."""


class TextCall(NamedTuple):
    """A path that generates nothing: tokens of text, text of tokens, a rendered chat. name: as in core/wires.py.

    answer: gets the body and the headers, in lower case; the value of the JSON body. Raises MidstreamError.
    """

    name: str
    answer: Callable[[Texts, bytes, Mapping[str, str]], Awaitable[Any]]
