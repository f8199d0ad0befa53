"""Implements `grpo init`, which writes a configuration file to start from.

Guarantees: an existing file is never overwritten; the file is one that `services.config.load` accepts.
"""

from __future__ import annotations

import re
from pathlib import Path

import tomli_w

from services.console.errors import EXIT_CONFIG, ConsoleError

TASK = """\
[[data.sources]]                # prompts: from a task that makes them up, so that this file runs as it is; `--data` takes a file
kind = "reasoning_gym"
task = "basic_arithmetic"
size = 10000

[[verifiers]]                   # how completions are scored: by the task's own scorer
kind = "reasoning_gym"
extract = '(-?\\d+)\\D*$'         # the answer is the last number of a completion
"""

FILE = """\
[[data.sources]]                # prompts: one row each, with the question and the reference answer
kind = "{kind}"
{path}
prompt_field = "prompt"         # the question: text, or a list of chat messages
answer_field = "answer"
# answer_pattern = '####\\s*(.+)' # GSM8K: the answer is what follows ####

[[verifiers]]                   # how completions are scored: `math`, `exact`, `regex`, or your own function (docs/rewards.md)
kind = "math"
"""

FORM = """\
# A run of grpo. Check it with `grpo doctor {file}`, start it with `grpo run {file}`.
# Keys that are left out have their defaults: `grpo config {file}` prints them all, `grpo config --explain` says what they mean.

[run]
name = "{name}"
steps = 100                     # training steps
dir = "runs"                    # the run's folder is runs/{name}

[model]
{model}
max_tokens = 2048               # most tokens of a prompt and its completion together

[data]
max_prompt_tokens = 512

{data}
[sampling]
group_size = 8                  # completions per prompt; they are compared with each other
max_tokens = 512                # most tokens of a completion

[generator]
count = 1                       # vLLM engines; on GPUs, one per GPU that is left beside the trainer's

[admission]
prompts_per_step = 16           # prompts, and so groups, in a training step
max_staleness = 1               # most steps between the weights that sampled a token and those that train on it

[optimizer]
learning_rate = 1e-6

[trainer]
ranks = 1                       # DeepSpeed processes, one per GPU
row_tokens = 4096               # tokens in one packed row; raise it as memory allows

[checkpoint]
every_steps = 20
"""


def init(file: Path, model: str, data: str) -> None:
    """Write a configuration of `model` and `data` to `file`; without `data`, prompts come from a reasoning-gym task."""
    name = file.stem if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", file.stem) else "run"
    source = FILE.format(kind=_kind(data), path=_line("path", data)) if data else TASK
    text = FORM.format(file=file, name=name, model=_line("path", model), data=source)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConsoleError(f"{file} already exists: give another path, or remove the file", EXIT_CONFIG) from None
    except OSError as error:
        raise ConsoleError(f"{file} cannot be written: {error.strerror}", EXIT_CONFIG) from None


def _kind(data: str) -> str:
    """Return the kind of a source by the name of its file."""
    kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(data).suffix)
    if kind is None:
        raise ConsoleError(f"--data {data}: the name of the file must end in .jsonl or .parquet", EXIT_CONFIG)
    return kind


def _line(key: str, value: str) -> str:
    return tomli_w.dumps({key: value}).strip()
