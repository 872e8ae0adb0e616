"""A load generator that costs little: while streams run it stores bytes with the time they came, and reads them afterwards.

Owns: one burst of streaming completions in a process of its own. `python loadgen.py` takes one `Load` as JSON on standard
input and prints one `Measured` as JSON.
Always holds: every stream answered 200, ended in order and carried exactly the tokens asked for, or the run fails; prompts
are random token ids, other ones in each stream and at each seed.
"""

from __future__ import annotations

import asyncio
import bisect
import gc
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LAST_CHUNK = b"\r\n0\r\n\r\n"
# Of vLLM, token ids in and out.
GENERATE = "/inference/v1/generate"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to send. All streams start at once; with `late_prompt`, one more follows once the first stream has had
    `late_after` reads, with a prompt of that many tokens and one new token."""

    port: int
    model: str
    streams: int
    prompt_tokens: int
    new_tokens: int
    # Prompts draw ids below this.
    vocabulary: int
    seed: int
    host: str = "127.0.0.1"
    path: str = "/v1/completions"
    headers: dict[str, str] = field(default_factory=dict)
    # More body fields; at GENERATE, more sampling_params.
    extra: dict[str, Any] = field(default_factory=dict)
    late_prompt: int = 0
    late_after: int = 64
    timeout_s: float = 900.0
    # Stream i asks for the i-th of these, round and round; empty: all ask for `model`.
    models: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Times in milliseconds. A gap lies between two tokens of one stream; tokens that came together have a gap of 0."""

    tokens: int
    # From the first byte sent to the last token.
    seconds: float
    tokens_per_s: float
    # Until every stream had its first token.
    prompt_tokens_per_s: float
    ttft_ms_p50: float
    gap_ms_mean: float
    gap_ms_p50: float
    gap_ms_p99: float
    gap_ms_max: float
    # Of gaps that begin when every stream has its first token; 0 where there are none.
    steady_gap_ms_mean: float
    steady_gap_ms_max: float
    tokens_per_event: float
    client_cpu_s: float
    # Ready to run, but without a core.
    client_waited_s: float
    late_ttft_ms: float | None = None
    late_gap_ms_max: float | None = (
        # Worst gap of a running stream between sending the late prompt and its answer.
        None
    )


class Stream(asyncio.Protocol):
    """One request on one connection: what was read, and when."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.request = request
        self.done = done
        self.sent = 0.0
        self.times: list[float] = []
        self.reads: list[bytes] = []
        # To be set at this many reads.
        self.wake: tuple[int, asyncio.Event] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self) -> None:
        self.sent = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.reads.append(data)
        if self.wake is not None and len(self.reads) >= self.wake[0]:
            self.wake[1].set()
            self.wake = None
        if data.endswith(LAST_CHUNK) or (
            len(data) < len(LAST_CHUNK) and b"".join(self.reads[-8:]).endswith(LAST_CHUNK)
        ):
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def dechunked(raw: bytes, *, whole: bool = True) -> Iterator[tuple[int, bytes]]:
    """(offset in `raw` after it, payload) of each chunk of a response. Raises ValueError unless it is a 200 and chunked, and
    `whole`."""
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found or b" 200 " not in head.split(b"\r\n")[0] or b"chunked" not in head.lower():
        raise ValueError(f"not a stream: {raw[:2000]!r}")
    at = len(head) + 4
    while True:
        line_end = raw.find(b"\r\n", at)
        if line_end < 0:
            if not whole:
                return
            raise ValueError(f"the stream was cut after {raw[-300:]!r}")
        size = int(raw[at:line_end].partition(b";")[0], 16)
        if size == 0:
            return
        start = line_end + 2
        at = start + size + 2
        if at > len(raw):
            if not whole:
                return
            raise ValueError(f"the stream was cut after {raw[-300:]!r}")
        yield start + size, raw[start : start + size]


def events(times: list[float], reads: list[bytes], *, whole: bool = True) -> Iterator[tuple[float, bytes]]:
    """(time of the read that completed it, data) of each server-sent event of a chunked response, which is all there unless
    not `whole`. Raises ValueError."""
    ends: list[int] = []
    total = 0
    for read in reads:
        total += len(read)
        ends.append(total)
    pending = b""
    for offset, payload in dechunked(b"".join(reads), whole=whole):
        *ended, pending = (pending + payload.replace(b"\r\n", b"\n")).split(b"\n\n")
        at = times[bisect.bisect_left(ends, offset)]
        for event in ended:
            if event.startswith(b"data: "):
                yield at, event[6:]


def tokens_in(event: dict[str, Any]) -> int:
    """Tokens whose logprobs are in one chunk: `logprobs.content[]`, or the legacy lists, or else ids alone."""
    count = 0
    for choice in event.get("choices", ()):
        logprobs = choice.get("logprobs") or {}
        listed = logprobs.get("content") or logprobs.get("token_logprobs") or choice.get("token_ids") or []
        count += len(listed)
    return count


def token_times(times: list[float], reads: list[bytes]) -> tuple[list[float], int]:
    """When each token of a stream came, and in how many events. Raises ValueError on an error event or a missing [DONE]."""
    arrived: list[float] = []
    carrying, finished = 0, False
    for at, data in events(times, reads):
        if data == b"[DONE]":
            finished = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the stream failed: {event['error']}")
        count = tokens_in(event)
        arrived += [at] * count
        carrying += count > 0
    if not finished:
        raise ValueError("the stream ended without [DONE]")
    return arrived, carrying


def request_bytes(
    load: Load, rng: random.Random, prompt_tokens: int, new_tokens: int, model: str | None = None
) -> bytes:
    prompt = [rng.randrange(load.vocabulary) for _ in range(prompt_tokens)]
    wanted = {"max_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True, **load.extra}
    body: dict[str, Any] = {"model": model or load.model, "stream": True}
    if load.path == GENERATE:
        body |= {"token_ids": prompt, "sampling_params": wanted}
    else:
        body |= {"prompt": prompt, **wanted}
    encoded = json.dumps(body, separators=(",", ":")).encode()
    headers = {
        "host": f"{load.host}:{load.port}",
        "content-type": "application/json",
        "content-length": str(len(encoded)),
        "x-request-id": f"load-{load.seed}-{rng.getrandbits(64):x}",
        **load.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {load.path} HTTP/1.1\r\n{lines}\r\n".encode() + encoded


def take_priority() -> bool:
    """Ask that this thread, and none it starts, runs as soon as data is there, before any server; False where that is not
    allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True


def waited_s() -> float:
    """Seconds this thread has spent ready to run without running."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least `share` of `ordered` does not exceed; 0 of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


async def run(load: Load) -> Measured:
    loop = asyncio.get_running_loop()
    rng = random.Random(load.seed)
    plans = [(load.prompt_tokens, load.new_tokens)] * load.streams
    if load.late_prompt:
        plans.append((load.late_prompt, 1))
    streams = []
    for number, plan in enumerate(plans):
        model = load.models[number % len(load.models)] if load.models else None
        stream = Stream(request_bytes(load, rng, *plan, model), loop.create_future())
        await loop.create_connection(lambda s=stream: s, load.host, load.port)  # type: ignore[misc]
        streams.append(stream)
    cpu, waited = time.process_time(), waited_s()
    late = streams.pop() if load.late_prompt else None
    wake = asyncio.Event()
    streams[0].wake = (load.late_after, wake)
    for stream in streams:
        stream.send()
    async with asyncio.timeout(load.timeout_s):
        if late is not None:
            await wake.wait()
            late.send()
            await late.done
        await asyncio.gather(*(stream.done for stream in streams))
    return measured(load, streams, late, time.process_time() - cpu, waited_s() - waited)


def measured(
    load: Load, streams: list[Stream], late: Stream | None, cpu_s: float, client_waited_s: float
) -> Measured:
    started = min(stream.sent for stream in streams)
    arrivals, carrying = [], 0
    for stream in streams:
        times, count = token_times(stream.times, stream.reads)
        if len(times) != load.new_tokens:
            raise ValueError(f"a stream had {len(times)} tokens, not {load.new_tokens}")
        arrivals.append(times)
        carrying += count
    gaps = [(a, b) for times in arrivals for a, b in itertools.pairwise(times)]
    widths = sorted((b - a) * 1e3 for a, b in gaps)
    seconds = max(times[-1] for times in arrivals) - started
    tokens = sum(map(len, arrivals))
    late_ttft_ms = late_gap_ms = None
    if late is not None:
        answered = token_times(late.times, late.reads)[0][0]
        late_ttft_ms = round((answered - late.sent) * 1e3, 3)
        during = [(b - a) * 1e3 for a, b in gaps if b > late.sent and a < answered]
        if not during:
            raise ValueError("no stream ran while the late prompt was computed")
        late_gap_ms = round(max(during), 3)
    all_begun = max(times[0] for times in arrivals)
    first = all_begun - started
    steady = [(b - a) * 1e3 for a, b in gaps if a >= all_begun]
    return Measured(
        tokens=tokens,
        seconds=round(seconds, 4),
        tokens_per_s=round(tokens / seconds, 2),
        prompt_tokens_per_s=round(load.prompt_tokens * load.streams / first, 2),
        ttft_ms_p50=round(statistics.median(times[0] - started for times in arrivals) * 1e3, 3),
        gap_ms_mean=round(statistics.fmean(widths), 3) if widths else 0.0,
        gap_ms_p50=round(percentile(widths, 0.5), 3),
        gap_ms_p99=round(percentile(widths, 0.99), 3),
        gap_ms_max=round(percentile(widths, 1.0), 3),
        steady_gap_ms_mean=round(statistics.fmean(steady), 3) if steady else 0.0,
        steady_gap_ms_max=round(max(steady, default=0.0), 3),
        tokens_per_event=round(tokens / carrying, 3),
        client_cpu_s=round(cpu_s, 4),
        client_waited_s=round(client_waited_s, 4),
        late_ttft_ms=late_ttft_ms,
        late_gap_ms_max=late_gap_ms,
    )


def main() -> int:
    import uvloop

    load = Load(**json.load(sys.stdin))
    take_priority()
    gc.disable()
    print(json.dumps(asdict(uvloop.run(run(load)))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
