"""OpenAI's completions and chat completions, with Fireworks' fields: token records to JSON, plain and streamed.

Always holds: `choices` is never null. A chunk names the snapshot of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.sse import DONE, json_line, sse_event
from midstream.core.types import TokenRecord, served_model_name
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.request.schema import parse_chat, parse_completion
from midstream.replica.response.choice import Choice, Piece, ToolCall
from midstream.replica.response.kept import Kept
from midstream.replica.response.records import RecordEncoder, snapshot_spans, tell_kv
from midstream.replica.response.shapes import (
    AnyChoice,
    CallEntry,
    ChatMessage,
    Delta,
    DeltaChoice,
    Extras,
    FunctionCall,
    MessageChoice,
    RawOutput,
    Response,
    SnapshotSpan,
    TextChoice,
)
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.base import Read, ResponseHead, Wire

_encode = msgspec.json.Encoder().encode


class OpenAIEncoder(RecordEncoder):
    """The responses of one HTTP request: a wire.base.Encoder of chat completions and completions."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: None = None
    ) -> None:
        super().__init__(checked, vocabulary, wide_routes=head.wide_routes)
        self._chat = checked.kind == "chat"
        self._id = head.id
        self._created = head.created
        self._model = head.model
        self._model_names: dict[str, str] = {}
        self._openings: dict[str, bytes] = {}
        #: Told with the next event.
        self.seam: dict[str, Any] | UnsetType = UNSET
        whole = "chat.completion" if self._chat else "text_completion"
        self._object = "chat.completion.chunk" if self._chat and checked.stream else whole

    # Streams

    def chunk(self, index: int, piece: Piece, first: Prompt | None) -> bytes:
        """One event for one piece; `first` is given with the first chunk of a choice."""
        checked = self._checked
        prompt_ids: tuple[int, ...] | UnsetType = UNSET
        if first is not None and checked.token_ids:
            prompt_ids = first.token_ids
        ids: list[int] | UnsetType = UNSET
        if checked.token_ids:
            ids = [] if piece.echoed else [scored.record.token_id for scored in piece.tokens]
        logprobs = self.logprobs(piece.tokens) if piece.tokens else None
        choice: AnyChoice
        if self._chat:
            delta = Delta("assistant" if first is not None else UNSET, piece.text)
            if checked.tools is not None:
                _set_calls(delta, piece)
            if piece.reasoning:
                _set_reasoning(delta, piece)
            choice = DeltaChoice(
                index=index, delta=delta, logprobs=logprobs, prompt_token_ids=prompt_ids, token_ids=ids
            )
        else:
            choice = TextChoice(
                index=index, text=piece.text, logprobs=logprobs, prompt_token_ids=prompt_ids, token_ids=ids
            )
            prompt_ids = UNSET
        if prompt_ids is not UNSET or self.seam is not UNSET:
            return self._event(piece.snapshot, [choice], prompt_ids)
        opening = self._openings.get(piece.snapshot) or self._opening(piece.snapshot)
        return b"%b%b]}\n\n" % (opening, json_line(choice))

    def finish_chunk(
        self, choice: Choice, snapshot: str, first: Prompt | None, raw: RawOutput | UnsetType, extras: Extras
    ) -> bytes:
        ids: list[int] | UnsetType = [] if self._checked.token_ids else UNSET
        prompt_ids: tuple[int, ...] | UnsetType = UNSET
        if first is not None and self._checked.token_ids:
            prompt_ids = first.token_ids
        role = "assistant" if first is not None else UNSET
        self._say_thinking([choice])
        chat = DeltaChoice(index=choice.index, delta=Delta(role))
        last: AnyChoice = chat if self._chat else TextChoice(index=choice.index, text="")
        last.finish_reason, last.token_ids, last.raw_output = choice.finish, ids, raw
        last.prompt_token_ids = prompt_ids
        if self._checked.perf_metrics:
            tell_kv(last, choice)
        return self._event(snapshot, [last], prompt_ids if self._chat else UNSET, extras)

    def replayed(self, choice: Choice, pieces: list[Piece], first: Prompt | None) -> None:
        """No event depends on those before it."""

    def end(self) -> bytes:
        return DONE

    def _opening(self, snapshot: str) -> bytes:
        """An event up to its only choice: the same for every token of a snapshot."""
        opening = self._openings[snapshot] = self._event(snapshot, []).removesuffix(b"]}\n\n")
        return opening

    def usage_chunk(self, snapshot: str, extras: Extras) -> bytes:
        return self._event(snapshot, [], extras=extras)

    def _event(
        self,
        snapshot: str,
        choices: list[AnyChoice],
        prompt_ids: tuple[int, ...] | UnsetType = UNSET,
        extras: Extras | None = None,
    ) -> bytes:
        response = Response(
            self._id, self._object, self._created, self._model_name(snapshot), choices, prompt_ids
        )
        if extras is not None:
            response.usage, response.perf_metrics = extras.usage, extras.perf_metrics
        response.midstream, self.seam = self.seam, UNSET
        return sse_event(response)

    # Plain responses

    def plain(
        self, choices: list[Choice], kept: list[Kept], prompts: list[Prompt], snapshot: str, extras: Extras
    ) -> bytes:
        encoded = [
            self._plain_choice(choice, kept[choice.index], prompts[choice.index // self._checked.n])
            for choice in choices
        ]
        response = Response(self._id, self._object, self._created, self._model_name(snapshot), encoded)
        if self._chat and self._checked.token_ids:
            response.prompt_token_ids = prompts[0].token_ids
        response.usage, response.perf_metrics = extras.usage, extras.perf_metrics
        self._say_thinking(choices)
        response.midstream = self.seam
        if extras.prompts:
            self._tell_prompts(response, extras.prompts)
        return _encode(response)

    def _say_thinking(self, choices: list[Choice]) -> None:
        """Which choices began a call in thinking that was never closed."""
        found = [choice.index for choice in choices if choice.call_in_thinking]
        if found:
            self.seam = ({} if self.seam is UNSET else self.seam) | {"call_in_thinking": found}

    def _tell_prompts(self, response: Response, prompts: Mapping[int, tuple[TokenRecord, ...]]) -> None:
        told = {prompt: self.prompt_logprobs(records) for prompt, records in prompts.items()}
        if self._chat:
            response.prompt_logprobs = told[0]
        for choice in response.choices:
            if isinstance(choice, TextChoice):
                choice.prompt_logprobs = told[choice.index // self._checked.n]

    def _plain_choice(self, choice: Choice, kept: Kept, prompt: Prompt) -> AnyChoice:
        text = "".join(kept.text)
        encoded: AnyChoice
        if self._chat:
            message = ChatMessage("assistant", text)
            if kept.calls:
                message.content, message.tool_calls = text or None, [_call(call) for call in kept.calls]
            if kept.reasoning:
                message.content, message.reasoning_content = text or None, "".join(kept.reasoning)
            encoded = MessageChoice(index=choice.index, message=message)
        else:
            encoded = TextChoice(index=choice.index, text=text)
            if self._checked.token_ids:
                encoded.prompt_token_ids = prompt.token_ids
        encoded.logprobs = self.logprobs(kept.echoed + kept.generated)
        encoded.finish_reason = choice.finish
        if self._checked.token_ids:
            encoded.token_ids = [scored.record.token_id for scored in kept.generated]
        if self._checked.raw_output:
            encoded.raw_output = self.raw_output(kept, prompt)
        encoded.snapshots = [SnapshotSpan(*span) for span in choice.spans]
        if kept.echoed and self._checked.logprobs:
            encoded.prompt_snapshots = snapshot_spans(kept.echoed)
        if self._checked.perf_metrics:
            tell_kv(encoded, choice)
        return encoded

    def _model_name(self, snapshot: str) -> str:
        name = self._model_names.get(snapshot)
        if name is None:
            name = self._model_names[snapshot] = served_model_name(self._model, snapshot)
        return name


def _set_calls(delta: Delta, piece: Piece) -> None:
    """With tools, a delta without text has no content: a message that is calls only ends up with none."""
    if not piece.text:
        delta.content = UNSET
    if piece.calls:
        delta.tool_calls = [msgspec.structs.replace(_call(call), index=call.index) for call in piece.calls]


def _set_reasoning(delta: Delta, piece: Piece) -> None:
    delta.reasoning_content = piece.reasoning
    if not piece.text:
        delta.content = UNSET


def _call(call: ToolCall) -> CallEntry:
    return CallEntry(call.id, FunctionCall(call.name, call.arguments))


COMPLETIONS = Wire("completions", "cmpl-", lambda body, _: Read(parse_completion(body)), OpenAIEncoder)
CHAT = Wire("chat_completions", "chatcmpl-", lambda body, _: Read(parse_chat(body)), OpenAIEncoder)
