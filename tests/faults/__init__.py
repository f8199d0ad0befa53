"""Fault injection: a driver that breaks a real run at random, watches it, and audits the result (docs/faults.md).

`python -m tests.faults --faults 200 --seed 1` from the root of the repository.
"""
