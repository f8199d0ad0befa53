"""Implements `grpo record` and `grpo replay-step` (docs/bundles.md)."""
