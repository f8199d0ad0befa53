"""Peak FLOP/s of devices, by which model FLOPs utilization (MFU) is measured.

Guarantees: a device that is not known has no peak, and a run on it no MFU, unless `trainer.peak_tflops` gives one.
"""

from __future__ import annotations

import re

import torch

PEAK_TFLOPS = {
    "V100": 125.0,  # NVIDIA V100 data sheet (float16)
    "A10": 125.0,  # NVIDIA A10 data sheet
    "A30": 165.0,  # NVIDIA A30 data sheet
    "A40": 149.7,  # NVIDIA A40 data sheet
    "A100": 312.0,  # NVIDIA A100 data sheet
    "L4": 121.0,  # NVIDIA L4 data sheet
    "L40": 181.0,  # NVIDIA L40 data sheet
    "L40S": 362.0,  # NVIDIA L40S data sheet
    "H100": 989.4,  # NVIDIA H100 data sheet, SXM
    "H100 PCIe": 756.0,  # NVIDIA H100 architecture white paper
    "H100 NVL": 835.5,  # NVIDIA H100 data sheet
    "GH200": 989.4,  # NVIDIA GH200 data sheet
    "H200": 989.4,  # NVIDIA H200 data sheet, SXM
    "H200 NVL": 835.5,  # NVIDIA H200 data sheet
    "B200": 2250.0,  # NVIDIA DGX B200 data sheet, an eighth
    "GB200": 2500.0,  # NVIDIA GB200 data sheet
    "MI300X": 1307.4,  # AMD Instinct MI300X data sheet
    "MI325X": 1307.4,  # AMD Instinct MI325X data sheet
}
"""Dense bfloat16 tensor FLOP/s by a part of the device's name, in 10^12. Figures with sparsity are twice these."""


def peak_tflops(given: float, dtype: str, device: torch.device) -> float:
    """Return the peak of a device in 10^12 FLOP/s, 0 if it is unknown. `given`: `trainer.peak_tflops`."""
    if given or dtype != "bfloat16" or device.type != "cuda":
        return given
    return known_tflops(torch.cuda.get_device_name(device))


def known_tflops(name: str) -> float:
    """Return the peak of a device by the longest entry that its name contains; 0 if there is none."""
    found = [known for known in PEAK_TFLOPS if re.search(rf"\b{known}\b", name)]
    return PEAK_TFLOPS[max(found, key=len)] if found else 0.0
