"""Replay: every combination either works or is rejected with the key, the value and the remedy."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from services.config import ConfigError, RunConfig, load

SAMPLERS = ("fifo", "lifo", "freshest", "uniform", "prioritized")
REMOVERS = ("fifo", "lifo", "lowest_priority", "stalest", "uniform")


def configured(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text('[model]\npath = "m"\n[[data.sources]]\nkind = "jsonl"\npath = "d"\n[[verifiers]]\nkind = "exact"\n')
    return load(file, overrides, environ={})


@pytest.mark.parametrize(("sampler", "remover"), list(product(SAMPLERS, REMOVERS)))
def test_every_sampler_works_with_every_remover(tmp_path: Path, sampler: str, remover: str) -> None:
    config = configured(tmp_path, f"replay.sampler={sampler}", f"replay.remover={remover}", "replay.max_uses=2")
    assert (config.replay.sampler, config.replay.remover) == (sampler, remover)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["replay.max_uses=0"], 'replay.sampler = "fifo" needs replay.max_uses >= 1'),
        (["replay.max_uses=0", "replay.sampler=uniform"], "replay.max_uses = 0 needs replay.samples_per_insert >= 1"),
        (["replay.samples_per_insert=0.5"], "samples_per_insert = 0.5 would generate groups that no step trains on"),
        (["replay.samples_per_insert=2"], "samples_per_insert = 2.0 cannot be reached with replay.max_uses = 1"),
        (["replay.min_size=33"], "replay.min_size = 33 cannot be reached: the table holds replay.capacity = 100000 groups"),
        (["replay.capacity=20", "replay.min_size=21"], "replay.min_size = 21 cannot be reached"),
        (
            ["replay.priority=reward"],
            'with replay.sampler = "fifo" and replay.remover = "fifo": set',
        ),
        (["replay.importance_beta=0.4"], 'replay.importance_beta = 0.4 has no effect with replay.sampler = "fifo"'),
        (["replay.sampler=random"], "replay.sampler = 'random'"),
    ],
)
def test_invalid_combinations_are_rejected_with_the_reason(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, *overrides)
    assert message in str(caught.value)
