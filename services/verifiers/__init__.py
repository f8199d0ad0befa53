"""Rewards: verifiers score completions, in killable processes (pool.py) or as services (remote_pool.py). `Scoring` calls all of
them.

Guarantees: every score is a finite number within its verifier's range; a verifier that raises, hangs, dies or returns anything
else is a `VerifierFailure`, never a score.
"""
