"""The configuration of the model in training: that of its folder, without the settings that would make the policy differ from the
generators'.

Guarantees: no dropout and no router noise, wherever its class keeps their rates; rotary frequencies that depend on length are
those that vLLM chooses by its own maximum; an export has the values of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from services.config.model_files import check_path, unusable
from services.trainer.model.attention import UnsupportedModel
from services.trainer.model.logprobs import LogitRule

NOISE = re.compile(r"drop|jitter")
"""Part of the names of rates of dropout and router noise, e.g. `attention_dropout`, `resid_pdrop`, `router_jitter_noise`."""

MULTIPLIERS = ("cohere", "hyperclovax")
"""Prefixes of the model types that multiply logits by their scale. Those of IBM and OpenBMB divide by `logits_scaling`."""


def read(path: str, max_tokens: int) -> Any:
    """Return the configuration of the model in `path` for sequences of at most `max_tokens`.

    Raises `UnsupportedModel`, and `ConfigError` if there is no such model.
    """
    check_path(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise unusable(path, "is not a model that can be loaded", error) from None
    for part in _parts(config):
        for name in _noises(part):
            setattr(part, name, 0.0)
        for rope in _ropes(part):
            _fix_frequencies(rope, max_tokens, path)
    return config


@contextmanager
def as_in_folder(config: Any, path: str) -> Iterator[None]:
    """Inside the block, restore the values of `config` that `read` changed."""
    changed: list[tuple[Any, str, Any]] = []
    for part, original in zip(_parts(config), _parts(AutoConfig.from_pretrained(path)), strict=True):
        for name in (*_noises(original), "rope_parameters"):
            if hasattr(original, name):
                changed.append((part, name, getattr(part, name)))
                setattr(part, name, getattr(original, name))
    try:
        yield
    finally:
        for part, name, value in changed:
            setattr(part, name, value)


def logit_rule(config: Any) -> LogitRule:
    """Return what a model does to its logits after the output layer."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0)
    if scaling := getattr(text, "logits_scaling", None):
        scale *= scaling if text.model_type.startswith(MULTIPLIERS) else 1 / scaling
    return LogitRule(scale, getattr(text, "final_logit_softcapping", None))


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Return a configuration and those inside it, e.g. `text_config`."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _noises(part: PreTrainedConfig) -> list[str]:
    return [name for name, value in vars(part).items() if NOISE.search(name) and isinstance(value, float) and value]


def _ropes(part: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters of a configuration: one set, or one for every type of layer."""
    given = getattr(part, "rope_parameters", None) or {}
    if "rope_type" in given:
        return [given]
    return [rope for rope in given.values() if isinstance(rope, dict)]


def _fix_frequencies(rope: dict[str, Any], max_tokens: int, path: str) -> None:
    """Make frequencies independent of a row's length, as vLLM's are: it chooses by its `max_model_len`, `model.max_tokens`."""
    if rope["rope_type"] == "dynamic":
        raise UnsupportedModel(
            f'model.path = {path!r} has rope_type = "dynamic", whose frequencies depend on the longest row in the trainer and '
            'are constant in vLLM: use a model with another rope_type, or set it to "default" in its config.json'
        )
    if rope["rope_type"] == "longrope":
        if max_tokens > rope["original_max_position_embeddings"]:
            rope["short_factor"] = rope["long_factor"]
        else:
            rope["long_factor"] = rope["short_factor"]
