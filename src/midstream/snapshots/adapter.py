"""A LoRA adapter's directory, as PEFT writes it, read from its configuration and its header: no tensor data, no torch.

Always holds: an AdapterSpec fits the base model to the last shape, and leaves no tensor of the file out. What would change
the numbers and is not served is refused by name. An adapter that a later version of PEFT writes with something new is refused,
too, if it has a tensor that is not known here.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from midstream.core.errors import SnapshotIncompatible, SnapshotMissing
from midstream.snapshots.layout import (
    INDEX_FILE,
    WEIGHTS_FILE,
    CheckpointSpec,
    TensorSpec,
    parse_object,
    read_file_layout,
    read_json,
)
from midstream.snapshots.messages import and_more, shown, shown_value

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
#: All that an adapter is. The weights come first, as in a bucket.
ADAPTER_FILES = (ADAPTER_WEIGHTS_FILE, ADAPTER_CONFIG_FILE)
RANK_MAX = 256
NUMBER_MAX = 1e9
#: An adapter's configuration, in bytes; and each list or map in it, in entries.
CONFIG_BYTES_MAX = 2**20
CONFIG_ENTRIES_MAX = 10_000
#: All patterns of a field together, in characters: each is tried on each module.
PATTERN_CHARS_MAX = 2**16
DTYPES = ("F32", "F16", "BF16")

#: By field of the configuration: the values that change nothing here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    # The others change the base's weights, too.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
_TENSOR = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
_COPY = re.compile(r"base_model\.model\.(?P<path>lm_head|(?:.+\.)?embed_tokens)(?:\.base_layer)?\.weight")
_FUSED = re.compile(r"(?P<experts>.+\.experts)(?:\.base_layer)*")
#: Only the plain spelling of a number: `01` would be a second name of an expert.
_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9][0-9]{0,8})\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
#: PEFT itself begins patterns with `.*\.`, for experts that transformers keeps in one tensor. No other repetition is served.
_PATTERN = re.compile(r"\.\*([\w.^$]|\\\.){1,255}|([\w.|^$]|\\\.){1,255}")
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})(\.dev)?")
_TURNED_UNTIL = (0, 19, 1)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class AdaptedMap:
    """One linear map of the base, and what is added to it: `scaling * b @ a`.

    a, b: names of tensors in the file. With experts == 0 they are [rank, inputs] and [outputs, rank]. Otherwise one pair of
    tensors holds those of all experts, as PEFT lays them out: [experts * rank, inputs], [outputs, rank * experts]. If turned,
    as before PEFT 0.19.1: [experts * rank, outputs], [inputs, rank * experts], and the transpose is added.
    """

    a: str
    b: str
    rank: int
    scaling: float
    inputs: int
    outputs: int
    experts: int = 0
    turned: bool = False


@dataclass(frozen=True)
class AdapterSpec:
    """maps: by the path of the module in the base, such as `model.layers.0.self_attn.q_proj` and
    `model.layers.0.mlp.experts.gate_up_proj`.

    copies: tensors of the base that PEFT writes again beside an adapted output layer, and their names in the base. Whoever
    reads the numbers has to find them equal.
    """

    maps: Mapping[str, AdaptedMap]
    copies: Mapping[str, str]

    @property
    def parameters(self) -> int:
        return sum(m.rank * (m.inputs + m.outputs) * max(1, m.experts) for m in self.maps.values())


def is_adapter(directory: Path) -> bool:
    """A checkpoint may have an adapter's configuration beside it, of which it was merged. A directory that is gone is none."""
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError:
        return False
    return is_adapter_listing(names)


def _has_checkpoint(directory: Path) -> bool:
    return any((directory / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))


def check_adapter_files(directory: Path) -> None:
    """Raise SnapshotError unless the files of an adapter are there and whole. Whether it fits a base is not looked at."""
    read_json(directory, ADAPTER_CONFIG_FILE)
    read_file_layout(directory / ADAPTER_WEIGHTS_FILE)


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise SnapshotIncompatible when files of these sizes, in bytes, are an adapter that is not read."""
    size = sizes.get(ADAPTER_CONFIG_FILE, 0)
    if is_adapter_listing(sizes) and size > CONFIG_BYTES_MAX:
        raise SnapshotIncompatible(
            f"{ADAPTER_CONFIG_FILE}: has {size} bytes, at most {CONFIG_BYTES_MAX} are read"
        )


def check_found(sizes: Mapping[str, int], config: bytes | None) -> None:
    """Raise SnapshotError when no replica takes an adapter of these files, whatever its base is.

    sizes: in bytes, by name. config: the configuration's bytes, if they were read. Of the weights nothing is read.
    """
    check_sizes(sizes)
    checkpoint = WEIGHTS_FILE in sizes or INDEX_FILE in sizes
    if not is_adapter_listing(sizes) and (checkpoint or ADAPTER_WEIGHTS_FILE not in sizes):
        return
    for name, how in ((ADAPTER_CONFIG_FILE, ""), (ADAPTER_WEIGHTS_FILE, " with safe_serialization=True")):
        if name not in sizes:
            raise SnapshotMissing(f"{name}: is not there; PEFT's save_pretrained writes it{how}")
    if config is not None:
        _check_config(parse_object(ADAPTER_CONFIG_FILE, config))


def is_adapter_listing(names: Collection[str]) -> bool:
    """Like is_adapter, given the names of a directory's files."""
    checkpoint = WEIGHTS_FILE in names or INDEX_FILE in names
    return ADAPTER_CONFIG_FILE in names and (ADAPTER_WEIGHTS_FILE in names or not checkpoint)


def read_adapter(directory: Path, base: CheckpointSpec) -> AdapterSpec:
    """The adapter in `directory`, which has to fit `base`. The message of every error names the field or the tensor.

    Raises SnapshotIncompatible; SnapshotMissing, SnapshotCorrupt, SnapshotError as read_file_layout does.
    """
    check_sizes({path.name: path.stat().st_size for path in directory.iterdir()})
    config = read_json(directory, ADAPTER_CONFIG_FILE)
    _check_config(config)
    if _has_checkpoint(directory):
        raise SnapshotIncompatible(f"{shown(directory.name)}: holds an adapter and a checkpoint; publish one")
    tensors = dict(read_file_layout(directory / ADAPTER_WEIGHTS_FILE).tensors)
    copies = _copies(tensors, base)
    for name in copies:
        del tensors[name]
    shapes = _BaseShapes(base)
    maps: dict[str, AdaptedMap] = {}
    scaling = _Scaling(config)
    for path, (a, b) in sorted(_pairs(tensors).items()):
        module, found = _map(path, (a, tensors[a]), (b, tensors[b]), shapes, config.get("peft_version"))
        if module in maps:
            raise SnapshotIncompatible(f"{shown(a)}: {shown(module)} is adapted twice")
        # PEFT's patterns are of the names that its file has; those of fused experts have none of their own there.
        maps[module] = scaling.of(module if found.experts else path, found)
    if not maps:
        raise SnapshotIncompatible(f"{ADAPTER_WEIGHTS_FILE}: adapts nothing")
    _check_experts(maps)
    _check_targets(config, maps, base)
    return AdapterSpec(maps, copies)


def _check_config(config: dict[str, Any]) -> None:
    for field, value in config.items():
        if isinstance(value, list | dict) and len(value) > CONFIG_ENTRIES_MAX:
            raise SnapshotIncompatible(
                f"{ADAPTER_CONFIG_FILE}: {shown(field)} has {len(value)} entries, at most {CONFIG_ENTRIES_MAX} are read"
            )
    for field, neutral in _NEUTRAL.items():
        value = config.get(field)
        if field == "peft_type" and value is None:
            raise SnapshotIncompatible(f"{ADAPTER_CONFIG_FILE}: peft_type is missing, 'LORA' is expected")
        # 1 and True are equal in Python.
        if not any(type(value) is type(each) and value == each for each in neutral):
            raise SnapshotIncompatible(
                f"{ADAPTER_CONFIG_FILE}: {field} is {shown_value(value)}, which is not served; "
                f"{shown_value(neutral[-1] if field == 'peft_type' else neutral[1])} is"
            )
    rank: Any = config.get("r")
    alpha = config.get("lora_alpha")
    if not _whole(rank) or not 1 <= rank <= RANK_MAX:
        raise SnapshotIncompatible(
            f"{ADAPTER_CONFIG_FILE}: r is {shown_value(rank)}, a number from 1 to {RANK_MAX} is expected"
        )
    if not _number(alpha):
        raise SnapshotIncompatible(
            f"{ADAPTER_CONFIG_FILE}: lora_alpha is {shown_value(alpha)}, a number is expected"
        )
    _check_patterns(config)
    for target in _targets(config):
        if not isinstance(target, str):
            raise SnapshotIncompatible(f"{ADAPTER_CONFIG_FILE}: target_modules has {shown_value(target)}")
        if target.rpartition(".")[2] == "embed_tokens":
            raise SnapshotIncompatible(
                f"{ADAPTER_CONFIG_FILE}: target_modules has {shown(target)}; adapters of embeddings are not served"
            )


def _check_patterns(config: dict[str, Any]) -> None:
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(field) or {}
        good = _whole if field == "rank_pattern" else _number
        if not isinstance(pattern, dict) or not all(good(value) for value in pattern.values()):
            raise SnapshotIncompatible(f"{ADAPTER_CONFIG_FILE}: {field} is not numbers by module")
        for each in pattern:
            if _PATTERN.fullmatch(each) is None:
                raise SnapshotIncompatible(
                    f"{ADAPTER_CONFIG_FILE}: {field} has {shown(each)}; names, dots, '|', '^', '$' and '.*' at"
                    " the beginning are served"
                )
        if (size := sum(map(len, pattern))) > PATTERN_CHARS_MAX:
            raise SnapshotIncompatible(
                f"{ADAPTER_CONFIG_FILE}: {field} has patterns of {size} characters, at most {PATTERN_CHARS_MAX}"
                " are served"
            )


def _check_experts(maps: Mapping[str, AdaptedMap]) -> None:
    """The maps of an expert are adapted one by one, or those of all experts together."""
    together = {module.rpartition(".")[0] for module, found in maps.items() if found.experts}
    for module in maps:
        if (match := _EXPERT.fullmatch(module)) and match[1] in together:
            raise SnapshotIncompatible(f"{shown(module)} is adapted twice: by itself and with all experts")


def _copies(tensors: Mapping[str, TensorSpec], base: CheckpointSpec) -> dict[str, str]:
    found = {}
    for name, spec in tensors.items():
        match = _COPY.fullmatch(name)
        if match is None:
            continue
        own = f"{match['path']}.weight"
        if own not in base.tensors:
            # The output layer is tied to the embedding.
            own = next((n for n in base.tensors if n.endswith("embed_tokens.weight")), own)
        if own not in base.tensors or base.tensors[own].shape != spec.shape:
            raise SnapshotIncompatible(
                f"tensor {shown(name)} has shape {shown_value(list(spec.shape))}, which the base model's has not"
            )
        _check_dtype(name, spec)
        found[name] = own
    return found


def _check_dtype(name: str, spec: TensorSpec) -> None:
    """Copies are checked, too: in another dtype their numbers could not be compared with the base's."""
    if spec.dtype not in DTYPES:
        raise SnapshotIncompatible(
            f"tensor {shown(name)} has dtype {spec.dtype}, one of {', '.join(DTYPES)} is expected"
        )


def _pairs(tensors: Mapping[str, TensorSpec]) -> dict[str, tuple[str, str]]:
    """The names of A and B, by their path in the file."""
    sides: dict[str, dict[str, str]] = {}
    for name, spec in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise SnapshotIncompatible(
                f"tensor {shown(name)} is none of a LoRA adapter that is served here"
                " (base_model.model.<module>.lora_A.weight or .lora_B.weight)"
            )
        _check_dtype(name, spec)
        if len(spec.shape) != 2:
            raise SnapshotIncompatible(f"tensor {shown(name)} has {len(spec.shape)} dimensions, not 2")
        sides.setdefault(match["path"], {})[match["side"]] = name
    for path, found in sides.items():
        if len(found) != 2:
            absent = "AB".replace(next(iter(found)), "")
            raise SnapshotIncompatible(f"{shown(path)}.lora_{absent}.weight is missing from the adapter")
    return {path: (found["A"], found["B"]) for path, found in sides.items()}


class _BaseShapes:
    """The linear maps of the base, by the path of their module."""

    def __init__(self, base: CheckpointSpec) -> None:
        self._tensors = base.tensors
        # By the path of the module, as transformers has it.
        self._maps = {
            _normal(n.removesuffix(".weight")): s for n, s in base.tensors.items() if n.endswith(".weight")
        }
        # By the path of the experts' module, the shapes of the maps of one expert.
        self._experts: dict[str, dict[str, tuple[int, ...]]] = {}
        self._counts: dict[str, int] = {}
        for name, spec in base.tensors.items():
            module = _normal(name.removesuffix(".weight"))
            if match := _EXPERT.fullmatch(module):
                self._experts.setdefault(match[1], {})[match[3]] = tuple(spec.shape)
                self._counts[match[1]] = max(self._counts.get(match[1], 0), int(match[2]) + 1)
            elif ".experts." in name and len(spec.shape) == 3:
                experts, part = _normal(name).rsplit(".", 1)
                self._experts.setdefault(experts, {})[part] = tuple(spec.shape[1:])
                self._counts[experts] = spec.shape[0]

    def linear(self, module: str) -> tuple[int, int] | None:
        """(outputs, inputs)."""
        embedding = module.endswith("embed_tokens")
        spec = None if embedding or _EXPERT.fullmatch(module) else self._maps.get(module)
        if spec is None and module == "lm_head":
            # It is tied to the embedding.
            spec = next((s for n, s in self._tensors.items() if n.endswith("embed_tokens.weight")), None)
        if spec is not None and len(spec.shape) == 2:
            return spec.shape[0], spec.shape[1]
        if match := _EXPERT.fullmatch(module):
            experts, number, part = match[1], int(match[2]), match[3]
            shape = self._one(experts, part)
            return shape if number < self._counts.get(experts, 0) else None
        return None

    def fused(self, experts: str) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of one expert, by the name of the parameter that holds all."""
        gate, down = self._one(experts, "gate_proj"), self._one(experts, "down_proj")
        if gate is None or down is None:
            return {}
        return {"gate_up_proj": (2 * gate[0], gate[1]), "down_proj": down}

    def count(self, experts: str) -> int:
        return self._counts.get(experts, 0)

    def _one(self, experts: str, part: str) -> tuple[int, int] | None:
        shapes = self._experts.get(experts, {})
        if part in shapes:
            return shapes[part][0], shapes[part][1]
        both = shapes.get("gate_up_proj")
        if both is not None and part in ("gate_proj", "up_proj"):
            return both[0] // 2, both[1]
        return None


def _normal(path: str) -> str:
    """The path as transformers' modules have it, with the names that this package uses for the maps of an expert."""
    path = path.replace(".block_sparse_moe.", ".mlp.")
    if match := _EXPERT.fullmatch(path):
        return f"{match[1]}.{match[2]}.{_PARTS.get(match[3], match[3])}"
    return path


def _map(
    path: str, a: tuple[str, TensorSpec], b: tuple[str, TensorSpec], shapes: _BaseShapes, version: Any
) -> tuple[str, AdaptedMap]:
    """The module that is adapted, and how, without its scaling. version: what the configuration says of PEFT's."""
    (a_name, a_spec), (b_name, b_spec) = a, b
    module = _normal(path)
    if match := _FUSED.fullmatch(module):
        experts, count = match["experts"], shapes.count(match["experts"])
        written = b_spec.shape[0], a_spec.shape[1]
        for part, (outputs, inputs) in shapes.fused(experts).items():
            if written in ((outputs, inputs), (inputs, outputs)):
                rows = _rank(a_name, a_spec, b_name, b_spec)
                if rows % count:
                    raise SnapshotIncompatible(
                        f"tensor {shown(a_name)} has {rows} rows, no multiple of the {count} experts"
                    )
                turned = _turned(version) if outputs == inputs else written != (outputs, inputs)
                found = AdaptedMap(a_name, b_name, rows // count, 1.0, inputs, outputs, count, turned)
                return f"{experts}.{part}", found
        raise SnapshotIncompatible(
            f"tensor {shown(a_name)} has shape {shown_value(list(a_spec.shape))} and {shown(b_name)} "
            f"{shown_value(list(b_spec.shape))}, which fit no map of the base model's {shown(experts)}"
        )
    shape = shapes.linear(module)
    if shape is None:
        raise SnapshotIncompatible(f"tensor {shown(a_name)}: the base model has no linear map {shown(path)}")
    outputs, inputs = shape
    if a_spec.shape[1] != inputs or b_spec.shape[0] != outputs:
        raise SnapshotIncompatible(
            f"tensors {shown(a_name)} {shown_value(list(a_spec.shape))} and {shown(b_name)} "
            f"{shown_value(list(b_spec.shape))} do not fit the base model's map of {inputs} inputs and {outputs} outputs"
        )
    return module, AdaptedMap(a_name, b_name, _rank(a_name, a_spec, b_name, b_spec), 1.0, inputs, outputs)


def _turned(version: Any) -> bool:
    """True if this PEFT wrote the fused experts' maps turned. Of a square map the shapes do not tell."""
    match = _VERSION.match(str(version))
    # Development versions of 0.19.1 are from before the change or behind it.
    if match is None or ((written := tuple(map(int, match.groups()[:3]))) == _TURNED_UNTIL and match[4]):
        raise SnapshotIncompatible(
            f"{ADAPTER_CONFIG_FILE}: peft_version is {shown_value(version)}; before 0.19.1 PEFT wrote experts' maps with as"
            " many inputs as outputs the other way round, so the version has to say which"
        )
    return written < _TURNED_UNTIL


def _rank(a_name: str, a: TensorSpec, b_name: str, b: TensorSpec) -> int:
    if a.shape[0] != b.shape[1] or not a.shape[0]:
        raise SnapshotIncompatible(
            f"tensor {shown(a_name)} has {a.shape[0]} rows, {shown(b_name)} has {b.shape[1]} columns;"
            " both are the rank"
        )
    return a.shape[0]


class _Scaling:
    """What the configuration says of ranks and scaling. It is checked."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._rank: int = config["r"]
        self._alpha: float = config["lora_alpha"]
        self._of_root = bool(config.get("use_rslora"))
        self._ranks, self._alphas = (
            _compiled(config.get(f) or {}) for f in ("rank_pattern", "alpha_pattern")
        )

    def of(self, module: str, found: AdaptedMap) -> AdaptedMap:
        """`found` with its scaling. module: the path that patterns are matched with."""
        rank: int = _of_pattern(self._ranks, module, self._rank)
        alpha: float = _of_pattern(self._alphas, module, self._alpha)
        if found.rank != rank or not 1 <= rank <= RANK_MAX:
            raise SnapshotIncompatible(
                f"tensor {shown(found.a)} has rank {found.rank}, {ADAPTER_CONFIG_FILE} says {shown_value(rank)}"
                f" (at most {RANK_MAX} are served)"
            )
        scaling = alpha / (math.sqrt(rank) if self._of_root else rank)
        return replace(found, scaling=scaling)


_Patterns = list[tuple[re.Pattern[str], Any]]


def _compiled(patterns: Mapping[str, Any]) -> _Patterns:
    """The patterns, compiled as PEFT does it. One that begins with `.*` needs nothing before it.

    So each has at most one repetition, and a pattern from outside cannot take long to match.
    """
    return [
        (re.compile(rf"({pattern})$" if pattern.startswith(".*") else rf"(.*\.)?({pattern})$"), value)
        for pattern, value in patterns.items()
    ]


def _of_pattern(patterns: _Patterns, module: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the end of the module's path."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _check_targets(config: dict[str, Any], maps: Mapping[str, AdaptedMap], base: CheckpointSpec) -> None:
    """Every module that the configuration names by the end of its path is there. A file that was cut lacks some."""
    wanted = frozenset(_targets(config))
    absent = [m for m in _linear_modules(base) if m not in maps and not wanted.isdisjoint(_ends(m))]
    if absent:
        raise SnapshotIncompatible(
            f"target_modules has {shown(absent[0].rsplit('.', 1)[-1])}, but the adapter has nothing for "
            f"{shown(absent[0])}{and_more(len(absent) - 1)}"
        )


def _targets(config: dict[str, Any]) -> list[Any]:
    """The modules that are adapted wherever they are, by the ends of their paths; none where the configuration says more."""
    targets = config.get("target_modules")
    limited = any(config.get(field) for field in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    return targets if isinstance(targets, list) and not limited else []


def _linear_modules(base: CheckpointSpec) -> Iterator[str]:
    """Experts are tensors of one module in transformers, so PEFT does not find them by name."""
    for name, spec in base.tensors.items():
        module = name.removesuffix(".weight")
        if module != name and len(spec.shape) == 2 and ".experts." not in name:
            yield module


def _ends(module: str) -> Iterator[str]:
    """The path itself, and what is behind each of its dots."""
    parts = module.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= NUMBER_MAX
