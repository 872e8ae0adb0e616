"""The targets of fuzzing by name: one for each parser of bytes that come from outside a process."""

from __future__ import annotations

from targets import (
    adapters,
    control_bodies,
    deployments,
    http_client,
    http_server,
    inference_wires,
    rollout_requests,
    signals,
    snapshot_files,
    tinker_bodies,
    tool_markup,
    upstream_json,
)
from targets.target import Target

TARGETS: dict[str, Target] = {
    "http_requests": http_server.TARGET,
    "http_responses": http_client.TARGET,
    "rollout_bodies": rollout_requests.BODY,
    "rollout_headers": rollout_requests.HEADERS,
    "messages_bodies": inference_wires.MESSAGES_BODIES,
    "responses_bodies": inference_wires.RESPONSES_BODIES,
    "token_bodies": inference_wires.TOKEN_BODIES,
    "text_bodies": inference_wires.TEXT_BODIES,
    "grammars": rollout_requests.GRAMMAR,
    "sse_events": rollout_requests.EVENT,
    "tool_calls": tool_markup.TARGET,
    "signals": signals.TARGET,
    "control_bodies": control_bodies.TARGET,
    "deployment_bodies": deployments.RESOURCE,
    "joining_replicas": deployments.MEMBER,
    "replica_messages": signals.INTERNAL,
    "safetensors": snapshot_files.SAFETENSORS,
    "checkpoints": snapshot_files.DIRECTORY,
    "manifests": snapshot_files.MANIFEST,
    "model_configs": snapshot_files.CONFIG,
    "adapters": adapters.TARGET,
    "arc2_blobs": snapshot_files.BLOB,
    "arc2_deltas": snapshot_files.DELTA,
    "tinker_json": tinker_bodies.JSON,
    "tinker_protobuf": tinker_bodies.PROTOBUF,
    "trainer_states": tinker_bodies.STATE,
    "tinker_completions": upstream_json.COMPLETION,
    "vllm_streams": upstream_json.STREAM,
    "vllm_answers": upstream_json.ANSWER,
    "vllm_routes": upstream_json.ROUTES,
    "child_frames": upstream_json.FRAMES,
}
