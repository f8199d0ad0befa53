"""The demo: a model of 0.9 M parameters learns to add up by GRPO on two CPU cores."""
