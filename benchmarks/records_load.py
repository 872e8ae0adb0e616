"""What records cost in throughput: one replica, the same streams with log-probabilities alone and with everything.

    python records_load.py [--rounds 8] [--streams 16 64] [--new 512] [--write]

Every column samples with top_p 0.95, so that masks have something to say. Columns alternate, in another order each round.
`share` is a column's tokens per second over those of the plain one in the same round; the median of the rounds is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from engine import Line, measure_line, say, warm, write_models
from hardware import provenance, write_result
from servers import TOKEN, Endpoint, Midstream, Server

PLAIN = "log-probabilities"
_ALL = {"include_routing_matrix": True, "return_sampling_mask": True}
COLUMNS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "all inline": _ALL,
    "all by reference": {**_ALL, "return_record_reference": True, "return_token_ids": True},
    "Fireworks' references": {"routing_matrix_format": "parquet_v1", "sampling_mask": "parquet_v1"},
}


class MidstreamRecords(Midstream):
    @property
    def store(self) -> str:
        return self.log.with_suffix(".records").as_uri()

    def command(self) -> list[str]:
        return [*super().command(), "--records", self.store]

    def endpoints(self) -> dict[str, Endpoint]:
        replica = super().endpoints()["midstream"].port
        headers = {"x-midstream-token": TOKEN, "x-fireworks-r3-store-id": self.store}
        return {
            name: Endpoint(
                replica, self.model.directory.name, headers, {"logprobs": True, "top_p": 0.95, **more}
            )
            for name, more in COLUMNS.items()
        }


def with_shares(row: dict[str, Any]) -> dict[str, Any]:
    plain = row["columns"][PLAIN]["tokens_per_s_rounds"]
    for column in row["columns"].values():
        shares = [own / other for own, other in zip(column["tokens_per_s_rounds"], plain, strict=True)]
        column["share"] = round(statistics.median(shares), 4)
        column["shares"] = [round(share, 4) for share in shares]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--new", type=int, default=512, help="tokens of a stream")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="to results/records_load.json")
    options = parser.parse_args()
    options.budget_s, options.columns = 1e9, None
    result = provenance(rounds=options.rounds, top_p=0.95, stream=True) | {"lines": []}
    with tempfile.TemporaryDirectory() as directory:
        (model,) = write_models(["tiny-moe"], Path(directory))
        with MidstreamRecords(model, Path(directory)) as server:
            servers: dict[str, Server] = {"midstream": server}
            warm(server, model)
            for streams in options.streams:
                line = Line("tiny-moe", "decode", streams, 64, options.new)
                row = with_shares(measure_line(servers, model, line, options))
                say(json.dumps({name: one["share"] for name, one in row["columns"].items()}))
                result["lines"].append(row)
    if options.write:
        write_result("records_load", result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
