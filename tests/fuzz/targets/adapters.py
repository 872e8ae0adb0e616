"""A stranger's LoRA adapter: snapshots/adapter.py, and what engine/adapter.py makes of its numbers.

Checked: only the documented errors come out, each a short line. An adapter that is accepted is read the same again, fits the
base map by map, and leaves no tensor out. Its scaling is the one that PEFT computes. Its numbers are those of the
`safetensors` package.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from midstream.core.errors import SnapshotError
from midstream.snapshots.adapter import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    DTYPES,
    RANK_MAX,
    AdaptedMap,
    AdapterSpec,
    check_adapter_files,
    is_adapter,
    read_adapter,
)
from midstream.snapshots.layout import DTYPE_BITS, WEIGHTS_FILE, CheckpointSpec, read_spec
from targets.snapshot_files import BETWEEN, directory, safetensors_file
from targets.target import Target, check, outcome

#: Longer than any message that is cut as it should be.
MESSAGE_CHARS_MAX = 1500
#: Of one tensor.
NUMBERS_MAX = 2**12
PREFIX = "base_model.model."
_LINE = re.compile(r"(?P<name>[^ ]*) (?P<dtype>\w*)(?P<shape>(?: [0-9]{1,6})*)", re.ASCII)
_VOCAB, _HIDDEN, _INNER, _EXPERTS = 6, 4, 3, 2
_SHAPES = {"gate_proj": (_INNER, _HIDDEN), "up_proj": (_INNER, _HIDDEN), "down_proj": (_HIDDEN, _INNER)}
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
#: By the path of a module: its outputs, its inputs, and how many experts it holds.
_Linear = Mapping[str, tuple[int, int, int]]


# -- the base


def base_shapes() -> dict[str, tuple[int, ...]]:
    """A dense layer, and a layer of each way in which files hold experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCAB, _HIDDEN),
        "lm_head.weight": (_VOCAB, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    for name in ("q_proj", "o_proj"):
        shapes[f"model.layers.0.self_attn.{name}.weight"] = (_HIDDEN, _HIDDEN)
    for part, shape in _SHAPES.items():
        shapes[f"model.layers.0.mlp.{part}.weight"] = shape
    for expert in range(_EXPERTS):
        for part, shape in _SHAPES.items():
            shapes[f"model.layers.1.mlp.experts.{expert}.{part}.weight"] = shape
        for own, part in _MIXTRAL.items():
            shapes[f"model.layers.3.block_sparse_moe.experts.{expert}.{own}.weight"] = _SHAPES[part]
    shapes["model.layers.2.mlp.experts.gate_up_proj"] = (_EXPERTS, 2 * _INNER, _HIDDEN)
    shapes["model.layers.2.mlp.experts.down_proj"] = (_EXPERTS, _HIDDEN, _INNER)
    return shapes


def linear_maps() -> _Linear:
    """Every map of the base that an adapter may add to."""
    maps: dict[str, tuple[int, int, int]] = {"lm_head": (_VOCAB, _HIDDEN, 0)}
    for name, shape in base_shapes().items():
        if name.startswith("model.layers.0."):
            maps[name.removesuffix(".weight")] = (shape[0], shape[1], 0)
    for layer in (1, 2, 3):
        experts = f"model.layers.{layer}.mlp.experts"
        maps[f"{experts}.gate_up_proj"] = (2 * _INNER, _HIDDEN, _EXPERTS)
        maps[f"{experts}.down_proj"] = (_HIDDEN, _INNER, _EXPERTS)
        for expert in range(_EXPERTS):
            for part, (outputs, inputs) in _SHAPES.items():
                maps[f"{experts}.{expert}.{part}"] = (outputs, inputs, 0)
    return maps


BASE = base_shapes()
LINEAR = linear_maps()


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same numbers each time, exact in every dtype."""
    count = math.prod(shape)
    return ((np.arange(count) + len(name)) % 7 - 3).astype("<f4").reshape(shape) / 4


def written(tensor: np.ndarray, dtype: str) -> bytes:
    """A BF16 number is the first half of an F32 one."""
    if dtype == "BF16":
        return (tensor.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    kind = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "BOOL": "?"}.get(dtype)
    if kind is None:
        return bytes(tensor.size * DTYPE_BITS.get(dtype, 0) // 8)
    return tensor.astype(kind).tobytes()


def array(tensor: Mapping[str, Any]) -> np.ndarray:
    """As F32."""
    dtype, data = tensor["dtype"], bytes(tensor["data"])
    if dtype == "BF16":
        found = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        found = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype])
    return found.astype("<f4").reshape(tensor["shape"])


def weights_file(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Of names, dtypes and shapes. A copy of a tensor of the base has its numbers."""
    header: dict[str, Any] = {}
    data = b""
    for name, dtype, shape in tensors:
        own = name.removeprefix(PREFIX).replace(".base_layer", "")
        begin, data = len(data), data + written(values(own if own in BASE else name, shape), dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, len(data)]}
    return safetensors_file(header, data)


def weights_of(lines: bytes) -> bytes:
    """The file that lines describe: a path, a dtype, a rank, outputs and inputs; or a tensor's name, dtype and shape.

    What has another line is the file itself.
    """
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for line in lines.decode("utf-8", "surrogateescape").split("\n"):
        found = _LINE.fullmatch(line)
        if found is None or math.prod(shape := tuple(map(int, found["shape"].split()))) > NUMBERS_MAX:
            return lines
        name, dtype = found["name"], found["dtype"]
        if len(shape) != 3:
            tensors.append((name, dtype, shape))
            continue
        rank, outputs, inputs = shape
        tensors.append((f"{PREFIX}{name}.lora_A.weight", dtype, (rank, inputs)))
        tensors.append((f"{PREFIX}{name}.lora_B.weight", dtype, (outputs, rank)))
    return weights_file(tensors)


@cache
def base() -> tuple[Path, CheckpointSpec]:
    """Beside the directory of an input."""
    place = directory().parent / "adapters-base"
    place.mkdir()
    (place / "config.json").write_bytes(b"{}")
    (place / WEIGHTS_FILE).write_bytes(weights_file((name, "F32", shape) for name, shape in BASE.items()))
    return place, read_spec(place)


# -- what is checked


def run(data: bytes) -> None:
    """The configuration, then the weights (weights_of); one that is empty is not there."""
    (base_place, fits), place = base(), directory()
    config, _, lines = data.partition(BETWEEN)
    weights = weights_of(lines)
    for name, content in ((ADAPTER_CONFIG_FILE, config), (ADAPTER_WEIGHTS_FILE, weights)):
        if content:
            (place / name).write_bytes(content)
    _, broken = outcome(SnapshotError, lambda: check_adapter_files(place))
    spec, refused = outcome(SnapshotError, lambda: read_adapter(place, fits))
    again, also = outcome(SnapshotError, lambda: read_adapter(place, fits))
    check((spec, str(refused)) == (again, str(also)), "another adapter when it is read again", spec, again)
    for error in (broken, refused):
        check(str(error).isprintable(), "a message that is no line", error)
        check(len(str(error)) <= MESSAGE_CHARS_MAX, "a message without a bound", len(str(error)))
    if spec is not None:
        tensors = dict(safetensors.deserialize(weights))
        check(broken is None, "files that are not whole are an adapter", broken)
        check(is_adapter(place), "an adapter that is none to the engine")
        check_spec(spec, json.loads(config), tensors, fits)
        check_numbers(spec, place, base_place, tensors)
    there = {path.name for path in place.iterdir()}
    check(there <= {ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE}, "files beside the adapter's", there)


def check_spec(
    spec: AdapterSpec, config: dict[str, Any], tensors: Mapping[str, Any], fits: CheckpointSpec
) -> None:
    used = [*spec.copies, *(name for found in spec.maps.values() for name in (found.a, found.b))]
    check(sorted(used) == sorted(tensors), "a tensor is left out, or used twice", used, list(tensors))
    check(spec.maps and spec.parameters > 0, "an adapter of nothing", spec)
    for name, own in spec.copies.items():
        check(tuple(tensors[name]["shape"]) == fits.tensors[own].shape, "a copy of another shape", name)
    together = {module.rpartition(".")[0] for module, found in spec.maps.items() if found.experts}
    for module, found in spec.maps.items():
        check(LINEAR.get(module) == (found.outputs, found.inputs, found.experts), "no map of the base", found)
        one = re.fullmatch(r"(.+\.experts)\.\d+\.\w+", module)
        check(one is None or one[1] not in together, "a map of an expert is adapted twice", module)
        many, rank = max(found.experts, 1), found.rank
        check(1 <= rank <= RANK_MAX, "a rank out of bounds", found)
        # As PEFT before 0.19.1 laid out what all experts have.
        turned = bool(found.experts) and found.turned
        columns, rows = (found.outputs, found.inputs) if turned else (found.inputs, found.outputs)
        check(tuple(tensors[found.a]["shape"]) == (many * rank, columns), "another a", found)
        check(tuple(tensors[found.b]["shape"]) == (rows, many * rank), "another b", found)
        check({tensors[found.a]["dtype"], tensors[found.b]["dtype"]} <= {*DTYPES}, "another dtype", found)
        check_scaling(module, found, config)


def check_scaling(module: str, found: AdaptedMap, config: dict[str, Any]) -> None:
    """As peft.tuners.lora computes it: the first pattern that matches, else the default."""
    path = module if found.experts else found.a.removeprefix(PREFIX).removesuffix(".lora_A.weight")

    def of(field: str, default: Any) -> Any:
        patterns = (config.get(field) or {}).items()
        return next((v for p, v in patterns if re.match(rf"(.*\.)?({p})$", path)), default)

    rank, alpha = of("rank_pattern", config["r"]), of("alpha_pattern", config["lora_alpha"])
    expected = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    check(rank == found.rank, "another rank than PEFT's", rank, found)
    check(found.scaling == expected and math.isfinite(expected), "another scaling than PEFT's", found)


def check_numbers(spec: AdapterSpec, place: Path, base_place: Path, tensors: Mapping[str, Any]) -> None:
    """A copy may have other numbers than the base, which is the only refusal that is left."""
    import torch

    from midstream.engine.adapter import load_adapter

    loaded, refused = outcome(SnapshotError, lambda: load_adapter(place, base_place, torch.float32))
    check(refused is None or spec.copies, "an adapter that fits is refused", refused)
    if loaded is None:
        check(str(refused).isprintable(), "a message that is no line", refused)
        return
    check(loaded.keys() == spec.maps.keys(), "other maps than the file has", list(loaded))
    for module, found in spec.maps.items():
        a, b = array(tensors[found.a]), array(tensors[found.b])
        if found.experts:
            a = a.reshape(found.experts, found.rank, -1)
            b = np.stack([b[:, expert :: found.experts] for expert in range(found.experts)])
        if found.turned:
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        b = b * np.float32(found.scaling)
        check(np.array_equal(loaded[module].a.numpy(), a, equal_nan=True), "other numbers of a", module)
        check(np.array_equal(loaded[module].b.numpy(), b, equal_nan=True), "other numbers of b", module)
    for name, own in spec.copies.items():
        expected = values(own, BASE[own])
        check(tensors[name]["dtype"] in DTYPES, "a copy of another dtype", name)
        check(np.array_equal(array(tensors[name]), expected), "a copy that is none of the base's", name)


# -- seeds


def lines(paths: Mapping[str, tuple[int, int]], rank: int = 1, dtype: str = "F32", *copies: str) -> bytes:
    """paths: in the file, with their outputs and inputs. copies: names of tensors of the base."""
    found = list[str]()
    for path, (outputs, inputs) in paths.items():
        found.append(f"{path} {dtype} {rank} {outputs} {inputs}")
    found += [f"{PREFIX}{own} {dtype} {_VOCAB} {_HIDDEN}" for own in copies]
    return "\n".join(found).encode()


def seeds() -> Iterator[bytes]:
    plain: dict[str, Any] = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
    attention = {"model.layers.0.self_attn.q_proj": (_HIDDEN, _HIDDEN)}
    both = attention | {"model.layers.0.self_attn.o_proj": (_HIDDEN, _HIDDEN)}
    expert = {f"model.layers.1.mlp.experts.1.{part}": shape for part, shape in _SHAPES.items()}
    mixtral = {"model.layers.3.block_sparse_moe.experts.0.w2": _SHAPES["down_proj"]}
    fused = {
        "model.layers.2.mlp.experts.base_layer": (2 * _INNER, _HIDDEN),
        "model.layers.2.mlp.experts": (_HIDDEN, _INNER),
    }
    turned = {path: shape[::-1] for path, shape in fused.items()}
    head = {"lm_head": (_VOCAB, _HIDDEN)}
    rows: list[tuple[dict[str, Any], bytes]] = [
        ({"target_modules": ["q_proj"]}, lines(attention)),
        ({"target_modules": ["q_proj", "o_proj"], "use_rslora": True}, lines(both, 1, "BF16")),
        ({"rank_pattern": {"o_proj": 1}, "alpha_pattern": {"0.self_attn.q_proj": -0.5}}, lines(both)),
        ({"alpha_pattern": {"^x|q_proj$": 3, "o_proj": 1}, "bias": "none"}, lines(both)),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, lines(attention, 1, "F16")),
        ({"target_modules": "all-linear"}, lines(expert)),
        ({"target_modules": [], "init_lora_weights": "eva"}, lines(mixtral, 1, "BF16")),
        ({"alpha_pattern": {"experts.gate_up_proj": 1}}, lines(fused, _EXPERTS)),
        ({"peft_version": "0.18.1"}, lines(turned, _EXPERTS)),
        ({"target_modules": ["lm_head"]}, lines(head, 1, "F32", "lm_head.weight")),
        ({}, lines(attention, 1, "F16", "model.embed_tokens.weight")),
        ({}, weights_of(lines(attention))),
    ]
    for more, weights in rows:
        yield json.dumps(plain | more).encode() + BETWEEN + weights
    for more in ({"r": True}, {"lora_alpha": 1e309}, {"use_dora": True}, {"target_modules": [["q_proj"]]}):
        yield json.dumps(plain | more).encode() + BETWEEN + lines(attention)
    yield b'{"peft_type":"LORA","r":1,"lora_alpha":1,"r":2}' + BETWEEN + lines(attention)
    yield json.dumps(plain).encode()
    yield BETWEEN + lines(attention)


WORDS: tuple[bytes, ...] = (
    *(b'"r":', b'"lora_alpha":', b'"use_rslora":true', b'"rank_pattern":{', b'"alpha_pattern":{'),
    *(b'"target_modules":', b'"layers_to_transform":', b'"exclude_modules":', b'"modules_to_save":["'),
    *(b"NaN", b"Infinity", b"1e309", b"-0", b"-0.0", b"1e-320", b"9" * 400, b"null", b"true", b"[" * 32),
    *(b"a|" * 120, b"^", b"$", b"|", b".lora_A.weight F32 1 4", b"base_model.model.", b" F32 1 3 4"),
    *(b".base_layer", b".experts.", b"block_sparse_moe", b"00", b"\xd9\xa1", b"9" * 4400, BETWEEN),
    *(b'"peft_version":"0.19.0"', b'"peft_version":"0.19.1', b".dev0"),
    *(b"embed_tokens", b"lm_head", b"\n", b" BOOL 6 4", b" F8_E4M3 6 4", b" I8 6 4", b" 1 4", b"\\ud800"),
)
TARGET = Target(run, seeds, WORDS, 8192)
