"""The distribution that tests recompute, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from resampling import drawn_from, is_firm

from midstream.core.types import SamplingParams

# Probabilities 0.4, 0.3, 0.2, 0.1.
LOGITS = np.log([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("sampling", "more", "expected"),
    [
        ({}, {}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, {}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, {}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.65}, {}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, {}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.01}, {}, [1, 0, 0, 0]),
        ({"min_p": 0.6}, {}, [4 / 7, 3 / 7, 0, 0]),
        # Among the two best, the second one is no longer needed for a half.
        ({"top_k": 2, "top_p": 0.5}, {}, [1, 0, 0, 0]),
        ({"logit_bias": {3: float(np.log(4))}}, {}, [4 / 13, 3 / 13, 2 / 13, 4 / 13]),
        ({"allowed_token_ids": (1, 2)}, {}, [0, 3 / 5, 2 / 5, 0]),
        ({}, {"allowed": [2, 3]}, [0, 0, 2 / 3, 1 / 3]),
        ({}, {"bad": [[0], [2, 1]], "emitted": [2]}, [0, 0, 2 / 3, 1 / 3]),
        ({}, {"bad": [[2, 1]], "emitted": [0]}, [0.4, 0.3, 0.2, 0.1]),
        ({"min_tokens": 2, "stop_token_ids": (0,)}, {"emitted": [1]}, [0, 3 / 6, 2 / 6, 1 / 6]),
        ({"min_tokens": 1, "stop_token_ids": (0,)}, {"emitted": [1]}, [0.4, 0.3, 0.2, 0.1]),
        ({"presence_penalty": float(np.log(2))}, {"emitted": [0, 0]}, [2 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ({"frequency_penalty": float(np.log(2))}, {"emitted": [0, 0]}, [1 / 7, 3 / 7, 2 / 7, 1 / 7]),
        # Of the prompt, too; these logits are negative.
        ({"repetition_penalty": 2.0}, {"prompt": [0], "emitted": [3]}, np.array([16, 30, 20, 1]) / 67),
        ({"temperature": 0.0, "logit_bias": {2: 9.0}}, {}, [0, 0, 1, 0]),
    ],
)
def test_each_step_does_what_its_name_says(sampling: Any, more: Any, expected: Any) -> None:
    given = {"prompt": [], "emitted": [], **more}
    for logprobs in drawn_from(LOGITS, SamplingParams(max_tokens=9, **sampling), **given):
        assert np.exp(logprobs) == pytest.approx(np.array(expected), abs=1e-9)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"min_p": 0.5 - 1e-7}, False),
        ({"min_p": 0.45}, True),
        # It is cut off by top_p. Whether it is there counts for the sum.
        ({"min_p": 0.5 - 1e-7, "top_p": 0.6}, False),
        # It is cut off before.
        ({"min_p": 0.5 - 1e-7, "top_k": 2, "top_p": 0.6}, True),
    ],
)
def test_a_draw_is_firm_unless_a_border_is_near_a_token(sampling: Any, expected: bool) -> None:
    assert is_firm(LOGITS, SamplingParams(max_tokens=9, **sampling), 0, 1e-6) == expected


def test_a_token_at_the_border_of_a_filter_may_be_there_or_not() -> None:
    found = drawn_from(LOGITS, SamplingParams(max_tokens=9, top_p=0.7), [], [])
    assert {round(float(np.exp(one[2])), 6) for one in found} == {0.0, round(2 / 9, 6)}
