"""Guards of the Redis Functions, removed one at a time: `python -m tests.mutants`. Every one must be noticed by a test."""
