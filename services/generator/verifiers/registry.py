"""Verifiers by name. A verifier's module is imported only if the run uses it, since some import a computer algebra system."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from services.config.data import Source, VerifierConfig
from services.generator.verifiers.base import Verifier

VERIFIERS: dict[str, str] = {
    "math": "services.generator.verifiers.math:MathVerifier",
    "exact": "services.generator.verifiers.exact:ExactVerifier",
    "regex": "services.generator.verifiers.regex:RegexVerifier",
    "reasoning_gym": "services.generator.verifiers.reasoning_gym:ReasoningGymVerifier",
}
"""Kind -> `module:Class`. The class takes (VerifierConfig, Source)."""


def build(config: VerifierConfig, source: Source) -> Verifier:
    """Return the verifier that `config` names. Raises ValueError for invalid settings."""
    module, _, name = VERIFIERS[config.kind].partition(":")
    make: Callable[[VerifierConfig, Source], Verifier] = getattr(importlib.import_module(module), name)
    return make(config, source)
