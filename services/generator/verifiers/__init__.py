"""Rewards: verifiers score completions in a pool of killable processes.

Guarantees: a score is between 0 and 1; a verifier that raises, hangs or dies is a `VerifierFailure`, never a score.
"""

from services.generator.verifiers.base import VerifierFailure, combine, verifier_names
from services.generator.verifiers.sandbox.pool import VerifierPool

__all__ = ["VerifierFailure", "VerifierPool", "combine", "verifier_names"]
