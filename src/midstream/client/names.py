"""From the names that a state dict has in memory to the names of the checkpoint.

Always holds: what is returned has the names of the checkpoint, as far as they are known here: from the weights in the
directory of the configuration, else from transformers. The caller's tensors are never changed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from midstream.core.errors import SnapshotError
from midstream.snapshots.layout import CONFIG_FILE, CheckpointSpec, read_spec
from midstream.snapshots.messages import and_more, shown
from midstream.snapshots.names import hint
from midstream.snapshots.tied import HEAD, embedding_of, ties_head, untied

log = logging.getLogger(__name__)

State = Mapping[str, Any]


def as_checkpoint(state: State, config_dir: Path) -> State:
    """`state` under the names of the checkpoint that `config_dir` describes. Fused experts become one tensor for each expert.

    state: as state_dict() gives it, or under the checkpoint's names. A tied output layer is left out. Raises ValueError that
    names the tensors that have other names, and what to do.
    """
    served = served_spec(config_dir)
    state = _without_tied(state, _config(config_dir), served)
    names = state.keys()
    if served is not None and names - {HEAD} == served.tensors.keys() - {HEAD}:
        return state
    if not any(hasattr(value, "detach") for value in state.values()) and hint(names) is None:
        return state
    known = _known_names(config_dir)
    if known is not None and names <= known.memory and names != known.checkpoint:
        if served is None and (absent := sorted(known.memory - names)):
            raise ValueError(_missing(absent))
        return known.revert(state)
    if served is None:
        advice = hint(names, () if known is None else known.checkpoint, sure=known is None)
        if advice is not None:
            raise ValueError(advice)
    return state


def served_spec(config_dir: Path) -> CheckpointSpec | None:
    """The checkpoint in `config_dir`; None if it holds no whole one, as where only the configuration is there."""
    try:
        return read_spec(config_dir)
    except SnapshotError:
        return None


def check_names(new: CheckpointSpec, served: CheckpointSpec | None) -> None:
    """Raise ValueError unless `new` has the tensors of `served`, the checkpoint beside the configuration that was given.

    Two checkpoints with no name in common are not compared: the directory may be given for its configuration alone. Then, and
    with None, only names are refused that no served checkpoint has.
    """
    if served is None or not new.tensors.keys() & served.tensors.keys():
        if (advice := hint(new.tensors, () if served is None else served.tensors, sure=True)) is not None:
            raise ValueError(advice)
        return
    left_out = {HEAD} if ties_head(served.config, served.tensors) else set()
    names, wanted = new.tensors.keys() - left_out, served.tensors.keys() - left_out
    absent, extra = sorted(wanted - names), sorted(names - wanted)
    if not absent and not extra:
        return
    advice = hint(extra, wanted)
    if absent and advice is None:
        raise ValueError(_missing(absent))
    what = "is missing" if absent else "is not in the checkpoint beside the given configuration"
    first = (absent or extra)[0]
    more = and_more(len(absent or extra) - 1)
    raise ValueError(f"tensor {shown(first)} {what}{more}{': ' if advice else ''}{advice or ''}")


def in_memory(state: State, model: Any) -> State:
    """`state` as save_pretrained takes it beside its model: whole, without a tied output layer.

    model: of transformers. Raises ValueError for names that no model in memory has, for a tensor that is missing, and for an
    output layer that is not the embedding though it is tied to it.
    """
    if (advice := hint(state, sure=True)) is not None:
        raise ValueError(advice)
    state = _without_tied(state, model.config.to_dict(), None)
    absent = sorted(model.state_dict().keys() - state.keys() - {HEAD})
    # With no name in common, the model is wrapped in a way that is not known here.
    if absent and state.keys() & model.state_dict().keys():
        raise ValueError(_missing(absent))
    return state


def from_memory(model: Any, state: State | None = None) -> State:
    """The tensors of `model` under the checkpoint's names, as its save_pretrained would write them.

    model: of transformers. state: its tensors under their names in memory, where the model has not got them whole. Raises the
    errors of `in_memory`.
    """
    state = in_memory(model.state_dict() if state is None else state, model)
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = {name: tensor for name, tensor in state.items() if name not in left_out}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        # Before transformers 5 the names in memory are those of the checkpoint.
        return state
    result: State = revert_weight_conversion(model, state)
    return result


def _missing(absent: Sequence[str]) -> str:
    return (
        f"tensor {shown(absent[0])} is missing{and_more(len(absent) - 1)}; give all tensors: named_parameters() leaves"
        " buffers out, which state_dict() has"
    )


def _without_tied(state: State, config: Mapping[str, Any], served: CheckpointSpec | None) -> State:
    """Without the output layer where it is tied to the embedding. Raises ValueError when the two are not equal.

    Gathering a state dict from shards copies the embedding, and then only its numbers show that the two are one.
    """
    name = embedding_of(state)
    if HEAD not in state or name is None:
        return state
    if not ties_head(config, state if served is None else served.tensors):
        return state
    if not _equal(state[HEAD], state[name]):
        raise ValueError(untied(name, "in the state dict"))
    return {key: tensor for key, tensor in state.items() if key != HEAD}


def _equal(head: Any, embedding: Any) -> bool:
    """NaN equals NaN here: it is refused elsewhere, by its own name."""
    if head is embedding:
        return True
    if head.shape != embedding.shape:
        return False
    if _where(head) is not None and _where(head) == _where(embedding):
        return True
    return bool(((head == embedding) | ((head != head) & (embedding != embedding))).all())


def _where(tensor: Any) -> tuple[Any, ...] | None:
    """The memory of a torch tensor, which two tied ones share; None for another kind of array."""
    if not hasattr(tensor, "data_ptr"):
        return None
    return tensor.device, tensor.data_ptr(), tensor.stride(), tensor.dtype


def _config(config_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((config_dir / CONFIG_FILE).read_text())
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}


class _Known(NamedTuple):
    """What transformers knows of a model's names, without the tied output layer. revert: from memory to the checkpoint."""

    memory: frozenset[str]
    checkpoint: frozenset[str]
    revert: Callable[[State], State]


def _known_names(config_dir: Path) -> _Known | None:
    try:
        text = (config_dir / CONFIG_FILE).read_bytes()
    except OSError:
        return None
    return _known_of(config_dir, text)


@functools.lru_cache(maxsize=2)
def _known_of(config_dir: Path, text: bytes) -> _Known | None:
    """None where transformers is older than 5, or does not know the model. text: of config.json, so that a change is seen."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    try:
        with _quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_dir))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ImportError) as error:
        log.info(
            "transformers makes no model of %s, so names are published as they are: %s", config_dir, error
        )
        return None

    def revert(state: State) -> State:
        try:
            tensors = {n: t if hasattr(t, "detach") else torch.from_numpy(t) for n, t in state.items()}
        except TypeError as error:
            raise ValueError(f"{hint(state)}; torch does not take these arrays: {error}") from error
        result: State = revert_weight_conversion(model, tensors)
        return result

    tied = {HEAD} if model.config.get_text_config().tie_word_embeddings else set()
    memory = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return _Known(frozenset(memory), frozenset(revert(memory)), revert)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within: transformers says nothing about a configuration that it reads."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()  # type: ignore[no-untyped-call, unused-ignore]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)  # type: ignore[no-untyped-call, unused-ignore]
