"""An environment of the classic API of verifiers with one turn."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false - it runs elsewhere

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import httpx
import verifiers as vf
from datasets import Dataset


def load_environment(rows: int = 4) -> Any:
    """Return the environment. What is said decides what the reward function meets."""

    def digits(completion: Any) -> float:
        said = str(completion[-1])
        if "judge" in said:
            raise RuntimeError("no judgement") from ConnectionRefusedError("the judge does not answer")
        if "slow" in said:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                urllib.request.urlopen(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.1)
        if "busy" in said:
            httpx.Response(503, request=httpx.Request("POST", "http://judge")).raise_for_status()
        if "loop" in said:
            raise TimeoutError("the answer takes too long to check")
        if "word" in said:
            raise ValueError("not a number")
        return sum(digit in said for digit in "0123") / 4

    data = Dataset.from_list([{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(rows)])
    held = Dataset.from_list([{"question": "What is 8 + 1?", "answer": "9"}])
    return vf.SingleTurnEnv(dataset=data, eval_dataset=held, system_prompt="Be brief.", rubric=vf.Rubric(funcs=[digits]))
