"""Rewards: verifiers score completions, in killable processes (sandbox/) or as services (remote/). `Scoring` asks all of them.

Guarantees: every score is a finite number within its verifier's range; a verifier that raises, hangs, dies or says anything else
is a `VerifierFailure`, never a score.
"""
