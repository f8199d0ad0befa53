"""Everything that one GPU can test in twenty minutes: `python -m tests.gpu`. `--dry` runs the same at toy sizes on a CPU."""
