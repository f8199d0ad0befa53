"""Missing or occupied resources of the machine, and mistakes about the run's folder."""

from __future__ import annotations

from pathlib import Path

from tests.newcomer.world import Mistake, add, put, sub

HIDE = """
import os, sys
for name in os.environ.get("HIDDEN_PACKAGES", "").split():
    sys.modules[name] = None
"""


def hidden(*names: str) -> dict[str, str]:
    """Return environment variables that hide packages; the folder's `sitecustomize.py` reads them."""
    return {"HIDDEN_PACKAGES": " ".join(names), "PYTHONPATH": ".:" + str(Path(__file__).parents[2])}


MISTAKES = [
    Mistake(
        "folder_not_writable",
        "run.dir",
        "'/proc/runs'",
        "set another run.dir",
        [sub("steps = 3", 'steps = 3\ndir = "/proc/runs"')],
    ),
    Mistake(
        "folder_is_a_file", "run.dir", "'rows.jsonl'", "set another run.dir", [sub("steps = 3", 'steps = 3\ndir = "rows.jsonl"')]
    ),
    Mistake("no_disk", "checkpoint.keep", "900000000", "lower checkpoint.keep", [add("[checkpoint]\nkeep = 900000000\n")]),
    Mistake("port_of_another", "web.port", "1", "0 for a free port", [add('[api]\nhost = "192.0.2.1"\n[web]\nport = 1\n')]),
    Mistake("one_port_for_all", "api.port", "8000", "set api.port = 0", [add("[api]\nport = 8000\n")]),
    Mistake("wrong_scheme", "redis.url", "http://localhost", "redis://", [add('[redis]\nurl = "http://localhost"\n')]),
    Mistake(
        "no_redis", "redis.url", "redis://127.0.0.1:1/0", "cannot be reached", [add('[redis]\nurl = "redis://127.0.0.1:1/0"\n')]
    ),
    Mistake(
        "password_of_no_server", "redis.password_file", "'secret'", "set redis.url", [add('[redis]\npassword_file = "secret"\n')]
    ),
    Mistake(
        "no_certificate",
        "api.certificate_file",
        "'cert.pem'",
        "cert.pem",
        [add('[api]\ncertificate_file = "cert.pem"\n')],
    ),
    Mistake(
        "key_of_wandb",
        "WANDB_MODE",
        "online",
        "set WANDB_API_KEY",
        [add('[tracking]\nwandb = "project"\n')],
        environ={"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "none"},
        place="",
    ),
    Mistake(
        "no_vllm",
        "generator.engine",
        '"vllm"',
        "pip install 'grpo[gpu]'",
        [put("sitecustomize.py", HIDE)],
        environ=hidden("vllm"),
        place="",
    ),
    Mistake(
        "no_trainer",
        "",
        "deepspeed",
        "pip install 'grpo[local]'",
        [put("sitecustomize.py", HIDE)],
        environ=hidden("deepspeed", "torch"),
        place="",
    ),
    Mistake(
        "no_math",
        "verifiers.1.kind",
        "'math'",
        "pip install 'grpo[generator]'",
        [put("sitecustomize.py", HIDE), add('[[verifiers]]\nkind = "math"\n')],
        environ=hidden("math_verify"),
    ),
    Mistake(
        "no_peft",
        "lora.rank",
        "8",
        "pip install 'grpo[trainer]'",
        [put("sitecustomize.py", HIDE), add("[lora]\nrank = 8\n")],
        environ=hidden("peft"),
    ),
    Mistake(
        "resume_what", "--resume foo", "foo", "give `latest` or the step", arguments=["my.toml", "--resume", "foo"], place=""
    ),
    Mistake("nothing_to_resume", "--resume", "latest", "remove --resume", arguments=["my.toml", "--resume", "latest"], place=""),
]
