"""Grammars that generated text must match: compiled once, followed token by token. Imports no torch.

Owns: the grammar library (llguidance), the tokenizer in the library's form, and one matcher per constrained sequence.
Always holds:
- The state of a matcher depends on its sequence's generated tokens alone. So it outlives preemption and swaps.
- A token that ends generation is allowed exactly where the grammar accepts. Where nothing else may follow, it is the only
  allowed token. A request without such tokens ends there by itself.
- A sequence without a grammar has no matcher and costs nothing.
- A grammar is compiled once while it is kept, also a grammar with an error. No error shows the library's inner state.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from midstream.core.types import GenerateRequest
from midstream.engine.embedded.limits import TokenFollower, TokenLimiter

logger = logging.getLogger(__name__)

#: Compiled grammars that are kept. The least recently used one goes first.
COMPILED_MAX = 64
#: An error then says what is wrong, and not the state of the parser.
QUIET = LLParserLimits(verbose_errors=False)


class Constraints:
    """The grammars of one model: `tokenizer_json` is the text of its tokenizer.json. Raises ValueError."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        eos = list(eos_token_ids) or None
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        except ValueError as error:
            if "too small" not in str(error):
                raise
            # The tokenizer has more tokens than the model has logits.
            self._tokenizer = LLTokenizer(tokenizer_json, eos_token=eos)
        # By grammar, its compiled form or the reason why there is none. The lock guards this table.
        self._compiled: OrderedDict[str, LLMatcher | str] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Constraints | None:
        """The grammars of a model; None if its directory has no tokenizer that the library can use. The log then says why."""
        file = model_dir / "tokenizer.json"
        try:
            return cls(file.read_text(encoding="utf-8"), vocab_size, eos_token_ids)
        except (OSError, ValueError) as error:
            logger.warning("grammars are refused: %s", error)
            return None

    def knows(self, grammar: str) -> bool:
        """Whether `matcher` finds the grammar compiled."""
        return grammar in self._compiled

    def prepare(self, grammar: str) -> LLMatcher | str:
        """Compile a grammar and keep the result, on any thread. It may take seconds, but not the interpreter lock."""
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
        # This fills the lexer tables that every copy begins with.
        compiled.compute_bitmask()
        return _first_line(compiled.get_error()) if compiled.is_error() else compiled

    def matcher(self, grammar: str, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher at the beginning of `grammar`, in llguidance's Lark dialect or JSON. Raises ValueError."""
        compiled = self.prepare(grammar)
        if isinstance(compiled, str):
            raise ValueError(compiled)
        return Matcher(compiled.deep_copy(), self._tokenizer, stop_token_ids)


class Matcher:
    """The place of one sequence in its grammar: a limits.Follower. `error` says why the sequence cannot continue."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos = tuple(tokenizer.eos_tokens)
        self._stops = tuple(stop_token_ids)
        self.error: str | None = None

    def mask(self) -> bytes | None:
        """The tokens that may come next, bit i (little-endian) for token i. None when the matcher has failed."""
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
            # The end could not be seen before, so the model's own end token marks it.
            for token in self._eos:
                mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    def _spell_out(self, mask: bytearray) -> None:
        """Replace a forced special token that the grammar refuses.

        Forced text may spell the name of a special token. The library then forces that token, and the grammar refuses it.
        Allow instead the first of the tokens that really spell the text.
        """
        at = next(i for i, bits in enumerate(mask) if bits)
        token = at * 8 + mask[at].bit_length() - 1
        if mask[at].bit_count() > 1 or token in self._stops or self._matcher.validate_tokens([token]):
            return
        spelled = self._tokenizer.greedy_tokenize(self._matcher.compute_ff_bytes().decode(errors="ignore"))
        mask[at] = 0
        for first in spelled[:1]:
            mask[first >> 3] |= 1 << (first & 7)

    def accept(self, token: int) -> bool:
        """Take a token that `mask` allowed. Returns whether the grammar has ended and no stop token has to follow."""
        if not self._matcher.consume_token(token):
            self.error = _first_line(self._matcher.get_error())
            return False
        return self._matcher.is_stopped() and (not self._stops or token in self._eos)


def follower_of(
    request: GenerateRequest, constraints: Constraints | None, vocab_size: int
) -> TokenFollower | None:
    """What follows a choice from its start: its grammar, its limits or both. Raises ValueError.

    constraints: None if the model's tokenizer does not work with grammars.
    """
    grammar = None
    if request.grammar is not None:
        if constraints is None:
            raise ValueError("this model's tokenizer does not work with grammars")
        grammar = constraints.matcher(request.grammar, request.sampling.stop_token_ids)
    return TokenLimiter(request.sampling, vocab_size, grammar) if request.sampling.limited else grammar


def _first_line(error: str) -> str:
    return error.partition("\n")[0]
