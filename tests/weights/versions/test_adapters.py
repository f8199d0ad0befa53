"""Only adapters are sent, and the receiver merges them as the trainer does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.trainer.model import lora
from services.weights.deadline import Deadline
from services.weights.versions.mirror import WeightMirror
from services.weights.versions.reader import VersionReader
from tests.support.models.tiny_vllm import make_config, make_model
from tests.support.senders import sender_of
from tests.support.versions import assert_same_bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_adapters_are_sent_and_merged_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model(tmp_path, tied=True).to(dtype)
    config = make_config(tmp_path, sync={"backend": "store", "folder": f"{tmp_path}/volume"}, lora={"rank": 2, "alpha": 8.0})
    lora.attach(model, config.lora, str(tmp_path))
    sender = sender_of(config, model)
    adapters = [weight for name, weight in model.named_parameters() if ".lora_" in name]
    mirror = WeightMirror()
    for version in range(3):
        if version:
            torch.manual_seed(version)
            with torch.no_grad():
                for weight in adapters:
                    weight += torch.randn_like(weight) * 0.1
        sender.open(3)
        sender.send(version, 3)
        held = dict(VersionReader(f"{tmp_path}/volume/3", mirror).take(Deadline(10), version))
        state = dict(model.named_parameters(remove_duplicate=False))
        expected = {name: weight.detach() for name, weight in lora.merged_state(state, config.lora).items()}
        assert_same_bits({name: held[name] for name in expected}, expected)
        assert "lm_head.weight" in held
    sent = sender.stats
    assert sent["delta"]
    assert sent["bytes"] <= sum(weight.numel() * dtype.itemsize for weight in adapters)
    assert {weight.dtype for weight in adapters} == {torch.float32}, "trained in float32, but sent in the model's dtype"
