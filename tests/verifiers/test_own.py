"""Custom functions as verifiers, in real processes: their arguments and results, and that they cannot harm a run."""

from __future__ import annotations

import json
import math
import socket
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.config import load
from services.protocol.entries import encode_entry
from services.protocol.messages import Row
from services.verifiers.base import Job, Scores, VerifierFailure, solved
from services.verifiers.scoring import Scoring

CONFIG = """
[model]
path = "m"
[[data.sources]]
kind = "jsonl"
path = "d"
[[verifiers]]
kind = "python"
timeout_s = 100
"""
ROW = msgspec.json.encode(Row([{"role": "user", "content": "How many?"}], {"level": 3, "tests": ["a", "b"]})).decode()

OWN = """
import asyncio, ctypes, os, socket, sys, time

def length(completion):
    return len(completion)

def everything(completion, prompt, answer, row, tokens, finish, source):
    assert prompt == [{"role": "user", "content": "How many?"}] and source == "main", (prompt, source)
    return {"score": tokens[0] + row["level"], "right": completion == answer, "why": f"{finish}, {row['tests']}"}

def whatever(**fields):
    return len(fields)

def scaled(completion, factor, offset=0):
    return factor * len(completion) + offset

class Loaded:
    made = 0
    def __init__(self, word="a"):
        Loaded.made += 1
        self.word = word
    def __call__(self, completion):
        return completion.count(self.word) / Loaded.made

class Scoring:
    def score(self, completion):
        return 0.5

async def later(completion):
    await asyncio.sleep(0.5)
    return len(completion)

async def never(completion):
    await asyncio.sleep(60)

def ranked(completions, answer, finish):
    order = sorted(completions, key=len)
    return [order.index(completion) / len(order) for completion in completions]

async def ranked_later(completions):
    return [{"score": i, "rank": i} for i, _ in enumerate(completions)]

def act(completion, row):
    if completion == "ok": return 1
    if completion == "raise": return {}["x"]
    if completion == "exit": os._exit(0)
    if completion == "quit": sys.exit(3)
    if completion == "crash": ctypes.string_at(0)
    if completion == "hang":
        while True: pass
    if completion == "stuck": time.sleep(60)
    if completion == "fork":
        while True: os.fork()
    if completion == "program": os.execv("/bin/true", ["true"])
    if completion == "memory": return len(bytearray(64 << 30))
    if completion == "huge": return {"score": 1, "why": "x" * (64 << 20)}
    if completion == "print":
        for _ in range(10_000): print("x" * 100); print("y" * 100, file=sys.stderr)
        return 1
    if completion == "frames":
        for descriptor in range(3, 64):
            try: os.write(descriptor, b"\\x07\\x00\\x00\\x00garbage")
            except OSError: pass
        return 1
    if completion == "text": return "1.0"
    if completion == "none": return None
    if completion == "nan": return float("nan")
    if completion == "big": return 10 ** 400
    if completion == "list": return [1.0, 2.0]
    if completion == "keyless": return {"reward": 1}
    if completion == "object": return {"score": 1, "what": object()}

def large(completion):
    return bool(bytearray(5 << 30))

def from_verl(solution_str, ground_truth):
    return 1.0

def call(completion):
    with socket.create_connection(("127.0.0.1", int(completion)), 1) as made:
        return made.send(b"!")

def secret(completion):
    return float(os.environ.get("SOME_API_KEY", -1))

async def lingering(completion):
    if completion == "raise": return {}["x"]
    if completion == "wait": await asyncio.sleep(60)
    return sum("_bounded" in repr(task.get_coro()) for task in asyncio.all_tasks())

def drips(completions):
    for completion in completions:
        if completion == "hang":
            while True: pass
        yield 1.0

def unordered(completions):
    return {1.0, 2.0}

def short(completions):
    return [1.0]

def asks(question):
    return 1

def positional(completion, /):
    return 1
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "run.toml").write_text(CONFIG)
    (folder / "my_rewards.py").write_text(textwrap.dedent(OWN))
    return folder


@asynccontextmanager
async def scoring(own: Path, function: str, *overrides: str, workers: int = 1) -> AsyncIterator[Scoring]:
    given = [f'verifiers.0.function="my_rewards.py:{function}"', *(f"verifiers.0.{override}" for override in overrides)]
    config = load(own / "run.toml", given, environ={})
    made = Scoring(config, config.data.sources, workers)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def job(*completions: str, answer: str = "four") -> Job:
    n = len(completions)
    return Job("main", list(completions), answer, ROW, ["stop"] * n, [[i] for i in range(n)])


async def scores(own: Path, function: str, *overrides: str, completions: tuple[str, ...] = ("a", "four")) -> Scores:
    async with scoring(own, function, *overrides) as made:
        return await made.score(job(*completions))


@pytest.mark.parametrize(
    ("function", "overrides", "expected"),
    [
        ("length", [], [1.0, 4.0]),
        ("whatever", [], [8.0, 8.0]),
        ("scaled", ["options={factor = 2, offset = 1}"], [3.0, 9.0]),
        ("Loaded", [], [1.0, 0.0]),
        ("Loaded", ['options={word = "f"}'], [0.0, 1.0]),
        ("Scoring", [], [0.5, 0.5]),
        ("later", [], [1.0, 4.0]),
        ("ranked", ['scope="group"'], [0.0, 0.5]),
        ("ranked_later", ['scope="group"'], [0.0, 1.0]),
    ],
)
async def test_a_function_gets_arguments_by_name(own: Path, function: str, overrides: list[str], expected: list[float]) -> None:
    assert (await scores(own, function, *overrides)).scores["python"] == expected


async def test_a_mapping_gives_parts_of_the_score_and_a_note(own: Path) -> None:
    found = await scores(own, "everything", 'name="mine"')
    assert found.scores == {"mine": [3.0, 4.0], "mine.right": [0.0, 1.0]}
    assert [json.loads(note)["mine"] for note in found.notes] == [
        {"right": right, "why": "stop, ['a', 'b']"} for right in (False, True)
    ]


async def test_numbers_of_numpy_are_parts(own: Path) -> None:
    (own / "counted.py").write_text(
        "import numpy as np\n\ndef score(completion):\n"
        "    long = np.int64(len(completion))\n"
        "    return {'score': long / 2, 'long': long, 'half': np.float32(0.5), 'is_long': long > 1, 'words': np.array([1, 2])}\n"
    )
    async with scoring(own, "length", 'function="counted.py:score"') as made:
        found = await made.score(job("a", "four"))
    assert found.scores == {
        "python": [0.5, 2.0], "python.long": [1.0, 4.0], "python.half": [0.5, 0.5], "python.is_long": [0.0, 1.0]
    }  # fmt: skip
    assert json.loads(found.notes[1])["python"] == {"long": 4.0, "half": 0.5, "is_long": 1.0, "words": "[1 2]"}


async def test_a_class_is_instantiated_once_for_all_sources(own: Path) -> None:
    two = 'data.sources=[{kind="jsonl", path="d"}, {kind="jsonl", path="e", name="other"}]'
    config = load(own / "run.toml", [two, 'verifiers.0.function="my_rewards.py:Loaded"'], environ={})
    made = Scoring(config, config.data.sources, 1)
    await made.start()
    try:
        for source in ("main", "other"):
            assert (await made.score(Job(source, ["a"], ""))).scores == {"python": [1.0]}, "it divides by the number of instances"
    finally:
        await made.close()


async def test_a_files_name_does_not_shadow_a_module(own: Path) -> None:
    (own / "json.py").write_text("import json\n\ndef score(completion):\n    return json.loads(completion)\n")
    async with scoring(own, "length", 'function="json.py:score"') as made:
        assert (await made.score(job("7"))).scores == {"python": [7.0]}


async def test_async_calls_of_a_group_run_concurrently(own: Path) -> None:
    async with scoring(own, "later", "timeout_s=3.5") as made:  # each call takes half a second
        found = await made.score(job(*"abcdefgh"))
    assert found.scores["python"] == [1.0] * 8, "sequentially they would exceed timeout_s = 3.5"


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("raise", r"failed: KeyError: 'x' \(my_rewards.py:\d+\)"),
        ("exit", "the worker died, exit status 0"),
        ("quit", "SystemExit: 3"),
        ("crash", "the worker died, SIGSEGV"),
        ("hang", "a call exceeded its time limit and its worker was killed"),
        ("stuck", "a call exceeded its time limit"),
        ("fork", "PermissionError"),
        ("program", "PermissionError"),
        ("memory", "MemoryError"),
        ("huge", r"returned \d+ bytes in addition to the score, more than 16384: return less"),
        ("frames", "the worker wrote garbage to its pool and was killed"),
        ("text", r"returned '1.0' \(str\): return a number"),
        ("none", "returned None"),
        ("nan", "score nan is not a finite number"),
        ("big", "return a number"),
        ("list", r"returned \[1.0, 2.0\] \(list\): return a number"),
        ("keyless", "a mapping without the key 'score'"),
    ],
)
async def test_a_faulty_function_fails_its_ticket_with_a_reason(own: Path, completion: str, reason: str) -> None:
    limit = 0.5 if completion in ("hang", "stuck") else 100
    async with scoring(own, "act", f"timeout_s={limit}") as made:
        with pytest.raises(VerifierFailure, match=reason) as caught:
            await made.score(job("ok", completion))
        assert "'python'" in str(caught.value)
        assert not caught.value.final
        assert (await made.score(job("ok", "ok"))).scores == {"python": [1.0, 1.0]}


async def test_memory_is_limited(own: Path) -> None:
    config = load(
        own / "run.toml", ['verifiers=[{kind = "python", function = "my_rewards.py:large", timeout_s = 100}]'], environ={}
    )
    made = Scoring(config, config.data.sources, 1)
    await made.start()
    try:
        with pytest.raises(VerifierFailure, match=r"MemoryError.*its worker may use 4 GiB"):
            await made.score(job("a"))
    finally:
        await made.close()


async def test_printed_output_is_discarded(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with scoring(own, "act") as made:
        assert (await made.score(job("print", "object"))).scores == {"python": [1.0, 1.0]}
    assert capfd.readouterr() == ("", "")


async def test_a_call_that_never_returns_is_cancelled(own: Path) -> None:
    async with scoring(own, "never", "timeout_s=0.2") as made:
        pids = made.pools[0].pids
        with pytest.raises(VerifierFailure, match=r"TimeoutError: a call took longer than timeout_s = 0\.2"):
            await made.score(job("a", "b"))
        assert made.pools[0].pids == pids


@pytest.mark.parametrize(
    ("range_", "completion", "message"),
    [("[0, 4]", "12345", r"score 5 is outside its range \[0, 4\]"), ("[2, 9]", "1", r"score 1 is outside its range \[2, 9\]")],
)
async def test_a_score_outside_the_range_is_a_failure(own: Path, range_: str, completion: str, message: str) -> None:
    async with scoring(own, "length", f"range={range_}") as made:
        with pytest.raises(VerifierFailure, match=message):
            await made.score(job("123", completion))
        assert (await made.score(job("123", "12"))).scores == {"python": [3.0, 2.0]}


async def test_a_group_needs_one_score_per_completion(own: Path) -> None:
    async with scoring(own, "short", 'scope="group"') as made:
        with pytest.raises(VerifierFailure, match="returned 1 results for 2 completions"):
            await made.score(job("a", "b"))


async def test_no_call_of_a_failed_group_runs_beside_the_next(own: Path) -> None:
    async with scoring(own, "lingering", "timeout_s=30") as made:
        with pytest.raises(VerifierFailure, match="KeyError"):
            await made.score(job("raise", "wait", "wait"))
        assert (await made.score(job("look"))).scores == {"python": [1.0]}


async def test_results_have_an_order_and_are_drawn_within_the_time_limit(own: Path) -> None:
    async with scoring(own, "unordered", 'scope="group"') as made:
        with pytest.raises(VerifierFailure, match="returned a set, whose order is not that of the completions"):
            await made.score(job("a", "b"))
    async with scoring(own, "drips", 'scope="group"', "timeout_s=1") as made:
        assert (await made.score(job("a", "b"))).scores == {"python": [1.0, 1.0]}
        with pytest.raises(VerifierFailure, match=r"exceeded its time limit") as caught:
            await made.score(job("a", "hang"))
        assert "did not answer" not in str(caught.value), "it is stopped from within"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def score(completion)\n    return 1", r"SyntaxError: expected ':' \(broken\.py:1\)"),
        (
            "import nothing_like_it",
            r"No module named 'nothing_like_it' \(broken\.py:1\): install it for .*, or put it into the folder",
        ),
        ("from .parse import number", r"no known parent package \(broken\.py:1\): name it as package\.module:name"),
        ("import json\njson.loads('{')", r"JSONDecodeError: .* \(broken\.py:2\)"),
    ],
)
async def test_code_that_cannot_be_imported_is_named_with_its_line(own: Path, code: str, message: str) -> None:
    (own / "broken.py").write_text(code)
    config = load(own / "run.toml", ['verifiers.0.function="broken.py:score"'], environ={})
    made = Scoring(config, config.data.sources, 1)
    with pytest.raises(VerifierFailure, match=message):
        await made.start()
    await made.close()


@pytest.mark.parametrize("allowed", [False, True])
async def test_only_a_verifier_with_network_has_connections(own: Path, allowed: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with scoring(own, "call", f"network={str(allowed).lower()}") as made:
            port = str(listener.getsockname()[1])
            if allowed:
                assert (await made.score(job(port))).scores == {"python": [1.0]}
            else:
                with pytest.raises(
                    VerifierFailure, match=r"PermissionError.*my_rewards\.py:\d+\): the sandbox refuses .* network = true"
                ):
                    await made.score(job(port))


async def test_a_secret_reaches_only_the_verifier_that_names_it(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "7")
    assert (await scores(own, "secret")).scores["python"] == [-1.0, -1.0]
    assert (await scores(own, "secret", 'variables=["SOME_API_KEY"]')).scores["python"] == [7.0, 7.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "my_rewards.py has no 'nothing'"),
        ("rankd", "my_rewards.py has no 'rankd': did you mean 'ranked'?"),
        ("from_verl", "parameter 'solution_str' is unknown; here it is called 'completion'"),
        ("ranked", "parameter 'completions' is unknown; scope = \"group\" offers it"),
        ("asks", "parameter 'question' is unknown: with scope = \"completion\" a verifier may ask for answer, completion,"),
        ("positional", "parameter 'completion' is passed by position"),
        ("OWN", "has no 'OWN'"),
        ("sys", "is not a function or class but module"),
    ],
)
async def test_an_unusable_function_is_reported_at_start(own: Path, function: str, message: str) -> None:
    with pytest.raises(VerifierFailure) as caught:
        await scores(own, function)
    assert message in str(caught.value)
    assert str(caught.value).startswith("verifier 'python' cannot be used: ")


@pytest.mark.parametrize(
    ("function", "option"), [("everything", 'options={answer = "x"}'), ("whatever", 'options={row = "x", other = 1}')]
)
async def test_an_option_for_a_parameter_of_the_group_is_refused(own: Path, function: str, option: str) -> None:
    with pytest.raises(VerifierFailure, match=r"options\.(answer|row) = 'x' has no effect: a parameter of this name gets the"):
        await scores(own, function, option)


async def test_the_answer_of_a_generated_task_is_its_entrys(own: Path) -> None:
    (own / "gym.toml").write_text(CONFIG.replace('kind = "jsonl"\npath = "d"', 'kind = "reasoning_gym"\ntask = "gcd"'))
    config = load(own / "gym.toml", ['verifiers.0.function="my_rewards.py:ranked"', 'verifiers.0.scope="group"'], environ={})
    fields = Job("main", ["x"], encode_entry({"question": "?", "answer": "4"}), ROW).fields(config.data.sources[0])
    assert (fields["answer"], fields["row"]["level"]) == ("4", 3)
    fields = Job("main", ["x"], encode_entry({"question": "?", "answer": None}), ROW).fields(config.data.sources[0])
    assert fields["answer"] == "", "some tasks have none"


@pytest.mark.parametrize(
    ("length", "score"), [(0, 0.0), (80, 0.0), (90, -0.5), (95, -0.75), (100, -1.0), (120, -1.0)]
)  # DAPO, equation 13, with L_max = 100 and L_cache = 20
async def test_a_long_completion_is_punished_softly(own: Path, length: int, score: float) -> None:
    overrides: list[str] = ['verifiers=[{kind="length", soft_tokens=20}]', "sampling.max_tokens=100"]
    config = load(own / "run.toml", overrides, environ={})
    made = Scoring(config, config.data.sources, 1)
    await made.start()
    try:
        found = await made.score(Job("main", ["x"], "", "", ["stop"], [[1] * length]))
    finally:
        await made.close()
    assert found.scores == {"length": [pytest.approx(score)]}
    assert math.copysign(1, found.scores["length"][0]) == (-1 if score else 1), "0 is not shown as -0"


def test_a_completion_is_solved_if_it_reaches_every_threshold() -> None:
    given: dict[str, Any] = {"a": [1.0, 0.7, 1 - 1e-9], "b": [5.0, 9.0, 5.0], "c": [math.pi] * 3}
    assert solved(given, {"a": 1.0, "b": 5.0}) == [True, False, True]
    assert solved(given, {}) == []
