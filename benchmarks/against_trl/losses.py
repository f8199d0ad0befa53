"""Losses and gradients that TRL's GRPOTrainer computes from fixed tensors, recorded for tests/trainer/losses/test_trl.py.

    python -m benchmarks.against_trl.losses            # compares with the record
    python -m benchmarks.against_trl.losses --record   # writes a new record

TRL is installed into build/trl, a separate environment that borrows torch and transformers from the current one. The code under
test is `GRPOTrainer._compute_loss` of the installed package, called on a stub that has the settings it reads and returns our
logprobs instead of a model's.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # `python benchmarks/against_trl/losses.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.against_trl.environment import TRL, trl_python

ROOT = Path(__file__).parent.parent.parent
RECORD = ROOT / "tests" / "trainer" / "losses" / "data" / "trl_losses.json"
LENGTHS = (9, 1, 5, 9, 3, 7)
TOLERANCE = 1e-6

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.272},
    "dapo, one mini-batch": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.272, "old": False},
    "dapo with KL": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.272, "beta": 0.05},
    "dapo with an entropy bonus": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.272, "entropy_coef": 0.01},
    "dapo, token_truncate": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.272, "beta": 0.05, "correction": "truncate"},
    "dapo, token_mask": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.272, "beta": 0.05, "correction": "mask"},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "max_completion_length": 16},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.272},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
    "gspo with KL": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.1,
    },
}  # fmt: skip
"""TRL's settings by name. `old` and `correction` determine which inputs the trainer passes to its loss."""


def inputs() -> dict[str, Any]:
    """Return tensors as lists [6, 9], for six responses with two tool tokens; advantages [6]."""
    import torch

    generator = torch.Generator().manual_seed(20)

    def normal(scale: float, *size: int) -> Any:
        return scale * torch.randn(*size, generator=generator, dtype=torch.float64)

    shape = (len(LENGTHS), max(LENGTHS))
    logprobs = -0.05 - normal(1.0, *shape).abs()
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    tools = torch.ones_like(mask)
    tools[0, 3:5] = 0
    old = (logprobs - normal(0.25, *shape)).clamp(max=-1e-3)
    tensors = {
        "logprobs": logprobs,
        "old": old,
        "sampling": (old - normal(0.4, *shape)).clamp(max=-1e-3),
        "reference": (logprobs - normal(0.3, *shape)).clamp(max=-1e-3),
        "entropy": normal(1.0, *shape).abs(),
        "advantages": normal(1.0, shape[0]),
    }
    rounded = {name: tensor.mul(1e6).round().div(1e6).tolist() for name, tensor in tensors.items()}
    return rounded | {"completion_mask": mask.tolist(), "tool_mask": tools.tolist()}


def compute(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return TRL's loss of every case and its gradient with respect to logprobs [6, 9] and entropy [6, 9]. Needs TRL."""
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    def tensor(name: str) -> Any:
        return torch.tensor(given[name], dtype=torch.float64 if isinstance(given[name][0], float) else None)

    results = {}
    for name, settings in CASES.items():
        logprobs, entropy = (torch.tensor(given[one], dtype=torch.float64, requires_grad=True) for one in ("logprobs", "entropy"))
        mask, tools = torch.tensor(given["completion_mask"]), torch.tensor(given["tool_mask"])
        old, sampling, reference = (torch.tensor(given[one], dtype=torch.float64) for one in ("old", "sampling", "reference"))
        batch = {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "tool_mask": tools, "advantages": tensor("advantages"), "ref_per_token_logps": reference,
            "num_items_in_batch": (mask * tools).sum(),
        }  # fmt: skip
        if settings.get("old", True):
            batch["old_per_token_logps"] = old
        if "correction" in settings:  # as in GRPOTrainer._generate_and_score_completions, with bounds 0.5 and 2
            ratio = ((old - sampling) * mask * tools).exp()
            masked = ratio.masked_fill((ratio < 0.5) | (ratio > 2), 0.0)
            batch["importance_sampling_ratio"] = ratio.clamp(max=2) if settings["correction"] == "truncate" else masked
        loss = GRPOTrainer._compute_loss(_trainer(settings, logprobs, entropy), None, batch)
        loss.backward()
        bonus = entropy.grad if entropy.grad is not None else torch.zeros_like(entropy)
        results[name] = {"loss": loss.item(), "gradient": _lists(logprobs.grad), "entropy_gradient": _lists(bonus)}
    return results


def _trainer(settings: dict[str, Any], logprobs: Any, entropy: Any) -> Any:
    """Return a stub of a trainer for `_compute_loss`: one process, no gradient accumulation, TRL's defaults."""
    epsilon = settings.get("epsilon", 0.2)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        loss_type=settings["loss_type"],
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        epsilon_low=epsilon,
        epsilon_high=settings.get("epsilon_high", epsilon),
        beta=settings.get("beta", 0.0),
        entropy_coef=settings.get("entropy_coef", 0.0),
        _entropy_bonus_enabled="entropy_coef" in settings,
        use_vllm="correction" in settings,
        max_completion_length=settings.get("max_completion_length"),
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda one: one, reduce=lambda one, reduction: one
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def _lists(values: Any) -> list[list[float]]:
    return [[float(f"{value:.10g}") for value in row] for row in values.tolist()]


def _ask_peer(given: dict[str, Any]) -> dict[str, Any]:
    """Run `compute` in TRL's environment, which is created if it is missing."""
    command = [str(trl_python()), "-W", "ignore", str(Path(__file__)), "--peer"]
    answer = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"TRL's side failed:\n{answer.stderr[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    """Record TRL's numbers, or compare them with the record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    options.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.peer:
        print(json.dumps(compute(json.load(sys.stdin))))
        return
    given = inputs()
    results = _ask_peer(given)
    if chosen.record:
        import torch

        made = {
            "by": "benchmarks/against_trl/losses.py",
            "trl": TRL,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        RECORD.parent.mkdir(exist_ok=True)
        cases = {name: {"trl": CASES[name]} | result for name, result in results.items()}
        RECORD.write_text(json.dumps({"made": made, "inputs": given, "cases": cases}, separators=(",", ":")) + "\n")
        print(f"recorded {len(cases)} cases in {RECORD.relative_to(ROOT)}")
        return
    recorded = json.loads(RECORD.read_text())
    assert recorded["inputs"] == given, "the record was made from other tensors: run with --record"
    for name, result in results.items():
        difference = abs(result["loss"] - recorded["cases"][name]["loss"])
        print(f"{name:30} {result['loss']:+.9f}  {difference:.1e} from the record")
        assert difference < TOLERANCE, name


if __name__ == "__main__":
    main()
