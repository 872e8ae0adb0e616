"""How an SGLang server is started, and what its answers may be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import INFO

from midstream.core.config import Settings
from midstream.core.errors import ConfigError
from midstream.core.server_settings import SglangSettings
from midstream.core.settings import load_settings
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.servers.chunks import InvalidAnswer
from midstream.engine.sglang import protocol
from midstream.engine.sglang.arguments import by_priority, check_arguments, command_line, environment, missing
from midstream.launch.engines import engine_fields

MODEL = Path("/models/m")


def test_the_command_line_has_every_flag_that_an_attached_server_needs_and_the_users_come_last() -> None:
    command = command_line("python", MODEL, "midstream", 1234, 7, ["--tp-size", "2"])
    assert command[:6] == ["python", "-P", "-m", "sglang.launch_server", "--model-path", "/models/m"]
    for flag in ("--skip-tokenizer-init", "--disable-overlap-schedule", "--incremental-streaming-output"):
        assert flag in command
    assert command[-2:] == ["--tp-size", "2"]
    place = command.index("--random-seed")
    assert command[place : place + 2] == ["--random-seed", "7"]
    assert missing(INFO) == []
    assert by_priority(INFO)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--port", "1"], "--port cannot be given: midstream calls the server at a port of its own"),
        (["--api-key=secret"], "--api-key cannot be given: the process list would show it"),
        (["--dp-size", "2"], "--dp-size cannot be given: a replica is one server"),
        (["--admin-api=secret"], "--admin-api: SGLang would read it as --admin-api-key: write the flag out"),
        (["--log-level", "info", "--api", "secret"], "--api: SGLang would read it as --api-key"),
        (["--dp", "2"], "--dp: SGLang would read it as --dp-size"),
        (["2"], "expected a flag of SGLang first"),
    ],
)
def test_flags_that_midstream_depends_on_are_refused(args: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"sglang.args: {why}")):
        check_arguments(args)


def test_the_environment_asks_for_raw_numbers_and_the_users_settings_win() -> None:
    env = environment({"A": "1", "HF_HUB_OFFLINE": "0"}, {"OMP_NUM_THREADS": "1"}, (1,))
    assert env["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert (env["A"], env["HF_HUB_OFFLINE"], env["OMP_NUM_THREADS"]) == ("1", "1", "1")
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment({"CUDA_VISIBLE_DEVICES": "4,6"}, {}, (1,))["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(ConfigError, match=r"sglang\.gpus: GPU 1"):
        environment({"CUDA_VISIBLE_DEVICES": "4"}, {}, (1,))


def test_a_replica_gets_its_server_or_starts_one(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'engine = "sglang"\n[sglang]\nurls = ["http://a:1", "http://b:2"]\n[deployment]\nreplicas = 2'
    )
    settings = load_settings(str(file), {})
    fields = engine_fields(settings, 1, 2)
    assert (fields["kind"], fields["server_url"], fields["sglang"]) == (
        "sglang",
        "http://b:2",
        settings.sglang,
    )
    assert engine_fields(Settings(engine="sglang"), 0, 1)["server_url"] is None
    file.write_text(file.read_text().replace("replicas = 2", "replicas = 3"))
    with pytest.raises(ConfigError, match=r"sglang\.urls names 2 servers for 3 replicas"):
        load_settings(str(file), {})
    twice = Settings(engine="sglang", sglang=SglangSettings(urls=("http://a:1", "http://a:1/")))
    with pytest.raises(ConfigError, match=r"sglang\.urls names a server twice"):
        engine_fields(twice, 0, 1)


def message(ids: list[int], *, count: int | None = None, **meta: Any) -> bytes:
    info = {
        "weight_version": "0:base",
        "completion_tokens": len(ids) if count is None else count,
        "cached_tokens": 0,
        "output_token_logprobs": [[-1.0, i, None] for i in ids],
    }
    return json.dumps({"output_ids": ids, "meta_info": info | meta}).encode()


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_is_read_however_it_is_cut(size: int) -> None:
    end = {"weight_versions": [{"version": "0:base", "start": 0, "end": 3}]}
    data = event(message([5])) + event(
        message([6, 7], count=3, finish_reason={"type": "length", "length": 3}, **end)
    )
    data += event(b"[DONE]")
    reader = protocol.SglangReader()
    chunks = [chunk for at in range(0, len(data), size) for chunk in reader.feed(data[at : at + size])]
    assert [[token.token_id for token in chunk.tokens] for chunk in chunks] == [[5], [6, 7], []]
    assert (chunks[1].finish, chunks[1].spans, chunks[2].done) == ("length", (("0:base", 0, 3),), True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (message([5], count=2), "2 tokens were generated, and 1 were sent"),
        (
            message([5], output_token_logprobs=[[-1.0, 6, None]]),
            r"log-probabilities of tokens \[6\] beside tokens \[5\]",
        ),
        (message([5], output_token_logprobs=[]), r"log-probabilities of tokens \[\] beside tokens \[5\]"),
        (b'{"output_ids": [5]}', "a message without meta_info"),
        (b'{"output_ids": "5"}', "Expected `array`"),
        (message([5], weight_version=None), "weight_version"),
        (b"{", "truncated"),
    ],
)
def test_other_answers_are_none(data: bytes, why: str) -> None:
    with pytest.raises(InvalidAnswer, match=why):
        protocol.SglangReader().feed(event(data))


def test_alternatives_that_are_missing_are_not_made_up() -> None:
    with pytest.raises(InvalidAnswer, match="alternatives for 0 tokens beside 1 tokens"):
        protocol.SglangReader(2).feed(event(message([5])))


def test_errors_and_aborts_are_said() -> None:
    (chunk,) = protocol.SglangReader().feed(event(b'{"error": {"message": "too\\nlong"}}'))
    assert chunk.error == "SGLang: too long"
    (chunk,) = protocol.SglangReader().feed(
        event(message([], finish_reason={"type": "abort", "message": "bad"}))
    )
    assert chunk.error == "SGLang: bad"
    (chunk,) = protocol.SglangReader().feed(event(message([], finish_reason={"type": "abort"})))
    assert (chunk.error, chunk.finish) == (None, "abort")
    (chunk,) = protocol.SglangReader().feed(event(message([5], output_token_logprobs=[[None, 5, None]])))
    assert chunk.not_finite
    assert chunk.error == "the model's log-probability of token 5 is not finite"


def test_a_body_gives_every_parameter_and_the_salt() -> None:
    shape: dict[str, Any] = {"top_k": 3, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {7: -1.5}}
    sampling = SamplingParams(max_tokens=9, temperature=0.5, stop_token_ids=(2,), **shape)
    request = GenerateRequest(
        request_id="r",
        prompt=(1, 2),
        sampling=sampling,
        priority=4,
        top_logprobs=2,
        emitted=((7,),),
        grammar="start: /a/",
    )
    made = json.loads(
        protocol.body(request, 0, name="n", salt="s", stream=True, routes_start=2, by_priority=True)
    )
    assert made == {
        "rid": "n",
        "input_ids": [1, 2, 7],
        "sampling_params": {
            "n": 1,
            "max_new_tokens": 8,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.0,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [2],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "logit_bias": {"7": -1.5},
            "ebnf": "start: /a/",
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 2,
        "stream": True,
        "extra_key": "s",
        "return_routed_experts": True,
        "routed_experts_start_len": 2,
        "priority": 4,
    }


@pytest.mark.skipif(
    "MIDSTREAM_SGLANG_URL" not in os.environ, reason="MIDSTREAM_SGLANG_URL names no SGLang server"
)
async def test_a_real_server_passes_the_proofs(tmp_path: Path) -> None:
    """MIDSTREAM_SGLANG_MODEL: the directory that it serves. It must have no other requests."""

    from midstream.engine.sglang.engine import SglangEngine

    model, url = Path(os.environ["MIDSTREAM_SGLANG_MODEL"]), os.environ["MIDSTREAM_SGLANG_URL"]
    engine = SglangEngine(model, SglangSettings(silence_s_max=60.0), tmp_path, url=url)
    card = (await engine.start()).card
    await engine.close()
    assert card.has("full_snapshots")
