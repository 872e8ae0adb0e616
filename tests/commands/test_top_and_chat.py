"""`midstream top` and `midstream chat` without a server: rates, trouble, hostile names, and streams that go wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from midstream.client import ServerClient
from midstream.commands import chat, observed, top
from midstream.commands.top_view import draw, spark

EVIL = "[bold]x[/bold]\x1b[2J\nforged"
METRICS = """\
midstream_gateway_requests_total{{path="control",status="503"}} 157.0
midstream_gateway_requests_total{{path="chat_completions",status="200"}} {ok}
midstream_gateway_requests_total{{path="chat_completions",status="429"}} 2.0
midstream_gateway_sessions 1.0
midstream_replica_requests_in_flight{{replica="r0"}} 3.0
midstream_replica_kv_blocks_used{{replica="r0"}} 10.0
midstream_replica_kv_blocks_capacity{{replica="r0"}} 40.0
midstream_replica_prompt_tokens_total{{replica="r0"}} 100.0
midstream_replica_cached_prompt_tokens_total{{replica="r0"}} 75.0
midstream_replica_generated_tokens_total{{replica="r0"}} {generated}
"""


class Served:
    """A server's answers. away: it does not answer. hidden: paths that the key may not see."""

    def __init__(self) -> None:
        self.generated, self.ok, self.away = 0.0, 4.0, False
        self.hidden: set[str] = set()
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if self.away:
            raise httpx.ConnectError("refused")
        if path in self.hidden:
            return httpx.Response(403, json={"error": {"message": "no"}})
        if path == "/metrics":
            return httpx.Response(200, text=METRICS.format(ok=self.ok, generated=self.generated))
        status, body = self.answers()[path]
        return httpx.Response(status, json=body)

    def answers(self) -> dict[str, tuple[int, Any]]:
        row = {
            "current_snapshot_identity": EVIL,
            "readiness": False,
            "loading_state": {"stage": "staging", "target_snapshot_identity": "step-2"},
            "midstream": {"replica": "r0", "error": EVIL, "generation": 2, "last_swap": {"pause_ms": 0.5}},
        }
        session = {
            "id": EVIL, "replica": "r0", "turns": 2, "open_turns": 1, "prompt_tokens": 9, "cached_share": 0.5,
            "generated_tokens": 7, "last_time_to_first_token_s": None, "mean_inter_token_s": None, "used_at": 90.0,
        }  # fmt: skip
        signal = {
            "identity": EVIL, "kind": "delta", "previous_snapshot_identity": EVIL, "signalled_at": 50.0, "files": [],
            "replicas": [{"replica": "r0", "ready_at": None, "error": EVIL}],
        }  # fmt: skip
        policy = {"policy": EVIL, "snapshot": EVIL, "frozen": True, "replicas": [row]}
        return {
            # Nothing is usable, and still it is an answer.
            "/health": (503, {"deployments": [{"name": "d", "wanted": 1}], "replicas": [{"name": "r0", "usable": False}]}),
            "/hot_load/v1/models/hot_load": (200, {"replicas": [row]}),
            "/v1/accounts": (200, {"accounts": [{"name": "accounts/a"}]}),
            "/v1/accounts/a/deployments": (200, {"deployments": [{"name": "accounts/a/deployments/d"}]}),
            "/v1/accounts/a/deployments/d/policies": (200, {"policies": [policy]}),
            "/v1/accounts/a/deployments/d/ledger": (
                200,
                {"desired_snapshot_identity": EVIL, "snapshots": [signal]},
            ),
            "/v1/sessions": (200, {"data": [session], "has_more": False, "unreachable": []}),
        }  # fmt: skip


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def observer(served: Served) -> Iterator[observed.Observer]:
    clock = iter(range(100, 1000, 2))
    server = ServerClient("http://h:1", http=httpx.Client(transport=httpx.MockTransport(served)))
    yield observed.Observer(server, None, now=lambda: float(next(clock)))
    server.close()


def drawn(seen: Any, width: int = 200, **options: Any) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as frame:
        console.print(draw(seen, **options))
    return frame.get()


def test_rates_are_of_the_time_between_two_looks_and_control_calls_are_no_requests(
    served: Served, observer: observed.Observer
) -> None:
    first = observer.look()
    served.generated, served.ok = 50.0, 8.0
    second = observer.look()
    seen = observed.summary(second, first)
    assert (seen["rates"]["generated_tokens"], seen["rates"]["requests"]) == (25.0, 2.0)
    assert seen["replicas"][0]["tokens_per_s"] == 25.0
    assert (seen["totals"]["requests"], seen["totals"]["failed_requests"], seen["errors"]) == (
        10,
        2,
        {"429": 2},
    )
    assert (seen["replicas"][0]["kv_share"], seen["replicas"][0]["cached_share"]) == (0.25, 0.75)
    served.generated = 10.0
    again = observed.summary(observer.look(), second)
    assert again["rates"]["generated_tokens"] is None, "a counter that began anew"
    assert observed.summary(first, None)["rates"]["requests"] is None


def test_the_long_lists_are_asked_for_now_and_then_only(served: Served, observer: observed.Observer) -> None:
    looks = [observer.look() for _ in range(4)]
    assert served.asked.count("/metrics") == 4
    assert served.asked.count("/v1/sessions") == 2
    assert all(len(look.sessions) == 1 for look in looks)


def test_what_the_key_may_not_see_is_left_out_and_never_guessed(
    served: Served, observer: observed.Observer
) -> None:
    served.hidden = {"/metrics", "/v1/sessions", "/v1/accounts"}
    seen = observed.summary(observer.look(), None)
    assert set(seen["totals"].values()) == {None}
    assert (seen["replicas"][0]["in_flight"], seen["replicas"][0]["kv_share"]) == (None, None)
    assert (seen["deployment"], seen["snapshots"], seen["policies"]) == (None, [], [])
    assert "the key does not have the scope observe" in drawn(seen)


def test_no_name_is_read_as_markup_or_acts_on_the_terminal(observer: observed.Observer) -> None:
    picture = drawn(observed.summary(observer.look(), None), speeds=[0.0, 4.0], trouble=EVIL)
    assert "\x1b" not in picture
    assert not [line for line in picture.splitlines() if line.startswith("forged")]
    assert picture.count(r"[bold]x[/bold]\x1b[2J\nforged") == 10
    assert "staging step-2, not ready" in picture
    assert "frozen" in picture


RUN = "run-20261127-101500-3fa9"
REPLICAS = [f"accounts-local-deployments-default-replica-{number}" for number in range(3)]
TRACEBACK = "InvalidRequest: " + "a long explanation of what failed " * 4


class LongNames(Served):
    """Names as a real run has them: TrainingRun's snapshots, replicas of a cluster, a harness's session keys."""

    def answers(self) -> dict[str, tuple[int, Any]]:
        told = super().answers()
        swap = {"pause_ms": 0.52, "fetch_ms": 812.0, "streams_crossed": 31}
        loads, idle = {"stage": "staging", "target_snapshot_identity": f"{RUN}/41"}, {"stage": "idle"}
        rows = [
            {
                "current_snapshot_identity": f"{RUN}/{38 + number}",
                "readiness": number > 0,
                "loading_state": idle if number else loads,
                "midstream": {
                    "replica": name, "error": TRACEBACK if number == 1 else None, "generation": 40, "last_swap": swap,
                },
            }
            for number, name in enumerate(REPLICAS)
        ]  # fmt: skip
        told["/hot_load/v1/models/hot_load"] = (200, {"replicas": rows})
        [session] = told["/v1/sessions"][1]["data"]
        keys = [f"verifiers-math-group-0042-rollout-{number:03}" for number in range(5)]
        listed = [session | {"id": key, "replica": REPLICAS[0], "last_reward": 0.25} for key in keys]
        told["/v1/sessions"] = (200, {"data": listed, "has_more": False, "unreachable": []})
        [policy] = told["/v1/accounts/a/deployments/d/policies"][1]["policies"]
        renamed = policy | {"policy": f"adapter-of-{RUN}", "snapshot": f"{RUN}/40", "replicas": rows}
        told["/v1/accounts/a/deployments/d/policies"] = (200, {"policies": [renamed]})
        [signal] = told["/v1/accounts/a/deployments/d/ledger"][1]["snapshots"]
        signals = [
            signal | {"identity": f"{RUN}/{number}", "previous_snapshot_identity": f"{RUN}/{number - 1}",
                      "replicas": [{"replica": name, "ready_at": 50.5, "error": None} for name in REPLICAS]}
            for number in (40, 41)
        ]  # fmt: skip
        ledger = {"desired_snapshot_identity": f"{RUN}/41", "snapshots": signals}
        told["/v1/accounts/a/deployments/d/ledger"] = (200, ledger)
        return told


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_name_is_broken_over_two_lines_however_narrow_the_terminal_is(width: int) -> None:
    server = ServerClient("http://h:1", http=httpx.Client(transport=httpx.MockTransport(LongNames())))
    seen = observed.summary(observed.Observer(server, None, now=lambda: 100.0).look(), None)
    server.close()
    lines = [line.rstrip() for line in drawn(seen, width, speeds=[1.0] * 60).splitlines()]
    assert max(map(len, lines)) <= width
    tables = {}
    for part in "\n".join(lines).split("\n\n")[1:]:
        title, *rows = part.splitlines()
        # Under the head of the columns.
        tables[title] = rows[1:]
    wanted = {
        "Replicas": [(name[-4:], f"/{38 + number}") for number, name in enumerate(REPLICAS)],
        "Snapshots, the newest first": [("/40",), ("/41",)],
        "Policies": [("3fa9", "/40")],
        "Sessions, the last used first": [(f"-{number:03}", "a-0", "50%", "0.25") for number in range(5)],
    }
    for title, rows in wanted.items():
        assert len(tables[title]) >= len(rows)
        for line, names in zip(tables[title], rows, strict=False):
            assert all(name in line for name in names), (title, line, names)
    for remark in ("what failed", "frozen", "desired"):
        assert remark in "\n".join(lines), "a remark is never left out"


def test_a_server_that_goes_is_asked_again_and_its_last_picture_stays(
    served: Served, observer: observed.Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.commands.top.time.sleep", lambda _: None)
    frames = top.frames(observer, 1.0)
    served.away = True
    assert next(frames)[0] is None
    served.away = False
    seen, _, trouble = next(frames)
    assert (seen is not None, trouble) == (True, "")
    served.away = True
    kept, _, trouble = next(frames)
    assert kept == seen
    assert "no answer for 0.0 s, trying again: GET http://h:1/health: refused" in trouble
    served.away, served.generated = False, 100.0
    seen, speeds, trouble = next(frames)
    assert (trouble, speeds[-1] > 0) == ("", True)


def test_the_line_of_speeds_has_its_highest_bar_where_the_most_was() -> None:
    assert spark([0.0, 1.0, 2.0, 4.0]) == "▁▃▅█"
    assert spark([0.0, 0.0]) == "▁▁"


def conversation(lines: str, status: int = 200) -> tuple[chat.Conversation, list[dict[str, Any]]]:
    """And the bodies of its requests."""
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content) | {"key": request.headers["x-multi-turn-session-id"]})
        return httpx.Response(status, text=lines)

    http = httpx.Client(base_url="http://h:1", transport=httpx.MockTransport(answer))
    return chat.Conversation(http, "m", "be short", {"max_tokens": 5}), asked


def chunk(text: str | None = None, snapshot: str = "one", **more: Any) -> str:
    delta = {} if text is None else {"content": text}
    event = {"model": f"m@{snapshot}", "choices": [{"delta": delta, "finish_reason": None}]} | more
    return f": m log\n\ndata: {json.dumps(event)}\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
END = chunk(choices=[], usage=USAGE, snapshot="two") + "data: [DONE]\n\n"


def test_a_label_of_an_adapter_and_its_base_names_both() -> None:
    talk, _ = conversation(chunk("a", "red-1") + chunk("b", "red-1@step-5") + "data: [DONE]\n\n")
    assert talk.ask("hi", lambda _: None).snapshots == ["red-1", "red-1@step-5"]


def test_an_answer_that_crosses_a_swap_names_both_snapshots() -> None:
    talk, asked = conversation(chunk("a") + chunk("b") + chunk("c", "two") + END)
    pieces: list[str] = []
    answer = talk.ask("hi", pieces.append)
    assert (pieces, answer.text, answer.snapshots) == (["a", "b", "c"], "abc", ["one", "two"])
    assert (answer.prompt_tokens, answer.cached_tokens, answer.tokens) == (9, 4, 3)
    assert answer.summary().startswith("served by one then two; 9 prompt tokens, 4 of them cached; 3 tokens")
    talk.ask("more", pieces.append)
    assert asked[1]["messages"] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": "more"},
    ]
    assert asked[0]["key"] == asked[1]["key"]
    talk.reset()
    talk.ask("anew", pieces.append)
    assert len(asked[2]["messages"]) == 2
    assert asked[2]["key"] != asked[1]["key"]


def test_an_interrupt_ends_the_answer_and_keeps_what_there_is_of_it() -> None:
    talk, asked = conversation(chunk("a") + chunk("b") + END)

    def interrupted(text: str) -> None:
        if text == "b":
            raise KeyboardInterrupt

    answer = talk.ask("hi", interrupted)
    assert (answer.text, answer.finish_reason, answer.tokens) == ("ab", "you", None)
    assert answer.summary().endswith("ended by you")
    talk.ask("more", lambda text: None)
    assert asked[1]["messages"][2] == {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        ('{"error": {"message": "too many"}}', 429, "429 too many"),
        (chunk("a") + 'data: {"error": {"message": "the engine died"}}\n\n', 200, "the engine died"),
        (chunk("a"), 200, "the stream ended before the answer did"),
        (chunk("a") + "data: {\n\n", 200, "not JSON"),
    ],
)
def test_a_turn_that_fails_leaves_the_conversation_as_it_was(lines: str, status: int, says: str) -> None:
    talk, asked = conversation(lines, status)
    for _ in range(2):
        with pytest.raises(chat.TurnRefused, match=says):
            talk.ask("hi", lambda text: None)
    assert asked[0]["messages"] == asked[1]["messages"]


def test_a_conversation_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[Callable[[], str]] = [
        lambda: "hi",
        raising(KeyboardInterrupt),
        lambda: "/reset",
        lambda: " ",
        raising(EOFError),
    ]
    monkeypatch.setattr("builtins.input", lambda _: typed.pop(0)())
    talk, asked = conversation(chunk("a\n\tb\x1b[2J\x07") + END)
    before = talk.session
    assert chat._talk(talk, "http://h:1") == 0
    said = capsys.readouterr().out
    assert "a\n\tb\\x1b[2J\\x07\n[served by one then two; " in said
    assert said.count(chat.HELP) == 2
    assert (len(asked), talk.session == before) == (1, False)


@pytest.mark.parametrize("way_out", ["/quit", "/exit"])
def test_help_and_the_words_that_end_a_conversation_are_not_prompts(
    way_out: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["/help", way_out, "never read"]
    monkeypatch.setattr("builtins.input", lambda _: typed.pop(0))
    talk, asked = conversation(END)
    assert chat._talk(talk, "http://h:1") == 0
    assert (typed, asked) == (["never read"], [])
    # Once at the beginning, and once when it was asked for.
    assert capsys.readouterr().out.count(chat.HELP) == 2
    assert all(word in chat.HELP for word in ("/help", way_out, "/reset"))


def test_help_in_a_file_of_prompts_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    talk, asked = conversation(END)
    assert chat._answer_lines(talk, io.StringIO("/help\n/quit\nnever read\n"), False) == 0
    said = capsys.readouterr()
    assert (said.out, said.err, asked) == ("", chat.HELP + "\n", [])


def raising(error: type[BaseException]) -> Callable[[], str]:
    def act() -> str:
        raise error

    return act
