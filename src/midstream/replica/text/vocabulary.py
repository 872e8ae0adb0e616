"""Token ids back to text, one token at a time, and stop strings.

Always holds: the concatenation of what a detokenizer emits equals the tokenizer's decode of all its tokens (special
tokens skipped), and no piece ends in half a character. A stop string is never emitted, not even a part of one that a
later token completes; what is emitted does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from midstream.core.sse import json_line
from midstream.replica.text.token_bound import bytes_per_token_max
from midstream.replica.text.toolcalls import unfinished

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_REPLACEMENT = "\ufffd"
#: Tokens that a windowed detokenizer holds back for an unfinished character.
_PENDING_MAX = 8
_NONE_KNOWN: Mapping[int, str | None] = MappingProxyType({})


def _byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: printable Latin-1 stands for itself, the rest is moved
    to code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return alphabet


BYTE_ALPHABET = _byte_level_alphabet()


class Vocabulary:
    """What each token id stands for: its bytes, its label in a response, whether it is special. Filled on demand."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        described = json.loads(tokenizer.to_str())
        self.byte_level = _is_byte_level(described)
        #: Bytes of text that one token stands for at most; None: not known.
        self.bytes_per_token = bytes_per_token_max(described, BYTE_ALPHABET)
        self._special = frozenset(
            i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}
        #: What `whole_text` found so far.
        self.whole_texts: dict[int, str | None] = {}
        #: What `label` found so far.
        self.labels: dict[int, tuple[str, msgspec.Raw]] = {}
        self._legacy_labels: dict[int, str] = {}
        #: What `lines` found so far.
        self.known_lines: dict[int, tuple[bytes, bytes, bytes]] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, special ones by their name; an id the tokenizer does not know has none."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """The token's share of the text: nothing for a special token."""
        return b"" if token_id in self._special else self.bytes_of(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """The token's share of the text, after whole characters; None when it is not itself whole characters."""
        if token_id in self.whole_texts:
            return self.whole_texts[token_id]
        try:
            text = self.text_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self.whole_texts[token_id] = text
        return text

    def label(self, token_id: int) -> tuple[str, msgspec.Raw]:
        """The `token` and (encoded) `bytes` fields of a log-probability entry."""
        known = self.labels.get(token_id)
        if known is None:
            data = self.bytes_of(token_id)
            known = data.decode("utf-8", "replace"), msgspec.Raw(msgspec.json.encode(list(data)))
            self.labels[token_id] = known
        return known

    def lines(self, token_id: int) -> tuple[bytes, bytes, bytes]:
        """As JSON on one line: the two fields of `label`, and the `whole_text`."""
        known = self.known_lines.get(token_id)
        if known is None:
            name, data = self.label(token_id)
            known = json_line(name), bytes(data), json_line(self.whole_text(token_id))
            self.known_lines[token_id] = known
        return known

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    def id_label(self, token_id: int) -> tuple[str, msgspec.Raw]:
        """Like `label`, with the token's number as its name."""
        return f"token_id:{token_id}", self.label(token_id)[1]

    def legacy_label(self, token_id: int) -> str:
        """The token's name in the legacy format, which has no `bytes`: half a character is spelled `bytes:\\xNN`, so
        that tokens of different bytes never share a name."""
        known = self._legacy_labels.get(token_id)
        if known is None:
            data = self.bytes_of(token_id)
            try:
                known = data.decode()
            except UnicodeDecodeError:
                known = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._legacy_labels[token_id] = known
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            codes = [BYTE_ALPHABET.get(character) for character in token]
            # A token outside the byte alphabet (an added one with spaces or CJK, say) stands for itself.
            return bytes(c for c in codes if c is not None) if None not in codes else token.encode()
        if found := _BYTE_TOKEN.match(token):
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode()

    def detokenizer(self, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """`shown`: special tokens that stand in the text by name."""
        shown = shown & self._special
        return ByteLevelDetokenizer(self, shown) if self.byte_level else WindowedDetokenizer(self, shown)

    def raw_text(self, token_ids: Iterable[int]) -> str:
        """All tokens as text, special ones by name."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")


def _is_byte_level(described: dict[str, Any]) -> bool:
    decoder = described.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [step.get("type") for step in steps] == ["ByteLevel"]


class Detokenizer(Protocol):
    #: The texts of tokens that would come next, where a text does not depend on the tokens before it. Others are pushed.
    known: Mapping[int, str | None]

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; may be empty."""

    def flush(self) -> str:
        """The rest at the end of the sequence: an unfinished character as replacement characters."""


class ByteLevelDetokenizer:
    """Exact: the bytes of each token through an incremental UTF-8 decoder, but for tokens that need none."""

    def __init__(self, vocabulary: Vocabulary, shown: frozenset[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._between_characters = True
        self._whole_texts = vocabulary.whole_texts
        # A shown token has another text here than elsewhere.
        self._known_between = _NONE_KNOWN if shown else self._whole_texts
        self.known: Mapping[int, str | None] = self._known_between

    def push(self, token_id: int) -> str:
        if self._between_characters and token_id not in self._shown:
            known = token_id in self._whole_texts
            text = self._whole_texts[token_id] if known else self._vocabulary.whole_text(token_id)
            if text is not None:
                return text
        read = self._vocabulary.bytes_of if token_id in self._shown else self._vocabulary.text_bytes
        text = self._decoder.decode(read(token_id))
        self._between_characters = self._decoder.getstate()[0] == b""
        self.known = self._known_between if self._between_characters else _NONE_KNOWN
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowedDetokenizer:
    """For tokenizers whose decode looks at neighbours (SentencePiece): decode a short window and emit what is new.

    A run of byte tokens that is not UTF-8 may be cut differently than a decode of the whole does it.
    """

    known: Mapping[int, str | None] = _NONE_KNOWN

    def __init__(self, vocabulary: Vocabulary, shown: frozenset[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        self._special = shown
        self._window: list[int] = []
        #: The decoded first `_shown` tokens of the window.
        self._shown_text = ""
        self._shown = 0

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            # A decode leaves it out, so it stands between the text before it and the text after it.
            return self.flush() + self._vocabulary.raw_text([token_id])
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        waiting = len(self._window) - self._shown
        if text.endswith(_REPLACEMENT) and waiting < _PENDING_MAX:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._tokenizer.decode(self._window)) if self._shown < len(self._window) else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        self._shown_text = self._tokenizer.decode(self._window)
        return new


class StopStrings:
    """Passes text through up to the first stop string to be completed; holds back what may become one.

    kept: the stop string itself is passed through, too.
    """

    def __init__(self, stops: tuple[str, ...], kept: bool = False) -> None:
        self._stops = stops
        self._kept = kept
        #: Of the held text, the characters in which no stop string ends.
        self._free = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, free: bool = False) -> str:
        """free: no stop string ends in this text."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer = self._held + text
        if free:
            self._free = len(buffer)
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := self._find(buffer, stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return buffer[: end if self._kept else start]
        keep = max(unfinished(buffer, stop) for stop in self._stops)
        self._free = max(self._free - (len(buffer) - keep), 0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def _find(self, buffer: str, stop: str) -> int:
        """Where the first stop string begins that ends after the free text; -1: nowhere."""
        return buffer.find(stop, max(self._free - len(stop) + 1, 0)) if self._free else buffer.find(stop)

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
