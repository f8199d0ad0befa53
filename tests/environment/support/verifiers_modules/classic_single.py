"""A single-turn environment for the classic API of verifiers."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false - it runs elsewhere

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import httpx
import verifiers as vf
from datasets import Dataset


def load_environment(rows: int = 4) -> Any:
    """Return the environment. A word in the completion selects how the reward function fails."""

    def digits(completion: Any) -> float:
        reply = str(completion[-1])
        if "judge" in reply:
            raise RuntimeError("no judgement") from ConnectionRefusedError("the judge does not answer")
        if "slow" in reply:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                urllib.request.urlopen(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.1)
        if "busy" in reply:
            httpx.Response(503, request=httpx.Request("POST", "http://judge")).raise_for_status()
        if "loop" in reply:
            raise TimeoutError("the answer takes too long to check")
        if "word" in reply:
            raise ValueError("not a number")
        return sum(digit in reply for digit in "0123") / 4

    data = Dataset.from_list([{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(rows)])
    held = Dataset.from_list([{"question": "What is 8 + 1?", "answer": "9"}])
    return vf.SingleTurnEnv(dataset=data, eval_dataset=held, system_prompt="Be brief.", rubric=vf.Rubric(funcs=[digits]))
