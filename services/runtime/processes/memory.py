"""Whether the kernel has killed processes because memory ran out. Such a process leaves nothing in its log."""

from __future__ import annotations

import contextlib
from pathlib import Path

COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Files with a line `oom_kill N`: of the container, and of the machine, which has no such file of its own."""
OUT_OF_MEMORY = (
    "memory ran out and the kernel killed a process; use a smaller model or lora.rank, or lower trainer.row_tokens, "
    "generator.count, generator.cpu_kv_cache_mib or generator.max_num_seqs"
)


def oom_kills() -> int:
    """Return how many processes the kernel has killed here because memory ran out, 0 if it does not say."""
    for path in COUNTERS:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
