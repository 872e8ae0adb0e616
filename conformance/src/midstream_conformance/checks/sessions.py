"""Sessions: where they are named, exact tokens from turn to turn, branches, traces and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream_conformance.answers import Answer, Json, largest_difference, plain_answer
from midstream_conformance.checks.paths import answered, call, refused
from midstream_conformance.endpoint import AFFINITY_HEADER, TRAJECTORY_HEADER, refusal
from midstream_conformance.outcome import expect
from midstream_conformance.rows import Evidence, row
from midstream_conformance.session import Session

EXACT = "docs/exact-sessions.md"
REWARDS = "docs/records.md: Rewards"
PATHS = "docs/harnesses.md: The session"
OWN = ("midstream",)
RECORDS = {"x-midstream-records": "logprobs"}
# Sampled, so that answers get other ids when they are rendered and tokenized again.
TURN: Json = {"max_tokens": 16, "ignore_eos": True, "return_token_ids": True, "temperature": 1}
HEADERS = (TRAJECTORY_HEADER, AFFINITY_HEADER, "x-session-id", "x-smg-routing-key")
TURNS = 4
# Nats: one number in two answers.
EQUAL = 1e-4


class Chat:
    """A conversation in one session, turn by turn."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.key = session.key()
        self.messages: list[Json] = []
        self.answers: list[Answer] = []

    async def turn(
        self, *, in_path: bool = False, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Answer:
        """Ask the next question, and keep what is answered. The session is named by the path, or by a header."""
        self.messages.append({"role": "user", "content": f"Question {len(self.answers)}?"})
        answer = await self.ask(self.messages, in_path=in_path, headers=headers, **fields)
        self.messages.append({"role": "assistant", "content": answer.choice.text})
        self.answers.append(answer)
        return answer

    async def ask(
        self,
        messages: list[Json],
        *,
        in_path: bool = False,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """Without keeping it."""
        endpoint = self._session.endpoint
        asked = {**TURN, **fields}
        if not in_path:
            named = {TRAJECTORY_HEADER: self.key, **(headers or {})}
            return await endpoint.complete(messages, path="/chat/completions", headers=named, **asked)
        path = f"/sessions/{self.key}{endpoint.prefix}/chat/completions"
        response = await call(
            self._session, path, {"model": endpoint.model, "messages": messages, **asked}, headers
        )
        expect(response.status_code == 200, f"{path}: {refusal(response)}")
        return plain_answer(response.headers, response.json())

    async def trace(self, prefix: str = "") -> Json:
        """Of the one replica that has turns."""
        traces = (await answered(self._session, f"{prefix}/sessions/{self.key}/trace", method="GET"))[
            "traces"
        ]
        expect(len(traces) == 1, f"turns on one replica were expected, got {len(traces)}")
        found: Json = traces[0]
        return found


def _prompt(answer: Answer) -> list[int]:
    return list(answer.body.get("prompt_token_ids") or ())


def _tokens(answer: Answer) -> list[int]:
    return _prompt(answer) + list(answer.choice.token_ids or ())


def _branch(holder: Mapping[str, Any]) -> Any:
    return (holder.get("midstream") or {}).get("branch")


def _expect_exact(before: Answer, after: Answer, turn: int) -> None:
    kept, prompt = _tokens(before), _prompt(after)
    expect(kept and prompt[: len(kept)] == kept, f"turn {turn} does not begin with the tokens of the one before",
           before=kept, prompt=prompt)  # fmt: skip
    expect(_branch(after.body) is None, f"turn {turn} says that it is a branch", branch=_branch(after.body))


@row(
    "sessions.path",
    "/sessions/KEY/v1 and a session header name the same session: each continues the other's turns",
    PATHS,
    OWN,
)
async def path(session: Session) -> Evidence:
    chat = Chat(session)
    for in_path in (True, False, True):
        await chat.turn(in_path=in_path)
    for turn, (before, after) in enumerate(zip(chat.answers, chat.answers[1:], strict=False), 2):
        _expect_exact(before, after, turn)
    replicas = sorted({str(answer.replica) for answer in chat.answers})
    expect(len(replicas) == 1, "the turns went to several replicas", replicas=replicas)
    parents = [turn["parent"] for turn in (await chat.trace())["turns"]]
    expect(parents == [0, 1, 2], "the session should have three turns, one behind the other", parents=parents)
    return {"turns": len(parents)}


@row(
    "sessions.conflict",
    "A session header that names another session than the path is a 400 that names it",
    PATHS,
    OWN,
)
async def conflict(session: Session) -> Evidence:
    chat, question = Chat(session), [{"role": "user", "content": "Who?"}]
    path = f"/sessions/{chat.key}{session.endpoint.prefix}/chat/completions"
    for header in HEADERS:
        await chat.ask(question, in_path=True, headers={header: chat.key})
        body = {"model": session.endpoint.model, "messages": question, **TURN}
        refused(
            await call(session, path, body, {header: session.key()}), f"{header} of another session", header
        )
    return {"headers": len(HEADERS)}


@row(
    "sessions.exact",
    "Each turn of a chat begins with exactly the tokens of the turn before it, as they were sampled",
    f"{EXACT}: What continues a turn",
    OWN,
)
async def exact(session: Session) -> Evidence:
    chat = Chat(session)
    await chat.turn()
    for turn in range(2, TURNS + 1):
        _expect_exact(chat.answers[-1], await chat.turn(), turn)
    return {"turns": TURNS, "tokens": len(_tokens(chat.answers[-1]))}


@row(
    "sessions.branch",
    "A history that was edited, or begun again, says so once in midstream.branch; one that continues does not",
    f"{EXACT}: Branches",
    OWN,
)
async def branch(session: Session) -> Evidence:
    chat = Chat(session)
    for turn in (1, 2):
        found = _branch((await chat.turn()).body)
        expect(found is None, f"turn {turn} says that it is a branch", branch=found)
    question, *_ = chat.messages
    edited = [question, {"role": "assistant", "content": "never said"}, {"role": "user", "content": "And?"}]
    for messages, why, known in ((edited, "edited", 1), ([question], "new", 1)):
        found = _branch((await chat.ask(messages)).body) or {}
        told = {"why": found.get("why"), "messages": found.get("messages")}
        expect(
            told == {"why": why, "messages": known}, f"a history that is {why} says otherwise", branch=found
        )
    streamed = await chat.ask(edited, stream=True)
    whys = [(_branch(event) or {}).get("why") for event in streamed.events if isinstance(event, dict)]
    expect(whys[:1] == ["edited"] and not any(whys[1:]), "the first chunk alone should say it", whys=whys)
    return {"turns": 5}


@row(
    "sessions.trace",
    "GET /sessions/KEY/trace gives each turn's tokens, log-probabilities and labels as the responses gave them",
    f"{EXACT}: The trace of a session",
    OWN,
)
async def trace(session: Session) -> Evidence:
    chat = Chat(session)
    for _ in range(3):
        await chat.turn(headers=RECORDS, logprobs=True)
    found = (await chat.trace())["turns"]
    expect((await chat.trace("/v1"))["turns"] == found, "/v1/sessions/KEY/trace has other turns")
    expect([turn["turn"] for turn in found] == [1, 2, 3], "three turns were expected", got=len(found))
    tokens: list[int] = []
    worst = 0.0
    for turn, answer in zip(found, chat.answers, strict=True):
        tokens += turn["added"]
        expect(tokens == _prompt(answer), f"turn {turn['turn']}: the prompt is not that of the response",
               trace=tokens, response=_prompt(answer))  # fmt: skip
        tokens += turn["token_ids"]
        expect(turn["token_ids"] == answer.choice.token_ids, f"turn {turn['turn']}: the ids are not those of the response",
               trace=turn["token_ids"], response=answer.choice.token_ids)  # fmt: skip
        worst = max(worst, *_apart(session, turn, answer))
        expect(worst <= EQUAL, f"turn {turn['turn']}: the log-probabilities are not those of the response",
               max_difference=worst)  # fmt: skip
        labels = [(span["snapshot"], span["start"], span["end"]) for span in turn["snapshots"]]
        wanted = [(answer.label, 0, len(turn["token_ids"]))]
        expect(
            labels == wanted, f"turn {turn['turn']}: the snapshots are not those of the response", got=labels
        )
        expect(turn["finish_reason"] == answer.choice.finish, f"turn {turn['turn']}: another finish reason")
    return {"turns": len(found), "tokens": len(tokens), "max_difference": worst}


def _apart(session: Session, turn: Json, answer: Answer) -> list[float]:
    """The check of the numbers that the engine knows."""
    apart = [largest_difference(turn["logprobs"] or (), answer.choice.logprobs)]
    if not session.target.missing("sampling_logprobs"):
        told = [float(token.entry["sampling_logprob"]) for token in answer.choice.tokens]
        apart.append(largest_difference(turn["sampling_logprobs"] or (), told))
    return apart


@row(
    "sessions.reward",
    "A reward of a session or a turn is in its trace, the last one of a name; one that is no number is a 400",
    REWARDS,
    OWN,
)
async def reward(session: Session) -> Evidence:
    chat = Chat(session)
    await chat.turn(in_path=True)
    own = f"/sessions/{chat.key}/reward"
    judged: Json = {"reward": -1.5, "name": "judge", "metadata": {"by": "conformance"}}
    for path, body in (
        (own, {"reward": 0.25, "turn": 1}),
        (f"/v1{own}", judged),
        (f"/v1{own}", {"reward": 0.75, "turn": 1}),
    ):
        await answered(session, path, body)
    refused(await call(session, own, {"reward": "much", "turn": 1}), "a reward that is no number", "reward")
    found = sorted(
        (
            (one["turn"], one["name"], one["reward"], one["metadata"])
            for one in (await chat.trace())["rewards"]
        ),
        key=str,
    )
    wanted = [(1, "reward", 0.75, None), (None, "judge", -1.5, judged["metadata"])]
    expect(found == wanted, "the trace's rewards are not those that were posted", got=found, wanted=wanted)
    return {"rewards": len(found)}
