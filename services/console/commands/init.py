"""The command `grpo init`, which inspects a model, data and a reward, or asks for them, and writes a configuration file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.config import ConfigError, RunConfig, load
from services.console.doctor.packages import there
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.initial.form import write
from services.console.initial.look import (
    SeenEnvironment,
    SeenModel,
    SeenReward,
    SeenRows,
    look_at_data,
    look_at_environment,
    look_at_model,
    look_at_reward,
    with_tools,
)
from services.console.options import Json
from services.console.printable import print_json
from services.dataprep.prompts.catalogue import PromptSource

MODEL = "Qwen/Qwen3-0.6B"
MOST_TOKENS = 2**31 - 1
SMALL_BYTES = 200 * 2**20  # of weights: a model of tens of millions of parameters


def init(
    file: Annotated[Path, typer.Argument(metavar="PATH", help="File to write; it must not exist.")] = Path("run.toml"),
    model: Annotated[str, typer.Option(help="Folder or hub name of the model; default: Qwen/Qwen3-0.6B.")] = "",
    data: Annotated[
        str,
        typer.Option(
            help="JSONL or parquet file of prompts, also as hf://datasets/OWNER/NAME/FILE; default: a reasoning-gym task."
        ),
    ] = "",
    prompt_field: Annotated[
        str, typer.Option(metavar="NAME", help="Field of the data that is the prompt; default: by its name, such as question.")
    ] = "",
    reward: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="Your reward function, or math or exact; default: depends on the data.")
    ] = "",
    environment: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="Your environment, a class, or your agent, a function; default: none.")
    ] = "",
    tool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="python|COMMAND|URL",
            help="Tool for the policy: python runs code that it writes; a command or URL is an MCP server. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Write a configuration file for a model, data and a reward, an environment or tools.

    It inspects them and, on a terminal, asks for what is not given. The file is short and commented, and passes `grpo doctor`.
    An existing file is never overwritten.
    """
    tools = tool or []
    if file.exists():
        raise ConsoleError(f"{file} already exists: give another path, or remove the file", EXIT_CONFIG)
    if sys.stdin.isatty() and not as_json and not (model and data and (reward or environment or tools)):
        model, data, reward = _asked(model, data, reward, bool(environment or tools))
    seen = look_at_model(model or MODEL)
    if prompt_field and not data:
        raise ConsoleError(f"--prompt-field {prompt_field} has no effect without --data: give --data FILE", EXIT_CONFIG)
    rows = look_at_data(data, prompt_field) if data else None
    chosen = look_at_reward(reward, file.absolute().parent) if reward else None
    world = look_at_environment(environment, file.absolute().parent) if environment else None
    if tools:
        world = with_tools(world, tools)
    if world and not rows:
        raise ConsoleError(f"--{'environment' if environment else 'tool'} needs prompts: give --data FILE", EXIT_CONFIG)
    if rows and not rows.answer and not (world and world.function and not chosen) and (chosen is None or not chosen.function):
        raise ConsoleError(
            f"--data {data}: no field of its rows looks like an answer, which the verifiers need: add a field called answer, "
            "or give your own reward with --reward FILE.py:FUNCTION",
            EXIT_CONFIG,
        )
    write(file, seen, rows, chosen, world, _small(seen))
    dropped = ""
    try:
        config = load(file, environ={})
        count, longest = _read(config, MOST_TOKENS)
        if longest > config.data.max_prompt_tokens:
            file.unlink()
            if drop := bool(seen.context and longest >= seen.context):
                dropped = _dropped(config, count, longest, f"{file} was not written: the longest prompt of {data}", seen)
            write(file, seen, rows, chosen, world, _small(seen), longest, drop)
            config = load(file, environ={})
    except ConfigError as error:
        file.unlink(missing_ok=True)
        raise ConsoleError(f"{file} was not written: {error}", EXIT_CONFIG) from None
    if as_json:
        print_json({"file": str(file), "model": vars(seen), "data": vars(rows) if rows else None, "run": config.run.name})
        return EXIT_OK
    for line in _told(seen, rows, chosen, world):
        print(line)
    if dropped:
        print(dropped)
    named = shlex.quote(str(file))
    print(f"wrote {file}: check it with `grpo doctor {named}`, start it with `grpo run {named}`")
    return EXIT_OK


def _asked(model: str, data: str, reward: str, rewarded: bool) -> tuple[str, str, str]:
    model = model or typer.prompt("Model: a folder, or a name on the Hugging Face Hub", default=MODEL)
    if not data:
        data = typer.prompt(
            "Data: a JSONL or parquet file, or hf://datasets/OWNER/NAME/FILE; empty for a made-up task",
            default="",
            show_default=False,
        )
    if not reward and data and not rewarded:
        what = "Reward: FILE.py:FUNCTION, math or exact; empty to choose by the data"
        reward = typer.prompt(what, default="", show_default=False)
    return model, data, reward


def _read(config: RunConfig, most_tokens: int) -> tuple[int, int]:
    """Return how many prompts of at most `most_tokens` there are, and the tokens of the longest; zeros if there is no tokenizer
    here yet, and for tasks, whose prompts are generated. Raises `ConfigError` for a row that cannot be read, and if none is left.
    """
    if not Path(config.model.path).is_dir() or any(source.kind == "reasoning_gym" for source in config.data.sources):
        return 0, 0
    if not (there("tokenizers") and there("jinja2")):
        return 0, 0
    read = PromptSource(config.with_values({"data.max_prompt_tokens": most_tokens, "data.long_prompts": "drop"}))
    return len(read), read.longest


def _dropped(config: RunConfig, count: int, longest: int, what: str, model: SeenModel) -> str:
    """Return a line on the rows that are too long for the model's context. Raise `ConsoleError` if all of them are."""
    try:
        kept, _ = _read(config, config.data.max_prompt_tokens)
    except ConfigError:
        raise ConsoleError(
            f"{what} has {longest} tokens, and the context of {model.path} ends at {model.context}, which leaves no room for "
            "a completion of any prompt: shorten them, or choose another model",
            EXIT_CONFIG,
        ) from None
    return (
        f'data   {count - kept:,} of {count:,} prompts are left out (data.long_prompts = "drop"): they have more than '
        f"{config.data.max_prompt_tokens} tokens, the longest {longest}, and the model's context ends at {model.context}"
    )


def _small(model: SeenModel) -> bool:
    files = list(Path(model.path).glob("*.safetensors"))
    return bool(files) and sum(file.stat().st_size for file in files) < SMALL_BYTES


def _told(model: SeenModel, rows: SeenRows | None, reward: SeenReward | None, environment: SeenEnvironment | None) -> list[str]:
    """Return the findings, one per line."""
    context = f"context of {model.context} tokens, {model.dtype}" if model.context else "read when the run starts"
    lines = [f"model  {model.path}: {context}"]
    if rows:
        answer = f"answer {rows.answer!r}" if rows.answer else "no answer"
        lines.append(f"data   {rows.path}: prompt {rows.prompt!r}, {answer}{f' by {rows.pattern}' * bool(rows.pattern)}")
    if reward:
        lines.append(f"reward {reward.function or reward.kind}")
    if environment:
        named = (environment.function, shlex.join(environment.command), environment.url, "python" * environment.code)
        lines.append(f"environment {', '.join(filter(None, named))}")
    return lines
