"""Grammars that generated text must match: compiled once, followed token by token. Imports no torch.

Owns: the grammar library (llguidance) and the tokenizer as it wants it; one matcher per constrained sequence.
Always holds:
- A matcher's state is that of its sequence's generated tokens, so it outlives preemption and swaps: tokens stay.
- A token that ends generation is allowed exactly where the grammar accepts. Where nothing else may follow, it is the only
  one allowed; a request without such tokens ends there by itself.
- A sequence without a grammar has no matcher and costs nothing.
- A grammar is compiled once while it is kept, also one that cannot be; no error shows the library's inner state.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)

COMPILED_MAX = 64  # grammars kept, least recently used out first
QUIET = LLParserLimits(verbose_errors=False)  # an error says what is wrong, not the state of everything


class Constraints:
    """The grammars of one model: `tokenizer_json` is the text of its tokenizer.json. Raises ValueError."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        eos = list(eos_token_ids) or None
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        except ValueError as error:
            if "too small" not in str(error):
                raise
            # More tokens than the model has logits for.
            self._tokenizer = LLTokenizer(tokenizer_json, eos_token=eos)
        self._compiled: OrderedDict[str, LLMatcher | str] = OrderedDict()  # or why it cannot be
        self._lock = threading.Lock()  # of that table

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Constraints | None:
        """None when the directory has no tokenizer that the library can use; the log says why."""
        file = model_dir / "tokenizer.json"
        try:
            return cls(file.read_text(encoding="utf-8"), vocab_size, eos_token_ids)
        except (OSError, ValueError) as error:
            logger.warning("grammars are refused: %s", error)
            return None

    def knows(self, grammar: str) -> bool:
        """Whether `matcher` need not compile it."""
        return grammar in self._compiled

    def prepare(self, grammar: str) -> LLMatcher | str:
        """Compile a grammar and keep what comes of it. Any thread may; it may take seconds, without the interpreter lock."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: str) -> LLMatcher | str:
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=QUIET)
        compiled.compute_bitmask()  # fills the lexer tables that every copy begins with
        return _first_line(compiled.get_error()) if compiled.is_error() else compiled

    def matcher(self, grammar: str, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher at the beginning of `grammar` (llguidance's Lark dialect or JSON). Raises ValueError."""
        compiled = self.prepare(grammar)
        if isinstance(compiled, str):
            raise ValueError(compiled)
        return Matcher(compiled.deep_copy(), self._tokenizer, stop_token_ids)


class Matcher:
    """Where one sequence stands in its grammar. `error` says why it cannot go on."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos = tuple(tokenizer.eos_tokens)
        self._stops = tuple(stop_token_ids)
        self.error: str | None = None

    def __repr__(self) -> str:
        return f"Matcher(accepting={self._matcher.is_accepting()}, error={self.error!r})"

    def mask(self) -> bytes | None:
        """The tokens that may come next, bit i (little-endian) for token i; None when the matcher has failed."""
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            self.error = _first_line(self._matcher.get_error())
            return None
        accepting = any(mask[token >> 3] >> (token & 7) & 1 for token in self._eos)
        for token in self._eos:
            mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        if accepting:
            for token in self._stops:
                mask[token >> 3] |= 1 << (token & 7)
        bytes_set = len(mask) - mask.count(0)
        if bytes_set == 1:
            self._spell_out(mask)
        elif bytes_set == 0:
            if not accepting:
                self.error = "no token of the vocabulary continues the grammar"
                return None
            for token in self._eos:  # the end was not seen coming; the model's own end token marks it
                mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    def _spell_out(self, mask: bytearray) -> None:
        """Forced text that spells the name of a special token comes as that token, which the grammar then refuses: allow
        the first of the tokens that really spell it."""
        at = next(i for i, bits in enumerate(mask) if bits)
        token = at * 8 + mask[at].bit_length() - 1
        if mask[at].bit_count() > 1 or token in self._stops or self._matcher.validate_tokens([token]):
            return
        spelled = self._tokenizer.greedy_tokenize(self._matcher.compute_ff_bytes().decode(errors="ignore"))
        mask[at] = 0
        for first in spelled[:1]:
            mask[first >> 3] |= 1 << (first & 7)

    def accept(self, token: int) -> bool:
        """Take a token allowed by `mask`. True: the grammar has ended and no stop token is waited for."""
        if not self._matcher.consume_token(token):
            self.error = _first_line(self._matcher.get_error())
            return False
        return self._matcher.is_stopped() and (not self._stops or token in self._eos)


def _first_line(error: str) -> str:
    return error.partition("\n")[0]
