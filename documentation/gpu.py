"""The results of `python -m tests.gpu`, from the file that it wrote on a GPU (tests/gpu/results.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "tests" / "gpu" / "results.json"

INTRODUCTION = """# GPU results

What `python -m tests.gpu` last measured on one {name} ({memory_gib:.0f} GiB), with PyTorch {torch}, CUDA {cuda}, NCCL {nccl}
and FlashAttention {flash_attention}. [On a GPU](../gpu.md) describes the stages and what they led to. The device computed
{matmul_tflops:.0f} TFLOP/s in a product of two matrices of 8,192 x 8,192 in bfloat16, and copied {copy_gb_per_s:,.0f} GB/s,
counting bytes read and written.

## Training steps

Four rows per step, each of a prompt and eight responses to it, in bfloat16. MFU is the share of the device's peak in bfloat16,
without recomputed operations. `trainer.compile` where the name says so.

| stage | tokens in a row | parameters | tokens/s | MFU | peak memory |
|---|---|---|---|---|---|
"""

LEFT_OUT = {"gpu", "seconds", "kernels_ms", "waits", "phases_s", "steps_s"}


def page() -> str:
    """Return the page."""
    figures: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["figures"]
    steps = {name: each for name, each in figures.items() if "row_tokens" in each}
    others = [name for name in figures if name not in steps and name not in ("device", "profile")]
    return "".join(
        (
            INTRODUCTION.format(**figures["device"]),
            *(_step(name, each) for name, each in sorted(steps.items())),
            "\n## Other stages\n\n| stage | results |\n|---|---|\n",
            *(f"| `{name}` | {_results(figures[name])} |\n" for name in others),
            _kernels(figures["profile"]),
        )
    )


def _step(name: str, of: dict[str, Any]) -> str:
    parameters, peak = of["parameters"] / 1e9, of["peak_mib"] / 1024
    speed = f"{of['tokens_per_s']:,} | {of['mfu']:.3f}"
    return f"| `{name}` | {of['row_tokens']:,} | {parameters:.2f} B | {speed} | {peak:.1f} GiB |\n"


def _results(of: dict[str, Any], prefix: str = "") -> str:
    parts = [
        _results(value, f"{name} ") if isinstance(value, dict) else f"{prefix}{name} {_shown(value)}"
        for name, value in of.items()
        if name not in LEFT_OUT
    ]
    return ", ".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"


def _kernels(of: dict[str, Any]) -> str:
    rows = (f"| `{name[:70]}` | {count} | {ms} |\n" for name, count, ms in of["kernels_ms"][:12])
    return (
        "\n## Kernels of `step_16k_compiled`\n\n"
        f"Of {of['step_s']} s under the profiler, the device computed {of['busy_s']} s.\n\n"
        f"| kernel | calls | ms |\n|---|---|---|\n{''.join(rows)}"
    )
