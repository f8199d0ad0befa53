"""Commands before a run: `grpo init`, which writes a configuration that fits a model, data and a reward, and `grpo rows`."""
