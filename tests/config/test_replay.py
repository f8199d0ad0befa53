"""Replay: every combination either works or is rejected with the key, the value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import ConfigError, RunConfig, load


def configured(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text('[model]\npath = "m"\n[[data.sources]]\nkind = "jsonl"\npath = "d"\n[[verifiers]]\nkind = "exact"\n')
    return load(file, overrides, environ={})


def test_the_remover_follows_from_the_sampler(tmp_path: Path) -> None:
    removers = {
        "fifo": "fifo", "lifo": "fifo", "uniform": "fifo", "freshest": "stalest", "prioritized": "lowest_priority",
    }  # fmt: skip
    found = {name: configured(tmp_path, f"replay.sampler={name}", "replay.max_uses=2").replay.remover for name in removers}
    assert found == removers


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["replay.max_uses=0"], "replay.max_uses = 0: input should be greater than or equal to 1"),
        (["replay.priority=reward"], 'with replay.sampler = "fifo": set replay.sampler = "prioritized"'),
        (["replay.samples_per_insert=2"], "replay.samples_per_insert = 2 was removed, and replay.max_uses limits"),
        (["replay.remover=lifo"], "replay.remover = 'lifo' was removed, and a full table drops"),
        (["replay.importance_beta=0.4"], 'replay.importance_beta = 0.4 has no effect with replay.sampler = "fifo"'),
        (["replay.sampler=random"], "replay.sampler = 'random'"),
    ],
)
def test_invalid_combinations_are_rejected_with_the_reason(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, *overrides)
    assert message in str(caught.value)
