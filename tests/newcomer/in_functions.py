"""Mistakes in reward functions and other custom code."""

from __future__ import annotations

from tests.newcomer.world import Mistake, add, drop, put, sub

FUNCTION = "verifiers.0.function"
PYTHON = 'kind = "python"\nfunction = "reward.py:score"\nrange = [0, 1]'


def reward(body: str) -> list:
    """Return the edit that changes the body of the reward."""
    return [put("reward.py", f"def score(completion, answer):\n    {body}\n")]


MISTAKES = [
    Mistake("no_reward_file", FUNCTION, "reward.py", "correct the path", [drop("reward.py")], calls=True),
    Mistake("no_such_function", FUNCTION, "reward.py:rate", "grpo score", [sub("reward.py:score", "reward.py:rate")], calls=True),
    Mistake("no_colon", FUNCTION, "'reward.py'", "such as my_rewards:score", [sub("reward.py:score", "reward.py")]),
    Mistake("syntax_error", FUNCTION, "SyntaxError", "grpo score", [put("reward.py", "def score(completion:\n")], calls=True),
    Mistake(
        "missing_import", FUNCTION, "No module named 'numby'", "grpo score", [put("reward.py", "import numby\n")], calls=True
    ),
    Mistake(
        "unknown_parameter",
        FUNCTION,
        "completons",
        "grpo score",
        [put("reward.py", "def score(completons):\n    return 0\n")],
        calls=True,
    ),
    Mistake("raises", FUNCTION, "ZeroDivisionError", "grpo score", reward("return 1 / 0"), calls=True),
    Mistake("returns_text", FUNCTION, "'good'", "grpo score", reward('return "good"'), calls=True),
    Mistake("returns_nothing", FUNCTION, "None", "grpo score", reward("pass"), calls=True),
    Mistake("returns_nan", FUNCTION, "nan", "grpo score", reward('return float("nan")'), calls=True),
    Mistake("out_of_range", FUNCTION, "7", "grpo score", reward("return 7.0"), calls=True),
    Mistake(
        "too_slow",
        FUNCTION,
        "0.3",
        "grpo score",
        [*reward("\n    while True: pass"), sub("range = [0, 1]", "range = [0, 1]\ntimeout_s = 0.3")],
        calls=True,
    ),
    Mistake("no_module", FUNCTION, "my_rewards:score", "grpo score", [sub("reward.py:score", "my_rewards:score")], calls=True),
    Mistake(
        "no_curriculum",
        "data.curriculum",
        "'lessons:easy'",
        "fix the name or its module",
        [sub("user_template", 'curriculum = "lessons:easy"\nuser_template')],
    ),
    Mistake("no_loss", "loss.policy", "'my_loss:loss'", "fix the name or its module", [add('[loss]\npolicy = "my_loss:loss"\n')]),
    Mistake(
        "no_engine",
        "generator.engine",
        "'engines:Mine'",
        "fix the name or its module",
        [add('[generator]\nengine = "engines:Mine"\n')],
    ),
    Mistake(
        "bad_regex",
        "verifiers.0.pattern",
        "'(open'",
        "not a valid regular expression",
        [sub(PYTHON, 'kind = "regex"\npattern = "(open"')],
    ),
    Mistake(
        "no_token",
        "verifiers.0.url",
        "JUDGE_KEY",
        "set it, or remove token",
        [sub(PYTHON, 'kind = "http"\nurl = "http://127.0.0.1:9"\ntoken = "env:JUDGE_KEY"')],
        calls=True,
    ),
    Mistake(
        "bad_judge_prompt",
        "verifiers.0.url",
        "qestion",
        "grpo score",
        [sub(PYTHON, 'kind = "judge"\nurl = "http://127.0.0.1:9/v1"\nmodel = "m"\nprompt = "{{ qestion }}"')],
        calls=True,
    ),
    Mistake(
        "not_an_address",
        "verifiers.0.url",
        "'localhost:8000'",
        "must begin with http:// or https://",
        [sub(PYTHON, 'kind = "http"\nurl = "localhost:8000"')],
    ),
]
