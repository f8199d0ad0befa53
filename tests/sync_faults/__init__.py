"""Weight-sync rounds with real processes as members, one of them hit in every round: `python -m tests.sync_faults --help`.

A run as a whole is broken by tests/faults; this is the rounds alone, in every phase, with the network between members and
trainer.
"""
