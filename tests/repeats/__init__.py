"""Every call of a whole run is sent again, at once and late: `python -m tests.repeats`."""
