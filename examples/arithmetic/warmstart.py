"""Make the demo's starting point: a tiny Qwen3 with its tokenizer that can work sums out but seldom does.

    python -m examples.arithmetic.warmstart --out build/arithmetic --seed 0

Guarantees: the folder appears complete or not at all; the same arguments and thread count always give the same bits; a folder
already made with the same arguments is left unchanged, and one made by anything else is never replaced.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.arithmetic.model_folder import make_folder
from services.config import ConfigError, RunConfig, load
from services.config.data import ReasoningGymSource

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder, or report that it is already made. Return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        config = load(options.config)
        _make(options, config)
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


def _make(options: argparse.Namespace, config: RunConfig) -> None:
    source = config.data.sources[0]
    if not isinstance(source, ReasoningGymSource):
        raise ValueError(f'{options.config}: data.sources.0.kind = "{source.kind}" has no worked examples: use "reasoning_gym"')

    def fill(folder: Path) -> dict[str, float]:
        # Imported late, so that --help and an already made folder respond at once.
        from examples.arithmetic.teaching import teach

        return teach(config, source, folder, options)

    make_folder(options.out, _stamp(options, config), fill)


if __name__ == "__main__":
    sys.exit(main())
