"""The command line and the environment of an SGLang server, and the features that its replica declares. Pure.

Owns: the flags that midstream gives, those that a user may not give, what an attached server must have, each with a reason.
docs/engines.md has the table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midstream.core.errors import ConfigError
from midstream.core.types import ENGINE_FEATURES, EngineCard
from midstream.engine.servers.flags import check_names
from midstream.engine.servers.gpus import GPUS, visible

_UNREAD = "midstream does not ask SGLang for them yet"
_IDS = "SGLang runs with --skip-tokenizer-init, without which tokens come by another way than the answers of a pause"
_ONE_SET = "an SGLang server holds one set of weights here"
#: Missing features and the reasons, for docs/engines.md.
LACKS = {
    "router_weights": "SGLang does not return them",
    "cached_prompt_logprobs": "it computes a prompt from its first token if its log-probabilities are asked for",
    "sampling_logprobs": _UNREAD,
    "sampling_masks": _UNREAD,
    "near_ties": "SGLang does not return the logits that it draws from",
    "router_ties": "SGLang does not return what a router chose by",
    "token_limits": _IDS,
    "session_kv": "SGLang evicts what was unused for longest, and takes no word of when a session comes back",
    "kv_travel": "midstream does not read the blocks of SGLang's cache",
    "kv_provenance": "SGLang does not say which weights computed cached KV",
    "reproducible_sampling": "a row's numbers depend on what it is batched with, and a resumed stream draws other numbers",
    "frozen_check": "while SGLang is paused it computes nothing, so the proof comes after the pause",
    "policies": "midstream does not load adapters into SGLang yet",
    "policy_base": _ONE_SET,
    "policy_crossing": "midstream does not load adapters into SGLang yet",
    "resident_snapshots": _ONE_SET,
    "audit": "turns are computed again by the embedded engine's model code, beside that engine alone",
    "short_swap": "SGLang loads the files of a snapshot in the pause",
}
#: Why requests have no order.
NO_ORDER = "SGLang runs without --enable-priority-scheduling --schedule-low-priority-values-first"
#: Midstream's hooks in SGLang (plugin/midstream_sglang_plugin.py), for an attached server.
PLUGIN_DIR = Path(__file__).parent / "plugin"
PLUGIN = f"it needs midstream's plug-in: start SGLang with PYTHONPATH={PLUGIN_DIR}"
NO_ROUTES = "SGLang runs without --enable-return-routed-experts"
#: What a server has if it was seen to (features_proof.py), and why it does not otherwise.
UNPROVED = {
    "routes": NO_ROUTES,
    "grammars": PLUGIN,
    "constrained_logprobs": PLUGIN,
    "logit_bias": PLUGIN,
}
#: Why there is no digest of the weights, unless the proof at the start says otherwise.
UNREAD = "SGLang was not seen to give equal checksums of equal weights"


def sglang_card(
    version: str,
    *,
    by_priority: bool = True,
    no_digest: str = UNREAD,
    unproved: Mapping[str, str] = UNPROVED,
) -> EngineCard:
    """by_priority: it goes by priority. no_digest: why it gives none of its weights; empty if it does.

    unproved: of the features in UNPROVED, those that it was not seen to have, and why.
    """
    lacks = {"priorities": "" if by_priority else NO_ORDER, "weights_digest": no_digest, **unproved}
    why = {feature: reason for feature, reason in lacks.items() if reason}
    features = tuple(f for f in ENGINE_FEATURES if f not in LACKS and f not in why)
    return EngineCard(kind="sglang", version=version, features=features, why=LACKS | why)


#: Fields of /server_info, what they must be, and the flag or the reason.
NEEDED: dict[str, tuple[tuple[Any, ...], str]] = {
    "skip_tokenizer_init": ((True,), "--skip-tokenizer-init, so that tokens and answers come by one way"),
    "disable_overlap_schedule": (
        (True,),
        "--disable-overlap-schedule, or a pause would leave a token behind that was sampled before it",
    ),
    "incremental_streaming_output": (
        (True,),
        "--incremental-streaming-output, so that each message has new tokens",
    ),
    "tokenizer_worker_num": ((1,), "one tokenizer worker"),
    "dp_size": ((1,), "without --dp-size: the first engine would answer for all"),
    "pp_size": ((1,), "without --pp-size: a pause would leave steps of other stages behind"),
    "speculative_algorithm": ((None,), "without --speculative-algorithm"),
    "enable_hierarchical_cache": ((False,), "without --enable-hierarchical-cache, which outlives a flush"),
    "disaggregation_mode": (("null",), "without --disaggregation-mode"),
    "allow_auto_truncate": ((False,), "without --allow-auto-truncate"),
    "stream_interval": ((1,), "without --stream-interval"),
    "enable_watermark": ((False, None), "without --enable-watermark"),
    "preferred_sampling_params": ((None,), "without --preferred-sampling-params"),
}
#: What midstream gives. A flag without a value is a switch.
OURS: dict[str, str | None] = {
    "skip-tokenizer-init": None,
    "disable-overlap-schedule": None,
    "incremental-streaming-output": None,
    "enable-priority-scheduling": None,
    "schedule-low-priority-values-first": None,
    "disable-priority-preemption": None,
    "sampling-defaults": "openai",
    # It takes the grammars that midstream makes.
    "grammar-backend": "llguidance",
}
_LOOPBACK = "midstream calls the server at a port of its own on loopback, over plain HTTP"
_GIVEN = "midstream gives it itself"
#: Flags that a user may not give, and why.
REFUSED = {
    "model-path": "set `model`",
    "model": "set `model`",
    "served-model-name": _GIVEN,
    "host": _LOOPBACK,
    "port": _LOOPBACK,
    "ssl-keyfile": _LOOPBACK,
    "ssl-certfile": _LOOPBACK,
    "config": "midstream could not check the flags in the file: give the flags themselves",
    "api-key": "the process list would show it: attach to the server instead (sglang.urls)",
    "admin-api-key": "the process list would show it",
    "random-seed": f"{_GIVEN}: replicas of one seed draw the same tokens",
    "weight-version": _GIVEN,
    "dp-size": "a replica is one server: set `replicas`",
    "data-parallel-size": "a replica is one server: set `replicas`",
    "grpc-mode": _LOOPBACK,
}


def check_arguments(args: Sequence[str]) -> None:
    """Raises ConfigError for flags that midstream depends on."""
    if args and not args[0].startswith("-"):
        raise ConfigError(f"sglang.args: expected a flag of SGLang first, got {args[0]!r}")
    check_names("SGLang", args, REFUSED)


def command_line(
    python: str, model_dir: Path, name: str, port: int, seed: int, args: Sequence[str]
) -> list[str]:
    """seed: of the server's sampler. Raises ConfigError."""
    check_arguments(args)
    command = [
        python,
        "-P",
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model_dir),
        "--served-model-name",
        name,
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--random-seed", str(seed)]
    for flag, value in OURS.items():
        command += [f"--{flag}"] if value is None else [f"--{flag}", value]
    return [*command, *args]


def environment(
    base: Mapping[str, str], given: Mapping[str, str], gpus: Sequence[int] = ()
) -> dict[str, str]:
    """The environment `base` of this process, then midstream's variables for SGLang, then `given`, the user's settings.

    gpus: indices among the GPUs that this process sees. Raises ConfigError when it does not see so many.
    """
    paths = (str(PLUGIN_DIR), given.get("PYTHONPATH", base.get("PYTHONPATH", "")))
    given = {**given, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env = {
        **base,
        # The log-probability of a token is the raw model's, whatever the temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        # /health would compute a token, which it cannot in a pause.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "HF_HUB_OFFLINE": "1",
    }
    if gpus and GPUS not in given:
        env[GPUS] = visible("sglang.gpus", gpus, base.get(GPUS))
    return {**env, **given}


def missing(info: Mapping[str, Any]) -> list[str]:
    """What a server lacks, by its /server_info: each with the flag, or the field that it does not have."""
    found = []
    for field, (values, flag) in NEEDED.items():
        if field not in info:
            found.append(f"a version whose /server_info has {field}")
        elif info[field] not in values:
            found.append(flag)
    return found


def by_priority(info: Mapping[str, Any]) -> bool:
    return bool(info.get("enable_priority_scheduling") and info.get("schedule_low_priority_values_first"))
