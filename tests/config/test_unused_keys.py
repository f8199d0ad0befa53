"""A key that has no effect with the other settings is rejected with key, value and remedy, unless it is set to its default."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from services.config import ConfigError, RunConfig, load, load_resolved, to_toml
from services.config.evaluation import Evaluation

ROOT = Path(__file__).parent.parent.parent
PRIORITIZED = "replay.sampler=prioritized"
EVALUATED = ["evaluation.every_steps=5", "evaluation.sources=[{kind='jsonl', name='held', path='h'}]", "generator.count=2"]
TWO = "data.sources=[{kind='jsonl', name='a', path='a', weight=2}, {kind='jsonl', name='b', path='b'}]"
BARE, UNIFORM = "data.chat_template=false", "replay.sampler=uniform"
TURNS = ["environments=[{kind='agent', name='e', run=['true']}]", "data.sources.0.environment=e"]
SOURCE, CLASS = "data.sources.0.environment=e", "environments.0.function=f.py:C"
TOOLS = ["environments=[{kind='python', name='e', tools=['python']}]", SOURCE]
PLAIN = ["environments=[{kind='python', name='e', function='f.py:C'}]", SOURCE]
SERVER = ["environments=[{kind='mcp', name='e', server=['true']}]", SOURCE]
REMOTE = "verifiers=[{kind='http', url='http://h'}]"


def configured(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text('[model]\npath = "m"\n[[data.sources]]\nkind = "jsonl"\npath = "d"\n[[verifiers]]\nkind = "exact"\n')
    return load(file, overrides, environ={})


UNREAD: list[tuple[str, list[str], str, list[str]]] = [
    ("data.sources.0.weight=2", [], "with one source: add another", [TWO]),
    ("data.system_prompt=x", [BARE], "with data.chat_template = false: set data.chat_template = true", []),
    ("data.chat_template_options={a=1}", [BARE], "with data.chat_template = false", []),
    (
        "verifiers.0.solved_at=0.5",
        ["verifiers.0.weight=-1"],
        "with weight = -1, since only verifiers with a positive weight say what is solved",
        ["verifiers.0.weight=1"],
    ),
    ("verifiers.0.solved_at=0.5", ["verifiers.0.weight=0"], "with weight = 0, since only", ["verifiers.0.weight=0.1"]),
    ("sampling.min_group_size=2", [], "without an environment, since then every completion", TURNS),
    ("replay.priority=reward", [UNIFORM], 'with replay.sampler = "uniform"', [PRIORITIZED]),
    ("replay.priority=trainer", [PRIORITIZED], "with replay.max_uses = 1", [PRIORITIZED, "replay.max_uses=2"]),
    ("replay.importance_beta=0.4", [UNIFORM], 'with replay.sampler = "uniform"', [PRIORITIZED]),
    ("sync.folder=/x", [], 'with sync.backend = "auto"', ["sync.backend=store"]),
    ("evaluation.top_p=0.5", [*EVALUATED, "evaluation.temperature=0"], "with evaluation.temperature = 0", EVALUATED),
    ("generator.verifier_workers=3", [REMOTE], "without a verifier that runs on the generator's machine: add one", []),
    ("environments.0.options={a=1}", TURNS, "without function, whose arguments they are: name one", [*TOOLS, CLASS]),
    ("environments.0.options={a=1}", TOOLS, "without function, whose arguments they are: name one", [*TOOLS, CLASS]),
    ("environments.0.solved_at=1", TOOLS, "without function, which alone gives a score: set solved_at of", [*TOOLS, CLASS]),
    ("environments.0.solved_at=1", SERVER, "without function, which alone gives a score", [*SERVER, CLASS]),
    ("lora.alpha=8", [], "with lora.rank = 0: set lora.rank", ["lora.rank=4"]),
    ("redis.ca_file=c", ["redis.url=redis://h:1"], "with redis.url = 'redis://h:1': use rediss://", ["redis.url=rediss://h:1"]),
    (
        "samples.share=0.5",
        ["samples.keep=0"],
        "with samples.keep = 0 and without tracing.endpoint: set one of them",
        ["samples.keep=9"],
    ),
]
"""A key and its value, settings with which it has no effect, the message, and settings with which it has an effect."""


def test_keys_without_effect_are_rejected_with_a_working_remedy(tmp_path: Path) -> None:
    failures = list[str]()
    for given, beside, why, cure in UNREAD:
        key = given.partition("=")[0]
        expected = rf"{re.escape(key)} = .+ has no effect {re.escape(why)}.*, or remove it(?!, or set it to its default, None)"
        try:
            configured(tmp_path, *beside, given)
        except ConfigError as error:
            if not re.search(expected, str(error)):
                failures.append(f"{given}: {error}")
        else:
            failures.append(f"{given} was accepted")
        config = configured(tmp_path, *cure, given)
        (tmp_path / "resolved.toml").write_text(to_toml(config))
        if load_resolved(tmp_path / "resolved.toml") != config:
            failures.append(f"{given} is read back differently")
    assert not failures


def test_a_missing_interval_of_evaluation_is_one_fault_that_names_all_its_keys(tmp_path: Path) -> None:
    values = dict.fromkeys(Evaluation.model_fields.keys() - {"every_steps"}, "7")
    values |= {"sources": "[{kind='jsonl', path='h', name='held'}]", "top_p": "0.5"}
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, *(f"evaluation.{key}={value}" for key, value in values.items()))
    for key, value in (values | {"sources": "[{'", "temperature": "7.0"}).items():
        assert f"evaluation.{key} = {value}" in str(caught.value)
    assert len(caught.value.faults) == 1
    assert "have no effect with evaluation.every_steps = 0: set evaluation.every_steps, or remove them, or set" in str(
        caught.value
    )


def test_keys_without_effect_for_one_reason_are_joined(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, "replay.priority=recency", "replay.importance_beta=0.5")
    assert (
        "replay.priority = 'recency' and replay.importance_beta = 0.5 have no effect with replay.sampler = \"fifo\": "
        "set replay.sampler = \"prioritized\", or remove them, or set them to their defaults, 'advantage' and 0.0"
    ) in str(caught.value)


def test_a_default_without_effect_is_not_an_error(tmp_path: Path) -> None:
    overrides = (UNIFORM, "evaluation.samples=1", "sync.folder=")
    assert configured(tmp_path, *overrides) == configured(tmp_path, UNIFORM)


def test_the_remedy_works_on_the_command_line(tmp_path: Path) -> None:
    given = ("reference.alpha=0.5", "loss.kl_beta=0")
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, *given)
    assert str(caught.value).endswith(
        "with loss.kl_beta = 0, which loads no reference: set loss.kl_beta > 0, or remove it, or set it to its default, 0.0"
    )
    assert configured(tmp_path, *given, "reference.alpha=0") == configured(tmp_path, "loss.kl_beta=0")


def test_an_old_run_with_unused_keys_can_be_resumed(tmp_path: Path) -> None:
    """An older version accepted them."""
    config = configured(tmp_path, "loss.kl_beta=0")
    begun = config.model_copy(update={"reference": config.reference.model_copy(update={"alpha": 0.5})})
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(begun))
    assert load_resolved(resolved) == begun
    with pytest.raises(ConfigError, match=r"reference\.alpha = 0\.5 has no effect"):
        load(resolved, environ={})
    assert load(resolved, environ={}, before=lambda given: begun) == begun
    with pytest.raises(ConfigError, match=r"reference\.alpha = 0\.7 has no effect"):
        load(resolved, ["reference.alpha=0.7"], environ={}, before=lambda given: begun)


def test_client_tls_keys_are_allowed_without_certificates(tmp_path: Path) -> None:
    """`grpo drain` reads it, for example where a proxy has a certificate from a private authority."""
    assert configured(tmp_path, "api.ca_file=ca.pem").api.ca_file == "ca.pem"


def test_the_examples_set_no_key_without_effect() -> None:
    for path in [*ROOT.glob("examples/*/config.toml"), ROOT / "docker" / "compose.toml"]:
        assert load(path, environ={}).run.name == tomllib.loads(path.read_text())["run"]["name"]
