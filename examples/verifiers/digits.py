"""An environment of verifiers 0.4: write digits, and then more of them. It knows of no trainer and no server."""

import aiohttp
import verifiers.v1 as vf

__all__ = ["DigitsHarness", "DigitsTaskset"]

TURNS, TOKENS = 2, 16


class DigitsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        """The share of digits in what both answers have room for."""
        said = "".join(answer.content or "" for answer in trace.assistant_messages)
        return sum(character in "0123456789" for character in said) / (TURNS * TOKENS)


class DigitsTaskset(vf.Taskset[DigitsTask, vf.TasksetConfig]):
    def load(self) -> list[DigitsTask]:
        prompts = [f"Write digits, {number}: " for number in range(4)]
        return [DigitsTask(vf.TaskData(prompt=prompt), self.config.task) for prompt in prompts]


class DigitsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks for more. It runs in this process; a program of its own would take a second of a core per rollout."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages = []
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as http:
            for words in (data.prompt, "More: ")[:TURNS]:
                messages.append({"role": "user", "content": words})
                body = {"model": ctx.model, "messages": messages}
                async with http.post(f"{endpoint}/chat/completions", json=body) as answer:
                    messages.append((await answer.json())["choices"][0]["message"])
        return vf.ProgramResult(0, "", "")
