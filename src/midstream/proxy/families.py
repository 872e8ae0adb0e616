"""The names of all metrics, with their kinds, labels and meanings: what /metrics shows and docs/metrics.md lists. Pure.

Always holds: names follow Prometheus' conventions, with base units at their ends. A counter's name is written here without the
`_total` that it is shown with. Names that begin with `vllm:` mean what they mean in vLLM 0.32.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from midstream.core.measures import SWAP_STAGES

Kind = Literal["counter", "gauge", "histogram", "info"]


class Family(NamedTuple):
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


_REPLICA = ("replica",)
_DEPLOYMENT = ("deployment",)

GATEWAY: dict[str, Family] = {
    "midstream_gateway_requests": Family(
        "counter", "requests answered, but for probes; status 499: the client left first", ("path", "status")
    ),
    "midstream_gateway_time_to_first_byte_seconds": Family(
        "histogram", "from a whole request to the first byte of its response", ("path",)
    ),
    "midstream_gateway_request_seconds": Family(
        "histogram", "from a whole request to the end of a whole response", ("path",)
    ),
    "midstream_gateway_routes": Family("counter", "placement decisions", ("reason",)),
    "midstream_gateway_retries": Family(
        "counter", "requests sent again before any response byte, and streams resumed", ("kind",)
    ),
    "midstream_gateway_moves": Family("counter", "sessions that moved to another replica", ("reason",)),
    "midstream_gateway_upstream_errors": Family("counter", "replica connections refused or lost", _REPLICA),
    "midstream_gateway_cut_responses": Family(
        "counter", "responses ended short because the replica went", _REPLICA
    ),
    "midstream_gateway_sessions": Family("gauge", "sessions with a known replica"),
    "midstream_gateway_in_flight": Family("gauge", "requests on the replica now", _REPLICA),
    "midstream_gateway_replica_up": Family("gauge", "1 when the event stream is up", _REPLICA),
    "midstream_gateway_replica_usable": Family("gauge", "1 when placement may use it", _REPLICA),
    "midstream_gateway_workers": Family("gauge", "gateway processes that listen"),
}
PROCESSES: dict[str, Family] = {
    "midstream_event_loop_stall_seconds": Family(
        "histogram",
        "steps longer than 50 ms that held up an event loop: gateway, supervisor, tinker, or a replica",
        ("process",),
    ),
}
DEPLOYMENTS: dict[str, Family] = {
    "midstream_deployment_replicas_wanted": Family("gauge", "replicas that it should have", _DEPLOYMENT),
    "midstream_deployment_replicas_usable": Family("gauge", "replicas that placement may use", _DEPLOYMENT),
    "midstream_deployment_policies": Family("gauge", "policies, loaded or not", _DEPLOYMENT),
}
REPLICAS: dict[str, Family] = {
    "midstream_replica": Family(
        "info", "what serves now, and where", ("replica", "deployment", "snapshot", "stage", "url")
    ),
    "midstream_replica_ready": Family("gauge", "1 when the engine answers and a snapshot serves", _REPLICA),
    "midstream_replica_requests_in_flight": Family("gauge", "requests the replica is serving", _REPLICA),
    "midstream_replica_sequences_running": Family("gauge", "sequences being stepped", _REPLICA),
    "midstream_replica_sequences_waiting": Family("gauge", "sequences queued in the engine", _REPLICA),
    "midstream_replica_kv_blocks_used": Family(
        "gauge",
        "blocks of the KV cache that running sequences have; what is only cached can be given out",
        _REPLICA,
    ),
    "midstream_replica_kv_blocks_capacity": Family("gauge", "blocks of the KV cache there are", _REPLICA),
    "midstream_replica_kv_block_tokens": Family("gauge", "tokens of a block of the KV cache", _REPLICA),
    "midstream_replica_kv_between_turns_tokens": Family(
        "gauge", "tokens in the KV cache of sessions between two turns", _REPLICA
    ),
    "midstream_replica_kv_free_tokens": Family("gauge", "tokens that the KV cache has room for", _REPLICA),
    "midstream_replica_kv_evicted_tokens": Family(
        "counter", "tokens evicted from the KV cache while their session lived", _REPLICA
    ),
    "midstream_replica_kv_again_tokens": Family(
        "counter", "evicted tokens that a later turn computed again", _REPLICA
    ),
    "midstream_replica_kv_offloaded_tokens": Family(
        "gauge", "tokens in the second tier of the KV cache", _REPLICA
    ),
    "midstream_replica_kv_restored_tokens": Family(
        "counter", "tokens copied back from the second tier of the KV cache", _REPLICA
    ),
    "midstream_replica_kv_dropped_tokens": Family(
        "counter", "tokens that went from the second tier of the KV cache unused", _REPLICA
    ),
    "midstream_replica_kv_travelled_tokens": Family(
        "counter", "tokens whose KV was copied from another replica", _REPLICA
    ),
    "midstream_replica_kv_budget_tokens": Family(
        "gauge", "tokens of the KV cache that sessions may claim; 0: no session waits", _REPLICA
    ),
    "midstream_replica_kv_claimed_tokens": Family(
        "gauge", "tokens that sessions are expected to have at one time at most", _REPLICA
    ),
    "midstream_replica_turn_wait_seconds": Family(
        "gauge", "how long a turn of a session that has begun is likely to wait; 0: none waits", _REPLICA
    ),
    "midstream_replica_prefill_tokens_per_second": Family(
        "gauge", "tokens of prompts that the last turns computed per second; 0: not measured", _REPLICA
    ),
    "midstream_replica_sessions_moved": Family(
        "counter", "sessions with a history that moved there from another replica", _REPLICA
    ),
    "midstream_replica_moved_tokens": Family(
        "counter", "tokens that were computed again there for sessions that moved", _REPLICA
    ),
    "midstream_replica_sessions_waiting": Family(
        "gauge", "new sessions that wait for room in the KV cache", _REPLICA
    ),
    "midstream_replica_sessions_refused": Family(
        "counter", "new sessions that found that queue full", _REPLICA
    ),
    "midstream_replica_sessions_understated": Family(
        "counter", "sessions that came to more tokens than x-midstream-expected-tokens said", _REPLICA
    ),
    "midstream_replica_long_texts": Family(
        "gauge", "long prompts and grammars being read, or waiting", _REPLICA
    ),
    "midstream_replica_stalled_seconds": Family("gauge", "longest stall of its event loop lately", _REPLICA),
    "midstream_replica_engine_silent_seconds": Family(
        "gauge", "since the engine was heard, from 5 on", _REPLICA
    ),
    "midstream_replica_records_waiting_bytes": Family(
        "gauge", "kept records that are not in the bucket yet", _REPLICA
    ),
    "midstream_replica_record_files_held_bytes": Family(
        "gauge", "record files of its deployment in the bucket, as it last saw them", _REPLICA
    ),
    "midstream_replica_generation": Family("gauge", "generation of the last accepted signal", _REPLICA),
    "midstream_replica_leaves_timestamp_seconds": Family(
        "gauge", "when the machine of a replica that leaves goes, in seconds since the epoch", _REPLICA
    ),
    "midstream_replica_snapshots_behind": Family(
        "gauge", "staleness: snapshots signalled after the one that serves", _REPLICA
    ),
    "midstream_replica_disagrees": Family(
        "gauge", "1 when its weights differ from those of others under the same name", _REPLICA
    ),
    "midstream_replica_prompt_tokens": Family("counter", "prompt tokens taken", _REPLICA),
    "midstream_replica_cached_prompt_tokens": Family("counter", "prompt tokens with reused KV", _REPLICA),
    "midstream_replica_generated_tokens": Family("counter", "tokens generated", _REPLICA),
    "midstream_replica_engine_steps": Family("counter", "engine steps", _REPLICA),
    "midstream_replica_records_durable": Family("counter", "records that a crash does not take", _REPLICA),
    "midstream_replica_records_lost": Family("counter", "records that found no room", _REPLICA),
    "midstream_replica_record_files_written": Family(
        "counter", "record files that the bucket has taken", _REPLICA
    ),
    "midstream_replica_record_files_failed": Family(
        "counter", "record files that the bucket did not take, each a request that failed", _REPLICA
    ),
    "midstream_replica_record_files_expired": Family(
        "counter", "record files that it removed for their age", _REPLICA
    ),
    "midstream_audit_turns": Family("counter", "turns that it computed again while it was idle", _REPLICA),
    "midstream_audit_waiting": Family("gauge", "turns that wait to be computed again", _REPLICA),
    "midstream_audit_max_dlogprob": Family(
        "gauge", "largest difference of a log-probability, in nats, of the last 100 audited turns", _REPLICA
    ),
    "midstream_audit_mismatches": Family(
        "counter", "audited turns that differ, by the likely cause", ("replica", "cause")
    ),
    "midstream_audit_skipped": Family(
        "counter", "turns that were to be audited and were not, by the reason", ("replica", "reason")
    ),
    "midstream_audit_last_mismatch_timestamp_seconds": Family(
        "gauge",
        "when the last turn that differs was found",
        ("replica", "session", "turn", "snapshot", "cause"),
    ),
}
TURNS: dict[str, Family] = {
    "midstream_turn_time_to_first_token_seconds": Family(
        "histogram", "from a request's arrival at its replica to its first token", _REPLICA
    ),
    "midstream_turn_queue_seconds": Family("histogram", "in the engine, before the first step", _REPLICA),
    "midstream_turn_inter_token_seconds": Family(
        "histogram", "mean time between two tokens of a turn", _REPLICA
    ),
    "midstream_turn_generation_seconds": Family(
        "histogram", "from the first token of a turn to its end", _REPLICA
    ),
    "midstream_turn_request_seconds": Family(
        "histogram", "from a request's arrival at its replica to its end", _REPLICA
    ),
    "midstream_turn_prompt_tokens": Family("histogram", "prompt tokens of a turn", _REPLICA),
    "midstream_turn_generated_tokens": Family("histogram", "tokens that a turn generated", _REPLICA),
    "midstream_turn_cached_prompt_ratio": Family(
        "histogram", "part of a turn's prompt tokens with reused KV", _REPLICA
    ),
    "midstream_session_turns": Family("histogram", "turns of a session, when it is closed", _REPLICA),
    "midstream_turn_choices": Family(
        "counter",
        "choices that ended; abort: also when the client left or the engine failed; dead_end: no token could follow",
        ("replica", "finish"),
    ),
}
_STAGES = {
    "fetch": "files fetched from the bucket",
    "rebuild": "whole files made of a parent and a delta",
    "verify": "names, shapes and digests verified",
    "stage": "loaded into the engine beside what serves",
    "hold": "staged, until it may switch",
    "commit": "from the closed gate to the switch",
    "check": "what serves is proven",
}
SWAPS: dict[str, Family] = {
    "midstream_swaps": Family(
        "counter",
        "swaps that ended; unchanged: ready, with exactly the weights of the snapshot before; superseded: given up for a newer "
        "snapshot; stopped: engine or policy ended",
        ("replica", "outcome"),
    ),
    "midstream_swap_pause_seconds": Family(
        "histogram", "no step ran for the switch, though sequences did", _REPLICA
    ),
    "midstream_swap_seconds": Family("histogram", "from the first stage of a swap to its last", _REPLICA),
    "midstream_swap_streams_crossed": Family("histogram", "sequences that ran at the switch", _REPLICA),
    **{
        f"midstream_swap_{stage}_seconds": Family("histogram", _STAGES[stage], _REPLICA)
        for stage in SWAP_STAGES
    },
}
PUSHES: dict[str, Family] = {
    "midstream_push_groups": Family(
        "gauge", "open groups of trainers; joined: it waits for its next update", ("deployment", "phase")
    ),
    "midstream_push_waiting_seconds": Family(
        "gauge",
        "age of the oldest pushed snapshot that is not in the bucket yet; 0: there is none",
        _DEPLOYMENT,
    ),
    "midstream_push_keeps": Family(
        "counter",
        "pushed snapshots that a replica wrote into the bucket, or that were given up after all tries",
        ("outcome",),
    ),
    "midstream_chain_rebases": Family(
        "counter",
        "incremental snapshots with long chains that a replica wrote into the bucket whole, or that were given up",
        ("outcome",),
    ),
    "midstream_push_updates": Family(
        "counter",
        "updates; fenced: committed without some replicas; dropped: refused at the end; ended: with their group",
        ("outcome",),
    ),
    "midstream_push_groups_ended": Family(
        "counter",
        "groups that ended; members: replicas changed; failed: a replica did not do its part; deadline: no call came in time; "
        "left: its trainer died",
        ("reason",),
    ),
    "midstream_push_seconds": Family("histogram", "calls of trainers that succeeded, by phase", ("phase",)),
    "midstream_push_received_bytes": Family("counter", "bytes of tensors of updates it finished", _REPLICA),
}
_MODEL = ("model_name", "engine")
VLLM: dict[str, Family] = {
    "vllm:num_requests_running": Family("gauge", "sequences being stepped", _MODEL),
    "vllm:num_requests_waiting": Family("gauge", "sequences queued in the engine", _MODEL),
    "vllm:kv_cache_usage_perc": Family("gauge", "part of the KV cache in use; 1 means full", _MODEL),
    "vllm:gpu_cache_usage_perc": Family("gauge", "the same, as older dashboards call it", _MODEL),
    "vllm:prompt_tokens": Family("counter", "prompt tokens taken", _MODEL),
    "vllm:generation_tokens": Family("counter", "tokens generated", _MODEL),
    "vllm:prefix_cache_queries": Family("counter", "prompt tokens looked for in the prefix cache", _MODEL),
    "vllm:prefix_cache_hits": Family("counter", "of these, tokens found", _MODEL),
    "vllm:request_success": Family("counter", "choices that ended, by reason", (*_MODEL, "finished_reason")),
    "vllm:time_to_first_token_seconds": Family("histogram", "from arrival to the first token", _MODEL),
    "vllm:request_time_per_output_token_seconds": Family(
        "histogram", "mean time between two tokens of a request", _MODEL
    ),
    "vllm:e2e_request_latency_seconds": Family("histogram", "from arrival to the end", _MODEL),
    "vllm:request_queue_time_seconds": Family("histogram", "waiting in the engine", _MODEL),
    "vllm:request_decode_time_seconds": Family("histogram", "from the first token to the end", _MODEL),
    "vllm:request_prompt_tokens": Family("histogram", "prompt tokens of a request", _MODEL),
    "vllm:request_generation_tokens": Family("histogram", "tokens that a request generated", _MODEL),
}
#: By heading of docs/metrics.md.
SECTIONS: dict[str, dict[str, Family]] = {
    "Gateway": GATEWAY,
    "Processes": PROCESSES,
    "Deployments": DEPLOYMENTS,
    "Replicas": REPLICAS,
    "Turns": TURNS,
    "Swaps": SWAPS,
    "Pushes": PUSHES,
    "vLLM's names": VLLM,
}
FAMILIES: dict[str, Family] = {name: one for section in SECTIONS.values() for name, one in section.items()}


def shown_name(name: str) -> str:
    """The name of its samples in /metrics. A histogram also has `_bucket`, `_sum` and `_count` after it."""
    return name + {"counter": "_total", "info": "_info"}.get(FAMILIES[name].kind, "")
