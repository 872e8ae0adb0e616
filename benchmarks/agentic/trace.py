"""Traces of agents' trajectories: lengths and waits, and no text.

Owns: the format, which docs/benchmarks.md describes; reading and writing it; scaling a trace down.
Always holds: what was written is read as the same trace. A wrong line is refused with its number, the field and what was
expected.

A file has one JSON object per line and one line per trajectory:

    {"group": 0, "stream": 0, "prompt_len": 7570, "out_lens": [399, 65], "obs_lens": [23, 942], "tool_times": [0.4, 0.0]}

The prompts of a group's streams are equal, and the first `shared_len` tokens of all prompts are equal; that number stands in
the file's first line, {"shared_len": N, ...}, which may say more of the trace. obs_lens and tool_times (seconds before the
next turn, optional) have an entry per turn, or one less: what follows the last answer is asked of no replica.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout_load import Plan, TurnPlan


class TraceError(ValueError):
    """A line is not of the format."""


@dataclass(frozen=True)
class Trajectory:
    group: int
    stream: int
    # Tokens of the first prompt.
    prompt_len: int
    # New tokens of each turn.
    out_lens: tuple[int, ...]
    # What the environment adds behind each turn but the last, in tokens, and how long it takes for that, in seconds.
    obs_lens: tuple[int, ...]
    tool_times: tuple[float, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of prompt and answer of each turn."""
        found, said = [], self.prompt_len
        for out, added in zip(self.out_lens, (*self.obs_lens, 0), strict=True):
            found.append(said + out)
            said += out + added
        return found

    @property
    def plan(self) -> Plan:
        added, pauses = (self.prompt_len, *self.obs_lens), (0.0, *self.tool_times)
        return [TurnPlan(*turn) for turn in zip(added, self.out_lens, pauses, strict=True)]


@dataclass(frozen=True)
class Trace:
    # Tokens that all prompts begin with.
    shared_len: int
    trajectories: tuple[Trajectory, ...]
    # Where it is from.
    about: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> Trace:
    """Raises TraceError or OSError."""
    first, *lines = path.read_text().splitlines()
    about = _object(first, 1)
    shared_len = _count(about.pop("shared_len", None), "shared_len", 1, least=0)
    trajectories = tuple(_trajectory(line, number) for number, line in enumerate(lines, start=2))
    _check(shared_len, trajectories)
    return Trace(shared_len, trajectories, about)


def write(path: Path, trace: Trace) -> None:
    lines = [{"shared_len": trace.shared_len, **trace.about}]
    lines += [
        {
            "group": one.group,
            "stream": one.stream,
            "prompt_len": one.prompt_len,
            "out_lens": one.out_lens,
            "obs_lens": one.obs_lens,
            "tool_times": one.tool_times,
        }
        for one in trace.trajectories
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"line {number}: expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise TraceError(f"line {number}: expected a JSON object, got {line[:60]}")
    return found


def _count(value: Any, name: str, number: int, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise TraceError(f"line {number}: {name}: expected a whole number of at least {least}, got {value!r}")
    return value


def _trajectory(line: str, number: int) -> Trajectory:
    fields = _object(line, number)
    group, stream = (_count(fields.get(name), name, number, least=0) for name in ("group", "stream"))
    prompt_len = _count(fields.get("prompt_len"), "prompt_len", number)
    out_lens = fields.get("out_lens")
    if not isinstance(out_lens, list) or not out_lens:
        raise TraceError(f"line {number}: out_lens: expected a list of a turn or more, got {out_lens!r}")
    outs = tuple(_count(one, "out_lens", number) for one in out_lens)
    observed = tuple(
        _count(one, "obs_lens", number) for one in _between(fields, "obs_lens", len(outs), number)
    )
    times = _between({"tool_times": [0.0] * len(outs), **fields}, "tool_times", len(outs), number)
    for seconds in times:
        if type(seconds) not in (int, float) or not 0 <= seconds < float("inf"):
            raise TraceError(f"line {number}: tool_times: expected seconds, 0 or more, got {seconds!r}")
    return Trajectory(group, stream, prompt_len, outs, observed, tuple(map(float, times)))


def _between(fields: dict[str, Any], name: str, turns: int, number: int) -> list[Any]:
    """An entry for each turn but the last."""
    found = fields.get(name)
    if not isinstance(found, list) or len(found) not in (turns, turns - 1):
        raise TraceError(f"line {number}: {name}: expected a list of {turns} or {turns - 1}, got {found!r}")
    return found[: turns - 1]


def _check(shared_len: int, trajectories: Sequence[Trajectory]) -> None:
    prompts: dict[int, int] = {}
    seen = set[tuple[int, int]]()
    for number, one in enumerate(trajectories, start=2):
        if one.prompt_len < shared_len:
            raise TraceError(
                f"line {number}: prompt_len: expected at least shared_len, which is {shared_len}"
            )
        if prompts.setdefault(one.group, one.prompt_len) != one.prompt_len:
            expected = prompts[one.group]
            raise TraceError(
                f"line {number}: prompt_len: expected {expected}, as in group {one.group} before"
            )
        if (one.group, one.stream) in seen:
            raise TraceError(f"line {number}: stream: {one.stream} of group {one.group} was there before")
        seen.add((one.group, one.stream))


def scaled(trace: Trace, tokens: float, seconds: float) -> Trace:
    """Every length times `tokens`, at least one; every wait times `seconds`. The prompts of a group stay equal."""

    def count(length: int) -> int:
        return max(1, round(length * tokens))

    shared_len = round(trace.shared_len * tokens)
    return Trace(
        shared_len,
        tuple(
            replace(
                one,
                prompt_len=max(shared_len, count(one.prompt_len)),
                out_lens=tuple(map(count, one.out_lens)),
                obs_lens=tuple(map(count, one.obs_lens)),
                tool_times=tuple(round(wait * seconds, 4) for wait in one.tool_times),
            )
            for one in trace.trajectories
        ),
        trace.about,
    )


def first_groups(trace: Trace, groups: int, streams: int) -> Trace:
    """So many groups, and so many streams of each."""
    counted: dict[int, int] = defaultdict(int)
    kept: list[Trajectory] = []
    for one in trace.trajectories:
        known = one.group in counted
        if (known or len(counted) < groups) and counted[one.group] < streams:
            counted[one.group] += 1
            kept.append(one)
    return replace(trace, trajectories=tuple(kept))


def live_tokens(trace: Trace) -> int:
    """Most KV that all trajectories have together when they all begin at once and advance turn by turn, each token once.

    What prompts share counts once, and a trajectory that is over counts no more.
    """
    turns = max(len(one.out_lens) for one in trace.trajectories)
    most = 0
    for turn in range(turns):
        here = [one for one in trace.trajectories if turn < len(one.out_lens)]
        own = sum(one.lengths[turn] - one.prompt_len for one in here)
        most = max(most, own + prompt_tokens(trace.shared_len, here))
    return most


def prompt_tokens(shared_len: int, trajectories: Iterable[Trajectory]) -> int:
    """Tokens of their first prompts, each once: what all share, and what each group adds."""
    prompts = {one.group: one.prompt_len for one in trajectories}
    return (shared_len + sum(length - shared_len for length in prompts.values())) if prompts else 0


def ideal_prefill(trace: Trace) -> int:
    """Prompt tokens that must be computed when every token is computed once in the whole fleet.

    The last token of an answer was drawn but is no input before the next turn, so it is computed with that one.
    """
    own = sum(observed + 1 for one in trace.trajectories for observed in one.obs_lens)
    return prompt_tokens(trace.shared_len, trace.trajectories) + own
