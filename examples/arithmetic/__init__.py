"""The demo: a model with 0.9 M parameters learns addition and subtraction by GRPO, on two CPU cores."""
