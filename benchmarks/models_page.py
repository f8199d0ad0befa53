"""Writes docs/models.md from the figures of the sweep (architectures.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
LONGEST = 200
"""Characters of a reason; the messages of libraries can be long."""

HEAD = """# Models

Which architectures can be trained. Made by `python -m benchmarks.architectures --page`, which builds a tiny model of every type
of causal language model in transformers {transformers}, from the defaults of its class with noise on every parameter, and loads
it as the trainer does. Do not edit by hand; a test compares its types with those of the code, and proves the sixteen most
unusual ones again.

| of {types} types | |
|---|---|
| can be built in a tiny size | {built} |
| proven | {proven} |
| refused on loading, with the reason | {refused} |
| wrong in packed rows without being refused | {silent} |
| fail after loading | {crashes} |

## What proven means

Packed rows with shared prompts, in training mode, give the same logprobs as the unmodified model of transformers in evaluation
mode, one sequence at a time: to within {worst_proven_gap:.0e} nats in float32, on other rows than those the trainer itself tries.

The trainer repeats this for the model it is given, with its real weights, before the first step: logprobs and the norm of
their gradient, on one short batch, in `model.dtype`, on the device that trains. If they differ by more than rounding, it refuses
the model and reports the figures. The bound for rounding is measured: five times the change caused by one unit in the last place
of every embedding, and at least 1e-4 nats in float32 or 0.05 in bfloat16. A model in bfloat16 is tried in float32 too where
memory allows it, since a mistake could hide in the rounding. Proofs are kept in `run.dir/.proofs`, under a digest of the
configuration, the parameters' shapes and first numbers, and the versions of the software.

On the first step the trainer also compares its logprobs with those of the engine. A mean difference above
`loss.correction_max_gap` stops the run, since the engine then computes a different model.

## What is changed on loading

- Every dropout rate and router noise in the configuration is set to 0. The export has the original values.
- `longrope` uses the factors that vLLM uses: the long ones if `model.max_tokens` exceeds the original length, otherwise the
  short ones, whatever the length of a row. `dynamic` is refused, because its frequencies depend on the row in transformers
  and are constant in vLLM.
- Logits are scaled and capped as in the model. Attention scores may be capped (Gemma 2) or have sinks (gpt-oss), and heads of
  keys and values may differ in size (DeepSeek). Capped scores and sinks are computed in blocks, without a fused kernel,
  which is slower; with FlashAttention this applies to sinks only.
- Layers of type `chunked_attention` are accepted up to `attention_chunk_size` tokens, where they equal full attention.
- Adapters on all linear layers (`lora.targets = []`) are refused for models whose experts are fused parameters, since the
  experts would get none. Name the layers in `lora.targets` to adapt only those.
- `trainer.sequence_parallel` is refused for latent attention and for sinks.

"""


def write(figures: Mapping[str, Any]) -> None:
    """Write the page."""
    PAGE.write_text(page(figures), encoding="utf-8")


def page(figures: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    rows = sorted(figures["verdicts"], key=lambda row: row["type"])
    proven = [row["type"] for row in rows if row["verdict"] == "proven"]
    lines = [
        HEAD.format(**figures),
        "## Proven\n",
        _wrapped(proven),
        "\n## Not trained\n",
        "| type | verdict | reason |\n|---|---|---|",
    ]
    lines += [f"| {row['type']} | {row['verdict']} | {_reason(row)} |" for row in rows if row["verdict"] != "proven"]
    return "\n".join(lines) + "\n"


def verdicts(text: str) -> dict[str, str]:
    """Return the verdict of every type on a page."""
    part = text.partition("## Proven\n")[2]
    proven, _, table = part.partition("## Not trained\n")
    found = dict.fromkeys(re.findall(r"`([^`]+)`", proven), "proven")
    rows = re.findall(r"^\| ([\w.-]+) \| ([a-z ]+) \|", table, re.MULTILINE)
    return found | {name: verdict for name, verdict in rows if name != "type"}


def _wrapped(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _reason(row: Mapping[str, Any]) -> str:
    """Return the reason without what is the same in every row, and without figures, which change with the seed."""
    text = re.sub(r"^model\.path = '…' (\(\w+\) )?", "", row["reason"])
    text = re.sub(r"(: use another model.*|, where rounding explains.*)$", "", text)
    text = text.replace(", use another model", "").replace(" for packed rows, use another", " for packed rows")
    text = re.sub(r" and the gradient's norm by [\d.]+% in \w+", "", text)
    if row["gap"] is not None:
        text = f"{text} {row['gap']:.2g} nats off".strip()
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text.replace("|", "\\|").replace("<", "&lt;")
