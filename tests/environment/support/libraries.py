"""Agents built with third-party libraries, used as usual except for the client."""

from __future__ import annotations

import asyncio
from typing import Any


async def agents(client: Any, row: dict[str, Any]) -> float:
    """Query the policy through the library openai-agents."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    result = await Runner.run(Agent(name="solver", model=model), row["prompt"][0]["content"], max_turns=2)
    return digits_in(result.final_output)


async def waiting(client: Any, row: dict[str, Any]) -> float:
    """Query the policy as smolagents does: with the synchronous client in a thread, and with a required tool call."""
    from openai import OpenAI

    tools = [{"type": "function", "function": {"name": "final_answer", "parameters": {"type": "object", "properties": {}}}}]
    with OpenAI(base_url=str(client.base_url), api_key=client.api_key) as theirs:
        reply = await asyncio.to_thread(
            theirs.chat.completions.create, model="policy", messages=row["prompt"], tools=tools, tool_choice="required"
        )
    return digits_in(reply.choices[0].message.content or "")


async def claude(client: Any, row: dict[str, Any]) -> float:
    """Query the policy through Anthropic's library."""
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key) as theirs:
        message = await theirs.messages.create(model="policy", max_tokens=12, messages=row["prompt"])
    return digits_in("".join(block.text for block in message.content if block.type == "text"))


def digits_in(text: str) -> float:
    """Return the fraction of the digits 0 to 3 that a text contains."""
    return sum(digit in text for digit in "0123") / 4
