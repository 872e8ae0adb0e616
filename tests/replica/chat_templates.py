"""Chat templates in the styles of well-known families, written for these tests, and a tokenizer that knows their markers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from midstream.replica.text.chat import TextModel
from midstream.replica.text.vocabulary import BYTE_ALPHABET

TEMPLATES = Path(__file__).parent / "templates"


class Style(NamedTuple):
    """end: what a model of this family ends its answers with. markers: all special tokens.

    call: a call as its models write one; empty where the style has no tools. thinks: answers may begin with thinking in tags.
    """

    end: str
    markers: tuple[str, ...]
    call: str = ""
    thinks: bool = False


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
_XML = "<tool_call>\n<function=NAME>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"

#: By the name of the file in templates/.
STYLES: dict[str, Style] = {
    # A default system message; results of tools are a user's message.
    "qwen2.5": Style("<|im_end|>", _IM, _HERMES),
    # Thinking of answers before the last question is dropped, later ones get an empty one.
    "qwen3": Style("<|im_end|>", _IM, _HERMES, True),
    "qwen3-coder": Style("<|im_end|>", _IM, _XML),
    # The content of a message with a call is not shown.
    "llama3": Style(
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        '{"name": "NAME", "parameters": ARGUMENTS}',
    ),
    "mistral": Style(
        "</s>",
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
        '[TOOL_CALLS] [{"name": "NAME", "arguments": ARGUMENTS}]',
    ),
    # Channels; an answer ends otherwise when more follows than when it is the last one.
    "gpt-oss": Style("<|return|>", ("<|start|>", "<|end|>", "<|return|>", "<|message|>", "<|channel|>")),
    "deepseek": Style("<EOS>", ("<BOS>", "<EOS>", "<User>", "<Assistant>"), "", True),
    "gemma": Style("<end_of_turn>", ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "phi": Style("<|end|>", ("<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>")),
    # The end stands behind a line feed.
    "chatml-newline": Style("<|im_end|>", _IM),
    # No special tokens at all.
    "plain": Style("</s>", ("</s>",)),
    # An index of the turn, and a count of all.
    "counted": Style("<|end|>", ("<|end|>",)),
    "zephyr": Style("</s>", ("</s>",)),
}


@cache
def text_model(name: str) -> TextModel:
    """Bytes, some merged pairs, and the markers: there is always more than one way to tokenize a text."""
    style = STYLES[name]
    vocabulary, merges = dict(BYTE_ALPHABET.items()), []
    for pair in ("he", "ll", "in", "er", "an", "th", "re", "on", "00", "11"):
        vocabulary[pair] = len(vocabulary)
        merges.append((pair[0], pair[1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in style.markers])
    template = (TEMPLATES / f"{name}.jinja").read_text()
    return TextModel(tokenizer, template, {})


def tools_of(name: str) -> list[dict[str, object]] | None:
    if not STYLES[name].call:
        return None
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    return [{"type": "function", "function": {"name": "look", "parameters": parameters}}]


def call_text(name: str, arguments: dict[str, object], *, spaced: bool) -> str:
    text = json.dumps(arguments) if spaced else json.dumps(arguments, separators=(",", ":"))
    return STYLES[name].call.replace("NAME", "look").replace("ARGUMENTS", text)
