"""Make the starting point of examples/tools: a tiny Qwen3 that can call tools but does not know when.

    python -m examples.tools.warmstart --out build/tools --seed 0

Guarantees: those of examples/arithmetic/model_folder.py; the same arguments and thread count always give the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.arithmetic.model_folder import make_folder
from services.config import ConfigError, RunConfig, load

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder, or report that it is already made. Return the exit status."""
    return warm_start(HERE, "examples.tools.teaching", arguments)


def warm_start(example: Path, teaching: str, arguments: Sequence[str] | None = None) -> int:
    """Make the folder of an example's model by `teach` of the module `teaching`. Return the exit status."""
    options = _parser(example.name).parse_args(arguments)
    try:
        config = load(example / "config.toml")

        def fill(folder: Path) -> dict[str, float]:
            # Imported late, so that --help and an already made folder respond at once.
            return importlib.import_module(teaching).teach(config, folder, options)

        make_folder(options.out, _stamp(example, options, config), fill)
    except (ConfigError, ValueError) as error:
        print(f"warmstart: {error}", file=sys.stderr)
        return 2
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{name}.warmstart", description=f"Make the starting point of examples/{name}."
    )
    parser.add_argument("--out", type=Path, default=Path(f"build/{name}"), help="folder to create (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, examples and their order (default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=12_000, help="number of examples (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads (default: %(default)s)")
    return parser


def _stamp(example: Path, options: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    """Return what the folder depends on: arguments, lengths and the code of the examples."""
    code = hashlib.sha256()
    for path in sorted(path for folder in {example, HERE, HERE.parent / "arithmetic"} for path in folder.glob("*.py")):
        code.update(path.read_bytes())
    chosen = {name: value for name, value in vars(options).items() if name != "out"}
    return {
        "arguments": chosen,
        "max_tokens": [config.model.max_tokens, config.sampling.max_tokens],
        "code": code.hexdigest()[:16],
    }


if __name__ == "__main__":
    sys.exit(main())
