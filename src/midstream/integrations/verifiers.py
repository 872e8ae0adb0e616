"""verifiers' rollouts as training sequences: its tokens and its environment's reward, with the server's record of each token.

verifiers keeps of an answer the token ids and the raw log-probabilities, and drops what else it says. It sends its trace's id
as the session of every turn. So the snapshots, and the log-probabilities that were sampled from, come from the session's
trace. verifiers' objects are read, and verifiers is not imported. Publishing is the caller's.

Always holds: each turn that verifiers has as tokens stands in a sequence with the same tokens before it, and both sides have as
many turns. Each sampled token counts once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from midstream.client.errors import PublishError
from midstream.client.records import REWARD, TrainingSequence, sequences_of
from midstream.client.server import ServerClient

logger = logging.getLogger(__name__)


def request_headers(at_least: str | None = None, *, wait_s: float = 60.0) -> dict[str, str]:
    """What a client's configuration (`vf.TrainClientConfig` or `vf.EvalClientConfig`) sends as `headers`.

    at_least: the snapshot that serves, or one that was signalled after it; a request waits for it for `wait_s` seconds.
    """
    records = {"x-midstream-records": "logprobs"}
    if at_least is None:
        return records
    return records | {"x-midstream-min-snapshot": at_least, "x-midstream-snapshot-wait": f"{wait_s:g}"}


def training_sequences(trace: Any, recorded: Mapping[str, Any]) -> list[TrainingSequence]:
    """The sequences of a finished rollout, with its reward as theirs. logprobs: of the distribution that was sampled from.

    trace: a `vf.Trace` or `vf.WireTrace`. recorded: the session of its id, as `SessionCalls.trace(trace.id)` answers. With the
    client of texts verifiers has no tokens, and the record's are taken. A compaction that verifiers does not train has the
    loss mask 1 here.

    Raises ValueError where the rollouts are not the same: another session, turns that only one of them has, other tokens.
    """
    if recorded["id"] != trace.id:
        raise ValueError(f"the record is of session {recorded['id']!r}, the rollout is {trace.id!r}")
    found = sequences_of(recorded, logprobs="sampling_logprob")
    turns = {(one.replica, turn.turn): one.token_ids[: turn.end] for one in found for turn in one.turns}
    if len(turns) != trace.num_turns:
        raise ValueError(
            f"rollout {trace.id}: verifiers has {trace.num_turns} turns, the record {len(turns)}"
        )
    known = set(map(tuple, turns.values()))
    for number, ids in _sampled(trace):
        if tuple(ids) not in known:
            raise ValueError(
                f"rollout {trace.id}: the record has no turn with the tokens of message {number}"
            )
    reward = {"name": REWARD, "reward": float(trace.reward), "turn": None}
    return [replace(one, rewards=[reward]) for one in found]


def _sampled(trace: Any) -> Iterator[tuple[int, list[int]]]:
    """Of each message that was sampled as tokens, its number on its branch and all tokens up to its end."""
    for branch in trace.branches:
        ids: list[int] = []
        for number, node in enumerate(branch.nodes):
            ids = [*ids, *node.token_ids]
            if any(node.mask):
                yield number, ids


async def sample_groups(env: Any, how: Any, server: ServerClient, n: int) -> list[list[TrainingSequence]]:
    """Of each task of an environment, the sequences of its `n` rollouts (see `training_sequences`). All are sampled at once.

    env: a `vf.Env` with a finite taskset. how: the `vf.ModelContext` of the rollouts. A rollout that failed, or that has a lost
    or foreign record, is left out with a warning in the log. Raises RuntimeError with the last reason where none of a
    task's rollouts is left.
    """

    async def rolled(slot: Any) -> list[TrainingSequence] | str:
        episode = await env.run_slot(slot, how)
        if not episode.ok:
            return _why(episode)
        found = []
        try:
            for trace in episode.traces:
                found += training_sequences(trace, await asyncio.to_thread(server.sessions.trace, trace.id))
        except (ValueError, PublishError) as error:
            return str(error)
        return found

    async with env.serving():
        slots = [env.slots(task, n) for task in env.taskset]
        done = await asyncio.gather(*(asyncio.gather(*map(rolled, group)) for group in slots))
    return [_left(group) for group in done]


def _why(episode: Any) -> str:
    """verifiers' last message about an episode that failed."""
    errors = [error for trace in episode.traces for error in trace.errors]
    return next(
        (str(error.message) for error in [*episode.errors, *errors[::-1]]), "verifiers says no reason"
    )


def _left(group: Sequence[list[TrainingSequence] | str]) -> list[TrainingSequence]:
    failed = [one for one in group if isinstance(one, str)]
    if len(failed) == len(group):
        raise RuntimeError(f"all {len(group)} rollouts of a task failed: {failed[-1]}")
    for why in failed:
        logger.warning("a rollout is left out: %s", why)
    return [one for found in group if not isinstance(found, str) for one in found]
