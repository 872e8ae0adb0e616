"""The tokenizer and chat template of a model directory: prompts in, token ids out. Does not import torch.

Owns: reading `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; what the template does with tools.
Always holds: `encode` adds the special tokens the tokenizer's own post-processor adds; a rendered chat is tokenized
without adding any, since a template writes its own. Tokenizing does not hold the interpreter lock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from midstream.core.errors import ConfigError, ContextExceeded, InvalidRequest
from midstream.replica.text import messageformat, reasoning_tags
from midstream.replica.text.messageformat import NO_LATER_SYSTEM, MessageFormat, without_later_system
from midstream.replica.text.reasoning_tags import ReasoningFormat
from midstream.replica.text.text_jobs import Leave
from midstream.replica.text.token_bound import tokens_at_least, utf8_size
from midstream.replica.text.toolformat import PROBE_TOOL, TemplateTools, examine
from midstream.replica.text.vocabulary import Vocabulary

PIECE_CHARACTERS = 2**16
#: Times the context. Cutting a text into pieces never doubles its tokens.
SURELY_OVER = 2
_SOME_TEXT = "probe"
#: Whatever the template, it shows messages of these roles as they are if they have no field but their content.
PLAIN_ROLES = ("user", "assistant")
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class TextModel:
    """Turns text and messages to token ids; `vocabulary` turns ids back to text. tool_template: takes the place of `template`
    where a request has tools."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        special_tokens: dict[str, str],
        tool_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self._template = template
        self._tool_template = tool_template or template
        self._special_tokens = special_tokens
        added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._added = {name: added[name] for name in sorted(added, key=len, reverse=True)}
        self._marker_texts = {token: name for name, token in added.items()}

    @classmethod
    def load(cls, directory: Path) -> TextModel:
        """Load from a Hugging Face model directory. Raises ConfigError."""
        file = directory / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
            config = _read_json(directory / "tokenizer_config.json")
            templates = _read_templates(directory, config)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{directory}: the tokenizer cannot be read: {error}") from error
        except Exception as error:
            # The tokenizers library raises bare Exception on a bad file.
            raise ConfigError(f"{file}: not a tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokens = {name: _token_text(config[name]) for name in _TEMPLATE_TOKENS if config.get(name)}
        return cls(tokenizer, templates.get("default"), tokens, templates.get("tool_use"))

    def encode(self, text: str) -> tuple[int, ...]:
        # One text in a batch: `encode` keeps the interpreter lock while it works, `encode_batch_fast` does not.
        return tuple(self.tokenizer.encode_batch_fast([text])[0].ids)

    @cached_property
    def tools(self) -> TemplateTools:
        """How the chat template treats tools and tool calls."""
        if self._tool_template is None:
            return TemplateTools(False, None, None)
        return examine(lambda messages, tools: self._rendered(messages, tools, generation_prompt=False))

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """The tags around reasoning, if the chat template has any."""
        if self._template is None:
            return None
        return reasoning_tags.examine(
            lambda messages, begins: self._rendered(messages, generation_prompt=begins)
        )

    @cached_property
    def _plain_format(self) -> MessageFormat:
        return self._message_format(None)

    @cached_property
    def _tool_format(self) -> MessageFormat:
        return self._message_format([PROBE_TOOL])

    def _message_format(self, tools: list[dict[str, Any]] | None) -> MessageFormat:
        thinks, arguments = self.reasoning is not None, self.tools.arguments
        return messageformat.examine(lambda given: self._rendered(given, tools), arguments, thinks=thinks)

    def message_format(self, *, tools: bool) -> MessageFormat:
        """What the chat template shows of messages. tools: of a request that has some."""
        return self._tool_format if tools else self._plain_format

    @cached_property
    def turn_opening(self) -> str:
        """What the chat template writes where the assistant's turn begins; empty if that cannot be separated."""
        user = [{"role": "user", "content": "probe"}]
        try:
            before, begun = (self.render(user, generation_prompt=begins) for begins in (False, True))
        except InvalidRequest:
            return ""
        return begun[len(before) :] if begun.startswith(before) else ""

    def literally(self, text: str) -> str:
        """`text` in the grammar language: its added tokens by id, the rest quoted."""
        names = "|".join(re.escape(name) for name in self._added)
        parts = re.split(f"({names})", text) if names else [text]
        return " ".join(
            f"<[{self._added[part]}]>" if part in self._added else json.dumps(part) for part in parts if part
        )

    def specials(self, without: frozenset[int]) -> str:
        """The added tokens in the grammar language, but for those; empty if there are none."""
        ids = sorted(set(self._added.values()) - without)
        starts = [i for i in ids if i - 1 not in set(ids)]
        ends = [i for i in ids if i + 1 not in set(ids)]
        ranges = ",".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
        return f"<[{ranges}]>" if ranges else ""

    def marker_ids(self, markers: tuple[str, ...]) -> frozenset[int]:
        return frozenset(self._added[name] for name in markers if name in self._added)

    @property
    def markers(self) -> Iterable[str]:
        """The texts of all added tokens."""
        return self._added

    def marker_text(self, token_id: int) -> str:
        """The text of an added token, such as one that ends an answer; empty for any other one."""
        return self._marker_texts.get(token_id, "")

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
        continued: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        plain: bool = False,
    ) -> str:
        """The prompt text of a chat, ending where the assistant's turn begins. Raises InvalidRequest.

        continued: it ends inside the last message. variables: more that the template may ask for. plain: the template shows the
        messages as they are. What it leaves out is in the text as MessageFormat says; what it cannot show is the caller's to
        refuse (MessageFormat.check).
        """
        if continued and (behind := self._begun(messages[-1])) is not None:
            before = self.render(messages[:-1], tools, variables=variables)
            form = self.reasoning
            assert form is not None
            return (
                before
                + ("" if before.rstrip().endswith(form.opening) else form.opening + form.after_open)
                + behind
            )
        shown = messages if plain else self.message_format(tools=tools is not None).shown(messages)
        return self._rendered(
            shown, tools, generation_prompt=generation_prompt, continued=continued, variables=variables
        )

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
        continued: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; use completions", param="messages"
            )
        try:
            rendered, _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=generation_prompt,
                continue_final_message=continued,
                **{**self._special_tokens, **variables},
            )
        except Exception as error:
            # A template may raise anything on messages it does not take.
            why = f"the chat template refused them: {error}"
            if len(others := without_later_system(messages)) < len(messages):
                with suppress(InvalidRequest):
                    self._rendered(others, tools, generation_prompt=generation_prompt, variables=variables)
                    why = f"{NO_LATER_SYSTEM}: {why}"
            raise InvalidRequest(f"messages: {why}", param="messages") from error
        return str(rendered[0])

    def _begun(self, answer: dict[str, Any]) -> str | None:
        """The reasoning that an answer is continued in; None: its content is continued. Raises InvalidRequest."""
        param = "continue_final_message"
        if answer.get("tool_calls"):
            raise InvalidRequest(
                f"{param}: the last message has tool calls, which are not the text that a turn of this session was"
                " cut in; leave out its tool calls, or the field",
                param=param,
            )
        thought = reasoning_tags.of_message(answer)
        if not thought or answer.get("content"):
            return None
        if self.reasoning is None:
            raise InvalidRequest(
                f"{param}: the last message has reasoning alone, and this model's chat template has none",
                param=param,
            )
        return thought

    def template_names(self, variable: str) -> bool:
        """Whether the chat template uses a variable of this name."""
        name = re.compile(rf"\b{re.escape(variable)}\b")
        return any(name.search(text) for text in (self._template, self._tool_template) if text is not None)

    def check_spaces(self, special: bool, spaces: bool | None) -> None:
        """spaces_between_special_tokens, where special tokens are shown: there are none. Raises InvalidRequest."""
        if special and spaces and not self.vocabulary.byte_level:
            param = "spaces_between_special_tokens"
            message = f"{param}: this server writes none with this model's tokenizer; leave it out"
            raise InvalidRequest(message, param=param)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_behind(self, text: str, *, special: bool) -> tuple[int, ...]:
        """The text behind tokens that begin a prompt. special: the tokenizer adds its own, so those that end a prompt, too."""
        tokens = self.encode_rendered(text)
        return tokens + self._ending if special else tokens

    @cached_property
    def _ending(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer writes behind a text."""
        plain, whole = self.encode_rendered(_SOME_TEXT), self.encode(_SOME_TEXT)
        at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), len(whole))
        return whole[at + len(plain) :]

    def check_size(self, text: str, where: str, param: str, context: int) -> None:
        """Raises InvalidRequest if the text's bytes alone say that it cannot fit the context. Takes microseconds."""
        if len(text) <= context:
            return
        size, per_token = utf8_size(text), self.vocabulary.bytes_per_token
        if per_token is not None and (least := tokens_at_least(size, per_token)) > context:
            why = (
                f"{size} bytes of text are at least {least} tokens, as a token of this model stands for at most"
                f" {per_token} bytes"
            )
            raise ContextExceeded(where, least, context, param=param, why=why)

    def check_pieces(self, text: str, where: str, param: str, context: int, leave: Leave | None) -> None:
        """Raises InvalidRequest if the text is far too long for the context, without tokenizing more of it than shows that.

        The pieces' tokens are not those of the whole text, but nearly as many. leave: asked between two pieces.
        """
        if len(text) <= max(PIECE_CHARACTERS, 4 * context):
            return
        tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            if leave is not None:
                leave.check()
            tokens += len(self.encode_rendered(text[start : start + PIECE_CHARACTERS]))
            if tokens > SURELY_OVER * context:
                why = f"the text has over {SURELY_OVER * context} tokens"
                raise ContextExceeded(where, tokens, context, param=param, why=why)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return values


def _read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name; a model with one template has `default`, some have `tool_use` beside it. Files win over the
    configuration."""
    found: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        found = {t["name"]: t["template"] for t in given}
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in (directory / "additional_chat_templates").glob("*.jinja")}
    return found | {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)
