"""The policy losses against TRL's GRPOTrainer, on tensors and numbers recorded by benchmarks/against_trl/losses.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.config.loss import Loss
from services.trainer import losses

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "trl_losses.json").read_text())
DAPO: dict[str, Any] = {"policy": "dapo", "denominator": "token"}
GSPO: dict[str, Any] = {"policy": "gspo", "denominator": "sequence"}
SAME: dict[str, dict[str, Any]] = {
    "grpo": {"policy": "grpo", "denominator": "sequence"},
    "dapo": DAPO,
    "dapo, one mini-batch": DAPO,
    "dapo with KL": DAPO | {"kl_beta": 0.05},
    "dapo with an entropy bonus": DAPO | {"entropy_coefficient": 0.01},
    "dapo, token_truncate": DAPO | {"kl_beta": 0.05, "correction_upper": 2.0},
    "dapo, token_mask": DAPO | {"kl_beta": 0.05, "correction_upper": 2.0, "correction_mask": {"token": [0.5, 2.0]}},
    "dr_grpo": {"policy": "dr_grpo", "denominator": "constant"},
    "cispo": {"policy": "cispo", "denominator": "token", "clip_high": 0.272},
    "gspo": GSPO | {"clip_low": 0.05, "clip_high": 0.08},
    "gspo with KL": GSPO | {"clip_low": 3e-4, "clip_high": 4e-4, "kl_beta": 0.1},
}
"""Our equivalent of TRL's settings in each case."""


def test_every_recorded_case_is_compared() -> None:
    assert SAME.keys() == RECORD["cases"].keys()
    assert {case["trl"]["loss_type"] for case in RECORD["cases"].values()} == {"grpo", "dapo", "dr_grpo", "cispo"}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_match_trl(name: str, dtype: torch.dtype) -> None:
    case, config = RECORD["cases"][name], Loss.model_validate({"kl_beta": 0.0} | SAME[name])
    given = {key: torch.tensor(value, dtype=dtype) for key, value in RECORD["inputs"].items()}
    logprobs, entropy = given["logprobs"].requires_grad_(), given["entropy"].requires_grad_()
    mask = (given["completion_mask"] * given["tool_mask"]).bool()
    counts = mask.sum(1)
    samples = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    ones = torch.ones(len(samples), dtype=dtype)
    old = given["old"] if case["trl"].get("old", True) else logprobs.detach()
    tokens = losses.Tokens(
        logprobs=logprobs[mask],
        old=old[mask],
        behaviour=given["sampling" if "correction" in case["trl"] else "old"][mask] if old is given["old"] else old[mask],
        reference=given["reference"][mask],
        advantages=given["advantages"][samples],
        weights=ones,
        shares=1 / counts[samples].to(dtype) if config.denominator == "sequence" else ones,
        entropy=entropy[mask],
        samples=samples,
    )
    counts_by_kind = {"token": len(samples), "sequence": len(mask), "constant": 6 * 16}  # completions x max_completion_length
    denominator = counts_by_kind[config.denominator]
    output = losses.compute(tokens, config, float(denominator))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor(case["gradient"], dtype=dtype), rtol=1e-5, atol=1e-6)
    bonus = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    torch.testing.assert_close(bonus, torch.tensor(case["entropy_gradient"], dtype=dtype), rtol=1e-5, atol=1e-6)


def test_the_recorded_cases_include_clipping() -> None:
    for name in ("grpo", "dapo", "dr_grpo", "gspo"):
        gradient = torch.tensor(RECORD["cases"][name]["gradient"])
        mask = (torch.tensor(RECORD["inputs"]["completion_mask"]) * torch.tensor(RECORD["inputs"]["tool_mask"])).bool()
        assert 0 < int((gradient[mask] == 0).sum()) < int(mask.sum()), f"{name}: some tokens must be clipped, and some not"
