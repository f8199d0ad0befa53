"""Weights into a vLLM worker: these modules run inside the worker process, which loads them as its extension class."""

OWNER = "GRPO_ENGINE_OWNER"
"""Environment variable: process id of the generator that owns the engine's processes."""
