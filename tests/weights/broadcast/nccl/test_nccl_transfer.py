"""Weights over the NCCL path into a real vLLM, with the NCCL library replaced by gloo (nccl_wire.py).

vLLM's communicators and packed broadcast and both ends of the transport are those used on a GPU.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import services.generator.engines.vllm as vllm_engine
import services.generator.engines.vllm_weights as vllm_weights
from services.generator.engines.vllm import VllmEngine
from services.groups.generated import SamplingParameters
from services.weights.broadcast import nccl
from services.weights.receiver import TransferFailed, WeightsChanged
from tests.support.models.tiny_vllm import BUCKET_BYTES, make_config, make_model, perturb
from tests.weights.test_weight_transfer import PROMPT, Pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # loading vLLM takes minutes on a busy machine
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # importing vLLM warns
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    from tests.weights.broadcast.nccl.nccl_wire import wired

    folder = tmp_path_factory.mktemp("nccl")
    model = make_model(folder, tied=False)
    worker = {
        "weight_transfer_config": {"backend": "grpo_nccl"},
        "worker_extension_cls": "tests.weights.broadcast.nccl.nccl_worker.WorkerExtension",
    }
    config = make_config(
        folder,
        generator={"max_num_seqs": 32, "engine_options": worker},
        sync={"deadline_s": 30.0},
    )
    with pytest.MonkeyPatch.context() as patch, wired():
        patch.setattr(vllm_engine, "backend_of", lambda config, gpu: "nccl")
        for module in (vllm_weights, nccl):
            patch.setattr(module, "BUCKET_BYTES", BUCKET_BYTES)
        engine = VllmEngine()
        await engine.start(config)
        assert not engine.stages
        pair = Pair(engine, model, config.model_copy(update={"sync": config.sync.model_copy(update={"backend": "nccl"})}))
        pair.limits = [vars(config.sync), vars(pair.config.sync)]
        yield pair
        pair.sender.close()
        await engine.close()


async def test_the_engine_matches_transformers_after_every_update(pair: Pair) -> None:
    for group in range(2):
        await pair.make_group()
        for step in range(2):
            perturb(pair.model, 100 * group + step)
            await pair.update()
            assert (pair.engine.version, pair.engine.whole) == (pair.version, True)
            await pair.assert_equal()


async def test_corrupted_weights_are_never_sampled_from(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.weights.broadcast.nccl.nccl_wire import Library

    honest, sent = Library.ncclBroadcast, []

    def flipping(self: Library, sendbuff: Any, recvbuff: Any, count: int, *rest: Any) -> None:
        if not sent:  # the first bucket when sent, after its checksums were computed
            import ctypes

            ctypes.c_uint8.from_address(recvbuff.value + 5).value ^= 1
        sent.append(count)
        honest(self, sendbuff, recvbuff, count, *rest)

    await pair.make_group()
    await pair.update()
    before = pair.version
    monkeypatch.setattr(Library, "ncclBroadcast", flipping)
    with pytest.raises(WeightsChanged) as raised:
        await pair.update()
    monkeypatch.undo()
    assert raised.value.tensor == next(name for name, _ in pair.model.named_parameters())
    assert len(sent) > 2, "buckets, and the checksums"
    assert (pair.engine.version, pair.engine.whole) == (before, False)
    with pytest.raises(TransferFailed, match="applied only in part"):
        await pair.engine.resume()
    await pair.make_group()
    await pair.update()
    await pair.assert_equal()


def short_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let transfers take only so long, on both sides."""
    for limits in pair.limits:
        monkeypatch.setitem(limits, "deadline_s", seconds)


async def test_a_full_update_repairs_a_timed_out_transfer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender never sends: the member's limit ends the broadcast in the worker, which stays responsive."""
    await pair.make_group()
    await pair.engine.pause()
    short_deadline(pair, monkeypatch, 1.0)
    with pytest.raises(TransferFailed, match="no complete update within 1"):
        await pair.engine.receive(77)
    monkeypatch.undo()
    assert not pair.engine.whole
    assert pair.engine.version != 77
    with pytest.raises(TransferFailed, match="applied only in part"):
        await pair.engine.resume()
    perturb(pair.model, 7)
    await pair.make_group()
    await pair.update()
    assert pair.engine.whole
    await pair.assert_equal()


async def test_a_sender_times_out_if_a_member_never_receives(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.weights.transport import SendFailed

    await pair.make_group()
    short_deadline(pair, monkeypatch, 1.0)
    with pytest.raises(SendFailed, match=r"longer than sync\.deadline_s = 1"):
        pair.sender.send(pair.version + 1, 1)
    monkeypatch.undo()
    running = await pair.engine.generate("goes-on", PROMPT, 5, SamplingParameters(16))
    assert len(running.tokens)
    await pair.make_group()
    await pair.update()
    await pair.assert_equal()
