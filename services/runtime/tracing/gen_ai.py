"""Attributes of spans by OpenTelemetry's conventions for generative AI, by which tracing backends recognise model calls.

The conventions are still in development; the names are those of version 1.41 (https://opentelemetry.io/docs/specs/semconv/gen-ai/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Attribute = str | int | float | Sequence[str]
PROVIDER = "grpo"


def inference(
    operation: str, temperature: float, max_tokens: int, read: int, sampled: int, finish: Sequence[str]
) -> dict[str, Attribute]:
    """Return the attributes of a call to the policy.

    Args:
        operation: `chat` for a turn, `text_completion` for the completions of a prompt.
        temperature: 0 is greedy sampling.
        max_tokens: Maximum number of tokens of a completion.
        read: Tokens of the prompt.
        sampled: Tokens of all completions.
        finish: Why each completion ended.
    """
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.choice.count": len(finish),
        "gen_ai.request.temperature": temperature,
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.usage.input_tokens": read,
        "gen_ai.usage.output_tokens": sampled,
        "gen_ai.response.finish_reasons": list(finish),
    }


def agent(name: str, conversation: str, read: int, sampled: int) -> dict[str, Attribute]:
    """Return the attributes of a rollout in the environment `name`; `read` and `sampled` are the tokens of all its turns."""
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": name,
        "gen_ai.conversation.id": conversation,
        "gen_ai.usage.input_tokens": read,
        "gen_ai.usage.output_tokens": sampled,
    }


def tools(calls: Sequence[Mapping[str, Any]], conversation: str) -> dict[str, Attribute]:
    """Return the attributes of a reply to tool calls; none if there are no calls. A single call is named with its id."""
    if not calls:
        return {}
    found: dict[str, Attribute] = {"gen_ai.operation.name": "execute_tool", "gen_ai.conversation.id": conversation}
    if len(calls) == 1:
        [call] = calls
        found |= {"gen_ai.tool.name": str(call["function"]["name"]), "gen_ai.tool.call.id": str(call["id"])}
        found["gen_ai.tool.type"] = "function"
    return found
