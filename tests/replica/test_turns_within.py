"""Answers that go on: with the very tokens of a cut one, or as a branch. Edited thinking. No turn is left out of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_client import Client, Reply, records_of
from chat_templates import STYLES, TEMPLATES
from msgspec.structs import replace
from replica_fakes import IM_END, IM_START, MODEL, FakeEngine, Running, ids, running, write_tokenizer
from test_resume_pipeline import CHAT, COMPLETIONS, RESUMABLE, by_choice, events, play, resume, units
from tokenizers import Tokenizer, processors

from midstream.core.traces import TracedTurn
from midstream.replica.record_files import RecordFiles
from midstream.replica.request.schema import ChatBody, CompletionBody
from midstream.replica.turns.history import Branch, History

NAMED = {"x-midstream-session": "s"}
USER = {"role": "user", "content": "he said"}
MORE = {"role": "user", "content": "and?"}


def an_engine(reply: tuple[int, ...]) -> FakeEngine:
    engine = FakeEngine()
    engine.info = replace(engine.info, max_model_len=2048)
    engine.reply = reply
    return engine


def thinking(directory: Path) -> Path:
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    return directory


async def say(here: Running, messages: list[dict[str, Any]], size: int, **more: Any) -> dict[str, Any]:
    headers = {**NAMED, **more.pop("headers", {})}
    body = {"model": MODEL, "messages": messages, "max_tokens": size, **more}
    answer = await here.http.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def go_on(here: Running, messages: list[dict[str, Any]], size: int, **more: Any) -> dict[str, Any]:
    return await say(here, messages, size, continue_final_message=True, add_generation_prompt=False, **more)


def turns_of(here: Running) -> list[TracedTurn]:
    trace = here.replica.trace(("", "s"))
    return [] if trace is None else trace.turns


def whole(message: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """The message that a client has of an answer and of what went on with it."""
    texts = {
        name: (message.get(name) or "") + (rest.get(name) or "") for name in ("content", "reasoning_content")
    }
    return {"role": "assistant", **{name: text for name, text in texts.items() if text or name == "content"}}


#: An answer, where it is cut, and what the template is like.
CUT: dict[str, tuple[tuple[int, ...], int, Any]] = {
    # A tokenizer would not cut "he" so.
    "letters": (tuple(b"hello there"), 4, write_tokenizer),
    "in a character": (tuple("aü ".encode()), 2, write_tokenizer),
    "behind a special token": ((*ids("a"), IM_START, *ids("bcd")), 3, write_tokenizer),
    "at a space": (tuple(b"one two"), 4, write_tokenizer),
    "in its thinking": (tuple(b"<think>\nhm hm\n</think>\n\nyes"), 11, thinking),
    "long in its thinking": (tuple(b"<think>\n" + b"hm " * 200 + b"\n</think>\n\nyes"), 500, thinking),
    "behind its thinking": (tuple(b"<think>\nhm\n</think>\n\nyes"), 22, thinking),
    "where it thinks no more": (tuple(b"yes and no"), 4, thinking),
}


@pytest.mark.parametrize("name", CUT)
async def test_a_cut_answer_goes_on_with_its_very_tokens(tmp_path: Path, name: str) -> None:
    reply, at, write = CUT[name]
    engine = an_engine(reply)

    async with running(tmp_path, engine, write=write) as here:
        first = (await say(here, [USER], at))["choices"][0]["message"]
        engine.reply = reply[at:]
        answer = await go_on(here, [USER, first], len(reply) - at)
        assert "midstream" not in answer
        rest = answer["choices"][0]["message"]
        both = whole(first, rest)
        assert "think>" not in both["content"]
        assert [(turn.parent, turn.added) for turn in turns_of(here)][1:] == [(1, [])]
        # The answer as a client has it is the turn that went on.
        answer = await say(here, [USER, both, MORE], 1)
        assert "midstream" not in answer
        assert turns_of(here)[2].parent == 2
    begun, went_on, next_one = (request.prompt for request in engine.requests)
    assert went_on == begun + reply[:at]
    assert next_one[: len(begun + reply)] == begun + reply


def sample(client: Client, history: History, tokens: tuple[int, ...], finish: str) -> dict[str, Any]:
    """The message that a client gets of these tokens, word for word."""
    client.finish = finish
    reply = Reply(client, history)
    reply.take(records_of(tokens))
    pieces = reply.end()
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for piece in pieces
        for call in piece.calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("name", STYLES)
def test_a_cut_answer_goes_on_whatever_the_template_is(name: str) -> None:
    for seed in range(8):
        client = Client(name, seed)
        _, history = client.ask()
        client.answer(history)
        prompt, history = client.ask()
        tokens = client.draw()
        cuts = sorted(client.rng.choices(range(1, len(tokens) + 1), k=2))
        at, messages, said = 0, list(client.messages), None
        for end in (*cuts, len(tokens)):
            rest = sample(client, history, tokens[at:end], "stop" if end == len(tokens) else "length")
            content = (said or {}).get("content", "") + rest["content"]
            calls = [*(said or {}).get("tool_calls", ()), *rest.get("tool_calls", ())]
            said = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
            client.messages, at = [*messages, said], end
            if end == len(tokens):
                break
            again, history = client.ask(goes_on=True)
            assert (again.token_ids, history.branch) == (prompt.token_ids + tokens[:end], None)
        client.messages.append(MORE)
        last, history = client.ask()
        assert history.branch is None
        assert last.token_ids[: len(prompt.token_ids + tokens)] == prompt.token_ids + tokens


ENDED: dict[str, tuple[tuple[int, ...], dict[str, Any], bool]] = {
    # The sampled tokens without the end.
    "by itself": ((*b"hello", IM_END), {}, True),
    # What the client has is less than the sampled tokens.
    "by a stop string": (tuple(b"hello!?"), {"stop": ["!?"]}, False),
}


@pytest.mark.parametrize("name", ENDED)
async def test_an_answer_that_had_ended_goes_on_as_a_branch(tmp_path: Path, name: str) -> None:
    reply, fields, exact = ENDED[name]
    engine = an_engine(reply)

    async with running(tmp_path, engine) as here:
        before = (await say(here, [USER], 20, **fields))["choices"][0]["message"]
        first = (await say(here, [USER, before, MORE], 20, **fields))["choices"][0]["message"]
        answer = await go_on(here, [USER, before, MORE, first], 2)
        assert answer["midstream"]["branch"]["why"] == "edited"
        assert answer["midstream"]["branch"]["turn"] == 1
        turn = turns_of(here)[2]
        assert (turn.parent, turn.branch) == (1, answer["midstream"]["branch"])
    _, begun, went_on = (request.prompt for request in engine.requests)
    assert went_on == begun + (tuple(b"hello") if exact else ids("hello"))


async def test_an_answer_that_a_client_wrote_goes_on_as_a_branch_and_its_thinking_stays_open(
    tmp_path: Path,
) -> None:
    engine = an_engine(tuple(b"said\n</think>\n\nyes"))

    async with running(tmp_path, engine, write=thinking) as here:
        begun = {"role": "assistant", "content": "", "reasoning_content": "He "}
        answer = await go_on(here, [USER, begun], 18)
        assert answer["midstream"]["branch"]["why"] == "unknown"
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("said", "yes")
        again = await say(here, [USER, whole(begun, message), MORE], 1)
        assert "midstream" not in again
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        body = {"model": MODEL, "messages": [USER, {**begun, "tool_calls": [call]}], "max_tokens": 2}
        refused = await here.http.post(CHAT, json=body | {"continue_final_message": True}, headers=NAMED)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "continue_final_message"
    text = "<|im_start|>user\nhe said<|im_end|>\n<|im_start|>assistant\n<think>\nHe "
    assert engine.requests[0].prompt == ids(text)


async def test_a_stream_within_an_answer_is_resumed_where_its_thinking_is_open(tmp_path: Path) -> None:
    """Cut after every write. The thinking was opened more tokens ago than are looked at of other prompts."""
    thought = tuple(b"<think>\n" + b"hm " * 100)

    async with play(tmp_path, lambda: an_engine(thought), thinking) as (here, there):
        first = (await say(here, [USER], len(thought)))["choices"][0]["message"]
        here.engine.reply = there.engine.reply = tuple(b"so\n</think>\n\nyes")
        body = {"messages": [USER, first], "continue_final_message": True, "max_tokens": 16, "seed": 3}
        asked = {"model": MODEL, "stream": True, **body}
        whole_stream = await here.http.post(CHAT, json=asked, headers={**RESUMABLE, **NAMED})
        writes = units(whole_stream.text)
        expected = by_choice(events("".join(writes)))
        deltas = [event["choices"][0]["delta"] for event in events("".join(writes))[:-1] if event["choices"]]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "so"
        assert "".join(delta.get("content") or "" for delta in deltas) == "yes"
        for cut in range(1, len(writes)):
            rest = await resume(there, CHAT, body, writes[:cut])
            assert by_choice(events("".join(writes[:cut]) + rest.text)) == expected


async def test_a_chat_with_the_tokenizers_special_tokens_is_a_turn_as_any_other(tmp_path: Path) -> None:
    engine = an_engine(tuple(b"hello "))

    def write(directory: Path) -> Path:
        write_tokenizer(directory)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        names = ("<|im_start|>", IM_START), ("<|im_end|>", IM_END)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>", special_tokens=[*names]
        )
        tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    async with running(tmp_path, engine, write=write) as here:
        messages: list[dict[str, Any]] = [USER]
        for _ in range(2):
            answer = await say(here, messages, 6, add_special_tokens=True)
            assert "midstream" not in answer
            messages += [answer["choices"][0]["message"], MORE]
        other = await say(here, messages, 6)
        assert other["midstream"]["branch"] == {"why": "edited", "messages": 0}
        assert [turn.parent for turn in turns_of(here)] == [0, 1, 0]
    first, second = (request.prompt for request in engine.requests[:2])
    added = ids("<|im_end|><|im_start|>user\nand?<|im_end|><|im_start|>assistant\n")
    assert first == (IM_START, *ids("<|im_start|>user\nhe said<|im_end|><|im_start|>assistant\n"), IM_END)
    assert second == (*first, *engine.reply, *added, IM_END)


async def test_each_of_several_prompts_is_a_turn_and_says_its_branch(tmp_path: Path) -> None:
    engine = an_engine(tuple(b"hello "))

    async with running(tmp_path, engine) as here:
        asked = {"model": MODEL, "max_tokens": 6, "n": 2}
        body = {**asked, "prompt": ["he said ", "else"]}
        assert "midstream" not in (await here.http.post(COMPLETIONS, json=body, headers=NAMED)).json()
        first = engine.requests[0].prompt + engine.reply
        body = {**asked, "prompt": [[*first, 9], [1, 2]]}
        answer = (await here.http.post(COMPLETIONS, json=body, headers=NAMED)).json()
        new = {"why": "new", "messages": 0}
        assert answer["midstream"] == {"branches": [None, new]}
        # A text is tokenized refetch, so that a stream of it can go on elsewhere.
        body = {**asked, "prompt": ["he said hello he", "else"], "stream": True}
        stream = events((await here.http.post(COMPLETIONS, json=body, headers=NAMED)).text)
        told = [event["midstream"]["branches"] for event in stream[:-1] if "midstream" in event]
        assert [[branch["why"] for branch in branches] for branches in told] == [["template", "new"]]
        turns = turns_of(here)
        assert len(turns) == 12
        assert {(turn.parent, tuple(turn.added)) for turn in turns[4:8]} == {(2, (9,)), (0, (1, 2))}
        assert [turn.branch and turn.branch["why"] for turn in turns[8:]].count("template") == 2
    assert engine.requests[4].prompt == ids("he said hello he")


async def test_sglangs_prompts_say_their_branches_too(tmp_path: Path) -> None:
    engine = an_engine(tuple(b"hello "))

    async with running(tmp_path, engine) as here:
        asked = {"sampling_params": {"max_new_tokens": 6}}

        async def ask(*prompts: list[int], **more: object) -> httpx.Response:
            body = {**asked, "input_ids": prompts, **more}
            return await here.http.post("/generate", json=body, headers=NAMED)

        first = (await ask([1, 2, 3], [4, 5])).json()
        assert not [one for one in first if {"branch", "branches"} & one["midstream"].keys()]
        turn, new = [1, 2, 3, *first[0]["output_ids"], 9], {"why": "new", "messages": 0}
        plain = (await ask(turn, [7, 8])).json()
        assert plain[0]["midstream"]["branches"] == [None, new]
        turn = [*turn, *plain[0]["output_ids"], 9]
        stream = events((await ask(turn, [7, 9], stream=True)).text)
        told = [e["midstream"]["branches"] for e in stream[:-1] if "branches" in e["midstream"]]
        assert told == [[None, new]]


_CALL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
#: A value of each field that changes something, of both kinds of request.
VALUES: dict[str, Any] = {
    "weight_version": {"min_version": 0},
    "model": MODEL,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "constrain_reasoning": True,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["zz"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "context_length_exceeded_behavior": "error",
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "seed": 7,
    "logprobs": True,
    "top_logprobs": 2,
    "echo": True,
    "echo_last": 2,
    "include_routing_matrix": True,
    "return_token_ids": True,
    "raw_output": True,
    "perf_metrics_in_response": True,
    "prompt_cache_key": "k",
    "prompt_cache_isolation_key": "k",
    "prompt_cache_max_len": 0,
    "session_id": "x",
    "user": "x",
    "cache_salt": "k",
    "request_id": "r",
    "priority": 3,
    "min_tokens": 2,
    "allowed_token_ids": [104, 105],
    "bad_words": ["bad"],
    "structured_outputs": {"choice": ["hello"]},
    "prompt_logprobs": 1,
    "return_routed_experts": True,
    "return_sampling_mask": True,
    "return_router_weights": True,
    "return_record_reference": True,
    "routing_matrix_format": "parquet_v1",
    "sampling_mask": "parquet_v1",
    "return_tokens_as_token_ids": True,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "add_special_tokens": True,
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "prediction": {"a": 1},
    "speculation": {"a": 1},
    "prompt_cache_retention": "24h",
    "safety_identifier": "x",
    "response_format": {"type": "json_object"},
    "midstream": {"snapshot": "base"},
    "prompt": ["ab", "cd"],
    "messages": [USER, {"role": "assistant", "content": "x"}, MORE],
    "tools": None,
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"mood": "glad"},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "separate_reasoning": False,
    "include_reasoning": False,
}
_NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "include_routing_matrix": {"logprobs": True},
    "return_routed_experts": {"logprobs": True},
    "return_sampling_mask": {"logprobs": True},
    "return_router_weights": {"logprobs": True, "include_routing_matrix": True},
    "return_record_reference": {"logprobs": True},
    "return_tokens_as_token_ids": {"logprobs": True},
    "stream_options": {"stream": True},
}
#: Refused but for values that ask for nothing.
REFUSED = {
    *("best_of", "use_beam_search", "typical_p", "mirostat_lr", "mirostat_target", "reasoning_effort"),
    *("reasoning_history", "thinking", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_decoding_backend", "guided_whitespace_pattern", "suffix", "images", "functions"),
    *("function_call", "modalities", "audio", "verbosity", "web_search_options", "prompt_truncate_len"),
    "safe_tokenization",
}
#: What the tokenizer of these tests cannot do.
REFUSED |= {"response_format", "structured_outputs"}


@pytest.mark.parametrize(("path", "kind"), [(CHAT, ChatBody), (COMPLETIONS, CompletionBody)])
async def test_no_field_of_a_request_leaves_its_turn_out_of_the_trace(
    tmp_path: Path, path: str, kind: type[ChatBody | CompletionBody]
) -> None:
    names = set(kind.__struct_fields__)
    assert names <= {*VALUES, *REFUSED}
    base = {"messages": [USER]} if kind is ChatBody else {"prompt": "he said"}
    store = (tmp_path / "bucket").as_uri()
    files = RecordFiles(store, "default")

    async with running(tmp_path, an_engine(tuple(b"hello ")), files=files) as here:
        for number, name in enumerate(sorted(names - REFUSED)):
            session = f"s{number}"
            body = {"model": MODEL, **base, "max_tokens": 5, **_NEEDS.get(name, {}), name: VALUES[name]}
            named = {"x-midstream-session": session, "x-fireworks-r3-store-id": store}
            answer = await here.http.post(path, json=body, headers=named)
            assert answer.status_code == 200, (name, answer.text)
            trace = here.replica.trace(("", session))
            expected = {"n": 2, "prompt": 2}.get(name, 1)
            assert trace is not None, name
            assert len(trace.turns) == expected, name
    files.close()


@pytest.mark.parametrize("kept", [True, False])
async def test_edited_thinking_is_a_branch_and_is_rendered(tmp_path: Path, kept: bool) -> None:
    engine = an_engine((*b"<think>\nhm\n</think>\n\nyes", IM_END))

    async with running(tmp_path, engine, write=thinking) as here:
        first = (await say(here, [USER], 40))["choices"][0]["message"]
        assert first["reasoning_content"] == "hm"
        call = {"role": "user", "content": "go on"}
        second = (await say(here, [USER, first, call], 40))["choices"][0]["message"]
        left_out = {"role": "assistant", "content": "yes"}
        inline = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
        for one, other in ((first, second), (left_out, second), (left_out, left_out), (inline, inline)):
            answer = await say(here, [USER, one, call, other, MORE], 1)
            assert "midstream" not in answer
        edited = [
            {**first, "reasoning_content": "hm, no"},
            {"role": "assistant", "content": "hm, no</think>yes"},
            {**first, "content": "not so\n</think>\n\nyes"},
            {"role": "assistant", "content": "yes", "reasoning": "hm, no"},
        ]
        for message in edited:
            answer = await say(here, [USER, message, call, second if kept else message, MORE], 1)
            # Also where only the thinking before the last answer was edited.
            assert answer["midstream"]["branch"] == {"why": "edited", "messages": 1}
            answer = await say(here, [USER, first, call, message, MORE], 1)
            assert answer["midstream"]["branch"] == {"why": "edited", "messages": 3, "turn": 1}
        # What the client says is what is rendered.
        last = {"role": "tool", "tool_call_id": "c", "content": "found"}
        await say(here, [USER, {**first, "reasoning_content": "never"}, last], 1)
        # And its next turn goes on from there.
        answer = await say(here, [USER, edited[0], call, first, MORE, first, call], 1)
        assert answer["midstream"]["branch"]["why"] == "edited"
    assert b"<think>\nnever\n</think>" in bytes(token for token in engine.requests[-2].prompt if token < 256)


def test_a_client_that_edits_thinking_goes_on_from_its_own_words() -> None:
    client = Client("deepseek", 0)
    client.tools = None
    _, history = client.ask()
    client.say(history, "<think>\nhm\n</think>\n\nyes")
    at = client.last_answer()
    client.messages[at] = {"role": "assistant", "content": "yes", "reasoning_content": "no"}
    prompt, history = client.ask()
    assert history.branch == Branch("edited", 1)
    client.say(history, "fine")
    _, history = client.ask()
    assert history.branch is None
    # The same words with the first thinking are another conversation.
    client.messages[at]["reasoning_content"] = "hm"
    _, history = client.ask()
    assert history.branch == Branch("edited", 2, 1)
    assert prompt.token_ids
