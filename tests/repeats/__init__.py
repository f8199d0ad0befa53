"""Every call of a whole run is repeated, at once and late: `python -m tests.repeats`."""
