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
from midstream.replica.wire.reading import same_fields

#: Fields that need messages, and those that a chat has under the same names.
_OF_MESSAGES = ("tools", "chat_template_kwargs", "continue_final_message")
_OF_CHATS = (*_OF_MESSAGES, "add_generation_prompt", "add_special_tokens")
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
    if asked.messages is not None:
        return ChatBody(model=model, messages=asked.messages, **same_fields(asked, _OF_CHATS))
    for name in _OF_MESSAGES:
        if getattr(asked, name):
            raise InvalidRequest(f"{name}: needs messages, not a prompt", param=name)
    return CompletionBody(model=model, prompt=asked.prompt or "", add_special_tokens=asked.add_special_tokens)


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
