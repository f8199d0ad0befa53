"""Peak FLOPS of devices by the names that drivers report."""

from __future__ import annotations

import pytest
import torch

from services.trainer.step.utilization import known_tflops, peak_tflops


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0), ("NVIDIA GH200 480GB", 989.4), ("NVIDIA A10G", 0.0), ("NVIDIA GeForce GTX 1080", 0.0),
    ],
)  # fmt: skip
def test_peak_flops_are_known_by_device_name(name: str, expected: float) -> None:
    assert known_tflops(name) == expected


def test_a_cpu_has_only_the_configured_peak() -> None:
    assert peak_tflops(0.0, "bfloat16", torch.device("cpu")) == 0
    assert peak_tflops(0.2, "float32", torch.device("cpu")) == 0.2
