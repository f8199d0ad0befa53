"""Everything that one GPU can test in twenty minutes: `python -m tests.gpu`. With `--dry`, the same at toy sizes on a CPU."""
