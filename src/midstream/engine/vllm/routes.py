"""vLLM's `routed_experts` as the routes of token records.

Owns: decoding the array without trusting it, and which row belongs to which token.
Always holds: a token gets the route of the pass that scored it, or none: InvalidRoutes refuses an array that is not exactly
what was expected. Nothing is unpickled.

vLLM 0.32 sends the array with the last chunk of a choice only. It is base64 of `.npy` bytes, of shape (rows, hidden layers,
experts per token), uint8 up to 256 experts, else uint16 (int32 in other versions). Rows of layers without experts are zeros.

`routed_experts_prompt_start` = S lies between 0 and the length of the prompt. Row r is the pass over the token at position
S + r (the first prompt token has position 0). It gave the logits of the token at position S + r + 1 and belongs to that one.
The last token was never passed over and has no row: P prompt tokens and G generated ones give P + G - 1 - S rows. Hence:

    generated tokens only       S = P - 1, count = G          (S = P would miss the pass that scored the first one)
    and the last k prompt ones  S = P - 1 - k, count = k + G  (k at most P - 1: nothing scores the first prompt token)

A layer that was not recorded is all zeros, which shows as one expert twice. With one expert per token it looks like a choice
of expert 0.

Rows of prompt tokens with KV from the prefix cache are there too: vLLM keeps them by block. In a request that continues
emitted tokens, these are part of its prompt and count into P.

midstream's worker extension sends the same rows with each token (worker_extension/midstream_vllm_routes.py), and those of a
prompt with its first token. Where that is the last one, too, they come in the place of `routed_experts`, as words.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Sequence
from tokenize import TokenError

import numpy as np
import numpy.lib.format as npy

from midstream.engine.servers.chunks import Chunk, RoutedPasses
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import InvalidRoutes, routes_of
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import ROWS

#: The types that vLLM uses, as `numpy.dtype.str` writes them.
DTYPES = ("|u1", "<u2", ">u2", "<i4", ">i4")
FORM = "uint8, uint16 or int32 of shape (passes, layers, experts per token)"
#: Of what the worker extension puts in their place: the first pass, how many there are, and words of their bytes.
WORD, WORDS_FORM = "<u4", "words"
#: Where the worker extension has no rows.
UNNOTED = "the model was compiled without the notes of its routers, so start vLLM with --enforce-eager"
#: In characters; numpy writes 118.
HEADER_MAX = 1024
#: The errors of numpy on an invalid header: it reads the text as a Python literal. A Warning only where those are errors.
UNREADABLE = (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError, Warning)


def decode_routes(data: str, shape: Shape, *, first: int, count: int) -> list[bytes]:
    """The routes of the tokens at positions first + 1 .. first + count, each of the pass over the token before.

    data: `routed_experts` of a choice, asked for with routed_experts_prompt_start = first. An array that has only the layers
    with experts is taken as well. Raises InvalidRoutes.
    Returns `count` routes: C-order [moe_layers, top_k] bytes, uint8, or little-endian uint16 above 256 experts.
    """
    return routes_of(_array(data, FORM, DTYPES, 3), shape, first=first, count=count)


def is_rows(numbers: Sequence[int]) -> bool:
    """Of what comes with a token: whether it is the rows of passes."""
    return bool(numbers) and numbers[0] == ROWS


def read_rows(numbers: Sequence[int]) -> RoutedPasses:
    """From what the worker extension wrote. Raises ValueError, OverflowError."""
    if len(numbers) < 3:
        raise ValueError(f"{list(numbers)} are no rows of passes")
    _, first, count, *words = numbers
    return RoutedPasses(first, count, np.array(words, dtype="<u4").tobytes())


def passes_of(chunk: Chunk) -> Sequence[RoutedPasses]:
    """Those of all its tokens, and of their prompt. Raises InvalidRoutes."""
    if chunk.routes is None:
        return chunk.passes
    words = _array(chunk.routes, WORDS_FORM, (WORD,), 1)
    if len(words) < 2:
        raise InvalidRoutes(f"{len(words)} words are no passes")
    return (RoutedPasses(int(words[0]), int(words[1]), words[2:].tobytes()), *chunk.passes)


def routes_with(
    passes: Sequence[RoutedPasses], shape: Shape, *, first: int, count: int, weights: bool = False
) -> list[tuple[bytes, bytes | None]]:
    """As decode_routes, of what came with tokens: in order, and `count` in all. weights: with those of routers, C-order
    [moe_layers, top_k] bytes, little-endian float32. Raises InvalidRoutes."""
    found: list[tuple[bytes, bytes | None]] = []
    for one in passes:
        if not one.count:
            raise InvalidRoutes(UNNOTED)
        if one.first != first + len(found) or one.count < 0:
            raise InvalidRoutes(
                f"{one.count} passes from position {one.first} on, expected some from {first + len(found)} on"
            )
        chosen, given = _rows(one, shape, weights=weights)
        routes = routes_of(chosen, shape, first=one.first, count=one.count)
        found += zip(routes, _weights(given, shape) if weights else [None] * one.count, strict=True)
    if len(found) != count:
        raise InvalidRoutes(f"routes of {len(found)} passes from position {first} on, expected {count}")
    return found


def _rows(passes: RoutedPasses, shape: Shape, *, weights: bool) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights, of [passes, layers, experts per token]. vLLM has all hidden layers."""
    kind = np.dtype(np.uint8 if shape.num_experts <= 256 else "<u2")
    form = (passes.count, shape.hidden_layers, shape.top_k)
    size = math.prod(form) * kind.itemsize
    words = size + -size % 4
    expected = words + weights * math.prod(form) * 4
    if len(passes.data) != expected:
        raise InvalidRoutes(f"{len(passes.data)} bytes of {passes.count} passes, expected {expected}")
    given = np.frombuffer(passes.data[words:], "<f4")
    return np.frombuffer(passes.data[:size], kind).reshape(form), given.reshape(form) if weights else given


def _weights(given: np.ndarray, shape: Shape) -> list[bytes]:
    """given: [passes, layers, experts per token]."""
    of_experts = given[:, list(shape.moe_layers), :]
    if not np.isfinite(of_experts).all():
        raise InvalidRoutes("weights of routers that are not finite")
    return [row.tobytes() for row in of_experts]


def _array(data: str, form: str, kinds: Sequence[str], axes: int) -> np.ndarray:
    """Decode base64 .npy text to an array of this form, a view of the decoded bytes. Raises InvalidRoutes."""
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRoutes(f"routed_experts is not base64: {error}") from error
    reader = io.BytesIO(raw)
    try:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        read_header = readers[npy.read_magic(reader)]
        shape, fortran, dtype = read_header(reader, max_header_size=HEADER_MAX)
    except (KeyError, *UNREADABLE) as error:
        raise InvalidRoutes(
            f"routed_experts is not an .npy array with a plain header: {str(error)[:200]!a}"
        ) from error
    if dtype.str not in kinds or len(shape) != axes or min(shape) < 0:
        raise InvalidRoutes(
            f"routed_experts must be {form}; its .npy header says {str(dtype)[:200]!a} {str(shape)[:200]}"
        )
    size = len(raw) - reader.tell()
    if math.prod(shape) * dtype.itemsize != size:
        raise InvalidRoutes(f"its header says {dtype} {list(shape)}, but {size} bytes follow: not that array")
    return np.frombuffer(raw, dtype, offset=reader.tell()).reshape(shape, order="F" if fortran else "C")
