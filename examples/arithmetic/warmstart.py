"""Make the demo's starting point: a tiny Qwen3 with its tokenizer that can work sums out but seldom does.

    python -m examples.arithmetic.warmstart --out build/arithmetic --seed 0

Guarantees: the folder appears complete or not at all; the same arguments and thread count always give the same bits; a folder
already made with the same arguments is left unchanged, and one made by anything else is never replaced.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.config import ConfigError, RunConfig, load
from services.config.data import ReasoningGymSource

HERE = Path(__file__).parent
STAMP = "warmstart.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder, or report that it is already made. Return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        config = load(options.config)
        stamp = _stamp(options, config)
        if _made(options.out, stamp):
            print(f"{options.out} is already made with these arguments")
            return 0
        _make(options, config, stamp)
    except (ConfigError, ValueError) as error:
        print(f"warmstart: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.arithmetic.warmstart", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/arithmetic"), help="folder to create (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=HERE / "config.toml", help="run whose task to teach (default: the demo's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, examples and their order (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=12_000, help="number of worked examples (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=256, help="number of questions to measure with (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=540, help="training steps; the last sixth is the second lesson (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads (default: %(default)s)")
    return parser


def _stamp(options: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    """Return what the folder depends on: arguments, task, answer pattern and the code of this example."""
    code = hashlib.sha256()
    for path in sorted(HERE.glob("*.py")):
        code.update(path.read_bytes())
    chosen = {name: value for name, value in vars(options).items() if name not in ("out", "config")}
    return {
        "arguments": chosen,
        "data": config.data.model_dump(mode="json"),
        "verifiers": [verifier.model_dump(mode="json") for verifier in config.verifiers],
        "max_tokens": [config.model.max_tokens, config.sampling.max_tokens],
        "code": code.hexdigest()[:16],
    }


def _made(folder: Path, stamp: dict[str, Any]) -> bool:
    """Return whether `folder` was made from `stamp`. Raises `ValueError` if it holds something that must not be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))["made_from"] == stamp
    except (OSError, ValueError, KeyError):
        raise ValueError(f"--out = {folder} contains files that this command did not make: choose another folder") from None


def _make(options: argparse.Namespace, config: RunConfig, stamp: dict[str, Any]) -> None:
    source = config.data.sources[0]
    if not isinstance(source, ReasoningGymSource):
        raise ValueError(f'{options.config}: data.sources.0.kind = "{source.kind}" has no worked examples: use "reasoning_gym"')
    started = time.monotonic()
    # Imported late, so that --help and an already made folder respond at once.
    from examples.arithmetic.teaching import teach

    options.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.out.with_name(f".{options.out.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        measured = teach(config, source, temporary, options)
        seconds = round(time.monotonic() - started, 1)
        (temporary / STAMP).write_text(json.dumps({"made_from": stamp, "measured": measured}, indent=2) + "\n", encoding="utf-8")
        _swap(temporary, options.out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{options.out}: ready in {seconds:g} s")


def _swap(new: Path, folder: Path) -> None:
    """Replace `folder` with `new`. For a moment neither exists, but never half of one."""
    old = new.with_name(f"{new.name}.old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
