"""vLLM's tokenize and detokenize: token ids of a prompt or a chat, and text of token ids.

Always holds: a prompt or a chat gives the token ids that a request with it would have outside a session. What would change
them and is not supported is refused by name. A text that surely cannot fit the context is refused unread; one that is a
little too long gets its true count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from midstream.core.errors import ContextExceeded, InvalidRequest
from midstream.replica.request.checked import split_prompts
from midstream.replica.request.schema import ChatBody, CompletionBody, decode
from midstream.replica.wire.base import TextCall, Texts
from midstream.replica.wire.bodies import DetokenizeBody, TokenizeBody

_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(texts: Texts, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    asked = await texts.beside(body, lambda body: decode(body, _tokenize), headers)
    model = texts.names.model if asked.model is None else asked.model
    texts.names.wanted(model, "")
    given = _body(asked, model)
    [prompt] = await texts.prompts(given, len(body), headers)
    strings = [texts.text.tokenizer.id_to_token(i) for i in prompt.token_ids]
    return {
        "count": len(prompt.token_ids),
        "max_model_len": texts.info.max_model_len,
        "tokens": prompt.token_ids,
        "token_strs": strings if asked.return_token_strs else None,
    }


def _body(asked: TokenizeBody, model: str) -> ChatBody | CompletionBody:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
    if not asked.add_generation_prompt:
        raise _refused("add_generation_prompt", "true")
    # A template writes its own special tokens; a prompt gets those of the tokenizer.
    if asked.add_special_tokens is not None and asked.add_special_tokens == (asked.prompt is None):
        raise _refused("add_special_tokens", "false with messages, true with a prompt")
    if asked.messages is not None:
        return ChatBody(model=model, messages=asked.messages, tools=asked.tools)
    if asked.tools:
        raise InvalidRequest("tools: need messages, not a prompt", param="tools")
    return CompletionBody(model=model, prompt=asked.prompt or "")


def _refused(param: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: must be {expected}; other values are not supported", param=param)


async def detokenize(texts: Texts, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    asked = await texts.beside(body, lambda body: decode(body, _detokenize), headers)
    texts.names.wanted(texts.names.model if asked.model is None else asked.model, "")
    size, context = len(asked.tokens), texts.info.max_model_len
    if size > context:
        raise ContextExceeded("tokens", size, context, param="tokens")
    if not asked.tokens:
        return {"prompt": ""} | ({"token_texts": []} if asked.return_token_texts else {})
    try:
        [ids] = split_prompts([*asked.tokens], texts.info.vocab_size)
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("prompt:", "tokens:", 1), param="tokens") from error
    vocabulary, numbers = texts.text.vocabulary, [int(i) for i in ids]
    answer: dict[str, Any] = {"prompt": vocabulary.raw_text(numbers)}
    if asked.return_token_texts:
        answer["token_texts"] = [vocabulary.label(i)[0] for i in numbers]
    return answer


TOKENIZE = TextCall("tokenize", tokenize)
DETOKENIZE = TextCall("detokenize", detokenize)
