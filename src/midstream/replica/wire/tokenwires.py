"""What wires of token ids in and token ids out have in common: sampling parameters of their own names, routes of a whole
sequence, and sampling masks as lists of ids.

Always holds: a sampling parameter that is unknown or not supported is refused by its name on that wire. Row p of a
sequence's routes is the route of the pass that read position p, so the last token has none.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from midstream.core.errors import InvalidRequest, UnknownField
from midstream.core.masks import kept_ids
from midstream.core.types import TokenRecord
from midstream.replica.request.schema import (
    CompletionBody,
    InferenceBody,
    check_supported,
    convert,
    unsupported,
)
from midstream.replica.response.answer import Ending
from midstream.replica.response.choice import Scored
from midstream.replica.wire.answers import WeightVersion

#: Where sampling parameters stand in a body.
SAMPLING = "sampling_params"
#: More than any context: a request goes up to the context.
TO_THE_CONTEXT = 2**31 - 1
#: Sampling parameters that have the same name on these wires and in OpenAI's API with vLLM's fields.
SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def read_sampling(
    given: Mapping[str, Any], names: Mapping[str, str], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Fields of an InferenceBody by name. names: of the wire's parameters, those here. neutral: the values of unsupported
    parameters that ask for nothing. Null is "not given". Raises InvalidRequest."""
    fields = {}
    for name, value in given.items():
        if value is None:
            if name not in names and name not in neutral:
                raise UnknownField(f"{SAMPLING}.{name}")
        elif name in neutral:
            if value not in neutral[name]:
                raise unsupported(f"{SAMPLING}.{name}")
        elif name in names:
            fields[names[name]] = value
        else:
            raise UnknownField(f"{SAMPLING}.{name}")
    return fields


def completion(
    prompt: list[Any] | str, fields: dict[str, Any], wire_names: Mapping[str, str]
) -> CompletionBody:
    """A completion of `fields` with this prompt. Its errors name fields as the wire does. Raises InvalidRequest."""
    try:
        checked = convert(fields, InferenceBody)
        check_supported(checked)
    except InvalidRequest as error:
        rename(error, wire_names)
        raise
    return CompletionBody(
        prompt=prompt, **{name: getattr(checked, name) for name in InferenceBody.__struct_fields__}
    )


def wire_names(sampling: Mapping[str, str], **others: str) -> dict[str, str]:
    """The wire's name of each field of a completion. sampling: as in `read_sampling`."""
    return {name: f"{SAMPLING}.{own}" for own, name in sampling.items()} | others


def rename(error: InvalidRequest, names: Mapping[str, str]) -> None:
    param, message = error.param or "", error.message
    name = names.get(param)
    if name is None:
        return
    if message.startswith(param):
        message = name + message[len(param) :]
    error.param, error.message, error.args = name, message, (message,)


def routes_from(
    start: int, prompt_size: int, prompt: Sequence[TokenRecord], generated: Sequence[Scored]
) -> list[bytes]:
    """The rows of a sequence's routes from position `start` on. prompt: records of the last prompt tokens."""
    own = [scored.record.route for scored in generated if scored.record.route is not None]
    first = prompt_size - len(prompt)
    rows = [
        record.route for at, record in enumerate(prompt, first) if at > start and record.route is not None
    ]
    return [*rows, *own[max(start - prompt_size + 1, 0) :]]


def route_array(rows: Iterable[bytes], shape: tuple[int, int], *, wide: bool) -> np.ndarray:
    """[rows, MoE layers, experts per token], uint8, or uint16 of a model with more than 256 experts."""
    return np.frombuffer(b"".join(rows), "<u2" if wide else "u1").reshape(-1, *shape)


def npy(array: np.ndarray) -> str:
    """The bytes of a .npy file, in base64."""
    file = io.BytesIO()
    np.save(file, array)
    return b64encode(file.getvalue()).decode()


#: Ids in the sampling masks of one answer. A list takes 36 bytes for each, where a mask has two, or one bit.
LISTED_MAX = 2**22


def check_bounded(made: CompletionBody, name: str) -> None:
    """Raises InvalidRequest where each sampling mask would list the whole vocabulary. name: of the field that asks."""
    filters = made.top_p is not None and made.top_p < 1
    filters = filters or (made.top_k or 0) > 0 or (made.min_p or 0) > 0 or made.temperature == 0
    if not (filters or made.allowed_token_ids or made.structured_outputs):
        message = f"{name}: nothing is masked without top_k, top_p, min_p or allowed_token_ids; leave it out"
        raise InvalidRequest(message, param=name)


class MaskLists:
    """The sampling masks of one answer as lists of ids. name: of the field that asks."""

    def __init__(self, vocab_size: int, name: str) -> None:
        self._vocab_size, self._name, self._left = vocab_size, name, LISTED_MAX

    def of(self, tokens: Iterable[Scored]) -> list[list[int]]:
        """The ids that each token was drawn from, ascending. Raises InvalidRequest."""
        found = []
        for scored in tokens:
            record = scored.record
            assert record.mask is not None
            ids = kept_ids(record.mask, record.token_id) or range(self._vocab_size)
            self._left -= len(ids)
            if self._left < 0:
                raise InvalidRequest(
                    f"{self._name}: the masks have more than {LISTED_MAX} ids, which are not listed here: "
                    "filter more, or ask another endpoint, which has them as bytes",
                    param=self._name,
                )
            found.append(list(ids))
        return found


def weight_versions(ending: Ending) -> list[WeightVersion]:
    return [WeightVersion(*span) for span in ending.spans]
