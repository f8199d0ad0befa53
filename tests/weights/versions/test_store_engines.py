"""A version store between real engines: DeepSpeed's partitions on one side, vLLM on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.generator.engines.vllm import VllmEngine
from services.groups.generated import SamplingParameters
from services.protocol.messages import Round
from services.weights.receiver import TransferFailed
from tests.support.models.tiny_vllm import assert_greedy, make_config, make_model, perturb, reference_logprobs
from tests.support.models.two_ranks import two_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # loading vLLM takes minutes on a busy machine
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # importing vLLM warns
]

ROOT = str(Path(__file__).parents[3])
PROMPT = [5, 17, 33, 65, 129]
FENCE = 4


class Publishing:
    """An engine, and a trainer that publishes its model's versions for it."""

    def __init__(self, engine: VllmEngine, model: Any, config: Any) -> None:
        from tests.support.senders import sender_of

        self.engine, self.model, self.config = engine, model, config
        self.sender = sender_of(config, model)
        self.version = -1

    def publish(self) -> str:
        self.version += 1
        folder, _ = self.sender.open(FENCE)
        self.sender.send(self.version, FENCE)
        return folder

    async def apply(self, folder: str) -> None:
        await self.engine.join(Round(0, self.version, "join", {}, 0, "store", folder, 0, 0, FENCE), 1)
        await self.engine.stage(self.version)
        await self.engine.pause()
        await self.engine.receive(self.version)
        await self.engine.resume()

    async def assert_equal(self) -> None:
        """Check that the engine samples like `transformers`."""
        sampled = await self.engine.generate(f"{self.version}-s", PROMPT, 1, SamplingParameters(32))
        np.testing.assert_allclose(sampled.logprobs, reference_logprobs(self.model, PROMPT, sampled.tokens), atol=1e-4)
        greedy = await self.engine.generate(f"{self.version}-g", PROMPT, 0, SamplingParameters(48, top_k=1))
        assert_greedy(self.model, PROMPT, greedy.tokens)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def publishing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Publishing]:
    folder = tmp_path_factory.mktemp("store")
    model = make_model(folder, tied=True)
    sync = {"backend": "store", "folder": str(folder / "volume"), "deadline_s": 10.0}
    config = make_config(folder, sync=sync)
    engine = VllmEngine()
    await engine.start(config)
    yield Publishing(engine, model, config)
    await engine.close()


async def test_vllm_matches_transformers_after_anchors_and_deltas(publishing: Publishing) -> None:
    import torch

    for step in range(4):
        if step % 2:
            perturb(publishing.model, step)
        else:
            with torch.no_grad():
                publishing.model.model.layers[0].self_attn.q_proj.weight[step] += 0.1
        await publishing.apply(publishing.publish())
        assert publishing.engine.version == publishing.version
        await publishing.assert_equal()


async def test_vllm_keeps_its_weights_when_a_version_is_damaged(publishing: Publishing, tmp_path: Path) -> None:
    import copy

    await publishing.apply(publishing.publish())
    before, model = publishing.version, copy.deepcopy(publishing.model)
    perturb(publishing.model, 99)
    folder = publishing.publish()
    path = Path(publishing.config.weights_place) / folder / f"{publishing.version}.{'delta'}" / "0.0"
    if not path.exists():
        path = path.parents[1] / f"{publishing.version}.anchor" / "0.0"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100] + bytes(100))
    with pytest.raises(TransferFailed, match=f"version {publishing.version} failed|corrupted in transfer"):
        await publishing.apply(folder)
    assert (publishing.engine.version, publishing.engine.whole) == (before, True)
    publishing.model, changed = model, publishing.model
    await publishing.assert_equal()
    publishing.model = changed
    path.write_bytes(whole)
    await publishing.apply(folder)
    await publishing.assert_equal()


RANK = """
import os, sys
import deepspeed, torch
import torch.distributed as dist
from pathlib import Path
from services.trainer import ranks
from tests.support.models.tiny_vllm import make_config, make_model
from tests.support.models.two_ranks import zero_engine
from tests.support.senders import sender_of
rank, root, stage = int(os.environ["RANK"]), Path(sys.argv[1]), int(sys.argv[2])
folder = root / str(rank)
torch.set_num_threads(1)
torch.manual_seed(0)
model = make_model(folder, tied=True).bfloat16()
config = make_config(folder, sync={"backend": "store", "folder": str(root / "volume")})
engine = zero_engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4), {"stage": stage}, bf16={"enabled": True})
sender = sender_of(config, engine.module, rank, 2, ranks.gather)
for version in range(3):
    if version:
        tokens = torch.arange(2 + version + rank, 60 + version + rank).unsqueeze(0)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    if rank == 0:
        sender.open(4)
    sender.send(version, 4)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if rank == 0:
            torch.save({n: w.detach().clone() for n, w in model.named_parameters(remove_duplicate=False)}, root / f"{version}.pt")
    dist.barrier()
print("sent", flush=True)
"""


@pytest.mark.parametrize("stage", [1, 3])
async def test_ranks_write_their_own_partitions(tmp_path: Path, stage: int) -> None:
    import torch

    from services.weights.deadline import Deadline
    from services.weights.versions.mirror import WeightMirror
    from services.weights.versions.reader import VersionReader
    from tests.support.versions import assert_same_bits

    async with two_ranks(tmp_path, RANK, tmp_path, stage) as ranks, asyncio.timeout(120):
        outputs = [await process.communicate() for process in ranks]
    assert all(b"sent" in output for output, _ in outputs)
    mirror = WeightMirror()
    reader = VersionReader(f"{tmp_path}/volume/4", mirror)
    assert [entry.base for entry in reader.catalogue().entries] == [None, 0, 1]
    assert all({name.partition(".")[0] for name in entry.parts} == {"0", "1"} for entry in reader.catalogue().entries)
    for version in range(3):
        expected = torch.load(tmp_path / f"{version}.pt")
        held = dict(reader.take(Deadline(20), version))
        assert_same_bits({name: held[name] for name in expected}, expected)
        assert len(held) == len(expected)
