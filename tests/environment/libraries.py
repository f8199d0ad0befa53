"""Agents of libraries that nobody here wrote; the difference to their usual use is the client."""

from __future__ import annotations

from typing import Any


async def agents(client: Any, row: dict[str, Any]) -> float:
    """Ask the policy by the library openai-agents."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    result = await Runner.run(Agent(name="solver", model=model), row["prompt"][0]["content"], max_turns=2)
    return sum(digit in result.final_output for digit in "0123") / 4
