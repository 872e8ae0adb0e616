"""The targets of fuzzing by name: one for each parser of bytes that come from outside a process.

Always holds: a process that runs one target imports what that one needs. All of them together take ten times as long to
instrument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from targets.target import Target

#: The module of each, and its name there.
_PLACES = {
    "http_requests": ("http_server", "TARGET"),
    "http_responses": ("http_client", "TARGET"),
    "rollout_bodies": ("rollout_requests", "BODY"),
    "rollout_headers": ("rollout_requests", "HEADERS"),
    "messages_bodies": ("inference_wires", "MESSAGES_BODIES"),
    "responses_bodies": ("inference_wires", "RESPONSES_BODIES"),
    "token_bodies": ("inference_wires", "TOKEN_BODIES"),
    "text_bodies": ("inference_wires", "TEXT_BODIES"),
    "grammars": ("rollout_requests", "GRAMMAR"),
    "sse_events": ("rollout_requests", "EVENT"),
    "tool_calls": ("tool_markup", "TARGET"),
    "signals": ("signals", "TARGET"),
    "control_bodies": ("control_bodies", "TARGET"),
    "deployment_bodies": ("deployment_calls", "RESOURCE"),
    "joining_replicas": ("deployment_calls", "MEMBER"),
    "session_bodies": ("sessions", "TARGET"),
    "audit_lines": ("audit_lines", "TARGET"),
    "replica_messages": ("signals", "INTERNAL"),
    "replica_events": ("replica_events", "TARGET"),
    "kept_records": ("kept_records", "TARGET"),
    "server_answers": ("server_answers", "TARGET"),
    "safetensors": ("snapshot_files", "SAFETENSORS"),
    "checkpoints": ("snapshot_files", "DIRECTORY"),
    "manifests": ("snapshot_files", "MANIFEST"),
    "model_configs": ("snapshot_files", "CONFIG"),
    "adapters": ("adapters", "TARGET"),
    "arc2_blobs": ("snapshot_files", "BLOB"),
    "arc2_deltas": ("snapshot_files", "DELTA"),
    "tinker_json": ("tinker_bodies", "JSON"),
    "tinker_protobuf": ("tinker_bodies", "PROTOBUF"),
    "trainer_states": ("tinker_bodies", "STATE"),
    "tinker_completions": ("upstream_json", "COMPLETION"),
    "vllm_streams": ("upstream_json", "STREAM"),
    "vllm_answers": ("upstream_json", "ANSWER"),
    "vllm_routes": ("upstream_json", "ROUTES"),
    "child_frames": ("upstream_json", "FRAMES"),
}


class _Targets(Mapping[str, Target]):
    def __getitem__(self, name: str) -> Target:
        module, attribute = _PLACES[name]
        found: Target = getattr(import_module(f"{__name__}.{module}"), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


TARGETS = _Targets()
