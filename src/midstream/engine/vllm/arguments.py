"""The command line and the environment of a vLLM server, from midstream's flags and the user's. Pure.

Owns: the flags that midstream gives, those that a user may replace, and those that a user may not give, each with a reason.
Always holds: no secret is in the command line. The user's settings win over other values of the environment.

The features that the replica of a vLLM server declares. docs/engines.md has the table.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from midstream.core.errors import ConfigError
from midstream.core.types import ENGINE_FEATURES, EngineCard
from midstream.engine.servers.flags import check_names
from midstream.engine.servers.gpus import GPUS, visible

#: Missing features and the reasons, for docs/engines.md.
LACKS = {
    "cached_prompt_logprobs": "it computes a prompt from its first token if its log-probabilities are asked for",
    "reproducible_sampling": "a row's numbers depend on what it is batched with, and a resumed stream draws other numbers",
    "router_ties": "vLLM does not return what a router chose by",
    "kv_travel": "midstream does not read the blocks of vLLM's cache",
    "policy_base": "a vLLM server holds one set of weights, which policies stand on",
    "resident_snapshots": "a vLLM server holds one set of weights",
    "audit": "turns are computed again by the embedded engine's model code, beside that engine alone",
}


#: What another proof at the start is about (routes_proof.py), and why a server lacks it until it has passed.
ROUTED = ("routes", "router_weights")
UNROUTED = dict.fromkeys(ROUTED, "vLLM was not seen to say which experts computed a token")
#: Why there are no policies, unless the proof at the start says otherwise.
NO_LORA = "vLLM runs without --enable-lora"
#: What the proof at the start is about (sampling_proof.py), and why a server lacks it until it has passed.
NUMBERS = ("sampling_logprobs", "near_ties", "constrained_logprobs", "sampling_masks")
UNPROVED = dict.fromkeys(
    NUMBERS, "vLLM was not seen to return the raw and the sampling log-probability of a token"
)
#: Why streams of a policy do not cross its swaps, unless the proof at the start says otherwise.
UNCROSSED = "vLLM was not seen to give a running request another adapter in a pause"
#: Why there is no digest of the weights, unless the proof at the start says otherwise.
UNREAD = "vLLM was not seen to give equal digests of equal weights"
#: Why weights are checked behind a pause, unless the proof at the start says otherwise.
UNFROZEN = (
    "while vLLM is paused it computes nothing, so the proof comes after the pause, before any of its tokens"
)
#: Why it is unknown which weights computed KV, unless the proof at the start says otherwise.
UNTOLD = "vLLM's scheduler was not seen to say which weights computed the KV of a request"
#: Why a session's KV is not kept for its next turn, unless the proof at the start says otherwise.
UNHELD = "vLLM's scheduler was not seen to hold the KV of a session between two turns"
#: Why nothing is staged in workers, nor read in them.
ONE_ANSWERS = "of several engines (--data-parallel-size) the first alone says what its workers did"
#: Why requests have no order.
NO_ORDER = "vLLM runs without --scheduling-policy priority"
#: Why a swap is not short, until the proof at the start has passed (beside.py).
UNSTAGED = "vLLM was not seen to load weights beside those that serve"
#: Why weights are not loaded in place, nor beside those that serve, in a server that this process did not start.
NOT_OURS = "the proof needs a server without other requests, which midstream starts itself"
#: Why a trainer writes no weights in place beside policies.
BESIDE_POLICIES = "vLLM would have to take adapters off while a trainer writes (--enable-lora)"


def vllm_card(
    version: str,
    *,
    no_routes: Mapping[str, str] = UNROUTED,
    by_priority: bool = True,
    no_policies: str = NO_LORA,
    no_crossing: str = UNCROSSED,
    no_full_snapshots: str = "",
    no_numbers: Mapping[str, str] = UNPROVED,
    no_digest: str = UNREAD,
    no_frozen_check: str = UNFROZEN,
    no_short_swap: str = UNSTAGED,
    no_provenance: str = UNTOLD,
    no_session_kv: str = UNHELD,
) -> EngineCard:
    """no_routes: those of ROUTED that it lacks, with the reasons. by_priority: it goes by priority.

    no_policies: why it serves none; empty if it does. no_crossing: why their streams keep an adapter; empty if
    they cross its swaps. no_full_snapshots: why it takes none; empty if it does.
    no_numbers: those of NUMBERS that it lacks, with the reasons.
    no_digest: why it gives none of its weights; empty if it does. no_frozen_check: why it checks none in a pause.
    no_short_swap: why its workers stage no weights; empty if they do. no_provenance: why it is unknown what computed KV.
    no_session_kv: why it keeps no KV for a session's next turn.
    """
    why = {**no_numbers, **no_routes}
    lacks = {
        "policies": no_policies,
        "policy_crossing": no_policies or no_crossing,
        "full_snapshots": no_full_snapshots,
        "priorities": "" if by_priority else NO_ORDER,
        "weights_digest": no_digest,
        "frozen_check": no_frozen_check,
        "short_swap": no_short_swap,
        "kv_provenance": no_provenance,
        "session_kv": no_session_kv,
    }
    why |= {feature: reason for feature, reason in lacks.items() if reason}
    missing = LACKS.keys() | why.keys()
    features = tuple(feature for feature in ENGINE_FEATURES if feature not in missing)
    return EngineCard(kind="vllm", version=version, features=features, why=why)


#: One more than clients may ask for: the sampled token has a place of its own.
MAX_LOGPROBS = 21
#: Grammars are in the dialect of this backend.
STRUCTURED = json.dumps({"backend": "guidance"})
#: vLLM takes requests in the order of their priorities, lower ones first, and equal ones in the order of arrival.
POLICY_FLAG, BY_PRIORITY = "scheduling-policy", "priority"
MODULE = "vllm.entrypoints.openai.api_server"
#: Opens the endpoint of token ids. Older versions have it always, and refuse the flag.
SCALE_OUT = "enable-scale-out"

#: Engines side by side, each with all weights.
ENGINES_FLAG = "data-parallel-size"
EXECUTOR_FLAG = "distributed-executor-backend"
LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
#: The extension that midstream loads into vLLM's workers, and its directory.
WORKER_FLAG = "worker-extension-cls"
WORKER = "midstream_vllm_worker.Worker"
#: midstream's scheduler, for versions of vLLM whose files have the queue that it knows.
SCHEDULER_FLAG, SCHEDULER = "scheduler-cls", "midstream_vllm_scheduler.scheduler"
KNOWN_QUEUE = "kv_holding_waiting"
#: Flags that give vLLM a connector, which may let a check wait for KV.
CONNECTOR_FLAG = "kv-transfer-config"
CONNECTORS = ("kv-transfer", "kv-offloading")
#: Those that find KV by vLLM's hashes of blocks, which have the salt in them.
SALTED = ("OffloadingConnector", "SimpleCPUOffloadConnector")
UNSALTED = "it may find KV by its tokens alone, whatever weights computed it, and for whom"
_CONNECTOR = re.compile(r"""\bkv_connector(?:_module_path)?["']?\s*[:=]\s*["']([\w.]+)""")
#: The one that a server with weight transfer has. It loads the other one, too.
TRANSFER_WORKER = "midstream_vllm_transfer.TransferWorker"
EXTENSIONS = (WORKER, TRANSFER_WORKER)
TRANSFER_FLAG = "weight-transfer-config"
#: Backends of vLLM that cannot be passed through, and why. Others are taken to bring whole tensors to `load_weights`.
NOT_PASSED = {
    "ipc": "it sends pickled handles of the trainer's own device, which could run any code",
    "sparse_nccl": "it patches weights, so no file could have what serves",
    "sharded_rdt": "each rank pulls its own slices, so no file could have what serves",
    "nccl_m2n": "it writes shards, so no file could have what serves",
}
WORKER_DIR = Path(__file__).parent / "worker_extension"
#: Why a server lacks what the extension gives.
NO_EXTENSION = (
    "it runs without midstream's worker extension: start it with "
    f"PYTHONPATH={WORKER_DIR} and --{WORKER_FLAG} {WORKER}"
)
#: Why a server lacks what the scheduler gives.
NO_SCHEDULER = (
    "it runs without midstream's scheduler, which is made for that of vLLM 0.32; an attached server is given it by "
    f"PYTHONPATH={WORKER_DIR} and --{SCHEDULER_FLAG} {SCHEDULER}"
)

#: The flag that makes vLLM serve adapters.
LORA_FLAG = "enable-lora"
#: Adapters in one step, and its value unless the user gives another. vLLM's default is 1.
PLACES_FLAG = "max-loras"
PLACES = 8

_ONE = "a replica is one server: set `replicas`"
_OURS = "midstream gives it itself"
_LOOPBACK = "midstream calls the server at a port of its own on loopback, over plain HTTP"
#: Flags that a user may not give, and why.
REFUSED = {
    "model": f"{_OURS}: set `model`",
    "served-model-name": _OURS,
    "host": _LOOPBACK,
    "port": _LOOPBACK,
    "uds": _LOOPBACK,
    "root-path": _LOOPBACK,
    "ssl-keyfile": _LOOPBACK,
    "ssl-certfile": _LOOPBACK,
    "grpc": _LOOPBACK,
    "headless": _LOOPBACK,
    "config": "midstream could not check the flags in the file: give the flags themselves",
    "api-key": "the process list would show it: set VLLM_API_KEY in vllm.env",
    "disable-fastapi-docs": "midstream reads /openapi.json to see that the endpoints it needs are there",
    "no-enable-scale-out": "midstream's requests go to /inference/v1/generate",
    "no-enable-prompt-tokens-details": "midstream reports how much of a prompt was cached",
    "lora-modules": "publish adapters as policies",
    TRANSFER_FLAG: "set vllm.weight_transfer",
    "lora-target-modules": "vLLM would leave out what an adapter has besides",
    "data-parallel-external-lb": _ONE,
    "data-parallel-hybrid-lb": _ONE,
}
#: Of the ranks of one server.
SAME_SEED = "the same on all machines: each rank draws tokens itself"
#: Flags that a user may give with this value only, and why.
ONLY = {
    "api-server-count": ("1", "with several API processes it is unknown which tokens came before a switch"),
    "logprobs-mode": ("raw_logprobs", "midstream reports raw log-probabilities"),
    "kv-offloading-backend": ("native", UNSALTED),
}
#: Flags by which midstream starts a server in another way.
SOUGHT = (
    *ONLY,
    CONNECTOR_FLAG,
    ENGINES_FLAG,
    LORA_FLAG,
    PLACES_FLAG,
    POLICY_FLAG,
    WORKER_FLAG,
    EXECUTOR_FLAG,
    "nnodes",
    "seed",
)
#: Other spellings of a flag: short forms, the beginning of one that is no other's, and negations of flags that midstream gives.
SAME = {
    "as": "api-server-count",
    "asc": "api-server-count",
    "dp": ENGINES_FLAG,
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "n": "nnodes",
    "no-disable-uvicorn-access-log": "disable-uvicorn-access-log",
    "enable-chunked-prefill": "no-enable-chunked-prefill",
}


def given_flags(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """The flags in `args`: their names as vLLM reads them, without leading dashes, and their values.

    Forms: `--flag value`, `--flag=value`, `--flag_name`, `--flag.key value`, `-f value`. The value is None if none follows.
    """
    flags: list[tuple[str, str | None]] = []
    for place, arg in enumerate(args):
        if not _is_flag(arg):
            continue
        name, equals, value = arg.lstrip("-").partition("=")
        name = name.partition(".")[0].replace("_", "-")
        following = args[place + 1] if place + 1 < len(args) and not _is_flag(args[place + 1]) else None
        flags.append((SAME.get(name, name), value if equals else following))
    return flags


def adapter_places(args: Sequence[str]) -> int:
    """Adapters that vLLM computes in one step; 0: it serves none. Raises ConfigError."""
    flags = dict(given_flags(args))
    if LORA_FLAG not in flags:
        return 0
    value = flags.get(PLACES_FLAG) or str(PLACES)
    if not value.isdecimal():
        raise ConfigError(f"vllm.args: --{PLACES_FLAG} must be a number, got {value}")
    return int(value)


def by_priority(args: Sequence[str]) -> bool:
    """True if a server with these further flags schedules by priority."""
    return dict(given_flags(args)).get(POLICY_FLAG, BY_PRIORITY) == BY_PRIORITY


def data_parallel(args: Sequence[str]) -> bool:
    """True if a server with these further flags has several engines."""
    return dict(given_flags(args)).get(ENGINES_FLAG, "1") != "1"


def unheard(extension: str, *, several: bool) -> str:
    """Why nothing is learnt from all workers of a server; empty if it is. extension: that they load. several: engines."""
    if extension not in EXTENSIONS:
        return NO_EXTENSION
    return ONE_ANSWERS if several else ""


def _is_flag(arg: str) -> bool:
    return arg.startswith("-") and not arg[1:2].isdigit() and len(arg) > 1


def check_arguments(args: Sequence[str]) -> None:
    """Raises ConfigError for flags that midstream depends on."""
    if args and not _is_flag(args[0]):
        raise ConfigError(f"vllm.args: expected a flag of vLLM first, got {args[0]!r}")
    check_names("vLLM", args, REFUSED, SOUGHT)
    adapter_places(args)
    given = dict(given_flags(args))
    if "nnodes" in given and "seed" not in given:
        raise ConfigError(f"vllm.args: --nnodes needs a --seed, {SAME_SEED}")
    for name, value in given_flags(args):
        if name in REFUSED:
            # In its short form.
            raise ConfigError(f"vllm.args: --{name} cannot be given: {REFUSED[name]}")
        if name == CONNECTOR_FLAG:
            _check_connector(value or "")
        only, why = ONLY.get(name, (value, ""))
        if value != only:
            raise ConfigError(f"vllm.args: --{name} must be {only}, got {value}: {why}")


def unsalted(config: str) -> str:
    """The connectors in a configuration of vLLM that are none of SALTED; "" if there is none. Another module's may be any."""
    return ", ".join(name for name in _CONNECTOR.findall(config) if name not in SALTED)


def _check_connector(config: str) -> None:
    if not config.lstrip().startswith("{"):
        raise ConfigError(f"vllm.args: --{CONNECTOR_FLAG}: give it as one JSON object")
    if names := unsalted(config):
        raise ConfigError(f"vllm.args: --{CONNECTOR_FLAG} cannot be given with {names}: {UNSALTED}")


def check_weight_transfer(backend: str, args: Sequence[str]) -> None:
    """Raises ConfigError unless trainers can send weights by this backend of vLLM; "" is none."""
    if (why := NOT_PASSED.get(backend)) is not None:
        raise ConfigError(f"vllm.weight_transfer: {backend} cannot be used: {why}")
    given = {name for name, _ in given_flags(args)} if backend else set()
    if LORA_FLAG in given:
        raise ConfigError(f"vllm.weight_transfer: {BESIDE_POLICIES}")
    if WORKER_FLAG in given:
        raise ConfigError(f"vllm.args: --{WORKER_FLAG} cannot be given with vllm.weight_transfer: {_OURS}")


def command_line(
    python: str,
    model_dir: Path,
    served_name: str,
    port: int,
    seed: int,
    args: Sequence[str],
    weight_transfer: str = "",
) -> list[str]:
    """seed: of the server's sampler. Two servers with one seed draw the same tokens. weight_transfer: the backend; "" for
    none. Raises ConfigError."""
    check_arguments(args)
    check_weight_transfer(weight_transfer, args)
    ours = {
        "generation-config": "vllm",
        SCALE_OUT: None,
        "enable-prompt-tokens-details": None,
        "disable-uvicorn-access-log": None,
        "structured-outputs-config": STRUCTURED,
        "max-logprobs": str(MAX_LOGPROBS),
        "seed": str(seed),
        POLICY_FLAG: BY_PRIORITY,
    }
    if not knows(python, SCALE_OUT):
        # It has these endpoints without a flag.
        del ours[SCALE_OUT]
    flags = dict(given_flags(args))
    if flags.get(EXECUTOR_FLAG) != "ray" and "nnodes" not in flags:
        # Processes on other machines may not find them.
        ours[WORKER_FLAG] = WORKER
    steps_alone = not data_parallel(args) and not any(name.startswith(CONNECTORS) for name in flags)
    if has_known_queue(python) and by_priority(args) and steps_alone:
        ours[SCHEDULER_FLAG] = SCHEDULER
    if is_cpu_build(python):
        # A generator on the CPU has no offset to set, so a seeded request ends the server if its prompt is computed in pieces.
        ours["no-enable-chunked-prefill"] = None
    if weight_transfer:
        ours[WORKER_FLAG] = TRANSFER_WORKER
        ours[TRANSFER_FLAG] = json.dumps({"backend": weight_transfer})
    if LORA_FLAG in flags:
        ours[PLACES_FLAG] = str(PLACES)
    command = [python, "-P", "-m", MODULE, "--model", str(model_dir), "--served-model-name", served_name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in ours.items():
        if name not in flags:
            command += [f"--{name}"] if value is None else [f"--{name}", value]
    return [*command, *args]


def is_cpu_build(python: str) -> bool:
    """Whether vLLM for CPUs is installed in the environment of `python`."""
    return any(Path(python).parent.parent.glob("lib/python*/site-packages/vllm*cpu*.dist-info"))


def knows(python: str, flag: str) -> bool:
    """Whether the vLLM in the environment of `python` has a flag; True where its files are not found."""
    packages = list(Path(python).parent.parent.glob("lib/python*/site-packages/vllm/entrypoints"))
    name = flag.replace("-", "_").encode()
    files = (file for package in packages for file in package.rglob("*args.py"))
    return not packages or any(name in file.read_bytes() for file in files)


def has_known_queue(python: str) -> bool:
    """Whether the vLLM in the environment of `python` schedules as midstream's scheduler knows it."""
    files = Path(python).parent.parent.glob("lib/python*/site-packages/vllm/v1/core/sched/scheduler.py")
    return any(KNOWN_QUEUE.encode() in file.read_bytes() for file in files)


def openmp_library(python: str) -> Path | None:
    """The library that vLLM for CPUs wants preloaded, if it is installed in the environment of `python`."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return library if is_cpu_build(python) and library.is_file() else None


def environment(
    base: Mapping[str, str],
    given: Mapping[str, str],
    python: str,
    cores: Sequence[int] = (),
    gpus: Sequence[int] = (),
    *,
    adapters: bool = False,
) -> dict[str, str]:
    """The environment `base` of this process, then midstream's variables for vLLM, then `given`, the user's settings.

    adapters: they are loaded and unloaded while the server runs.

    gpus: indices among the GPUs that this process sees. Raises ConfigError when it does not see so many.
    """
    env = {
        **base,
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if adapters:
        env[LORA_VARIABLE] = "True"
    if cores:
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    if gpus and GPUS not in given:
        env[GPUS] = visible("vllm.gpus", gpus, base.get(GPUS))
    paths = (str(WORKER_DIR), given.get("PYTHONPATH", base.get("PYTHONPATH", "")))
    given = {**given, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    preloaded, library = env.get("LD_PRELOAD", ""), openmp_library(python)
    if library is not None and "libiomp5" not in preloaded:
        env["LD_PRELOAD"] = os.pathsep.join(filter(None, (str(library), preloaded)))
    return {**env, **given}
