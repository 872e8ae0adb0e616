"""Rollouts of verifiers' own agent against a server, and its traces made of our records. Prints JSON. Runs in .venv-harness.

The harness is verifiers' `null` with its bundled chat program; its tool is a Toolset behind verifiers' MCP server; the model
clients are verifiers' own. Nothing of the package is replaced.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClient
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.interception.server import _collect_stream

ROUNDS = 3
#: A call as Llama 3 writes it.
CALL = r'\{"name": "desk_look", "parameters": \{"where": "(desk|door|lamp)"\}\}'


class Desk(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def look(self, where: Literal["desk", "door", "lamp"]) -> str:
        """What is at a place."""
        return f"At the {where} there is nothing."


class FindTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config: Any) -> list[vf.Toolset]:
        return [Desk(vf.ToolsetConfig())]

    @vf.reward
    async def looked(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


def chat_agent(url: str, model: str) -> vf.AgentConfig:
    """Chat completions, streamed: the server renders, keeps the session's tokens and its numbers."""
    client = vf.EvalClientConfig(
        base_url=f"{url}/v1", api_key_var="NO_KEY", headers={"x-midstream-records": "logprobs"}
    )
    # Without commas an untrained model adds no members of its own to the arguments.
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": {"44": -100}}
    return agent_config(client, model, forced)


def token_agent(url: str, model: str, tokenizer: str) -> vf.AgentConfig:
    """prime-rl's way: verifiers renders, and bridges from one turn's tokens to the next's."""
    client = vf.TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="NO_KEY",
        headers={"x-midstream-records": "routes"},
        renderer={"name": "llama-3"},
        renderer_model_name=tokenizer,
    )
    return agent_config(
        client, model, {"structured_outputs": {"regex": CALL}, "return_routed_experts": "raw"}
    )


def agent_config(client: vf.ClientConfig, model: str, forced: dict[str, Any]) -> vf.AgentConfig:
    return vf.AgentConfig(
        harness={"id": "null"},
        runtime=vf.SubprocessConfig(),
        model=model,
        client=client,
        sampling={"max_tokens": 400, "seed": 1, **forced},
        max_turns=ROUNDS,
    )


async def rollout(config: vf.AgentConfig) -> vf.Trace:
    task = FindTask(vf.TaskData(prompt="Find the key.", system_prompt="You look for keys."))
    async with vf.Agent(config) as agent:
        return await agent.run(task)


#: A request of each API that verifiers relays.
ASKED: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20},
    "/responses": {"input": "Hi", "max_output_tokens": 20},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20},
}


async def relayed(url: str, model: str) -> list[dict[str, Any]]:
    """What verifiers reads of an answer in each API: whole, of a stream, and the tokens that it counts before."""
    client = EvalClient(vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY"))
    found = []
    for dialect in DIALECTS:
        body = ASKED[dialect.upstream_path] | {"model": model, "temperature": 0.0}
        whole = await client.get_response(dialect, body, vf.SamplingConfig(), session_id="relayed")
        stream = await client.relay(dialect, body | {"stream": True}, session_id="relayed")
        # As verifiers' interception server reads a relayed stream; one without its last event is an error.
        streamed, _ = await _collect_stream(dialect, stream)
        counted = [await client.relay_aux(dialect, route, body) for route in dialect.aux_routes]
        answers = [
            {
                "message": each.message.model_dump(exclude={"provider_state"}),
                "finish": each.finish_reason,
                "usage": [each.usage.input_tokens, each.usage.completion_tokens],
            }
            for each in (whole, streamed)
        ]
        found.append({"path": dialect.upstream_path, "answers": answers, "counted": counted})
    await client.close()
    return found


async def refused(url: str, model: str) -> list[Any]:
    """How verifiers is answered when its base URL names another session than its header."""
    client = EvalClient(vf.EvalClientConfig(base_url=f"{url}/sessions/other/v1", api_key_var="NO_KEY"))
    try:
        body = ASKED["/chat/completions"] | {"model": model}
        await client.get_response(DIALECTS[0], body, vf.SamplingConfig(), session_id="own")
    except vf.ProviderError as error:
        return [error.status_code, str(error)]
    finally:
        await client.close()
    return []


def told(trace: vf.Trace) -> dict[str, Any]:
    """What a trainer reads of a trace."""
    branches = [
        {
            "token_ids": branch.token_ids,
            "mask": branch.sampled_mask,
            "logprobs": branch.logprobs,
            "routes": None if branch.routed_experts is None else branch.routed_experts.tolist(),
        }
        for branch in trace.branches
    ]
    return {
        "id": trace.id,
        "ok": trace.ok,
        "errors": [error.message for error in trace.errors],
        "stop": trace.stop_condition,
        "reward": trace.reward,
        "metrics": trace.metrics,
        "truncated": trace.is_truncated,
        "turns": trace.num_turns,
        "output_tokens": trace.num_output_tokens,
        "tools": [message.content for message in trace.tool_messages],
        "branches": branches,
    }


def main(kind: str, *arguments: str) -> None:
    if kind == "relayed":
        answers, error = asyncio.run(relayed(*arguments)), asyncio.run(refused(*arguments))
        print(json.dumps({"answers": answers, "refused": error}))
        return
    if kind == "records":
        lines = Path(arguments[0]).read_text().splitlines()
        traces = [vf.WireTrace.model_validate_json(line) for line in lines]
    else:
        traces = [asyncio.run(rollout({"chat": chat_agent, "tokens": token_agent}[kind](*arguments)))]
    print(json.dumps([told(trace) for trace in traces]))


if __name__ == "__main__":
    # verifiers starts a toolset's module as its server, and so imports this one by its name elsewhere.
    Desk.run()
