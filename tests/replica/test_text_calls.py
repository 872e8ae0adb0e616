"""vLLM's tokenize and detokenize against the ids that a request has."""

from pathlib import Path
from typing import Any

import pytest
from replica_fakes import HE, IM_END, IM_START, FakeEngine, Running, ids
from test_replica_wire import ask, play, refusal

CHAT = [{"role": "user", "content": "he said"}]


def test_tokens_are_those_of_a_request_and_their_text_comes_back(tmp_path: Path) -> None:
    async def scenario(here: Running) -> None:
        said = (await here.http.post("/tokenize", json={"prompt": "he a", "return_token_strs": True})).json()
        assert said == {
            "count": 3, "max_model_len": 128, "tokens": [HE, 32, 97], "token_strs": ["he", "Ġ", "a"],
        }  # fmt: skip
        chat = (await here.http.post("/tokenize", json={"messages": CHAT})).json()
        assert chat["token_strs"] is None
        await ask(here, "/v1/chat/completions", messages=CHAT, max_tokens=1)
        assert tuple(chat["tokens"]) == here.engine.requests[-1].prompt
        whole = {"tokens": [IM_START, *ids("he"), IM_END]}
        answer = await here.http.post("/detokenize", json=whole)
        assert answer.json() == {"prompt": "<|im_start|>he<|im_end|>"}
        assert (await here.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}

    play(tmp_path, FakeEngine(), scenario)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"prompt": "a" * 10_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 129}, "tokens"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, path: str, body: dict[str, Any], param: str) -> None:
    async def scenario(here: Running) -> None:
        status, message, named = refusal(await here.http.post(path, json=body))
        assert (status, named) == (400, param), message

    play(tmp_path, FakeEngine(), scenario)
