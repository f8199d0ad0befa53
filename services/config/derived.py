"""Defaults that depend on the model: a configuration that sets no lengths fits any model. Pure except for reading `config.json`.

Guarantees: a key that is set keeps its value; a length exceeds its documented default only if others that are set need it;
the same file and folder give the same values. A hub name is not looked up: its lengths are the documented defaults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from services.config.data import Data
from services.config.generation import Sampling
from services.config.root import Model, RunConfig
from services.config.training import Trainer

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
"""What model families call the length of their context in `config.json`."""


def context_of(folder: Path) -> int | None:
    """Return how many tokens the model in a folder was made for, or None if its `config.json` does not say."""
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(tree, dict):
        return None
    given = cast("dict[str, Any]", tree)
    inner = given.get("text_config")
    for table in (cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}, given):
        for key in CONTEXT_KEYS:
            if isinstance(table.get(key), int) and table[key] > 0:
                return table[key]
    return None


def derived(config: RunConfig) -> RunConfig:
    """Return the configuration with the lengths that it does not set."""
    model, data, sampling = config.model, config.data, config.sampling
    context = context_of(Path(model.path)) if Path(model.path).is_dir() else None
    prompt = data.max_prompt_tokens if "max_prompt_tokens" in data.model_fields_set else None
    completion = sampling.max_tokens if "max_tokens" in sampling.model_fields_set else None
    total = model.max_tokens
    if "max_tokens" not in model.model_fields_set:
        wanted = (prompt or _default(Data, "max_prompt_tokens")) + (completion or _default(Sampling, "max_tokens"))
        total = max(_default(Model, "max_tokens"), wanted)
        total = min(total, context) if context else total
    prompt, completion = shared_out(total, prompt, completion)
    row = config.trainer.row_tokens
    if "row_tokens" not in config.trainer.model_fields_set:
        longest = total if config.environments else prompt + completion  # a rollout's segments fill the model's context
        row = max(_default(Trainer, "row_tokens"), longest)
    return config.with_values(
        {
            "model.max_tokens": total,
            "data.max_prompt_tokens": prompt,
            "sampling.max_tokens": completion,
            "trainer.row_tokens": row,
        }
    )


def shared_out(total: int, prompt: int | None, completion: int | None) -> tuple[int, int]:
    """Return the longest prompt and the longest completion in a context of `total` tokens; None: not set.

    If neither is set and their defaults do not fit, the completion gets its default, but at most half, and the prompt the rest.
    If one is set, the other gets the rest, or its default if there is no rest: then the two are refused.
    """
    most_prompt, most_completion = _default(Data, "max_prompt_tokens"), _default(Sampling, "max_tokens")
    if prompt is None:
        left = total - completion if completion is not None else max(total // 2, total - most_completion)
        prompt = min(most_prompt, left) if left > 0 else most_prompt
    if completion is None:
        completion = min(most_completion, total - prompt) if total > prompt else most_completion
    return prompt, completion


def _default(section: type[Model | Data | Sampling | Trainer], key: str) -> int:
    return section.model_fields[key].default
