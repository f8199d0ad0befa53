"""Rewards: verifiers score completions, in killable processes (sandbox/) or as services (remote/). `Scoring` calls all of them.

Guarantees: every score is a finite number within its verifier's range; a verifier that raises, hangs, dies or returns anything
else is a `VerifierFailure`, never a score.
"""
