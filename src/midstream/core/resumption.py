"""The resume log of a stream: its lines, how a replica writes and reads them, and the request to continue. Pure.

A gateway asks a replica for the log (HEADER_RESUMABLE). The replica then sends every write of the stream as one HTTP chunk.
A chunk begins with the log's lines, as SSE comments, and holds whole events. The first line is `: m {...}` with an Opening.
Each event of the engine has a line `: m CHOICE:TOKEN` or, when there is more to say, `: m {...}` with a Step. `: m end` stands
behind the usage. The lines of the chunks that a client got say exactly what it got. A gateway sends them to PATH_RESUME.

Always holds:
- A line is UTF-8 without a line end. Steps of a choice are in the order in which its tokens were made.
- A stream continues exactly only if the serving snapshot computed all KV before it. Otherwise it continues only if the client
  says so, under the serving snapshot and labelled with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import Conflict, InvalidRequest
from midstream.core.sse import json_line
from midstream.core.types import FinishReason, GenerationEvent, TokenRecord

#: Internal: asks a replica for comments (request), says that they come (response). The value is always "1".
HEADER_RESUMABLE = "x-midstream-resumable"
#: What a client wants done when its replica dies in the middle of a stream: exact (the default), any, or off.
HEADER_FAILOVER = "x-midstream-failover"
FAILOVER_MODES = ("exact", "any", "off")
PATH_RESUME = "/replica/resume"
MARK = b": m "
# The log line that comes with [DONE].
LAST = b"end"
# The last line of a stream that its replica gives up through no fault of the request.
GIVEN_UP = b"given up"


def given_up() -> bytes:
    """The block by which a replica gives a stream up. Nothing follows it."""
    return MARK + GIVEN_UP + b"\n\n"


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """What all choices of a stream have in common. seed: that of the sampler, given by the client or drawn. prompts: a digest
    of the prompts' token ids. ids: the token ids of the only prompt, where the body alone does not give them: it continues
    a turn that only the lost replica had. within: how many of the last of these ids belong to the answer that is continued.
    nonce: what ids of tool calls follow from, where the client gave the id. branch: as the response says it, of several prompts
    a list; the next replica says it again, as the client may not have got that far."""

    id: str
    created: int
    seed: int
    prompts: str
    ids: tuple[int, ...] | None = None
    nonce: str = ""
    within: int = 0
    branch: Any = None


class Step(
    msgspec.Struct, frozen=True, omit_defaults=True, rename={"choice": "c", "tokens": "t", "snapshot": "s"}
):
    """An event of the engine without its log-probabilities and routes.

    snapshot: the label of the tokens; "" for the same one as before. kv: which snapshots computed the choice's KV, as in
    GenerationEvent.kv_snapshots. over: the event was the last one of its choice. renamed: as in GenerationEvent. files: with
    kv, GenerationEvent.kv_files, which is comparable between replicas.
    """

    choice: int
    tokens: tuple[int, ...] = ()
    snapshot: str = ""
    cached: int | None = None
    kv: tuple[tuple[str, int, int], ...] | None = None
    finish: FinishReason | None = None
    over: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    files: str = ""


class Resume(msgspec.Struct, frozen=True):
    """A request to continue a stream. path, body: of the request that began it. state: the log's lines, without MARK.

    lost: the replica that the stream was on. exact: refuse if the stream cannot continue as if nothing had happened.
    """

    path: str
    lost: str
    exact: bool
    state: str
    body: msgspec.Raw


_opening = msgspec.json.Decoder(Opening)
_step = msgspec.json.Decoder(Step)
_resume = msgspec.json.Decoder(Resume)


class ResumeLogWriter:
    """Makes the lines of one stream."""

    def __init__(self, opening: Opening, choices: int) -> None:
        self._opening: Opening | None = opening
        self._labels = [""] * choices

    def write(self, choice: int, event: GenerationEvent, over: bool) -> bytes:
        """The lines of one event of the engine, a block of their own in the stream. over: the event ended the choice."""
        tokens, labels = event.tokens, self._labels
        if (
            len(tokens) == 1
            and tokens[0].snapshot == labels[choice]
            and not over
            and event.kv_snapshots is None
            and event.cached_tokens is None
        ):
            return b": m %d:%d\n\n" % (choice, tokens[0].token_id)
        lines = b""
        if self._opening is not None:
            lines, self._opening = MARK + json_line(self._opening) + b"\n", None
        for step in self._steps(choice, event, over):
            lines += MARK + json_line(step) + b"\n"
        return lines + b"\n"

    def end(self) -> bytes:
        """The line of the last write."""
        return MARK + LAST + b"\n\n"

    def _steps(self, choice: int, event: GenerationEvent, over: bool) -> Iterable[Step]:
        """One for each run of tokens of equal label. The last one has what is true of the event as a whole."""
        runs: list[tuple[str, list[int]]] = []
        for record in event.tokens:
            if not runs or runs[-1][0] != record.snapshot:
                runs.append((record.snapshot, []))
            runs[-1][1].append(record.token_id)
        for label, ids in runs[:-1]:
            yield Step(choice, tuple(ids), self._changed_label(choice, label))
        label, ids = runs[-1] if runs else ("", [])
        changed = self._changed_label(choice, label)
        rest = (event.cached_tokens, event.kv_snapshots, event.finish)
        yield Step(choice, tuple(ids), changed, *rest, over, event.renamed, event.kv_files)

    def _changed_label(self, choice: int, label: str) -> str:
        """The label, or "" if it is that of the tokens before."""
        if label in ("", self._labels[choice]):
            return ""
        self._labels[choice] = label
        return label


class ResumeLogReader:
    """Reads the lines of a stream. Steps are decoded at once, and lines of single tokens when they are asked for.

    Raises InvalidRequest.
    """

    def __init__(self, state: str) -> None:
        first, *self._lines = state.split("\n")
        try:
            self.opening = _opening.decode(first)
            self._steps = {i: _step.decode(line) for i, line in enumerate(self._lines) if line[:1] == "{"}
        except (*NOT_JSON, ValueError) as error:
            raise _unreadable(error) from error

    def __repr__(self) -> str:
        return f"ResumeLogReader({len(self._lines)} steps)"

    def events(self, choices: int) -> Iterator[tuple[int, GenerationEvent]]:
        """(choice, event) of a stream of so many choices, as the engine gave them. Log-probabilities are 0, and there are no
        routes. Raises InvalidRequest."""
        labels: dict[int, str] = {}
        for number, line in enumerate(self._lines):
            step = self._steps.get(number) or _read(line)
            if not 0 <= step.choice < choices:
                raise _unreadable(f"there is no choice {step.choice}")
            label = labels[step.choice] = step.snapshot or labels.get(step.choice, "")
            tokens = tuple(TokenRecord(token, 0.0, None, label) for token in step.tokens)
            yield (
                step.choice,
                GenerationEvent(
                    tokens=tokens,
                    cached_tokens=step.cached,
                    kv_snapshots=step.kv,
                    kv_files=step.files,
                    finish=step.finish,
                    renamed=step.renamed,
                ),
            )

    def over(self) -> set[int]:
        """The choices that are complete."""
        return {step.choice for step in self._steps.values() if step.over}

    def snapshot(self, finished: Collection[int]) -> str | None:
        """The one snapshot that computed all KV of the choices that are not `finished`; None: they have none yet.

        Raises CannotResume when there are several. Spans of one name are of one snapshot, however often it was loaded: had its
        files been others before, those would have another label. The label of the last token counts, too: where a prompt was
        cached whole, the serving snapshot made the first token over older KV.
        """
        last = {step.choice: step.kv for step in self._steps.values() if step.kv}
        labels = {step.choice: step.snapshot for step in self._steps.values() if step.snapshot}
        spans = [spans for choice, spans in last.items() if choice not in finished]
        names = {snapshot for kv in spans for snapshot, _, _ in kv}
        names |= {label for choice, label in labels.items() if choice in last and choice not in finished}
        if len(names) > 1:
            raise CannotResume(
                "weights were swapped behind the stream: its KV cannot be computed again as it was"
            )
        return names.pop() if names else None

    def files(self, finished: Collection[int]) -> set[str]:
        """What the files of `snapshot` are, as far as that is known: several where they were not the same ones throughout."""
        last = {step.choice: step.files for step in self._steps.values() if step.kv}
        return {files for choice, files in last.items() if files and choice not in finished}


class CannotResume(Conflict):
    """The stream cannot continue as it would have done."""


def read_resume(body: bytes) -> Resume:
    """Raises InvalidRequest."""
    try:
        return _resume.decode(body)
    except NOT_JSON as error:
        raise InvalidRequest(f"not a stream to resume: {error}") from error


def snapshot_to_resume_under(state: str) -> str | None:
    """ResumeLogReader.snapshot of the unfinished choices. Raises CannotResume, InvalidRequest."""
    log = ResumeLogReader(state)
    return log.snapshot(log.over())


def _read(line: str) -> Step:
    choice, _, token = line.partition(":")
    try:
        return Step(int(choice), (int(token),))
    except ValueError as error:
        raise _unreadable(error) from error


def _unreadable(why: object) -> InvalidRequest:
    return InvalidRequest(f"state: no lines of a resume log: {why}", param="state")
