"""Faults that are put into parsers, to show that fuzzing finds such faults.

Always holds: each is of the kind that tests with chosen inputs miss: a bound, a cut in the wrong place, an error that escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from midstream.api import adapter_calls, deployments
from midstream.client import records
from midstream.core import http_answer
from midstream.core.decoding import Fault
from midstream.core.errors import ConfigError
from midstream.engine.vllm import protocol
from midstream.fleet import membership, subscription
from midstream.http import bodies
from midstream.proxy import audit
from midstream.replica.text import toolcalls
from midstream.replica.wire import messages, table, textcalls, vllm
from midstream.snapshots import adapter, layout
from midstream.snapshots.arc2 import blob


class Planted(NamedTuple):
    """target: which finds it, in at most `runs` executions."""

    target: str
    runs: int
    put_in: Callable[[], None]


def _ranges_unbounded() -> None:
    """A tensor may end behind its file's end."""

    def check_ranges(file: str, ranges: Any, data_bytes: int, gaps: bool) -> None:
        pass

    layout._check_ranges = check_ranges


def _tag_cut_short() -> None:
    """A tag that is cut before its last character is shown as text."""
    whole = toolcalls.unfinished
    toolcalls.unfinished = lambda text, tag: size if (size := whole(text, tag)) < len(tag) - 1 else 0


def _frames_unchecked() -> None:
    """A blob whose last frame is cut short is taken."""
    blob._check_frames = lambda blob, empty: None


def _line_forgotten() -> None:
    """The rest of a line that was cut after its first byte is read without that byte."""
    feed = protocol.ChunkReader.feed

    def forgetful(self: protocol.ChunkReader, data: bytes) -> Any:
        if self._held == 1:
            self._parts, self._held = [], 0
        return feed(self, data)

    protocol.ChunkReader.feed = forgetful  # type: ignore[method-assign]


def _patterns_unchecked() -> None:
    """Any text of a configuration is compiled as a regular expression."""
    adapter._PATTERN = re.compile(r".{1,255}")


def _block_error_escapes() -> None:
    """A block with a field of another kind is an error of the server."""
    messages.converted = lambda block, kind, where, param: msgspec.convert(block, kind)


def _items_called_messages() -> None:
    """A refusal of an item names the field of the chat that it was made into."""
    own = table.GENERATING["responses"]
    table.GENERATING["responses"] = own._replace(rename=lambda error, details: None)


def _sampling_called_otherwise() -> None:
    """A refusal of a sampling parameter names OpenAI's field."""
    vllm._WIRE_NAMES = {}


def _tokens_unchecked() -> None:
    """Text is asked for of ids that no token has."""
    textcalls.split_prompts = lambda prompt, vocab_size: [tuple(prompt)]  # type: ignore[arg-type]


def _adapter_called_policy() -> None:
    """A refusal of an adapter's name names a field that the call has not."""
    adapter_calls._rename = lambda error, param: None


def _url_read_loosely() -> None:
    """What a reader of URLs passes over stays in the URL of a replica."""

    def replica_name(url: str) -> str:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r}: expected http://HOST:PORT") from error
        if parts.scheme != "http" or not host or not port or parts.path not in ("", "/"):
            raise ConfigError(f"{url!r}: expected http://HOST:PORT")
        return f"{host}:{port}"

    membership.replica_name = replica_name


def _beginning_is_inside() -> None:
    """A bucket whose name begins as another one's counts as a place in it."""
    deployments.lies_in = lambda url, bucket: url.startswith(bucket)


def _fault_unnamed() -> None:
    """A refusal of a reward's field does not name it."""
    bodies.fault = lambda error: Fault("", str(error))


def _end_of_line_forgotten() -> None:
    """A byte that begins a piece and ends a line is lost."""
    feed = subscription.Lines.feed

    def forgetful(self: subscription.Lines, data: bytes) -> None:
        if data[1:2] == b"\n":
            data = data[1:]
        feed(self, data)

    subscription.Lines.feed = forgetful  # type: ignore[method-assign]


def _labels_uncounted() -> None:
    """A turn may have labels for some of its tokens only."""
    counted = records._check_count

    def check_count(about: Any, turn: Any, what: str, given: Any) -> None:
        if what != "snapshot":
            counted(about, turn, what, given)

    records._check_count = check_count


def _words_expected() -> None:
    """A refusal without the API's words ends the trainer."""
    http_answer.HttpAnswer.message = property(lambda answer: str(answer.json()["error"]["message"]))


def _texts_uncut() -> None:
    """A client's text goes into the audit log as long as it is."""
    audit._cut = lambda text: text


FAULTS = {
    "ranges_unbounded": Planted("safetensors", 100_000, _ranges_unbounded),
    "tag_cut_short": Planted("tool_calls", 100_000, _tag_cut_short),
    "frames_unchecked": Planted("arc2_blobs", 100_000, _frames_unchecked),
    "line_forgotten": Planted("vllm_streams", 100_000, _line_forgotten),
    "patterns_unchecked": Planted("adapters", 100_000, _patterns_unchecked),
    "block_error_escapes": Planted("messages_bodies", 100_000, _block_error_escapes),
    "items_called_messages": Planted("responses_bodies", 100_000, _items_called_messages),
    "sampling_called_otherwise": Planted("token_bodies", 100_000, _sampling_called_otherwise),
    "tokens_unchecked": Planted("text_bodies", 100_000, _tokens_unchecked),
    "adapter_called_policy": Planted("control_bodies", 100_000, _adapter_called_policy),
    "url_read_loosely": Planted("joining_replicas", 100_000, _url_read_loosely),
    "beginning_is_inside": Planted("deployment_bodies", 100_000, _beginning_is_inside),
    "fault_unnamed": Planted("session_bodies", 100_000, _fault_unnamed),
    "end_of_line_forgotten": Planted("replica_events", 100_000, _end_of_line_forgotten),
    "labels_uncounted": Planted("kept_records", 100_000, _labels_uncounted),
    "words_expected": Planted("server_answers", 100_000, _words_expected),
    "texts_uncut": Planted("audit_lines", 100_000, _texts_uncut),
}
