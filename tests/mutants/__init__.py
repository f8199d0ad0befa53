"""The guards of the Redis Functions, removed one at a time: `python -m tests.mutants`. A test must notice each removal."""
