"""CPU per hop and bytes of one long answer, inline and by reference: `python benchmarks/record_references.py [TOKENS]`.

Prints JSON. The answer has 48 layers of 8 of 128 experts, and masks of up to 50 ids of a vocabulary of 150,000. Experts are
drawn unevenly, as routers choose them: in each layer the probability of the expert of rank r goes with 1/(r + 8). The gateway's
hop is the JSON that it copies once from one buffer to another; it parses nothing. The client's is all that gives arrays.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from midstream.client.decode import routes_of, sampling_masks_of
from midstream.client.references import ChoiceColumns, read_reference
from midstream.core.types import TokenRecord
from midstream.replica.record_files import RecordFiles
from midstream.replica.request.checked import Prompt
from midstream.replica.response.answer import ResponseHead
from midstream.replica.response.referenced import ReferencedRecords

LAYERS, TOP_K, EXPERTS, VOCABULARY = 48, 8, 128, 150_000
ROUNDS = 3


class _Asked(msgspec.Struct):
    n: int = 1
    routes: bool = True
    masks: bool = True
    router_weights: bool = False


class _Ended:
    """A choice, as far as a file needs it."""

    index = 0
    earlier_kv: tuple[()] = ()

    def __init__(self, tokens: int) -> None:
        self.spans = self.kv = [("step-1", 0, tokens)]


def records(tokens: int) -> list[TokenRecord]:
    draw = np.random.default_rng(0)
    weights = 1 / (np.arange(EXPERTS) + 8)
    keys = np.log(weights) + draw.gumbel(size=(tokens, LAYERS, EXPERTS)).astype(np.float32)
    ranks = np.argpartition(-keys, TOP_K, axis=2)[..., :TOP_K]
    of_rank = np.stack([draw.permutation(EXPERTS) for _ in range(LAYERS)])
    routes = of_rank[np.arange(LAYERS)[None, :, None], ranks].astype(np.uint8)
    made = []
    for at in range(tokens):
        kept = np.unique(draw.integers(0, VOCABULARY, draw.integers(1, 50))).astype("<u4")
        mask = b"\0" if at % 2 else b"\4" + kept.tobytes()
        token = int(kept[0])
        logprob = float(np.float32(-draw.exponential()))
        made.append(TokenRecord(token, logprob, logprob / 2, "step-1", routes[at].tobytes(), mask=mask))
    return made


def inline(made: list[TokenRecord]) -> bytes:
    entries = [
        {
            "token": " token",
            "bytes": list(b" token"),
            "logprob": record.logprob,
            "sampling_logprob": record.sampling_logprob,
            "text_offset": 6 * at,
            "token_id": record.token_id,
            "top_logprobs": [],
            "routing_matrix": base64.b64encode(record.route or b"").decode(),
            "sampling_mask": base64.b64encode(record.mask or b"").decode(),
        }
        for at, record in enumerate(made)
    ]
    return msgspec.json.encode({"choices": [{"logprobs": {"content": entries}}]})


def cpu_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    """The least of a few rounds, all threads together."""
    best, made = float("inf"), None
    for _ in range(ROUNDS):
        before = time.process_time()
        made = work()
        best = min(best, 1000 * (time.process_time() - before))
    return round(best, 2), made


def decoded(body: bytes) -> Any:
    choice = json.loads(body)["choices"][0]
    return routes_of(choice, top_k=TOP_K), sampling_masks_of(choice)


def arrays(url: str, reference: Any) -> list[ChoiceColumns]:
    """With the columns that are decoded when they are asked for."""
    found = read_reference(url, reference)
    for one in found:
        assert one.routes is not None
        assert one.mask_bytes is not None
    return found


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 30_000
    made = records(tokens)
    with tempfile.TemporaryDirectory() as directory:
        url = Path(directory).as_uri()
        files = RecordFiles(url, "default")
        head = ResponseHead("cmpl-1", 0, "m", False, (LAYERS, TOP_K))
        asked: Any = _Asked()
        ended: Any = [_Ended(tokens)]

        def kept() -> ReferencedRecords:
            found = ReferencedRecords(files, asked, head, [Prompt((1,) * 100)])
            for record in made:
                found.take(0, record)
            return found

        keeping, collected = cpu_ms(kept)
        writing, reference = cpu_ms(lambda: asyncio.run(files.put(lambda: collected._encoded(ended))))
        encoding, body = cpu_ms(lambda: inline(made))
        answer = msgspec.json.encode({"choices": [{"logprobs": None}], "record_reference": reference})
        rows = {
            "inline": {
                "bytes": len(body),
                "replica_cpu_ms": encoding,
                "gateway_cpu_ms": cpu_ms(lambda: bytearray(body))[0],
                "client_cpu_ms": cpu_ms(lambda: decoded(body))[0],
            },
            "by reference": {
                "bytes": len(answer),
                "file_bytes": reference.bytes,
                "replica_cpu_ms": round(keeping + writing, 2),
                "gateway_cpu_ms": cpu_ms(lambda: bytearray(answer))[0],
                "client_cpu_ms": cpu_ms(lambda: json.loads(answer))[0],
                "client_proved_and_small_columns_cpu_ms": cpu_ms(lambda: read_reference(url, reference))[0],
                "client_with_arrays_cpu_ms": cpu_ms(lambda: arrays(url, reference))[0],
                "client_with_masks_as_ids_cpu_ms": cpu_ms(
                    lambda: [one.sampling_masks() for one in arrays(url, reference)]
                )[0],
            },
        }
        files.close()
    print(json.dumps({"tokens": tokens, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
