"""Programs in worker processes: their tools, replies, rewards and commands. Every failure has a reason."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.environments import AgentEnvironment, EnvironmentConfig, PythonEnvironment
from services.console.doctor import Finding, fault
from services.console.doctor.environments import environments
from services.console.doctor.preflight import without_repeats
from services.console.doctor.work import Work
from services.environment.programs.loaded import BadReply, LoadedProgram, scores_of
from services.environment.programs.pool import ProgramPool
from services.environment.programs.process import ProgramFailed, ProgramProcess, ProgramUnusable
from services.environment.programs.tools import TURN_CALLS, answered, methods_of
from services.environment.programs.verifiers_library import _with_valid_parts
from services.environment.records import RECORD_BYTES, pack_record, reply_of, unpack_records
from tests.support.harness import save_tokenizer_folder, small_config

PROGRAMS = Path(__file__).parents[1] / "support" / "programs.py"


class Shop:
    tools = ["price"]

    def price(self, item: str, count: int = 1) -> dict[str, Any]:
        """Look up a price."""
        if item == "nothing":
            raise KeyError(item)
        return {"total": 3 * count}


def called(name: str, arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": name, "arguments": arguments}}]}


@asynccontextmanager
async def process(environment: EnvironmentConfig) -> AsyncIterator[ProgramProcess]:
    pool = ProgramPool(environment)
    try:
        async with pool.process() as one:
            yield one
    finally:
        await pool.close()


async def test_a_tool_is_described_by_its_signature_and_answers_every_call() -> None:
    tools = methods_of(Shop(), Shop.tools)
    function = tools["price"].described["function"]
    assert (function["name"], function["description"]) == ("price", "Look up a price.")
    assert function["parameters"]["required"] == ["item"]
    assert function["parameters"]["properties"]["count"] == {"default": 1, "type": "integer"}
    for arguments, expected in (
        ('{"item": "tea", "count": 2}', '{"total": 6}'),
        ({"item": "tea"}, '{"total": 3}'),
        ('{"item": "tea", "count": "many"}', "Error: count:"),
        ("no JSON", "Error: "),
        ('{"item": "nothing"}', "Error: KeyError: 'nothing'"),
    ):
        [reply] = await answered(called("price", arguments), tools)
        assert (reply["role"], reply["tool_call_id"]) == ("tool", "a")
        assert reply["content"].startswith(expected)
    [reply] = await answered(called("prise", "{}"), tools)
    assert reply["content"] == "Error: there is no tool 'prise'; the tools are price"


async def test_calls_of_unknown_tools_share_the_limits_of_a_turn() -> None:
    many = methods_of(None, [Shop().price])
    many |= {f"tool_{number}": many["price"] for number in range(1000)}
    message = {"tool_calls": called("absent", "{}")["tool_calls"] * (TURN_CALLS + 1)}
    replies = [reply["content"] for reply in await answered(message, many)]
    assert replies[0].startswith("Error: there is no tool 'absent'; the tools are price, tool_0, ")
    assert {len(reply) for reply in replies[:-1]} == {500}
    assert replies[-1] == "Error: not called, since one message may call at most 100 tools"


async def test_a_tools_parameters_may_have_any_name() -> None:
    def odd(_x: int, model_config: str, model_fields: list[int], json: bool = True, self: int = 2) -> str:
        return f"{_x} {model_config} {model_fields} {json} {self}"

    [tool] = methods_of(None, [odd]).values()
    parameters = tool.described["function"]["parameters"]
    assert list(parameters["properties"]) == ["_x", "model_config", "model_fields", "json", "self"]
    assert parameters["required"] == ["_x", "model_config", "model_fields"]
    given = {"_x": 1, "model_config": "a", "model_fields": [3]}
    assert await tool.call(given) == "1 a [3] True 2"
    assert await tool.call(given | {"self": 5}) == "1 a [3] True 5"
    assert await tool.call(given | {"_x": "many"}) == (
        "Error: _x: Input should be a valid integer, unable to parse string as an integer"
    )
    assert (await tool.call({"_x": 1})).startswith("Error: model_config: Field required")


async def test_a_result_that_cannot_be_written_is_an_error_for_the_model() -> None:
    def power(base: int, exponent: int) -> int:
        return base**exponent

    def nested(depth: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(depth):
            found = [found]
        return found

    def keyed() -> dict[Any, int]:
        return {(1, 2): 3}

    tools = methods_of(None, [power, nested, keyed])
    for call, expected in (
        (called("power", {"base": 9, "exponent": 5000}), "Error: ValueError: Exceeds the limit (4300 digits)"),
        (called("nested", {"depth": 100_000}), "Error: RecursionError: "),
        (called("keyed", {}), "Error: TypeError: keys must be str"),
    ):
        [reply] = await answered(call, tools)
        assert reply["content"].startswith(expected)


@given(st.recursive(st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
async def test_a_tool_answers_any_arguments(arguments: Any) -> None:
    [reply] = await answered(called("price", arguments), methods_of(Shop(), Shop.tools))
    assert isinstance(reply["content"], str)


async def test_malformed_calls_and_lost_results_are_answered() -> None:
    program = LoadedProgram(Shop())
    assert (await program.turn({"error": "no closing brace"}))["messages"] == [
        {"role": "user", "content": "Error: no closing brace"}
    ]
    assert (await program.turn({"content": "done"}))["messages"] is None
    [reply] = (await program.unknown(called("price", "{}")))["messages"] or []
    assert "unknown" in reply["content"]
    assert await program.score() is None


@pytest.mark.parametrize(
    "expected",
    [
        "good", {"part": 1.0}, {"score": float("nan")}, {"score": "1"}, [1.0], 1.1e30, {"score": 1, "part": -1.1e30},
        {"score": 1, "a part": 1}, {"score": 1, "p" * 41: 1}, {"score": 1} | {f"p{number}": 1 for number in range(33)},
    ],
)  # fmt: skip
def test_an_invalid_reward_is_rejected(expected: Any) -> None:
    with pytest.raises(BadReply, match="is not valid"):
        scores_of(expected)


def test_the_parts_of_a_librarys_reward_get_valid_names() -> None:
    found = {f"<lambda> {number}": number for number in range(40)} | {"score": 1}
    parts = scores_of(_with_valid_parts(found)) or {}
    assert len(parts) == 33
    assert (parts["_lambda__31"], parts["score"]) == (31.0, 1.0)


def test_a_reward_may_consist_of_numpys_numbers() -> None:
    assert scores_of(np.float32(0.5)) == {"score": 0.5}
    assert scores_of({"score": np.bool_(True), "words": np.int64(3)}) == {"score": 1.0, "words": 3.0}


async def test_a_class_that_does_not_end_leaves_no_tools_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.environment.programs.loaded.CLOSE_LIMIT_S", 0.05)
    closed: list[str] = []

    class Hanging:
        async def close(self) -> None:
            closed.append("begun")
            await asyncio.Event().wait()

    class Tools:
        tools = ()

        async def close(self) -> None:
            closed.append("tools")

    with pytest.raises(TimeoutError):
        await LoadedProgram(Hanging(), [cast(Any, Tools())]).close()
    assert closed == ["tools", "begun"]


def test_records_are_complete_or_dropped() -> None:
    reply = reply_of([{"role": "user", "content": "x"}], {"state": 1}, 0.5, [])
    assert unpack_records([pack_record(reply)]) == [reply]
    assert unpack_records([pack_record(reply), b"Rgarbage"]) == []
    with pytest.raises(ValueError, match="bytes with its snapshot"):
        pack_record(reply_of([], "x" * RECORD_BYTES, 0.0))


async def test_a_blocking_program_loses_only_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.environment.programs.process.STOP_LIMIT_S", 0.5)
    code = (
        "import time\nclass Slow:\n    def turn(self, message):\n        time.sleep(60)\n    def score(self):\n        return 1\n"
    )
    (tmp_path / "slow.py").write_text(code)
    slow = PythonEnvironment(name="slow", kind="python", function=f"{tmp_path / 'slow.py'}:Slow", timeout_s=20.0)
    async with process(slow) as one:
        first = one.pid
        await one.do("a", "start", {})
        one._environment = slow.model_copy(update={"timeout_s": 0.5})
        with pytest.raises(ProgramFailed, match=r"turn took longer than timeout_s = 0\.5"):
            await one.do("a", "turn", {"content": "x"})
        one._environment = slow
        await one.ensure()
        assert one.pid not in (None, first)
        await one.do("b", "start", {})
        assert (await one.do("b", "score")).value == {"score": 1.0}


async def test_a_command_prints_its_reward_or_fails_with_a_reason() -> None:
    script = "import json, os, sys; row = json.loads(os.environ['GRPO_ROW']); print('hello'); print(row['reward'])"
    given = {"url": "http://127.0.0.1:1/v1", "key": "k"}
    node = "import sys; print('throw err;\\n\\nError: Cannot find module\\n\\nNode.js v20', file=sys.stderr); sys.exit(1)"
    async with process(AgentEnvironment(name="n", kind="agent", run=[sys.executable, "-c", node])) as one:
        with pytest.raises(ProgramFailed, match=r"exited with status 1: Error: Cannot find module$"):
            await one.do("a", "run", {**given, "row": {}})
    async with process(AgentEnvironment(name="c", kind="agent", run=[sys.executable, "-c", script])) as one:
        assert (await one.do("a", "run", {**given, "row": {"reward": 0.5}})).value == {"score": 0.5}
        parts = json.dumps({"score": 1, "part": 2})
        assert (await one.do("a", "run", {**given, "row": {"reward": parts}})).value == {"score": 1.0, "part": 2.0}
        with pytest.raises(ProgramFailed, match="print the reward, a number, as the last line"):
            await one.do("a", "run", {**given, "row": {"reward": "none"}})
        with pytest.raises(ProgramFailed, match="exited with status 1: KeyError: 'reward'"):
            await one.do("a", "run", {**given, "row": {}})


async def test_unloadable_code_is_named() -> None:
    pool = ProgramPool(PythonEnvironment(name="e", kind="python", function=f"{PROGRAMS}:agent"))
    with pytest.raises(ProgramUnusable, match=r"environment 'e' cannot be used: .* is not a class but function"):
        await pool.start()
    await pool.close()


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("Echo", "", "started with the first row, tools: add; replied to its answer and scored 0.333, in"),
        ("Rude", "", "started with the first row, tools: none; ended with its answer and scored 0.25, in"),
        ("Rude", "options = { turn = 3 }", "turn: 3 is not a reply: return a text, a list of messages"),
        ("Rude", 'options = { score = "good" }', "score: the reward 'good' is not valid: give a finite number"),
        ("Echo", "options = { turns = 2, laps = 3 }", "unexpected keyword argument 'laps'"),
        ("Endless", "", "a rollout with the first row took longer than 0.5 s: not tried to its end"),
        ("Absent", "", "has no 'Absent'"),
        ("Gymnasium", "", "class Gymnasium defines none of tools, start, turn, score"),
        ("Deaf", "", "turn is called as turn(self, message), but: too many positional arguments"),
        ("Echo", "solved_at = 1.0", "scored 0.333, in"),
        ("Silent", "", "the rollout has no reward: its program gave none"),
    ],
)
def test_doctor_tries_the_class(name: str, keys: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "Endless":
        monkeypatch.setattr("services.console.doctor.environments.TRIAL_LIMIT_S", 0.5)
    assert expected in tried(tmp_path, f'kind = "python", function = "{PROGRAMS}:{name}"', keys).detail


def test_doctor_accepts_a_class_without_a_score_until_its_end(tmp_path: Path) -> None:
    game = (
        "class Game:\n    won = None\n    def turn(self, message):\n        return 'go on'\n"
        "    def score(self):\n        return self.won\n"
    )
    (tmp_path / "game.py").write_text(game)
    found = tried(tmp_path, f'kind = "python", function = "{tmp_path / "game.py"}:Game"')
    assert (found.state, "replied to its answer and gave no reward yet" in found.detail) == ("note", True)


def test_doctor_scores_a_class_that_has_not_replied(tmp_path: Path) -> None:
    """A rollout whose first reply is cut off is scored without a turn."""
    code = (
        "class Own:\n    def turn(self, message):\n        self.right = True\n"
        "    def score(self):\n        return float(self.right)\n"
    )
    (tmp_path / "own.py").write_text(code)
    found = tried(tmp_path, f'kind = "python", function = "{tmp_path / "own.py"}:Own"')
    assert (found.state, found.remedy) == ("fault", "set whatever score() reads in start()")
    assert "a rollout whose first reply is cut off at sampling.max_tokens is scored without turn(), and this fails: score: " in (
        found.detail
    )
    assert "'Own' object has no attribute 'right'" in found.detail


def test_doctor_names_the_environment_whose_file_is_missing(tmp_path: Path) -> None:
    save_tokenizer_folder(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    sources = [f'{{name = "{name}", kind = "jsonl", path = "{data}", environment = "{name}"}}' for name in "ab"]
    tables = [
        f'{{name = "a", kind = "python", function = "{__name__}:Shop"}}',
        f'{{name = "b", kind = "python", function = "{tmp_path / "no-such.py"}:Game"}}',
    ]
    given = f"data.sources=[{', '.join(sources)}]", f"environments=[{', '.join(tables)}]", "verifiers=[]"
    [found] = environments(small_config(tmp_path, None, *given), Work())
    assert found.detail.startswith(f"environments.1.function = '{tmp_path}/no-such.py:Game': the file of a function, ")


def test_doctor_notes_a_threshold_for_a_score_that_is_not_given(tmp_path: Path) -> None:
    found = tried(tmp_path, f'kind = "python", function = "{PROGRAMS}:Silent"', "solved_at = 1.0", 'verifiers=[{kind="exact"}]')
    assert found.state == "note"
    assert "gave no score: with environments.0.solved_at = 1, it does not count as solved" in found.detail


def tried(folder: Path, program: str, keys: str = "", *overrides: str) -> Finding:
    """Return doctor's finding about an environment."""
    save_tokenizer_folder(folder / "model")
    source = f'{{kind = "jsonl", path = "{folder / "data.jsonl"}", environment = "world"}}'
    table = f'{{name = "world", {program}{f", {keys}" if keys else ""}}}'
    given = [f"data.sources=[{source}]", "verifiers=[]", f"environments=[{table}]", *overrides]
    [finding] = list(environments(small_config(folder, None, *given), Work()))
    return finding


@pytest.mark.parametrize(
    ("name", "keys", "state", "expected"),
    [
        ("agent", "", "ok", "asked the policy 2 times with the first row and scored 2, in"),
        ("agent", "max_turns = 1", "ok", "asked the policy once with the first row, reached a limit and gave no reward, in"),
        ("agent", 'options = { questions = "2" }', "fault", "run: TypeError: 'str' object cannot be interpreted as an integer"),
        ("agent", "options = { questions = 0 }", "fault", "the agent exited without calling the policy"),
        ("forgetful", "", "fault", 'no reward: its program gave none, and no verifier scores source "main"'),
        ("hanging", "timeout_s = 0.5", "fault", "the agent took longer than timeout_s = 0.5"),
    ],
)
def test_doctor_rehearses_an_agent(name: str, keys: str, state: str, expected: str, tmp_path: Path) -> None:
    finding = tried(tmp_path, f'kind = "agent", run = "{PROGRAMS}:{name}"', keys)
    assert (finding.state, expected in finding.detail) == (state, True), finding
    hint = "without a tool call, as models sometimes do: if the error is about that, return a low reward instead of raising"
    assert (hint in finding.remedy) == (state == "fault")


def test_doctor_rehearses_a_command(tmp_path: Path) -> None:
    finding = tried(tmp_path, f'kind = "agent", run = ["{sys.executable}", "agent.py"]')
    assert "agent.py': [Errno 2] No such file or directory" in finding.detail
    assert finding.remedy.endswith("(the program starts in a folder of its own, so its paths must be absolute)")


@pytest.mark.parametrize(("kind", "key"), [("agent", "run"), ("mcp", "server")])
def test_doctor_names_the_file_that_a_command_means(kind: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("")
    finding = tried(tmp_path, f'kind = "{kind}", {key} = ["{sys.executable}", "own.py"]', "", 'verifiers=[{kind = "exact"}]')
    assert "own.py': [Errno 2] No such file or directory" in finding.detail
    assert finding.remedy == (
        f"the program starts in a folder of its own, so its paths must be absolute: write {tmp_path.resolve() / 'own.py'}"
    )


def test_an_unusable_environment_is_one_fault(tmp_path: Path) -> None:
    lost = "environment 'world' cannot be used: no server"
    found = [
        fault("data source main", f"data.sources.0.path = 'a.jsonl': {lost}", "fix this error"),
        fault("data source other", "data.sources.1.path = 'b.jsonl' does not exist", "correct the path"),
        fault("environment world", f"environments.0.run = ['x']: {lost}", "fix this error"),
    ]
    assert without_repeats(found) == found[1:]
    assert without_repeats(found[:2]) == found[:2]


def test_an_environment_may_leave_the_reward_to_verifiers(tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("class Silent:\n    def turn(self, message):\n        return None\n")
    program = f'kind = "python", function = "{silent}:Silent"'
    assert "no reward: its program gave none" in tried(tmp_path, program).detail
    left = tried(tmp_path, program, "", 'verifiers=[{kind = "exact"}]')
    assert (left.state, "ended with its answer and left the reward to verifiers, in" in left.detail) == ("ok", True)
