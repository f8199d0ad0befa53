"""Make the starting point of examples/code: a tiny Qwen3 that writes programs, one in three of which prints the answer.

    python -m examples.code.warmstart --out build/code --seed 0

Guarantees: those of examples/arithmetic/model_folder.py; the same arguments and thread count always give the same bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.tools.warmstart import warm_start

if __name__ == "__main__":
    sys.exit(warm_start(Path(__file__).parent, "examples.code.teaching"))
