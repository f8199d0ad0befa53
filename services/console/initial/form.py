"""The configuration file that `grpo init` writes.

Guarantees: an existing file is never overwritten; the file is one that `services.config.load` accepts; keys that the model
determines are left out, since their defaults follow it.
"""

from __future__ import annotations

import re
from pathlib import Path

import tomli_w

from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.initial.look import SeenEnvironment, SeenModel, SeenReward, SeenRows

TASK = """\
[[data.sources]]                # prompts from a task that generates them, so that this file runs as it is; `--data` takes a file
kind = "reasoning_gym"
task = "basic_arithmetic"
"""

FILE = """\
[[data.sources]]                # prompts, one per row; grpo doctor reads them all
kind = "{kind}"
{path}
{prompt:31} # the question: text, or a list of chat messages
{answer}"""

FORM = """\
# A run of grpo. Check it with `grpo doctor {file}`, start it with `grpo run {file}`.
# Keys that are left out have their defaults: `grpo config {file}` prints them all, `grpo config --explain` explains them.
# Lengths that are left out follow the model: `model.max_tokens` its context, `sampling.max_tokens` what prompts leave of it.

[run]
name = "{name}"
steps = 100                     # training steps
dir = "runs"                    # the run's folder is runs/{name}

[model]
{model}
dtype = "{dtype}"{pad}  # bfloat16 on a GPU, float32 on a CPU or for a very small model

{data}
{judges}
[sampling]
group_size = 8                  # completions per prompt; they are compared with each other

[generator]
count = 1                       # vLLM engines; on GPUs, one per GPU that the trainer leaves free

[admission]
prompts_per_step = 16           # prompts, and so groups, in a training step
max_staleness = 1               # maximum number of steps between the weights that sampled a token and those that train on it

[optimizer]
learning_rate = {rate:15} # the smaller the model, the larger: 1e-6 for billions of parameters, 1e-4 for millions

[checkpoint]
every_steps = 20
"""

PLAIN = "chat_template = false           # the model's tokenizer has none: prompts are tokenised as they are\n"
LONG = 'max_prompt_tokens = {tokens:<11} # the longest prompt of the data; a smaller one needs long_prompts = "drop"\n'
DROP = 'long_prompts = "drop"           # leaves out prompts that are longer than max_prompt_tokens\n'
GYM = """\
[[verifiers]]                   # how completions are scored: by the task's own scorer
kind = "reasoning_gym"
extract = '(-?\\d+)\\D*$'         # the answer is the last number of a completion
"""
OWN = """\
[[verifiers]]                   # how completions are scored: by your function; try it with `grpo score {file}`
kind = "python"
{function}
# range = [0, 1]                # refuses other scores, and defines when a completion is solved
"""
BUILT_IN = """\
[[verifiers]]                   # how completions are scored: `math`, `exact`, `regex`, or your own function (docs/rewards.md)
kind = "{kind}"
"""
EXTRACT = """\
# extract = 'answer is ([^.\\n]+)' # what is compared; without it, a completion must be the answer and nothing else
"""

ENVIRONMENT = """\
[[environments]]                # what replies to the policy, offers it tools, or calls it (docs/environments.md)
name = "own"
kind = "{kind}"{pad}# {told}
{program}
max_turns = 16                  # a rollout that needs more is truncated
"""
SOLVED = "# solved_at = 1.0               # score from which a rollout counts as solved\n"
SHARED = "# shared = true                 # for a stateless server: one session for all rollouts of a worker\n"
CODE = 'tools = ["python"]              # runs code that the policy writes, without network'
KINDS = {
    "python": "python: a class, or built-in tools",
    "agent": "agent: a function that calls the policy",
    "mcp": "mcp: the tools of a server; needs pip install 'grpo[mcp]'",
}


def write(
    file: Path,
    model: SeenModel,
    rows: SeenRows | None,
    reward: SeenReward | None,
    environment: SeenEnvironment | None,
    small: bool,
    longest: int = 0,
    drop: bool = False,
) -> None:
    """Write the configuration; without `rows` prompts come from a reasoning-gym task. `small`: a model of millions of weights.

    `longest`: tokens of the longest prompt, if it exceeds what the model's context leaves by default. `drop`: leave out such
    prompts.
    """
    name = file.stem if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", file.stem) else "run"
    table = ("" if model.chat else PLAIN) + (DROP if drop else LONG.format(tokens=longest) if longest else "")
    data = f"[data]\n{table}\n" * bool(table) + (_source(rows) if rows else TASK)
    judges = "" if environment and environment.function and not reward else _verifier(file, rows, reward)
    if environment:
        data += 'environment = "own"             # its rollouts run in this environment\n'
        judges = _environment(environment) + "\n" * bool(judges) + judges
    rate = "1e-4" if small else "1e-6"
    text = FORM.format(
        file=file,
        name=name,
        model=_line("path", model.path),
        dtype=model.dtype,
        pad=" " * (20 - len(model.dtype)),
        data=data,
        judges=judges,
        rate=rate,
    )
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConsoleError(f"{file} already exists: give another path, or remove the file", EXIT_CONFIG) from None
    except OSError as error:
        raise ConsoleError(f"{file} cannot be written: {error.strerror}", EXIT_CONFIG) from None


def _source(rows: SeenRows) -> str:
    answer = '# answer_field = "answer"       # the reference answer, if your reward compares with one\n'
    if rows.answer:
        answer = f"{_line('answer_field', rows.answer):31} # the reference answer\n"
    if rows.pattern:
        answer += f"{f'answer_pattern = {rows.pattern!r}':31} # the part of it that is the answer\n".replace("\\\\", "\\")
    return FILE.format(kind=rows.kind, path=_line("path", rows.path), prompt=_line("prompt_field", rows.prompt), answer=answer)


def _verifier(file: Path, rows: SeenRows | None, reward: SeenReward | None) -> str:
    if reward is not None and reward.function:
        return OWN.format(file=file, function=_line("function", reward.function))
    if reward is None and rows is None:
        return GYM
    kind = reward.kind if reward else "math" if rows and rows.mathematics else "exact"
    return BUILT_IN.format(kind=kind) + EXTRACT * (kind == "exact")


def _environment(seen: SeenEnvironment) -> str:
    program = [
        _line("run" if seen.kind == "agent" else "server", list(seen.command)) if seen.command else "",
        _line("server", seen.url) if seen.url else "",
        _line("run" if seen.kind == "agent" else "function", seen.function) if seen.function else "",
        CODE if seen.code else "",
    ]
    text = ENVIRONMENT.format(
        kind=seen.kind, pad=" " * (23 - len(seen.kind)), told=KINDS[seen.kind], program="\n".join(filter(None, program))
    )
    return text + SHARED * (seen.kind == "mcp") + SOLVED * bool(seen.function)


def _line(key: str, value: str | list[str]) -> str:
    if isinstance(value, list):  # on one line, unlike tomli_w
        return f"{key} = [{', '.join(_line(key, word).removeprefix(f'{key} = ') for word in value)}]"
    return tomli_w.dumps({key: value}).strip()
