"""Every call of a whole run, repeated immediately and late: `python -m tests.repeats`."""
