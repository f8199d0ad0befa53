"""A member as a separate process, which follows rounds with a scripted engine and reports the weights that it holds.

It inspects its weights whenever a token could be sampled, and prints lines of JSON: `applied` and `mixed` by itself, `holds` for
each line of input. Weights of version v begin with v in every tensor (tests/sync_faults/campaign.py), so a mixture shows.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from services.config import RunConfig, load
from services.generator.metrics import GeneratorMetrics
from services.http.entry import open_service
from services.runtime import logs
from services.runtime.loops import Loop
from services.weights.broadcast.gloo import begin_broadcast
from services.weights.checksums import WeightChanged, check, checksums
from services.weights.deadline import Deadline, let_go
from services.weights.receiver import TransferFailed, WeightsChanged
from services.weights.rounds.member import WeightFollower
from tests.support.scripted import ScriptedEngine

SAMPLE_S = 0.005


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Return a digest of names and bytes that does not depend on the transfer's code."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(weights.items()):
        hashed.update(name.encode())
        hashed.update(weight.detach().numpy().tobytes())
    return hashed.hexdigest()


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class StagingEngine(ScriptedEngine):
    """Receives while sampling, like vLLM with gloo; reports applied weights."""

    async def receive(self, version: int) -> None:
        await super().receive(version)
        tell(event="applied", version=version, digest=digest(self.weights))

    def holds(self) -> tuple[int, str]:
        """Return version and digest of complete weights; version -1 if there are none."""
        return (self.version, digest(self.weights)) if self.whole and self.weights else (-1, "")


class StreamingEngine(StagingEngine):
    """Writes arriving weights in place, like vLLM with NCCL: a broken transfer leaves a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = False

    async def receive(self, version: int) -> None:
        if self.connection is None:
            raise TransferFailed("no group")
        self.whole = False
        try:
            await asyncio.to_thread(self._stream, *self.connection)
        except WeightChanged as error:
            raise WeightsChanged(error.tensor) from None
        except (RuntimeError, TimeoutError) as error:
            self.connection = None
            let_go(error)
            raise TransferFailed(str(error)) from None
        self.whole, self.version = True, version
        tell(event="applied", version=version, digest=digest(self.weights))

    def _stream(self, group: Any, manifest: Any, _: Any) -> None:
        deadline = Deadline(self._config.sync.deadline_s)
        for bucket in manifest.buckets:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            begin_broadcast(group, buffer, deadline).wait()
            for name, weight in bucket.views(buffer):
                self.weights.setdefault(name, torch.zeros_like(weight)).copy_(weight)
        names = [meta.name for meta in manifest.tensors]
        sent = torch.empty(len(names), 2, dtype=torch.int64)
        begin_broadcast(group, sent, deadline).wait()
        check(names, [checksums(self.weights[name] for name in names)], sent)


async def sample(engine: StagingEngine) -> None:
    """Inspect the weights whenever a token could be sampled."""
    while True:
        if engine.go.is_set() and engine.weights:
            marks = {int(weight.view(-1)[0]) for weight in engine.weights.values()}
            if marks != {engine.version}:
                tell(event="mixed", version=engine.version, marks=sorted(marks))
        await asyncio.sleep(SAMPLE_S)


async def answer(engine: StagingEngine) -> None:
    """Report the current weights for each input line; return at the end of input."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        version, held = engine.holds()
        tell(event="holds", version=version, digest=held)


async def follow(config: RunConfig, name: str, streams: bool) -> None:
    """Run the member."""
    torch.set_num_threads(1)
    engine = StreamingEngine() if streams else StagingEngine()
    await engine.start(config)
    async with open_service("generator", config, name) as service:

        async def work(loop: Loop) -> None:
            loop.limit_s = float("inf")
            await service.created()
            service.say(phase="unsynced", world=engine.world)
            looking = asyncio.create_task(sample(engine))
            await answer(engine)
            looking.cancel()

        service.add_loop("weights", WeightFollower(service, engine, GeneratorMetrics(service.registry)).follow)
        await service.run(work)


def main() -> None:
    """Parse the command line and follow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--streams", action="store_true")
    options = parser.parse_args()
    logs.configure("sync-faults", options.name)
    asyncio.run(follow(load(options.config, [], environ=dict(os.environ)), options.name, options.streams))


if __name__ == "__main__":
    main()
