"""Weight-sync rounds with real processes as members, one of which is hit in every round: `python -m tests.sync_faults --help`.

tests/faults breaks whole runs; this breaks only the rounds, in every phase, with a network between members and trainer.
"""
