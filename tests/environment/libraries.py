"""Agents of libraries that nobody here wrote; the difference to their usual use is the client."""

from __future__ import annotations

import asyncio
from typing import Any


async def agents(client: Any, row: dict[str, Any]) -> float:
    """Ask the policy by the library openai-agents."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    result = await Runner.run(Agent(name="solver", model=model), row["prompt"][0]["content"], max_turns=2)
    return digits_in(result.final_output)


async def smol(client: Any, row: dict[str, Any]) -> float:
    """Ask the policy by the library smolagents, which waits for replies in a thread."""
    from smolagents import EMPTY_PROMPT_TEMPLATES, OpenAIServerModel, ToolCallingAgent

    model = OpenAIServerModel("policy", api_base=str(client.base_url), api_key=client.api_key)
    prompts = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Answer."}  # the library's own are longer than the tests' context
    agent = ToolCallingAgent(tools=[], model=model, prompt_templates=prompts, max_steps=2, verbosity_level=0)
    return digits_in(str(await asyncio.to_thread(agent.run, row["prompt"][0]["content"])))


async def claude(client: Any, row: dict[str, Any]) -> float:
    """Ask the policy by Anthropic's library."""
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key) as theirs:
        message = await theirs.messages.create(model="policy", max_tokens=12, messages=row["prompt"])
    return digits_in("".join(block.text for block in message.content if block.type == "text"))


def digits_in(text: str) -> float:
    """Return how many of four digits a text has."""
    return sum(digit in text for digit in "0123") / 4
