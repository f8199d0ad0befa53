"""The data path against plain streams as in PipelineRL: pickled groups, one entry at a time.

    python benchmarks/stream.py --json

In the plain path, a generator XADDs each finished group as pickled lists of tokens, logprobs and rewards. A preprocessor XREADs
one entry at a time, computes advantages, and XADDs the group to the stream of one of two trainer ranks. A rank XREADs one entry
at a time and makes arrays of it. Nothing is claimed, committed, bounded or deleted; a killed process loses what it held. Ours is
the path of benchmarks/datapath.py, from ticket to commit with all its guarantees, for the same groups. Both run in one process,
with their sides working concurrently, on the same server, and alternate.
`ratio` is groups/s of ours over theirs, the median of pairs (goal: 5). `dataprep_ratio` is the CPU time per group of their
preprocessor over that of our dataprep, each running alone, ours with packing, plans and statistics. `left_ratio` is what they
leave in Redis over what we leave, after all groups are trained. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # `python benchmarks/stream.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import group_arguments, report, run, whole_steps
from benchmarks.datapath import GROUP_SIZE, RANKS, Ours, Times, make_payload, used_bytes, work
from services.console.run.redis_server import RedisServer
from services.protocol import codec
from services.protocol.payloads import Payload
from services.store import Store

ACTOR, TRAINING = "stream:actor", "stream:training:"


class Plain:
    """One repetition of the plain path."""

    def __init__(self, client: Any, groups: Sequence[Sequence[dict[str, Any]]], count: int) -> None:
        self.client, self.groups, self.count = client, groups, count

    async def run(self, together: bool) -> Times:
        """Run the three sides together or, to measure their CPU time, one after another."""
        before, started = await used_bytes(self.client), time.perf_counter()
        dataprep_s = await work(self._generate(), self._preprocess(), self._train(), together)
        wall_s = time.perf_counter() - started
        left_bytes = await used_bytes(self.client) - before
        await self.client.delete(ACTOR, *(f"{TRAINING}{rank}" for rank in range(RANKS)))
        return Times(wall_s, dataprep_s, left_bytes)

    async def _generate(self) -> None:
        for i in range(self.count):
            await self.client.xadd(ACTOR, {"data": pickle.dumps(self.groups[i % len(self.groups)])})

    async def _preprocess(self) -> None:
        last = "0-0"
        for i in range(self.count):
            last, group = await self._next(ACTOR, last)
            rewards = [completion["reward"] for completion in group]
            mean, std = sum(rewards) / len(rewards), float(np.std(rewards))
            for completion in group:
                completion["advantages"] = [(completion["reward"] - mean) / (std + 1e-4)] * len(completion["input_ids"])
            await self.client.xadd(f"{TRAINING}{i % RANKS}", {"data": pickle.dumps(group)})

    async def _train(self) -> None:
        async def rank(number: int) -> None:
            last = "0-0"
            for _ in range(number, self.count, RANKS):
                last, group = await self._next(f"{TRAINING}{number}", last)
                for completion in group:
                    tokens = np.array(completion["input_ids"], np.int32)
                    logprobs = np.array(completion["logprobs"], np.float32)
                    assert len(tokens) == len(np.array(completion["advantages"], np.float32)) > len(logprobs)

        await asyncio.gather(*map(rank, range(RANKS)))

    async def _next(self, stream: str, last: str) -> tuple[str, list[dict[str, Any]]]:
        while not (found := await self.client.xread({stream: last}, count=1, block=1000)):
            pass
        ((_, ((entry, fields),)),) = found
        return entry, pickle.loads(fields[b"data"])  # our own bytes: a foreign pickle could run any code


def listed(raw: bytes) -> list[dict[str, Any]]:
    """Return a group as lists, one dictionary per completion."""
    payload = codec.decode(raw, Payload)
    starts = np.cumsum([0, *payload.lengths])
    return [
        {
            "input_ids": payload.prompt.tolist() + payload.tokens[a:b].tolist(),
            "logprobs": payload.logprobs[a:b].tolist(),
            "reward": float(i % 3 == 0),
        }
        for i, (a, b) in enumerate(pairwise(starts))
    ]


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Alternate both sides, and report."""
    server = RedisServer(folder, program=options.server)
    server.start()
    payloads = [make_payload(seed) for seed in range(64)]
    groups = [listed(payload) for payload in payloads]
    names = ("ratio", "dataprep_ratio", "left_ratio", "groups_per_s", "plain_groups_per_s", "dataprep_us_per_group",
             "plain_dataprep_us_per_group", "left_bytes_per_group", "plain_left_bytes_per_group")  # fmt: skip
    samples: dict[str, list[float]] = {name: [] for name in names}
    try:
        store = await Store.connect(server.url, "stream", server.password)
        for repeat in range(options.repeats + 1):
            times = []
            for together in (True, False):
                times.append(await Ours(store, payloads, options.groups, options.prompts_per_step).run(together))
                times.append(await Plain(store.client, groups, options.groups).run(together))
            ours, plain, ours_apart, plain_apart = times
            if repeat == 0:
                continue  # the first fills caches and memory
            figures = (
                plain.wall_s / ours.wall_s, plain_apart.dataprep_s / ours_apart.dataprep_s,
                plain.left_bytes / ours.left_bytes, options.groups / ours.wall_s, options.groups / plain.wall_s,
                ours_apart.dataprep_s / options.groups * 1e6, plain_apart.dataprep_s / options.groups * 1e6,
                ours.left_bytes / options.groups, plain.left_bytes / options.groups,
            )  # fmt: skip
            for name, figure in zip(names, figures, strict=True):
                samples[name].append(figure)
            if not options.json:
                print(f"ours {options.groups / ours.wall_s:7.0f} groups/s   plain {options.groups / plain.wall_s:7.0f} groups/s")
        await store.close()
    finally:
        server.stop()
    subject = {"groups": options.groups, "completions": GROUP_SIZE, "payload_bytes": len(payloads[0])}
    subject |= {"pickle_bytes": len(pickle.dumps(groups[0])), "server": Path(server.program).name}
    report({"benchmark": "stream", **subject}, samples)


def main() -> int:
    """Parse the command line and run."""
    return run(measure, whole_steps(group_arguments(__doc__, 1024)))


if __name__ == "__main__":
    sys.exit(main())
