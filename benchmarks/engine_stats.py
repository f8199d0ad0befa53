"""The cost of vLLM's own metrics: the same sequences on two engines, with and without them.

    python -m benchmarks.engine_stats --json

Both engines hold the same tiny model, with which work per iteration and per token weighs more than with any real one. They
alternate on the same prompts and seeds. `stats_share` is the CPU time that metrics add, over that without them, of this process
and of vLLM's. `wall_ratio` is the time with metrics over that without.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/engine_stats.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from benchmarks.common import arguments, report, run
from benchmarks.weights.engine import make_model
from services.config.load import validate
from services.generator.engines.vllm import VllmEngine
from services.groups.generated import SamplingParameters

PROMPTS, LENGTH, TOKENS = 64, 32, 128
SMALL = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


class Side:
    """An engine, and the CPU time of its processes."""

    def __init__(self, folder: Path, quiet: bool) -> None:
        tree: dict[str, Any] = {
            "model": {"path": str(folder), "dtype": "float32", "max_tokens": LENGTH + TOKENS},
            "data": {"sources": [{"kind": "jsonl", "path": "prompts.jsonl"}], "max_prompt_tokens": LENGTH},
            "verifiers": [{"kind": "exact"}],
            "sampling": {"max_tokens": TOKENS},
            "generator": {"max_num_seqs": PROMPTS, "engine_options": {"disable_log_stats": quiet}},
        }
        self.config, self.engine, self.processes = validate(tree, origin="benchmark"), VllmEngine(), list[psutil.Process]()

    async def start(self) -> None:
        """Start the engine."""
        before = {child.pid for child in multiprocessing.active_children()}
        await self.engine.start(self.config)
        self.processes = [psutil.Process(child.pid) for child in multiprocessing.active_children() if child.pid not in before]

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return time.process_time() + sum(each.user + each.system for each in times)

    async def sample(self, seed: int) -> tuple[float, float]:
        """Sample all prompts; return the CPU seconds and the wall seconds."""
        before, began = self._cpu_s(), time.perf_counter()
        prompts = [[3 + (seed + i * j) % 1000 for j in range(LENGTH)] for i in range(PROMPTS)]
        await asyncio.gather(
            *(
                self.engine.generate(f"{seed}-{i}", prompt, seed + i, SamplingParameters(TOKENS))
                for i, prompt in enumerate(prompts)
            )
        )
        return self._cpu_s() - before, time.perf_counter() - began


async def measure(options: argparse.Namespace, folder: Path) -> object:
    """Alternate the engines, and report."""
    make_model(folder / "model", max_position_embeddings=LENGTH + TOKENS, **SMALL)
    sides = [Side(folder / "model", quiet) for quiet in (True, False)]
    try:
        for side in sides:
            await side.start()
        for side in sides:
            await side.sample(0)  # warms up
        shares, ratios = list[float](), list[float]()
        for pair in range(1, options.repeats + 1):
            order = sides if pair % 2 else sides[::-1]
            taken = {side: await side.sample(1000 * pair) for side in order}
            (quiet_cpu, quiet_s), (cpu, wall_s) = (taken[side] for side in sides)
            shares.append(cpu / quiet_cpu - 1)
            ratios.append(wall_s / quiet_s)
    finally:
        for side in sides:
            await side.engine.close()
    return report({"prompts": PROMPTS, "tokens": TOKENS}, {"stats_share": shares, "wall_ratio": ratios})


def main() -> int:
    """Parse the command line and measure."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=12, help="pairs of measurements")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
