"""`grpo init` and `grpo --version`."""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from services.config import load
from services.config.data import FileSource, ReasoningGymSource
from services.config.environments import McpEnvironment, PythonEnvironment
from services.config.verifiers import ExactConfig, MathConfig
from services.console.commands.__main__ import main
from services.console.doctor.preflight import preflight
from services.console.initial.look import BOXED
from services.dataprep.prompts.rows import Needs, read_rows
from services.verifiers.builtin.math import MathVerifier
from services.verifiers.builtin.simple import ExactVerifier
from tests.newcomer.world import CONTEXT, make_model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with a model in `model`."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    return tmp_path


def rows(file: Path, *records: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file.name


def test_the_file_describes_model_data_and_reward(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(here / "prompts.jsonl", {"question": "say 1", "solution": "1", "level": 3})
    (here / "own.py").write_text("def _help(): ...\n\ndef rate(completion, answer):\n    return float(completion == answer)\n")
    assert main(["init", "--model", "model", "--data", data, "--reward", "own.py"]) == 0
    assert "context of 64 tokens" in capsys.readouterr().out
    config = load("run.toml", environ={})
    (source,), (verifier,) = config.data.sources, config.verifiers
    assert isinstance(source, FileSource)
    assert (config.run.name, config.model.path, source.path) == ("run", "model", data)
    assert (source.prompt_field, source.answer_field) == ("question", "solution")
    assert verifier.kind == "python"
    assert verifier.function == f"{here / 'own.py'}:rate"
    assert config.model.max_tokens == CONTEXT
    found = preflight(config, [], {}, own=True)
    assert [one for one in found if one.state == "fault"] == [], "the file passes `grpo doctor`"


@pytest.mark.parametrize(
    ("code", "kind", "reward"),
    [
        ("class Own:\n    def score(self):\n        return 1\n", "python", ""),
        ("class Own:\n    def turn(self, message):\n        return None\n", "python", "exact"),
        ("async def Own(client, row):\n    await client.models.list()\n    return 1\n", "agent", ""),
    ],
)
def test_an_environment_gives_the_reward_unless_one_is_named(here: Path, code: str, kind: str, reward: str) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1", "answer": "1"})
    (here / "own.py").write_text(code)
    assert main(["init", "--model", "model", "--data", data, "--environment", "own.py", "--reward", reward]) == 0
    config = load("run.toml", environ={})
    [environment] = config.environments
    assert (environment.kind, environment.name) == (kind, config.data.sources[0].environment)
    assert [each.kind for each in config.verifiers] == [reward] * bool(reward)
    faults = [one.detail for one in preflight(config, [], {}, own=True) if one.state == "fault"]
    assert all("exited without calling the policy" in one for one in faults), "otherwise the file passes `grpo doctor`"
    assert len(faults) == (kind == "agent")


def test_the_commands_that_follow_can_be_copied(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1", "answer": "1"})
    assert main(["init", "my run.toml", "--model", "model", "--data", data, "--reward", "exact"]) == 0
    assert "start it with `grpo run 'my run.toml'`" in capsys.readouterr().out


CLASS = "class Own:\n    def score(self):\n        return 1\n"
AGENT = "agent.py"
SERVER = Path(__file__).parents[2] / "environment" / "support" / "mcp_server.py"


@pytest.mark.parametrize(
    ("given", "kind", "verifiers"),
    [
        (["--tool", "python"], "python", ["exact"]),
        (["--tool", "python", "--environment", "own.py"], "python", []),
        (["--tool", "python server.py"], "mcp", ["exact"]),
        (["--tool", "python server.py", "--tool", "python", "--environment", "own.py:Own", "--reward", "math"], "mcp", ["math"]),
    ],
)
def test_tools_are_offered_and_the_file_passes_doctor(here: Path, given: list[str], kind: str, verifiers: list[str]) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1", "answer": "1 2"})
    (here / "own.py").write_text(CLASS)
    (here / "server.py").write_bytes(SERVER.read_bytes())
    assert main(["init", "--model", "model", "--data", data, *given]) == 0
    config = load("run.toml", environ={})
    [environment] = config.environments
    assert (environment.kind, [each.kind for each in config.verifiers]) == (kind, verifiers)
    assert isinstance(environment, PythonEnvironment | McpEnvironment)
    assert environment.tools == ["python"] * ("python" in given)
    assert bool(environment.function) == ("--environment" in given)
    if isinstance(environment, McpEnvironment):
        assert environment.command == ["python", str(here / "server.py")], "it starts in another folder"
    assert [one.detail for one in preflight(config, [], {}, own=True) if one.state == "fault"] == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["own.py:Own"], "methods of a class, which --environment FILE.py:CLASS names; for a file that is an MCP server, give"),
        (["own.py"], "give --tool 'python own.py'"),
        (["nowhere"], "there is no program 'nowhere': give python, or the command or URL of an MCP server"),
        (["python 'server.py"], "not a valid command (No closing quotation)"),
        (["http://a", "http://b"], "an environment has one MCP server, and --tool http://a is one"),
        (["http://127.0.0.1:1/mcp"], "the MCP server 'http://127.0.0.1:1/mcp' cannot be used"),
        (["python", AGENT], "an agent brings its tools"),
    ],
)
def test_what_is_no_tool_is_refused_with_what_to_give(
    here: Path, given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1", "answer": "1"})
    (here / AGENT).write_text("async def solve(client, row):\n    return 1\n")
    options = [word for each in given for word in ("--environment" if each == AGENT else "--tool", each)]
    assert main(["init", "--model", "model", "--data", data, *options]) == 2
    assert why in capsys.readouterr().err
    assert not Path("run.toml").exists()


@pytest.mark.parametrize(
    ("answers", "kind", "pattern"),
    [
        (["it is 3\n#### 3", "#### 1,000"], "math", r"####\s*(.+)"),
        ([r"so \boxed{x^2}"], "math", BOXED),
        ([r"so \boxed{\frac{\sqrt{2^{3}}}{2}} units", r"\boxed{7}"], "math", BOXED),
        (["7", 8], "math", ""),
        ([r"\frac{1}{2}", "7", "p - q"], "math", ""),
        (["Paris"], "exact", ""),
        (["Paris", "Rome", "in $5$ days", "Bern"], "exact", ""),
    ],
)
def test_answer_patterns_of_common_data_sets_are_detected(here: Path, answers: list[Any], kind: str, pattern: str) -> None:
    data = rows(here / "prompts.jsonl", *({"prompt": "say 1", "answer": answer} for answer in answers))
    assert main(["init", "--model", "model", "--data", data]) == 0
    config = load("run.toml", environ={})
    (source,) = config.data.sources
    assert isinstance(source, FileSource)
    assert (config.verifiers[0].kind, source.answer_pattern) == (kind, pattern)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"It is \boxed{3}. See {2}.", "3"),
        (r"First \boxed{1}, then\n\boxed{\frac{\sqrt{2^{3}}}{2}} {units}.", r"\frac{\sqrt{2^{3}}}{2}"),
        (r"\boxed{\{1, 2\}} or {3}", r"\{1, 2\}"),
    ],
)
def test_the_last_box_is_the_answer_with_its_braces(here: Path, solution: str, answer: str) -> None:
    data = rows(here / "prompts.jsonl", {"problem": "say 1", "solution": solution})
    assert main(["init", "--model", "model", "--data", data]) == 0
    [source] = load("run.toml", environ={}).data.sources
    [row] = read_rows(source, Needs())
    assert row.answer == answer
    assert MathVerifier(MathConfig(kind="math"), source).score(solution, row.answer) == 1


@pytest.mark.parametrize(("answer", "given"), [("Paris", []), ("7", ["--reward", "exact"])])
def test_text_answers_come_with_a_pattern_to_fill_in(here: Path, answer: str, given: list[str]) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1", "answer": answer})
    assert main(["init", "--model", "model", "--data", data, *given]) == 0
    file = Path("run.toml")
    assert file.read_text().count("\n# extract = ") == 1
    file.write_text(file.read_text().replace("\n# extract", "\nextract"))
    [config] = load(file, environ={}).verifiers
    assert isinstance(config, ExactConfig)
    source = load(file, environ={}).data.sources[0]
    assert ExactVerifier(config, source).score(f"I think that the answer is {answer}", answer) == 1


@pytest.mark.parametrize(
    ("row", "given", "field"),
    [
        ({"q": "say 1", "level": 3, "answer": "1"}, [], "q"),
        ({"q": "say 1", "source": "book", "answer": "1"}, ["--prompt-field", "q"], "q"),
        ({"instruction": "say 1", "input": "", "output": "1"}, [], "instruction"),
        ({"instruction": "say", "input": "1", "output": "1"}, ["--prompt-field", "instruction"], "instruction"),
        ({"prompt": "title", "turns": [{"role": "user", "content": "1"}], "answer": "1"}, ["--prompt-field", "turns"], "turns"),
    ],
)
def test_the_field_of_the_prompt_is_named_or_the_only_one(here: Path, row: dict[str, Any], given: list[str], field: str) -> None:
    assert main(["init", "--model", "model", "--data", rows(here / "prompts.jsonl", row), *given]) == 0
    [source] = load("run.toml", environ={}).data.sources
    assert isinstance(source, FileSource)
    assert source.prompt_field == field


@pytest.mark.parametrize(
    ("row", "given", "why"),
    [
        (
            {"conversations": [{"from": "human", "value": "say 1"}], "source": "sharegpt"}, [],
            "it is not clear which field is the prompt, a text or a list of messages (fields: conversations, source): "
            "give --prompt-field NAME",
        ),
        ({"title": "one", "body": "say 1", "answer": "1"}, [], "(fields: title, body, answer): give --prompt-field NAME"),
        ({"answer": "1"}, [], "(fields: answer): give --prompt-field NAME"),
        ({"instruction": "say", "input": "1", "output": "1"}, [], "in two fields, instruction and input: join them in one"),
        ({"prompt": "say 1", "answer": "1"}, ["--prompt-field", "q"], "have no such field: choose one of prompt, answer"),
    ],
)  # fmt: skip
def test_an_unclear_prompt_is_refused_with_the_fields(
    here: Path, row: dict[str, Any], given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(here / "prompts.jsonl", row)
    (here / "own.py").write_text("def score(completion):\n    return 1\n")
    assert main(["init", "--model", "model", "--data", data, "--reward", "own.py", *given]) == 2
    assert why in capsys.readouterr().err
    assert not Path("run.toml").exists()


@pytest.mark.parametrize("answer", [["x", "y"], True])
def test_an_own_reward_takes_answers_of_any_type(here: Path, answer: Any) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1", "answer": answer})
    (here / "own.py").write_text("def score(row):\n    return float(row['answer'] in (['x', 'y'], True))\n")
    assert main(["init", "--model", "model", "--data", data, "--reward", "own.py"]) == 0
    faults = [one.detail for one in preflight(load("run.toml", environ={}), [], {}, own=True) if one.state == "fault"]
    assert faults == []


def test_the_longest_prompt_fits(here: Path) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1 " * 12, "answer": "1"})
    assert main(["init", "--model", "model", "--data", data]) == 0
    config = load("run.toml", environ={})
    assert config.data.max_prompt_tokens > CONTEXT // 2
    assert config.sampling.max_tokens == CONTEXT - config.data.max_prompt_tokens
    assert 'a smaller one needs long_prompts = "drop"' in Path("run.toml").read_text()


def test_prompts_beyond_the_context_are_left_out_and_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(here / "prompts.jsonl", *({"prompt": "say 1 " * times, "answer": "1"} for times in (1, 200, 2)))
    assert main(["init", "--model", "model", "--data", data]) == 0
    assert '1 of 3 prompts are left out (data.long_prompts = "drop"): they have more than' in capsys.readouterr().out
    config = load("run.toml", environ={})
    assert config.data.long_prompts == "drop"
    assert [one.detail for one in preflight(config, [], {}, own=True) if one.state == "fault"] == []


def test_a_prompt_that_leaves_no_room_is_reported_by_its_length(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1 " * 200, "answer": "1"})
    assert main(["init", "--model", "model", "--data", data]) == 2
    errors = capsys.readouterr().err
    assert re.search(
        rf"the longest prompt of {re.escape(data)} has \d{{3,}} tokens, and the context of model ends at {CONTEXT}", errors
    )
    assert not Path("run.toml").exists()


def test_missing_arguments_are_asked_for_on_a_terminal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows(here / "prompts.jsonl", {"prompt": "say 1", "answer": "1"})
    monkeypatch.setattr("sys.stdin", io.StringIO(f"model\n{data}\nexact\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["init"]) == 0
    config = load("run.toml", environ={})
    assert (config.model.path, config.verifiers[0].kind) == ("model", "exact")


def test_without_data_the_file_runs_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sums.toml"
    assert main(["init", str(file)]) == 0
    assert f"grpo run {file}" in capsys.readouterr().out
    config = load(file, environ={})
    assert config.run.name == "sums"
    assert isinstance(config.data.sources[0], ReasoningGymSource)


def test_parquet_is_recognised_by_its_extension(here: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"problem": "say 1", "answer": "1"}]), here / "rows.parquet")
    assert main(["init", "--model", "model", "--data", "rows.parquet"]) == 0
    source = load("run.toml", environ={}).data.sources[0]
    assert isinstance(source, FileSource)
    assert (source.kind, source.prompt_field) == ("parquet", "problem")


def test_an_invalid_run_name_falls_back_to_the_default(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "my run.toml")]) == 0
    assert load(tmp_path / "my run.toml", environ={}).run.name == "run"


def test_an_existing_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("mine")
    assert main(["init", str(file)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_row_without_the_prompt_is_an_error_and_no_other_field_takes_its_place(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "prompts.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?", "answer": "4"}\n')
    assert main(["init", "mine.toml", "--model", "model", "--data", "prompts.jsonl", "--reward", "exact"]) == 2
    assert "prompts.jsonl:2: no field 'prompt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "prompts.csv"], "must end in .jsonl or .parquet: convert it"),
        (["--data", "prompts.jsonl"], "prompts.jsonl is not a file (resolved to "),
        (["--model", "./model"], "neither a folder nor a name on the hub (owner/name): correct the path"),
        (["--prompt-field", "question"], "--prompt-field question has no effect without --data"),
        (["--reward", "own.py"], "own.py cannot be read (No such file or directory): correct the path"),
        (["--reward", "accuracy"], "give FILE.py:FUNCTION, or one of math, exact"),
        (["no/such/folder/run.toml"], "No such file or directory"),
    ],
)
def test_errors_are_reported_on_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"prompts.jsonl": b"[" * 5000 + b"]" * 5000}, "--data prompts.jsonl:1: not valid JSON"),
        ({"prompts.jsonl": b'{"prompt": "a"}\n{"prompt": "\xff"}'}, "--data prompts.jsonl:2: not valid JSON"),
        ({"prompts.parquet": b"PAR1"}, "--data prompts.parquet: it is not a parquet file"),
        ({"model/config.json": b"[1]"}, "--model model: config.json cannot be read"),
        ({"model/config.json": b"[" * 5000}, "--model model: config.json cannot be read"),
    ],
)
def test_damaged_files_are_reported_on_one_line(
    files: dict[str, bytes], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    name = next(iter(files))
    option = ["--model", "model"] if name.startswith("model") else ["--data", name]
    assert main(["init", "run.toml", *option]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run.toml").exists()


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"grpo {importlib.metadata.version('grpo')}\n"
