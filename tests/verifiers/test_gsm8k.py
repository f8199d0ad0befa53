"""The verifier `math` on all of GSM8K, through the pool as in a run: gold answers are right, off-by-one answers are wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
from pathlib import Path

import pytest

from services.config.data import FileSource
from services.verifiers.pool import VerifierPool
from tests.support.verifiers import scored, verifier

FOLDER = Path(__file__).parents[1] / "data" / "gsm8k"
PATTERN = r"####\s*(.+)"
FORMS = (
    "worked solution",
    "boxed",
    "boxed, separators and unit",
    "last number of the text",
    "solution off by one",
    "boxed off by one",
)
RIGHT = 4  # the first four forms are right answers


def _solutions() -> list[str]:
    lines = b"".join(gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()) for name in ("train", "test")).splitlines()
    return [json.loads(line)["answer"] for line in lines]


def _completions(solution: str, gold: str) -> list[str]:
    value = int(gold.replace(",", ""))
    return [
        solution,
        f"Adding up gives \\boxed{{{gold}}}.",
        f"So it is $\\boxed{{\\${value:,} \\text{{ dollars}}}}$.",
        f"After 3 days and 2 nights she has {gold}.",
        solution.replace(f"#### {gold}", f"#### {value + 1}"),
        f"Adding up gives \\boxed{{{value - 1}}}.",
    ]


async def test_gold_answers_are_right_and_off_by_one_answers_wrong(capsys: pytest.CaptureFixture[str]):
    solutions = _solutions()
    assert len(solutions) == 8792
    pool = VerifierPool([("math", verifier("math"))], workers=2, sources=[FileSource(kind="jsonl", path="gsm8k.jsonl")])

    async def grade(solution: str) -> list[float]:
        match = re.search(PATTERN, solution)
        assert match is not None, solution
        gold = match[1]
        return (await scored(pool, _completions(solution, gold), gold))["math"]

    await pool.start()
    try:
        started = time.perf_counter()
        scores = await asyncio.gather(*(grade(solution) for solution in solutions))
        elapsed_s = time.perf_counter() - started
    finally:
        await pool.close()
    with capsys.disabled():
        print(f"\nGSM8K, {len(scores)} answers, {len(scores) * len(FORMS) / elapsed_s:,.0f} grades/s on 2 workers")
        for form, column in zip(FORMS, zip(*scores, strict=True), strict=True):
            print(f"  {form:<28} {sum(column):5.0f} of {len(column)} graded correct")
    assert all(row == [1.0] * RIGHT + [0.0] * (len(FORMS) - RIGHT) for row in scores)
    assert pool.counts.groups == len(solutions)
    assert pool.counts.failures == 0
