"""A step that was saved to a file, with its payloads, trains from that file alone to the same bits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from services.protocol import codec
from tests.support.models.rank_worker import launch
from tests.support.models.tiny_model import make_config, make_payloads, make_samples, plan_of

LAYOUT = [[[[0, 1, 2], [3, 4]]], [[[7, 6, 5]]]]  # two mini-batches of one rank


@pytest.mark.slow
def test_a_saved_step_trains_to_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    payloads = make_payloads(groups=2, size=4)
    samples = make_samples(payloads)
    plan, ranks = plan_of(LAYOUT, samples, 0, make_config(tiny_model).loss)
    file = tmp_path / "step.msgpack"
    bodies = {name: codec.encode(payload) for name, payload in payloads.items()}
    file.write_bytes(msgspec.msgpack.encode((codec.encode(plan), [codec.encode(rank) for rank in ranks], bodies)))
    job = ("train", {"model": tiny_model, "sections": {}, "payloads": payloads, "samples": samples, "layouts": [LAYOUT]})
    (trained,), (again,) = launch(1, [job, ("saved step", {"model": tiny_model, "file": file})], tmp_path / "ranks")
    steps = [
        {name: value for name, value in each.items() if "time/" not in name} for each in (*trained["metrics"], again["metrics"])
    ]
    assert steps[0] == pytest.approx(steps[1], rel=0, abs=0, nan_ok=True)
    assert all(torch.equal(weight, again["weights"][name]) for name, weight in trained["weights"].items())
