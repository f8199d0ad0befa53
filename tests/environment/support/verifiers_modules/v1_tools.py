"""An environment for the v1 API of verifiers with a tool, which the library serves through MCP."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false - it runs elsewhere

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ToolSums"]


class Adder(vf.Toolset[vf.ToolsetConfig]):
    """A tool that adds."""

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class ToolTask(vf.Task[vf.TaskData]):
    """Scores the digits of a reply."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Return the tools."""
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        """Return the fraction of the digits 0 to 3 that the reply contains."""
        return sum(digit in trace.last_reply for digit in "0123") / 4


class ToolSums(vf.Taskset[ToolTask, vf.TasksetConfig]):
    """Questions about sums."""

    def load(self) -> Iterator[ToolTask]:
        """Yield the tasks."""
        for number in range(4):
            yield ToolTask(vf.TaskData(prompt=f"What is {number} + 1?"), self.config.task)


if __name__ == "__main__":
    Adder.run()
