"""What `grpo init` finds out about a model, data and a reward. It reads files and imports none of the user's code.

Guarantees: what cannot be read is refused with the option that named it, its value and the remedy.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.config import ConfigError
from services.config.derived import context_of
from services.config.model_files import HUB_NAME
from services.console.errors import EXIT_CONFIG, ConsoleError

if TYPE_CHECKING:
    from services.dataprep.prompts.files import SourceFile

ROWS = 200  # of the data that are inspected
PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "messages", "text")
ANSWERS = ("answer", "solution", "target", "ground_truth", "final_answer", "expected_answer", "label", "output")
"""Names of fields in data sets, the likeliest first."""
BOXED = r"(?s:.*)\\boxed\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})+)\}"
"""The last box of a text; within it, braces may be nested three deep."""
PATTERNS = (r"####\s*(.+)", BOXED)
"""How data sets mark the answer within a worked solution: GSM8K, MATH."""
NUMBER = re.compile(r"\s*\$?-?[\d,./]+%?\s*")
LATEX = re.compile(r"\\[a-zA-Z]+|\^|\$.+\$")
BUILT_IN = ("math", "exact")
CONVERT = "for example pandas.read_csv(FILE).to_json('data.jsonl', orient='records', lines=True)"


@dataclass(frozen=True)
class SeenModel:
    """A model's folder, or a name on the hub, about which nothing is known."""

    path: str
    context: int | None = None
    dtype: str = "bfloat16"
    chat: bool = True


@dataclass(frozen=True)
class SeenRows:
    """Files of prompts, of which the first was inspected."""

    path: str
    kind: str
    prompt: str
    answer: str
    """Empty: no field of the rows looks like one."""
    pattern: str
    mathematics: bool
    """Whether the answers are numbers, boxed or LaTeX, rather than other text."""


@dataclass(frozen=True)
class SeenReward:
    """A verifier: a built-in kind, or `file.py:function`."""

    kind: str
    function: str = ""


@dataclass(frozen=True)
class SeenEnvironment:
    """A class or an agent, as `file.py:name`; an MCP server; code that the policy writes."""

    kind: str
    function: str = ""
    command: tuple[str, ...] = ()
    url: str = ""
    code: bool = False


def look_at_model(path: str) -> SeenModel:
    """Return the known facts about a model. Raise `ConsoleError` for a path that is neither a folder of one nor a hub name."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if HUB_NAME.fullmatch(path) and not folder.exists():
            return SeenModel(path)
        raise ConsoleError(f"--model {path}: neither a folder nor a name on the hub (owner/name): correct the path", EXIT_CONFIG)
    try:
        described = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ConsoleError(
            f"--model {path}: config.json cannot be read ({error}): give a folder made by save_pretrained", EXIT_CONFIG
        ) from None
    given = str(described.get("dtype") or described.get("torch_dtype") or "bfloat16")
    chat = any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    chat = chat or '"chat_template"' in _text(folder / "tokenizer_config.json")
    return SeenModel(str(folder), context_of(folder), "float32" if given == "float32" else "bfloat16", chat)


def look_at_data(path: str, prompt_field: str = "") -> SeenRows:
    """Return how the rows of files are to be read, from the first of them. Raise `ConsoleError` if they cannot be.

    `prompt_field`: the field of the prompt; empty: the one whose name says so, or the only one that may be it.
    """
    kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(path).suffix)
    if kind is None:
        raise ConsoleError(
            f"--data {path}: the name of the file must end in .jsonl or .parquet: convert it ({CONVERT})", EXIT_CONFIG
        )
    from services.dataprep.prompts.files import find_files

    try:
        first = find_files(path)[0]
    except ConfigError as error:
        raise ConsoleError(f"--data {path} {error}", EXIT_CONFIG) from None
    rows = _jsonl(first) if kind == "jsonl" else _parquet(first)
    if not rows:
        raise ConsoleError(f"--data {path}: it has no rows: add prompts", EXIT_CONFIG)
    names = [name for name in rows[0] if all(name in row for row in rows)]
    prompt = _prompt_field(path, rows, names, prompt_field)
    answer = _first(ANSWERS, [name for name in names if name != prompt])
    answers = [str(row[answer]) for row in rows] if answer else []
    pattern = next((each for each in PATTERNS if answers and all(re.search(each, text) for text in answers)), "")
    if pattern:
        answers = [found[1] for text in answers if (found := re.search(pattern, text))]
    return SeenRows(path, kind, prompt, answer, pattern, pattern == BOXED or _is_mathematics(answers))


def look_at_reward(text: str, folder: Path) -> SeenReward:
    """Return the verifier that `--reward` names: a built-in kind, or a function of a file, relative to `folder`."""
    if text in BUILT_IN:
        return SeenReward(text)
    if not text.partition(":")[0].endswith(".py"):
        raise ConsoleError(f"--reward {text}: give FILE.py:FUNCTION, or one of {', '.join(BUILT_IN)}", EXIT_CONFIG)
    function, _ = _defined("--reward", text, folder, ("score", "reward"))
    return SeenReward("python", function)


def look_at_environment(text: str, folder: Path) -> SeenEnvironment:
    """Return the environment that `--environment` names: a class, or a function that is an agent, relative to `folder`."""
    if not text.partition(":")[0].endswith(".py"):
        raise ConsoleError(f"--environment {text}: give FILE.py:CLASS, or FILE.py:FUNCTION of an agent", EXIT_CONFIG)
    function, node = _defined("--environment", text, folder, ())
    return SeenEnvironment("python" if isinstance(node, ast.ClassDef) else "agent", function)


def with_tools(environment: SeenEnvironment | None, tools: Sequence[str]) -> SeenEnvironment:
    """Return an environment with the tools that `--tool` names: the tool python, and an MCP server."""
    if environment and environment.kind == "agent":
        raise ConsoleError(
            f"--tool {tools[0]}: an agent brings its tools: leave out --tool, or give a class as --environment", EXIT_CONFIG
        )
    found = environment or SeenEnvironment("python")
    servers = [tool for tool in tools if tool != "python"]
    if len(servers) > 1:
        raise ConsoleError(
            f"--tool {servers[1]}: an environment has one MCP server, and --tool {servers[0]} is one: remove one", EXIT_CONFIG
        )
    found = replace(found, code="python" in tools)
    if not servers:
        return found
    [server] = servers
    if server.startswith(("http://", "https://")):
        return replace(found, kind="mcp", url=server)
    return replace(found, kind="mcp", command=_command(server))


def _command(tool: str) -> tuple[str, ...]:
    """Return the words of a command that starts an MCP server, with absolute paths, since it starts in another folder."""
    try:
        words = shlex.split(tool)
    except ValueError as error:
        raise ConsoleError(f"--tool {tool}: not a valid command ({error}): correct its quotes", EXIT_CONFIG) from None
    place = tool.partition(":")[0]
    if len(words) == 1 and place.endswith(".py"):
        raise ConsoleError(
            f"--tool {tool}: tools of your own are methods of a class, which --environment FILE.py:CLASS names; "
            f"for a file that is an MCP server, give --tool 'python {place}'",
            EXIT_CONFIG,
        )
    if not words or shutil.which(words[0]) is None:
        raise ConsoleError(
            f"--tool {tool}: there is no program {' '.join(words[:1])!r}: give python, or the command or URL of an MCP server",
            EXIT_CONFIG,
        )
    return tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in words)


def _defined(option: str, text: str, folder: Path, usual: Sequence[str]) -> tuple[str, ast.stmt]:
    """Return a function or class that an option names, as `file.py:name` relative to `folder`, and its definition."""
    place, _, name = text.partition(":")
    file = Path(place).expanduser()
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConsoleError(f"{option} {text}: {file} cannot be read ({error.strerror}): correct the path", EXIT_CONFIG) from None
    except (SyntaxError, ValueError) as error:
        raise ConsoleError(f"{option} {text}: {file} is not valid Python ({error}): correct it", EXIT_CONFIG) from None
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    public = [each for each in defined if not each.startswith("_")]
    name = name or _first(usual, public) or (public[0] if len(public) == 1 else "")
    if name not in defined:
        names = ", ".join(public) or "none"
        raise ConsoleError(f"{option} {text}: name one of the functions of {file} after a colon: {names}", EXIT_CONFIG)
    there = file.absolute()
    return f"{there.relative_to(folder) if there.is_relative_to(folder) else there}:{name}", defined[name]


def _jsonl(file: SourceFile) -> list[dict[str, Any]]:
    rows, path = list[dict[str, Any]](), file.shown
    try:
        lines = file.path.open("rb")
    except OSError as error:
        raise _unreadable(file, error) from None
    with lines:
        for number, line in enumerate(islice(lines, ROWS), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConsoleError(
                    f"--data {path}:{number}: not valid JSON ({error}): write one object per line", EXIT_CONFIG
                ) from None
            if not isinstance(row, dict):
                raise ConsoleError(f"--data {path}:{number}: expected a JSON object: fix or remove the line", EXIT_CONFIG)
            rows.append(row)
    return rows


def _parquet(given: SourceFile) -> list[dict[str, Any]]:
    path = given.shown
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConsoleError(f"--data {path} needs pyarrow: pip install 'grpo[dataprep]'", EXIT_CONFIG) from None
    try:
        with pyarrow.parquet.ParquetFile(given.path) as file:
            return [row for batch in islice(file.iter_batches(ROWS), 1) for row in batch.to_pylist()]
    except OSError as error:
        raise _unreadable(given, error) from None
    except (pyarrow.ArrowException, ValueError, OverflowError, KeyError) as error:  # also values that Python cannot hold
        raise ConsoleError(
            f"--data {path}: it is not a parquet file that can be read ({error}): correct it or the path", EXIT_CONFIG
        ) from None


def _prompt_field(path: str, rows: Sequence[dict[str, Any]], names: Sequence[str], given: str) -> str:
    """Return the field of the prompt. Raise `ConsoleError` if it is not clear which one that is."""
    fields = ", ".join(rows[0]) or "none"
    if given:
        if given not in rows[0]:
            raise ConsoleError(
                f"--prompt-field {given}: the rows of {path} have no such field: choose one of {fields}", EXIT_CONFIG
            )
        return given
    found = _first(PROMPTS, list(rows[0]))
    if found == "instruction" and any(row.get("input") for row in rows):
        raise ConsoleError(
            f"--data {path}: its prompts are in two fields, instruction and input: join them in one called prompt, or give "
            "--prompt-field instruction to leave out the other",
            EXIT_CONFIG,
        )
    candidates = [name for name in names if name not in ANSWERS and isinstance(rows[0][name], str | list | dict)]
    if not found and len(candidates) == 1 and isinstance(rows[0][candidates[0]], str):
        return candidates[0]
    if not found:
        raise ConsoleError(
            f"--data {path}: it is not clear which field is the prompt, a text or a list of messages (fields: {fields}): "
            "give --prompt-field NAME, or add a field called prompt",
            EXIT_CONFIG,
        )
    return found


def _is_mathematics(answers: Sequence[str]) -> bool:
    """Return whether all answers are numbers, or LaTeX is among them and at least half are either."""
    numbers, latex = sum(bool(NUMBER.fullmatch(text)) for text in answers), sum(bool(LATEX.search(text)) for text in answers)
    return bool(answers) and (numbers == len(answers) or (latex > 0 and 2 * (numbers + latex) >= len(answers)))


def _unreadable(file: SourceFile, error: OSError) -> ConsoleError:
    return ConsoleError(f"--data {file.shown}: cannot be read ({error.strerror or error}): correct the path", EXIT_CONFIG)


def _first(likely: Sequence[str], names: Sequence[str]) -> str:
    return next((name for name in likely if name in names), "")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
