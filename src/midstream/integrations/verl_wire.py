"""verl's generation requests over HTTP, and what it gets of each token. Imports nothing of verl.

Always holds:
- Ids go in and come out as they are; no text is made of them.
- There is one log-probability and one version for each sampled id. What the server does not return is an error, never a guess.
- All requests of a trajectory have its session key, so its turns keep their replica.
- A request asks for a snapshot of this run, or a later one. An answer of another run's weights is an error.

The path is vLLM's `/inference/v1/generate`: it knows verl's sampling parameters by their names, and returns routes as verl has
them, from the prompt's first position on.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from numpy.lib import format as npy

from midstream.client.calls import RETRY_S, RetryingCaller
from midstream.client.errors import PublishError
from midstream.client.server import ServerClient

PATH = "/inference/v1/generate"
#: verl's own parameters that are those of the path.
SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
    }
)
LIMITS = ("max_tokens", "max_new_tokens")
#: A request asks for the oldest of the last so many snapshots that answered, or a later one. A server knows the order of the
#: newest 1,024 signals alone, so a long run must not ask for its first snapshot for ever.
SEEN = 100


@dataclass(frozen=True)
class VerlSettings:
    """`actor_rollout_ref.rollout.engine_kwargs.midstream` of verl's configuration.

    url: the server's. bucket: where snapshots go. served: the served model's directory, whose config.json snapshots have.
    run: a name that no other run has; snapshot N of it is `run/N`. model: None where the server has one deployment.
    work_dir: None means a temporary one; see SnapshotPublisher. dtype: that of the served weights. parallel: requests in flight
    of one agent-loop worker. wait_s: how long a request waits for the run's first snapshot, in seconds.
    """

    url: str
    bucket: str
    served: str
    run: str
    model: str | None = None
    api_key: str | None = None
    work_dir: str | None = None
    full_every: int = 20
    parallel: int = 64
    dtype: str = "bfloat16"
    wait_s: float = 60.0

    def snapshot(self, version: int) -> str:
        return f"{self.run}/{version}"

    def version(self, snapshot: str) -> int:
        """verl's `global_steps` of a snapshot. Raises ValueError for another run's."""
        run, _, number = snapshot.rpartition("/")
        if run != self.run or not number.isdecimal():
            raise ValueError(
                f"snapshot {snapshot!r} is not of the run {self.run!r}: who else publishes there?"
            )
        return int(number)


@dataclass(frozen=True)
class Generated:
    """One answer. logprobs: of what was sampled from, in nats. versions: `global_steps` of the weights behind each id.

    snapshots: their names. experts: [prompt + ids - 1, MoE layers, top-k]; None unless asked for. stop_reason: as verl says it.
    """

    token_ids: list[int]
    logprobs: list[float]
    snapshots: list[str]
    versions: list[int]
    experts: npt.NDArray[Any] | None
    stop_reason: str


def request_of(
    prompt_ids: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    prompt_length: int,
    response_length: int,
    routes: bool,
    model: str | None = None,
) -> dict[str, Any]:
    """The body of a request. sampling: verl's sampling parameters; without a limit, what is left of both lengths in tokens.

    Raises ValueError for parameters that cannot be honoured.
    """
    unknown = sampling.keys() - SAMPLING - {*LIMITS, "logprobs"}
    if unknown:
        raise ValueError(f"sampling parameters that midstream does not know: {', '.join(sorted(unknown))}")
    left = prompt_length + response_length - len(prompt_ids)
    limit = next((sampling[name] for name in LIMITS if name in sampling), min(response_length, left))
    asked = {name: value for name, value in sampling.items() if name in SAMPLING}
    asked |= {"max_tokens": max(1, min(limit, left)), "logprobs": 1}
    if routes:
        asked["return_routed_experts"] = True
    return {"token_ids": list(prompt_ids), "sampling_params": asked} | (
        {} if model is None else {"model": model}
    )


def generated(answer: Mapping[str, Any], settings: VerlSettings, *, routes: bool) -> Generated:
    """Reads an answer. Raises ValueError where something is missing."""
    (choice,) = answer["choices"]
    ids = [int(one) for one in choice["token_ids"]]
    records = choice["logprobs"]["content"]
    snapshots: list[str] = []
    for span in choice["weight_versions"]:
        if span["start"] != len(snapshots):
            raise ValueError(f"spans of snapshots leave a gap or overlap: {choice['weight_versions']}")
        snapshots += [span["version"]] * (span["end"] - span["start"])
    if not len(ids) == len(records) == len(snapshots):
        raise ValueError(f"{len(ids)} ids, {len(records)} log-probabilities, {len(snapshots)} snapshots")
    return Generated(
        token_ids=ids,
        logprobs=[float(one["sampling_logprob"]) for one in records],
        snapshots=snapshots,
        versions=[settings.version(one) for one in snapshots],
        experts=_experts(choice["routed_experts"]) if routes else None,
        stop_reason="completed" if choice["finish_reason"] == "stop" else str(choice["finish_reason"]),
    )


def _experts(encoded: str) -> npt.NDArray[Any]:
    try:
        # Objects, which would be pickled, are a ValueError.
        array: npt.NDArray[Any] = npy.read_array(io.BytesIO(base64.b64decode(encoded, validate=True)))
    except binascii.Error as error:
        raise ValueError(f"routes are not base64: {error}") from error
    if array.ndim != 3:
        raise ValueError(f"routes are [positions, layers, top-k], got {list(array.shape)}")
    return array


def extra_fields(one: Generated) -> dict[str, Any]:
    """verl's `extra_fields` of an answer: the oldest and the newest version in it, and each token's snapshot.

    verl counts how stale a trajectory is by min_global_steps and max_global_steps.
    """
    return {
        "global_steps": one.versions[-1] if one.versions else None,
        "min_global_steps": min(one.versions, default=None),
        "max_global_steps": max(one.versions, default=None),
        "snapshots": one.snapshots,
    }


def serving(settings: VerlSettings) -> str:
    """The newest snapshot of the run that the server serves or loads. Raises PublishError when it serves another run's."""
    server = ServerClient(settings.url, model=settings.model, api_key=settings.api_key)
    try:
        status = server.snapshots.status()
        return max((one.target or one.snapshot or "" for one in status.replicas), key=settings.version)
    except ValueError as error:
        raise PublishError(f"publish weights of the run {settings.run!r} first: {error}") from error
    finally:
        server.close()


class Generator:
    """Asks a server, one request per call; many calls at a time. Opens its connections in the process that first asks.

    first: a snapshot of the run that was signalled.
    """

    def __init__(self, settings: VerlSettings, first: str) -> None:
        self.settings = settings
        self._url = settings.url.rstrip("/") + PATH
        self._open: tuple[RetryingCaller, ThreadPoolExecutor] | None = None
        self._seen = deque([first], maxlen=SEEN)

    def __getstate__(self) -> dict[str, Any]:
        # Ray sends it to its workers: connections and threads stay.
        return self.__dict__ | {"_open": None}

    async def generate(self, session: str, body: Mapping[str, Any], *, routes: bool) -> Generated:
        """session: the trajectory's key. Retries as `midstream.client` does.

        Raises SignalRefused, Unanswered, and PublishError on an answer without records or of another run's weights.
        """
        caller, threads = self._connected()
        headers = {
            "x-multi-turn-session-id": session,
            "x-midstream-min-snapshot": self._seen[0],
            "x-midstream-snapshot-wait": f"{self.settings.wait_s:g}",
        }

        def ask() -> Any:
            return caller.call("POST", self._url, deadline_s=RETRY_S, json=body, headers=headers).body

        answer = await asyncio.get_running_loop().run_in_executor(threads, ask)
        try:
            one = generated(answer, self.settings, routes=routes)
        except (KeyError, TypeError, ValueError) as error:
            raise PublishError(f"{self._url}: {error!r}") from error
        if one.versions and one.versions[-1] > self.settings.version(self._seen[-1]):
            self._seen.append(one.snapshots[-1])
        return one

    def close(self) -> None:
        if self._open is not None:
            caller, threads = self._open
            threads.shutdown()
            caller.close()
            self._open = None

    def _connected(self) -> tuple[RetryingCaller, ThreadPoolExecutor]:
        if self._open is None:
            parallel = self.settings.parallel
            threads = ThreadPoolExecutor(parallel, thread_name_prefix="rollouts")
            self._open = RetryingCaller.of_rollouts(self.settings.api_key, parallel), threads
        return self._open
