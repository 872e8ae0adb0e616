"""Runs one agent framework's own tool loop against a server; prints what it saw, as JSON. Runs in .venv-harness.

Arguments: the framework, the base URL, the model. The base URL names the session; nothing else is told to the framework.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

Place = Literal["desk", "door", "lamp"]
LOOKS: list[str] = []
ROUNDS = 4


def look(where: Place) -> str:
    """What is at a place."""
    LOOKS.append(where)
    return f"At the {where} there is nothing."


async def openai_agents(base_url: str, model: str, api: str) -> Any:
    import agents
    from openai import AsyncOpenAI

    agents.set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key="k"), use_for_tracing=False)
    agents.set_default_openai_api("responses" if api == "responses" else "chat_completions")
    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    agent = agents.Agent(
        name="finder",
        instructions="Find the key.",
        model=model,
        model_settings=settings,
        tools=[agents.function_tool(look)],
        # What an untrained model says after a call has no end.
        tool_use_behavior="stop_on_first_tool",
        reset_tool_choice=False,
    )
    history: list[Any] = []
    said = []
    for number in range(ROUNDS):
        # The framework keeps the history, and sends it back in its own words.
        asked = [*history, {"role": "user", "content": f"Look again, {number}."}]
        if number % 2:
            result: Any = agents.Runner.run_streamed(agent, asked)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, asked)
        history = result.to_input_list()
        said.append(str(result.final_output))
    return said


async def pydantic_ai(base_url: str, model: str, api: str) -> Any:
    from pydantic import BaseModel, ConfigDict
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    class Found(BaseModel):
        # Without it an untrained model adds members with any number in them.
        model_config = ConfigDict(extra="forbid")
        where: Place

    served: Any
    if api == "messages":
        anthropic = AnthropicProvider(base_url=base_url.removesuffix("/v1"), api_key="k")
        served = AnthropicModel(model, provider=anthropic)
    else:
        served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key="k"))
    settings: Any = {"max_tokens": 400, "parallel_tool_calls": False}
    agent = Agent(served, output_type=Found, tools=[look], instructions="Find.", model_settings=settings)
    history: list[Any] = []
    said = []
    # It may find the key at once.
    while len(said) < ROUNDS or not LOOKS:
        async with agent.run_stream("Look again.", message_history=history) as streamed:
            said.append((await streamed.get_output()).where)
        result = await agent.run("And again.", message_history=streamed.all_messages())
        said.append(result.output.where)
        history = result.all_messages()
    return said


RUNS: dict[str, Any] = {
    "openai-agents": lambda url, model: openai_agents(url, model, "chat"),
    "openai-agents-responses": lambda url, model: openai_agents(url, model, "responses"),
    "pydantic-ai": lambda url, model: pydantic_ai(url, model, "chat"),
    "pydantic-ai-messages": lambda url, model: pydantic_ai(url, model, "messages"),
}

if __name__ == "__main__":
    framework, url, name = sys.argv[1:]
    said = asyncio.run(RUNS[framework](url, name))
    print(json.dumps({"looks": LOOKS, "said": said}))
