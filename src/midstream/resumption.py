"""What a stream tells of itself on the way, so that another replica can go on where it broke off. Pure.

A replica that is asked to (HEADER_RESUMABLE) sends every write of a stream as one HTTP chunk that begins with comment lines
and holds whole events: `: m {...}` with an Opening first, then for each event of the engine `: m CHOICE:TOKEN` or, when there
is more to say, `: m {...}` with a Step. Whoever holds all comments of the chunks that a client got knows exactly what the
client got. They are sent back in a Resume, to PATH_RESUME of another replica.

Always holds: a line is UTF-8 without a line end; steps of a choice are in the order in which its tokens were made; a stream is
continued exactly only where all KV behind it was computed by the snapshot that serves there, and otherwise not, or, when the
client says so, under that other snapshot and labelled with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from midstream.errors import Conflict, InvalidRequest
from midstream.sse import json_line
from midstream.types import FinishReason, GenerationEvent, TokenRecord

#: Internal: asks a replica for comments (request), says that they come (response). The value is always "1".
HEADER_RESUMABLE = "x-midstream-resumable"
#: What a client wants done when its replica dies in the middle of a stream: exact (the default), any, or off.
HEADER_FAILOVER = "x-midstream-failover"
FAILOVER_MODES = ("exact", "any", "off")
PATH_RESUME = "/replica/resume"
MARK = b": m "
LAST = b"end"  # the line that comes with [DONE]


class Opening(msgspec.Struct, frozen=True):
    """What a whole stream has in common. seed: the one that is sampled with, given by the client or not. prompts: a digest
    of the prompts' token ids."""

    id: str
    created: int
    seed: int
    prompts: str


class Step(
    msgspec.Struct, frozen=True, omit_defaults=True, rename={"choice": "c", "tokens": "t", "snapshot": "s"}
):
    """An event of the engine that was taken, less its numbers. snapshot: the label of the tokens; "" as for the last ones.

    kv: which snapshots computed the choice's KV, as in GenerationEvent.kv_snapshots. over: it was the last of its choice,
    for whatever reason.
    """

    choice: int
    tokens: tuple[int, ...] = ()
    snapshot: str = ""
    cached: int | None = None
    kv: tuple[tuple[str, int, int], ...] | None = None
    finish: FinishReason | None = None
    over: bool = False


class Resume(msgspec.Struct, frozen=True):
    """A stream to go on with. path, body: of the request that began it. state: its comments, one a line, without MARK.

    lost: the replica that it was on. exact: refuse where it cannot go on as if nothing had happened.
    """

    path: str
    lost: str
    exact: bool
    state: str
    body: msgspec.Raw


_opening = msgspec.json.Decoder(Opening)
_step = msgspec.json.Decoder(Step)
_resume = msgspec.json.Decoder(Resume)


class Teller:
    """The comments of one stream."""

    def __init__(self, opening: Opening, choices: int) -> None:
        self._opening: Opening | None = opening
        self._labels = [""] * choices

    def tell(self, choice: int, event: GenerationEvent, over: bool) -> bytes:
        """The lines for one event of the engine, a block of their own in the stream. over: it ended the choice."""
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
        """What comes with the last write."""
        return MARK + LAST + b"\n\n"

    def _steps(self, choice: int, event: GenerationEvent, over: bool) -> Iterable[Step]:
        """One for each run of tokens of equal label; what is true of the event as a whole goes with the last."""
        runs: list[tuple[str, list[int]]] = []
        for record in event.tokens:
            if not runs or runs[-1][0] != record.snapshot:
                runs.append((record.snapshot, []))
            runs[-1][1].append(record.token_id)
        for label, ids in runs[:-1]:
            yield Step(choice, tuple(ids), self._told(choice, label))
        label, ids = runs[-1] if runs else ("", [])
        told = self._told(choice, label)
        yield Step(choice, tuple(ids), told, event.cached_tokens, event.kv_snapshots, event.finish, over)

    def _told(self, choice: int, label: str) -> str:
        if label in ("", self._labels[choice]):
            return ""
        self._labels[choice] = label
        return label


class Told:
    """What was told of a stream, read back: what is said of many tokens at once, the rest when it is asked for.

    Raises InvalidRequest.
    """

    def __init__(self, state: str) -> None:
        first, *self._lines = state.split("\n")
        try:
            self.opening = _opening.decode(first)
            self._steps = {i: _step.decode(line) for i, line in enumerate(self._lines) if line[:1] == "{"}
        except (msgspec.DecodeError, ValueError) as error:
            raise _not_told(error) from error

    def __repr__(self) -> str:
        return f"Told({len(self._lines)} steps)"

    def events(self, choices: int) -> Iterator[tuple[int, GenerationEvent]]:
        """(choice, event) as the engine gave them, with log-probabilities of 0 and without routes, of a stream of
        so many choices."""
        labels: dict[int, str] = {}
        for number, line in enumerate(self._lines):
            step = self._steps.get(number) or _read(line)
            if not 0 <= step.choice < choices:
                raise _not_told(f"there is no choice {step.choice}")
            label = labels[step.choice] = step.snapshot or labels.get(step.choice, "")
            tokens = tuple(TokenRecord(token, 0.0, None, label) for token in step.tokens)
            yield (
                step.choice,
                GenerationEvent(
                    tokens=tokens, cached_tokens=step.cached, kv_snapshots=step.kv, finish=step.finish
                ),
            )

    def over(self) -> set[int]:
        """The choices that are complete."""
        return {step.choice for step in self._steps.values() if step.over}

    def snapshot(self, finished: Collection[int]) -> str | None:
        """The one snapshot that computed all KV of the choices that are not `finished`; None: they have none yet.

        Raises CannotResume when there are several, also when they have one name: its files were others once. The label of the
        last token counts, too: where all of a prompt was cached, the first token is of what serves over KV of what served.
        """
        last = {step.choice: step.kv for step in self._steps.values() if step.kv}
        labels = {step.choice: step.snapshot for step in self._steps.values() if step.snapshot}
        spans = [spans for choice, spans in last.items() if choice not in finished]
        names = {snapshot for kv in spans for snapshot, _, _ in kv}
        names |= {label for choice, label in labels.items() if choice in last and choice not in finished}
        if len(names) > 1 or any(len(kv) > 1 for kv in spans):
            raise CannotResume(
                "weights were swapped behind the stream: its KV cannot be computed again as it was"
            )
        return names.pop() if names else None


class CannotResume(Conflict):
    """The stream cannot be continued as it would have gone on."""


def read_resume(body: bytes) -> Resume:
    """Raises InvalidRequest."""
    try:
        return _resume.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not a stream to resume: {error}") from error


def snapshot_to_resume_under(state: str) -> str | None:
    """Told.snapshot of what is unfinished. Raises CannotResume, InvalidRequest."""
    told = Told(state)
    return told.snapshot(told.over())


def _read(line: str) -> Step:
    choice, _, token = line.partition(":")
    try:
        return Step(int(choice), (int(token),))
    except ValueError as error:
        raise _not_told(error) from error


def _not_told(why: object) -> InvalidRequest:
    return InvalidRequest(f"state: not what a stream tells of itself: {why}", param="state")
