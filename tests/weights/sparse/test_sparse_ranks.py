"""Patches of trainers with several ranks, and members that die: real processes, NCCL over gloo (nccl/nccl_wire.py)."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.weights.sparse import patch as patches
from services.weights.sparse.sender import SparseWeightSender
from tests.support.models.tiny_vllm import make_config
from tests.support.models.two_ranks import address, two_ranks
from tests.support.versions import assert_same_bits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]  # importing vLLM warns

ROOT = str(Path(__file__).parents[3])
VERSIONS = 4

RANK = """
import os, sys
import deepspeed, torch
import torch.distributed as dist
from contextlib import nullcontext
from pathlib import Path
from services.trainer import ranks
from services.trainer.weight_sender import make_sender
from services.weights.versions import encoder
from tests.support.models.tiny_vllm import make_config, make_model
from tests.support.models.two_ranks import zero_engine
encoder.PIECE_BYTES = 8 << 10  # several pieces for each rank
rank, root, stage, versions = int(os.environ["RANK"]), Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder = root / str(rank)
torch.set_num_threads(1)
torch.manual_seed(0)
model = make_model(folder, tied=True).bfloat16()
config = make_config(folder)
config = config.model_copy(update={"sync": config.sync.model_copy(update={"backend": "nccl", "encoding": "sparse"})})
engine = zero_engine(model, torch.optim.AdamW(model.parameters(), lr=1e-5), {"stage": stage}, bf16={"enabled": True})
if rank == 0:
    from tests.weights.nccl.nccl_wire import wired
else:
    wired = nullcontext
with wired():
    sender = make_sender(config, engine.module, rank, 2, ranks.gather, 256 << 10)
    if rank == 0:
        print(*sender.open(), flush=True)
        sender.connect(2)
    for version in range(versions):
        if version:
            tokens = torch.arange(2 + version + rank, 60 + version + rank).unsqueeze(0)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        if rank == 0:
            sender.label(version, 4)
            sender.members_hold(version - 1 if version else None)
        sender.send()
        if rank == 0:
            print("sent", sender.sent["delta"], sender.sent["share"], flush=True)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            if rank == 0:
                held = {n: w.detach().clone() for n, w in model.named_parameters(remove_duplicate=False)}
                torch.save(held, root / f"{version}.pt")
        dist.barrier()
"""


@pytest.mark.parametrize("stage", [1, 3])
async def test_every_rank_finds_the_changes_in_its_share(tmp_path: Path, stage: int) -> None:
    from tests.support.models.tiny_vllm import make_model
    from tests.weights.nccl.nccl_wire import wired
    from tests.weights.sparse.plain_engine import PlainEngine

    model = make_model(tmp_path / "here", tied=True).bfloat16()
    got: list[dict[str, torch.Tensor]] = []

    def receive(host: str, port: int) -> None:
        engine = PlainEngine(dict(model.named_parameters(remove_duplicate=False)))
        engine.join(host, port, 1, 2)
        for version in range(VERSIONS):
            engine.take()
            assert (engine.changed, engine.whole, engine.patcher.held) == ("", True, (4, version))
            got.append({name: weight.clone() for name, weight in engine.held.items()})
        engine.shutdown()

    with wired():
        async with two_ranks(tmp_path, RANK, tmp_path, stage, VERSIONS) as ranks, asyncio.timeout(150):
            await asyncio.to_thread(receive, *await address(ranks[0]))
            outputs = [await process.communicate() for process in ranks]
    sent = [line.split() for line in outputs[0][0].decode().splitlines() if line.startswith("sent")]
    assert [delta for _, delta, _ in sent] == ["0.0"] + ["1.0"] * (VERSIONS - 1)
    assert all(0 < float(share) < 0.8 for _, _, share in sent[1:])
    for version, weights in enumerate(got):
        assert_same_bits(weights, torch.load(tmp_path / f"{version}.pt"))


async def test_a_member_killed_in_mid_patch_leaves_others_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.weights.nccl import nccl_wire
    from tests.weights.nccl.nccl_wire import wired
    from tests.weights.sparse.plain_engine import CHUNK_BYTES, PlainEngine, weights

    monkeypatch.setattr(patches, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(nccl_wire, "LIMIT_S", 4.0)
    parameters = {name: torch.nn.Parameter(weight) for name, weight in weights().items()}
    config = make_config(tmp_path)
    sync = config.sync.model_copy(update={"backend": "nccl", "encoding": "sparse", "transfer_deadline_s": 12.0})
    parts = {name: [parameter] for name, parameter in parameters.items()}
    config = config.model_copy(update={"sync": sync})
    sender = SparseWeightSender(config, parts, lambda w: w[0].detach(), 0, 1, lambda v: [v], lambda *_: None, 16 << 10)

    def train() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.02))
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def send(version: int, held: int | None) -> dict[str, torch.Tensor]:
        now = train()
        sender.label(version, 4)
        sender.members_hold(held)
        sender.send()
        return now

    with wired(), ThreadPoolExecutor(3) as pool:
        survivor = PlainEngine(weights())
        host, port = sender.open()
        dying = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.weights.sparse.plain_engine", host, str(port), "2", "3"),
            env=os.environ | {"PYTHONPATH": ROOT},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            joining = pool.submit(survivor.join, host, port, 1, 3)
            async with asyncio.timeout(120):
                while sender.absent([2]):  # it is still importing vLLM
                    assert dying.returncode is None
                    await asyncio.sleep(0.05)
            sender.connect(3)
            joining.result()
            taking = pool.submit(survivor.take)
            first = await asyncio.to_thread(send, 0, None)
            taking.result()
            assert_same_bits(survivor.held, first)
            assert dying.stdout is not None
            async with asyncio.timeout(60):
                assert await dying.stdout.readline() == b"whole\n"
            taking = pool.submit(survivor.take, 10.0)
            outcome = (await asyncio.gather(asyncio.to_thread(send, 1, 0), return_exceptions=True))[0]
            refused = taking.exception()
            assert await dying.wait() == -9
            second = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            applied = refused is None and not survivor.changed
            assert_same_bits(survivor.held, second if applied else first)
            assert survivor.whole
            assert survivor.patcher.held == (4, 1 if applied else 0), (outcome, refused)
        finally:
            if dying.returncode is None:
                dying.kill()
                await dying.wait()
        host, port = sender.open()
        sender._sent = None  # a group was torn down
        joining = pool.submit(survivor.join, host, port, 1, 2)
        sender.connect(2)
        joining.result()
        for version, delta in ((2, 0.0), (3, 1.0)):
            taking = pool.submit(survivor.take)
            now = await asyncio.to_thread(send, version, version - 1)
            taking.result()
            assert sender.sent["delta"] == delta
            assert_same_bits(survivor.held, now)
        sender.close_group()
        survivor.shutdown()
