"""Rewards: verifiers score completions in a pool of killable processes.

Guarantees: a score lies in 0..1; a verifier that breaks, hangs or dies is a `VerifierFailure`, never a score.
"""

from services.generator.verifiers.base import VerifierFailure, combine, verifier_names
from services.generator.verifiers.sandbox.pool import VerifierPool

__all__ = ["VerifierFailure", "VerifierPool", "combine", "verifier_names"]
