"""Histograms as metrics: every value is in one bin, bins add up, and trackers show them as distributions."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from services.groups.group_statistics import is_trained, trained
from services.groups.histograms import BOUNDS, PREFIX, counted, edges, named, separated
from services.protocol.messages import Ticket
from services.store import Claim
from services.tracker.event_files import EventFiles
from services.trainer.losses import HISTOGRAMS, _counts
from tests.support import flow
from tests.support.documented import undocumented


@pytest.mark.parametrize("what", BOUNDS)
def test_each_value_is_in_the_bin_with_the_next_bound(what: str) -> None:
    bounds = BOUNDS[what]
    assert list(bounds) == sorted(set(bounds))
    values = [*bounds, bounds[0] - 1, bounds[-1] + 1, *np.random.default_rng(3).uniform(bounds[0], bounds[-1], 500)]
    found = counted(what, "train", values)
    expected = Counter(f"{PREFIX}{what}/train/{min((b for b in bounds if v <= b), default=math.inf):g}" for v in values)
    assert found == expected
    assert sum(found.values()) == len(values)
    assert all(is_trained(name) for name in found)
    assert not undocumented(found)


def test_the_trainers_counts_match_the_definition() -> None:
    random, rows, expected = torch.Generator().manual_seed(1), list[torch.Tensor](), list[int]()
    for bounds in map(BOUNDS.__getitem__, HISTOGRAMS):
        edge_cases = torch.tensor([*bounds, bounds[0] - 1, bounds[-1] + 1], dtype=torch.float32)
        drawn = torch.empty(300 - len(edge_cases)).uniform_(bounds[0], bounds[-1], generator=random)
        rows.append(torch.cat([edge_cases, drawn]))
        exact = np.searchsorted(np.array(bounds, np.float32), rows[-1].numpy())  # in the precision of the values
        expected += np.bincount(exact, minlength=len(bounds) + 1).tolist()
    counts = _counts(torch.stack(rows))
    assert counts.dtype == torch.float64
    assert counts.tolist() == expected
    assert _counts(torch.empty(len(HISTOGRAMS), 0)).tolist() == [0] * len(expected)


def test_a_record_is_split_and_bins_have_finite_edges() -> None:
    record = {"step": 3.0, "reward/train/mean": 0.5, **counted("reward", "train", [-99, 0.05, 1, 1]), f"{PREFIX}odd": 1.0}
    plain, histograms = separated(record)
    assert plain == {"step": 3.0, "reward/train/mean": 0.5}
    assert histograms == {f"{PREFIX}reward/train": [(-10.0, 1.0), (0.1, 1.0), (1.0, 2.0)]}
    limits, counts = edges("reward", histograms[f"{PREFIX}reward/train"])
    assert limits[0] == -17.0
    assert limits[-1] == 1.0
    assert len(limits) == len(counts) + 1
    assert sum(counts) == 4
    assert edges("length", [(math.inf, 2.0)]) == ([2.0**18, 2.0**19 - 2.0**17], [2.0])
    assert edges("length", []) == ([0.0, 8.0], [0.0])
    assert named("length", "train", [0] * (len(BOUNDS["length"]) + 1)) == {}


def test_a_steps_rewards_and_lengths_are_counted() -> None:
    tickets = [Ticket(f"0-{i}", i, 0, i, 0, [1, 2], "", 4, "main") for i in range(3)]
    claims = [Claim(f"{ticket.seq}-0", 1, ticket.id, b"", ticket) for ticket in tickets]
    record = trained([flow.header(claim, lengths=[7, 8, 9, 70]) for claim in claims], 5, [0, 0, 0], ["main"])
    found = {name.removeprefix(PREFIX): value for name, value in record.items() if name.startswith(PREFIX)}
    assert found == {"reward/train/0": 6, "reward/train/1": 6, "length/train/8": 6, "length/train/16": 3, "length/train/128": 3}


def test_tensorboard_receives_histograms(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventFiles(tmp_path)
    for step in range(3):
        files.write([{"step": float(step), "a": 1.0, **counted("advantage", "train", [-0.6, 0.3, 0.3, 9])}], [])
    files.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    assert events.Tags()["scalars"] == ["a"]
    shown = events.Histograms(f"{PREFIX}advantage/train")
    assert [one.step for one in shown] == [0, 1, 2]
    value = shown[0].histogram_value
    assert value.num == 4
    assert {limit: n for limit, n in zip(value.bucket_limit, value.bucket, strict=True) if n} == {-0.5: 1, 0.5: 2, 4.0: 1}


@pytest.mark.slow
def test_wandb_receives_histograms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.harness import small_config
    from tests.tracker.readers import read_wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    from services.tracker.wandb_run import WandbRun

    config = small_config(tmp_path, None, "tracking.wandb=tests")
    run = WandbRun(config, tmp_path / "wandb", "abcd")
    run.write([{"step": 0.0, "a": 1.0, **counted("length", "train", [5, 9, 9])}], [])
    run.close()
    (row,) = read_wandb(tmp_path / "wandb")
    assert row["a"] == 1.0
    name = f"{PREFIX}length/train"
    assert (row[f"{name}/_type"], row[f"{name}/values"], row[f"{name}/bins"]) == ("histogram", [1, 2], [0, 8, 16])
