"""Grammars compiled in a process of their own, which may be stopped; and that process.

Owns: the child, its pipes, and the verdicts that are remembered.
Always holds: a grammar is compiled for at most CPU_S_MAX of processor time and MEMORY_MAX of memory, whatever it is: then the
child ends, the grammar is refused, and the next one gets a new child. All grammars of one request take REQUEST_CPU_S_MAX at
most, remembered ones included, and one grammar more. No verdict shows the grammar library's inner state.
The child ends when its standard input does, so it never outlives the replica.
"""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from midstream.replica.text.schemarules import NO_ANSWER

if TYPE_CHECKING:
    from midstream.replica.text.grammar import ProblemWith

log = logging.getLogger(__name__)

#: A schema within the bounds of schema_bounds.py takes a tenth of it.
CPU_S_MAX = 2.0
REQUEST_CPU_S_MAX = 4.0
#: The wall time on a machine that is busy with other work.
WALL_S_MAX = 30.0
MEMORY_MAX = 4 * 2**30
KEPT_MAX = 256
TOO_LONG = "it takes too long to compile; make it smaller"
TOO_LONG_TOGETHER = "the schemas of this request take too long to compile together; make them smaller"

_COMPILE = re.compile(r"failed to compile JSON schema: (?P<why>[^\n]*)(?P<rest>(?:\n[^\n]+)*)")
_REGEX_ERROR = re.compile(r"^error: (?P<why>.*)$", re.MULTILINE)
#: What the library says in words of its own options and expressions.
_REASONS = {
    "Regex is empty": "no text matches its pattern, format and length together",
    "oneOf constraints": "oneOf is not supported where its alternatives may overlap; use anyOf",
    "are not disjoint": "patternProperties: patterns that may match the same name are not supported",
}
_TOO_MUCH = frozenset((-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV))
QUIET = LLParserLimits(verbose_errors=False)


class GrammarVerdict(msgspec.Struct, frozen=True, array_like=True):
    """problem: why it cannot be used; None: it can. cpu_s: processor time that it took to find out."""

    problem: str | None
    cpu_s: float


class GrammarChecks:
    """Why grammars do not compile. Any thread may ask; one grammar is compiled at a time."""

    def __init__(self, cpu_s_max: float = CPU_S_MAX) -> None:
        self._cpu_s_max = cpu_s_max
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[tuple[str, bool], GrammarVerdict] = OrderedDict()
        self._closed = False

    def __repr__(self) -> str:
        return f"GrammarChecks({len(self._known)} known, child={self._child and self._child.pid})"

    def problem(self, grammar: str, *, begun: bool) -> str | None:
        """Why `grammar` cannot be used; None: it can. begun: look for its first token, too, as bytes; not for grammars that
        name tokens of the model."""
        return self.verdict(grammar, begun=begun).problem

    def of_request(self, between: Callable[[], None]) -> ProblemWith:
        """`problem` for the grammars of one request, which share REQUEST_CPU_S_MAX. between: called before each."""
        used_s = 0.0

        def problem(grammar: str, *, begun: bool) -> str | None:
            nonlocal used_s
            between()
            if used_s > REQUEST_CPU_S_MAX:
                return TOO_LONG_TOGETHER
            verdict = self.verdict(grammar, begun=begun)
            used_s += verdict.cpu_s
            return verdict.problem

        return problem

    def verdict(self, grammar: str, *, begun: bool) -> GrammarVerdict:
        """Like `problem`, with what the check took."""
        key = (grammar, begun)
        with self._lock:
            verdict = self._known.get(key) or self._ask(grammar, begun)
            # No verdict says nothing of the grammar: the machine was busy, or the child was killed.
            if verdict is None:
                return GrammarVerdict(TOO_LONG, self._cpu_s_max)
            self._known[key] = verdict
            self._known.move_to_end(key)
            if len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
            return verdict

    def close(self) -> None:
        """Does not wait: the child is killed."""
        self._closed = True
        self._end()

    def _ask(self, grammar: str, begun: bool) -> GrammarVerdict | None:
        """None: the child's end was not this grammar's doing."""
        code = None
        for _ in range(2):
            if self._closed:
                break
            line, timed_out = self._exchange(self._running(), msgspec.json.encode([grammar, begun]) + b"\n")
            if line:
                return msgspec.json.decode(line, type=GrammarVerdict)
            code = self._end()
            if timed_out or code in _TOO_MUCH:
                break
            log.warning("the process that compiles grammars ended with code %s", code)
        ended_itself = code is not None and (code > 0 or code in _TOO_MUCH)
        return GrammarVerdict(TOO_LONG, self._cpu_s_max) if ended_itself else None

    def _exchange(self, child: subprocess.Popen[bytes], question: bytes) -> tuple[bytes, bool]:
        """The child's answer, empty if there is none; and whether it was waited for in vain."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(question)
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], WALL_S_MAX)
            return (child.stdout.readline(), False) if ready else (b"", True)
        except (OSError, ValueError):
            return b"", False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "midstream.replica.text.grammarcheck", str(self._cpu_s_max)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._child

    def _end(self) -> int | None:
        """How the child ended, which it has now."""
        child, self._child = self._child, None
        if child is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It may be about to end by itself.
            child.wait(0.05)
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return child.wait()


def compile_problem(tokenizer: LLTokenizer, grammar: str, *, begun: bool) -> str | None:
    """What GrammarChecks.problem says, in this process and without a bound."""
    if not begun:
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=QUIET)
        return reason(messages[0]) if failed else None
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=QUIET)
    if not matcher.is_error():
        matcher.compute_bitmask()
        _look_into(matcher)
    return reason(matcher.get_error()) if matcher.is_error() else None


def _look_into(matcher: LLMatcher) -> None:
    """Take the first bytes of an object: after them the parser has all continuations at once, and may give up."""
    for byte in b'{"':
        if matcher.is_error() or not matcher.compute_bitmask()[byte >> 3] >> (byte & 7) & 1:
            return
        matcher.consume_token(byte)
        matcher.compute_bitmask()


def reason(message: str) -> str:
    """An error of the library in one line, without its inner state and the place in a text that the client never saw."""
    if "NoExtension" in message:
        return NO_ANSWER
    if "TooComplex" in message or "fuel" in message or "Parser Error" in message:
        return "it is too complex"
    found = _COMPILE.search(message)
    if found is None:
        return message.partition("\n")[0].strip()
    for pattern, why in _REASONS.items():
        if pattern in found["why"]:
            return why
    detail = _REGEX_ERROR.search(found["rest"])
    return found["why"].rstrip(":") + (f": {detail['why']}" if detail else "")


def main(cpu_s_max: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    # The replica decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = LLTokenizer("byte")
    decoder = msgspec.json.Decoder(tuple[str, bool])
    for line in sys.stdin.buffer:
        grammar, begun = decoder.decode(line)
        # SIGPROF ends this process, also inside the library.
        signal.setitimer(signal.ITIMER_PROF, cpu_s_max)
        began_s = time.process_time()
        problem = compile_problem(tokenizer, grammar, begun=begun)
        signal.setitimer(signal.ITIMER_PROF, 0)
        verdict = GrammarVerdict(problem, time.process_time() - began_s)
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
