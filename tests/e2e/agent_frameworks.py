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
    settings = agents.ModelSettings(tool_choice="required", max_tokens=200, temperature=1.0)
    agent = agents.Agent(
        name="finder",
        instructions="Find the key.",
        model=model,
        model_settings=settings,
        tools=[agents.function_tool(look)],
    )
    first = await agents.Runner.run(agent, "Where is the key?")
    # The framework keeps the history, and sends it back in its own words.
    second = await agents.Runner.run(
        agent, [*first.to_input_list(), {"role": "user", "content": "Look again."}]
    )
    return [str(first.final_output), str(second.final_output)]


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
    first = await agent.run("Where is the key?")
    async with agent.run_stream("Look again.", message_history=first.all_messages()) as streamed:
        second = await streamed.get_output()
    third = await agent.run("And again.", message_history=streamed.all_messages())
    return [first.output.where, second.where, third.output.where]


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
