"""Programs that the tests run in environments."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any


class Echo:
    """Replies a few times and scores the number of replies. It can be restored."""

    tools = ["add"]

    def __init__(self, turns: int = 3, log: str = "") -> None:
        self.turns, self.log, self.seen = turns, log, 0

    def start(self, row: dict[str, Any]) -> str:
        self._note(f"start {row['answer']}")
        return "begin"

    def turn(self, message: dict[str, Any]) -> str | None:
        self.seen += 1
        self._note(f"turn {self.seen}")
        return f"again {self.seen}" if self.seen < self.turns else None

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    def score(self) -> dict[str, float]:
        return {"score": self.seen / self.turns, "turns": float(self.seen)}

    def snapshot(self) -> int:
        return self.seen

    def restore(self, state: int) -> None:
        self.seen = state
        self._note(f"restore {state}")

    def _note(self, text: str) -> None:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(text + "\n")


class Rude:
    """Returns given values as its reply and score, which need not be valid."""

    def __init__(self, **replies: Any) -> None:
        self.replies = replies

    def turn(self, message: dict[str, Any]) -> Any:
        return self.replies.get("turn")

    def score(self) -> Any:
        return self.replies.get("score", 0.25)


class Uneven:
    """Scores with a part that only the first of a process' rollouts has, and no score at all in the third."""

    rollouts = 0

    def turn(self, message: dict[str, Any]) -> None: ...

    def score(self) -> dict[str, float] | None:
        Uneven.rollouts += 1
        if Uneven.rollouts == 3:
            return None
        return {"score": 1.0, "always": 2.0} | ({"first": 3.0} if Uneven.rollouts == 1 else {})


class Silent:
    """Ends the rollout without a score."""

    def turn(self, message: dict[str, Any]) -> None: ...


class Endless:
    """Never replies."""

    async def turn(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(3600)


class Fragile:
    """Raises in its second rollout and dies in its third. It cannot be restored."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def turn(self, message: dict[str, Any]) -> None:
        count = len(list(self.folder.iterdir()))
        (self.folder / str(count)).touch()
        if count == 1:
            raise ValueError("on purpose")
        if count == 2:
            os._exit(3)

    def score(self) -> float:
        return 1.0


async def agent(client: Any, row: dict[str, Any], questions: int = 2) -> float:
    """Query the policy a few times, each time in a separate conversation."""
    said = [
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"{row['answer']} {i}"}])
        for i in range(questions)
    ]
    return float(len(said))


async def forgetful(client: Any, row: dict[str, Any]) -> None:
    """Query the policy, and return no reward."""
    await agent(client, row, 1)


async def hanging(client: Any, row: dict[str, Any]) -> None:
    """Query the policy, and never return."""
    await agent(client, row, 1)
    await asyncio.sleep(3600)


class Digits:
    """Rewards digits in the policy's replies, in two turns. It can be restored."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def turn(self, message: dict[str, Any]) -> str | None:
        self.said.append(message["content"])
        return "more" if len(self.said) < 2 else None

    def score(self) -> float:
        return sum(any(digit in text for digit in "0123") for text in self.said) / 2

    def snapshot(self) -> list[str]:
        return self.said

    def restore(self, state: list[str]) -> None:
        self.said = state


class Adder:
    """Offers a tool in every rollout, and a second one if the row requests it. It starts without messages."""

    tools = ["add"]

    def start(self, row: dict[str, Any]) -> None:
        if row.get("more"):
            self.tools = ["add", "negate"]

    def add(self, a: int, note: str = "x") -> int:
        """Add to a number what only this object knows: "é" > 'e' & <tool_call>."""
        return a + len(note)

    def negate(self, a: int) -> int:
        """Negate a number."""
        return -a

    def turn(self, message: dict[str, Any]) -> None:
        return None

    def score(self) -> float:
        return 1.0


class Unlisted:
    """Lists its tools only on instances, not on the class."""

    @property
    def tools(self) -> list[str]:
        return ["add"]

    def add(self, a: int) -> int:
        return a


class Missing:
    """Lists a tool that does not exist."""

    tools = ["absent"]


class Gymnasium:
    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, True


class Deaf:
    def turn(self) -> None:
        return None
