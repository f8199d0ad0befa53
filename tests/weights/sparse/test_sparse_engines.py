"""Patches over the NCCL path into a real vLLM, on one worker and split over two.

The NCCL library is replaced by gloo (tests/weights/nccl/nccl_wire.py), and weights are kept as on a GPU (plain_worker.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
import torch

import services.generator.engines.vllm as vllm_engine
import services.generator.engines.vllm_weights as vllm_weights
from services.generator.engines.vllm import VllmEngine
from services.weights.receiver import TransferFailed, WeightsChanged, WeightsMisloaded
from services.weights.sender import SendFailed
from services.weights.sparse import sender as senders
from services.weights.sparse.sender import SparseWeightSender
from services.weights.transports import nccl
from tests.support.models.tiny_vllm import BUCKET_BYTES, make_config, make_model, perturb
from tests.weights.test_weight_transfer import Pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # loading vLLM takes minutes on a busy machine
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # importing vLLM warns
]


class SparsePair(Pair):
    """A trainer of one rank, and an engine of one worker or several."""

    async def make_group(self) -> None:
        host, port = self.sender.open()
        size = 1 + self.engine.world
        joining = self.engine.join(self.round(host, port, size), 1)
        await asyncio.gather(asyncio.to_thread(self.sender.connect, size), joining)

    async def ask(self, what: str, *given: Any) -> list[Any]:
        return await self.engine._llm.collective_rpc(what, args=given)

    async def step(self, seed: int) -> bool:
        """Change a fiftieth of the weights and send them; return whether they were sent as a patch."""
        perturb(self.model, seed, share=0.02)
        await self.update()
        return bool(self.sender.sent["delta"])

    async def whole(self) -> None:
        """Send all weights in a new group."""
        await self.make_group()
        self.sender._sent = None
        await self.update()
        assert not self.sender.sent["delta"]
        assert (self.engine.version, self.engine.whole) == (self.version, True)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Limit the member's transfers to `seconds`."""
        config = self.engine._loaded._config
        self.engine._loaded._config = config.model_copy(
            update={"sync": config.sync.model_copy(update={"transfer_deadline_s": seconds})}
        )
        yield
        self.engine._loaded._config = config


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[(1, True), (2, False)], ids=["one", "split"])
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SparsePair]:
    from services.trainer.weight_sender import make_sender
    from tests.weights.nccl.nccl_wire import wired

    workers, tied = request.param
    folder = tmp_path_factory.mktemp("sparse")
    model = make_model(folder, tied=tied)
    options = {
        "weight_transfer_config": {"backend": "grpo_nccl"},
        "worker_extension_cls": "tests.weights.sparse.plain_worker.PlainExtension",
    }
    config = make_config(
        folder,
        generator={"max_num_seqs": 32, "tensor_parallel": workers, "engine_options": options},
        sync={"join_deadline_s": 20.0, "transfer_deadline_s": 30.0, "kv": "keep"},
    )
    with pytest.MonkeyPatch.context() as patch, wired():
        patch.setattr(vllm_engine, "transport", lambda config, gpu: "nccl")
        for module in (vllm_weights, nccl):
            patch.setattr(module, "BUCKET_BYTES", BUCKET_BYTES)
        engine = VllmEngine()
        await engine.start(config)
        sync = config.sync.model_copy(update={"backend": "nccl", "encoding": "sparse"})
        sparse = config.model_copy(update={"sync": sync})
        pair = SparsePair(engine, model, sparse)
        pair.sender = make_sender(sparse, model, 0, 1, lambda value: [value], BUCKET_BYTES)  # type: ignore[assignment]
        yield pair
        pair.sender.close_group()
        await engine.close()


async def test_patches_give_the_same_bits_as_a_reload(pair: SparsePair) -> None:
    await pair.whole()
    assert await pair.ask("takes_patches") == [True] * pair.engine.world
    for seed in range(3):
        assert await pair.step(400 + seed)
        assert pair.sender.sent["share"] < 0.4, "float32: nine bytes per changed element"
        assert 0.01 < pair.sender.sent["changed"] < 0.03
        await pair.assert_equal()
    patched = await pair.ask("digests")
    await pair.whole()
    assert await pair.ask("digests") == patched
    assert await pair.ask("mirrors") == [0] * pair.engine.world
    assert await pair.step(410), "in a new group, too, as members hold the last version sent"
    await pair.make_group()
    assert await pair.step(411), "and in a group that they have just joined"
    await pair.assert_equal()


async def test_a_complete_change_is_sent_as_all_weights(pair: SparsePair) -> None:
    await pair.whole()
    perturb(pair.model, 420)
    await pair.update()
    assert not pair.sender.sent["delta"], "a patch would be longer"
    await pair.assert_equal()
    assert await pair.step(421)


async def test_all_weights_are_sent_periodically(pair: SparsePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "WHOLE_EVERY", 3)
    await pair.whole()
    assert [await pair.step(430 + i) for i in range(6)] == [True, True, False, True, True, False]
    await pair.assert_equal()


async def test_a_corrupted_patch_is_rejected_and_a_reload_recovers(pair: SparsePair, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.whole()
    before, version = await pair.ask("digests"), pair.engine.version
    honest = SparseWeightSender._collected

    def damaged(self: SparseWeightSender, *given: Any) -> Iterator[torch.Tensor]:
        for part in honest(self, *given):
            part[-1] ^= 1  # the last byte of the new bits
            yield part

    monkeypatch.setattr(SparseWeightSender, "_collected", damaged)
    with pytest.raises(WeightsChanged):
        await pair.step(440)
    monkeypatch.undo()
    assert await pair.ask("digests") == before, "nothing was written"
    assert pair.engine.version == version
    if pair.engine.world == 1:
        assert pair.engine.whole
        await pair.engine.resume()
    else:  # one worker may have accepted what another rejected
        with pytest.raises(TransferFailed, match="applied only in part"):
            await pair.engine.resume()
    await pair.whole()
    await pair.assert_equal()
    assert await pair.step(441)


async def test_lost_writes_are_detected_and_a_reload_recovers(pair: SparsePair) -> None:
    await pair.whole()
    await pair.ask("lose_writes", True)
    with pytest.raises(WeightsMisloaded):
        await pair.step(450)
    await pair.ask("lose_writes", False)
    with pytest.raises(TransferFailed, match="applied only in part"):
        await pair.engine.resume()
    assert await pair.ask("takes_patches") == [False] * pair.engine.world
    await pair.whole()
    await pair.assert_equal()
    assert await pair.step(451)


async def test_a_sender_that_stops_in_mid_patch_changes_nothing(pair: SparsePair, monkeypatch: pytest.MonkeyPatch) -> None:
    if pair.engine.world > 1:
        pytest.skip("an engine with several workers exits when a transfer fails")
    await pair.whole()
    before, version = await pair.ask("digests"), pair.engine.version

    def breaking(self: SparseWeightSender, *given: Any) -> Iterator[torch.Tensor]:
        raise RuntimeError("the trainer is gone")
        yield

    monkeypatch.setattr(SparseWeightSender, "_collected", breaking)
    perturb(pair.model, 460, share=0.02)
    await pair.engine.pause()
    pair.version += 1
    pair.sender.label(pair.version, 1)
    pair.sender.members_hold(version)
    with pair.limited(1.0):
        sent, received = await asyncio.gather(
            asyncio.to_thread(pair.sender.send), pair.engine.receive(pair.version), return_exceptions=True
        )
    monkeypatch.undo()
    assert isinstance(sent, SendFailed)
    assert isinstance(received, TransferFailed)
    assert (pair.engine.version, pair.engine.whole) == (version, True)
    assert await pair.ask("digests") == before
    await pair.engine.resume()
    await pair.whole()
    await pair.assert_equal()


async def test_a_worker_without_memory_for_a_patch_gets_all_weights(pair: SparsePair) -> None:
    await pair.whole()
    before, version = await pair.ask("digests"), pair.engine.version
    await pair.ask("lack_memory", True)
    with pytest.raises(TransferFailed, match="was not applied: CUDA out of memory"):
        await pair.step(465)
    await pair.ask("lack_memory", False)
    assert await pair.ask("digests") == before
    assert (pair.engine.version, pair.engine.whole) == (version, pair.engine.world == 1)
    await pair.whole()
    assert await pair.ask("takes_patches") == [False] * pair.engine.world
    assert not await pair.step(466)
    await pair.assert_equal()
    await pair.ask("trust")


async def test_a_transfer_that_never_starts_changes_nothing(pair: SparsePair, monkeypatch: pytest.MonkeyPatch) -> None:
    if pair.engine.world > 1:
        pytest.skip("an engine with several workers exits when a transfer fails")
    await pair.whole()
    before, version = await pair.ask("digests"), pair.engine.version
    await pair.engine.pause()
    with pair.limited(1.0), pytest.raises(TransferFailed):
        await pair.engine.receive(version + 1)
    assert (pair.engine.version, pair.engine.whole) == (version, True)
    assert await pair.ask("digests") == before
    await pair.engine.resume()
    await pair.whole()
    await pair.assert_equal()


@pytest.mark.parametrize(("fence", "of_another_version"), [(1, 1), (2, 0)])
async def test_a_patch_for_other_weights_is_rejected(pair: SparsePair, fence: int, of_another_version: int) -> None:
    await pair.whole()
    before, version = await pair.ask("digests"), pair.engine.version
    base = version + of_another_version
    pair.sender._sent = (fence, base)  # as after an acknowledgement of an unapplied version, or of another trainer's weights
    pair.version += 2
    pair.sender.label(pair.version, fence)
    pair.sender.members_hold(base)
    perturb(pair.model, 470, share=0.02)
    await pair.engine.pause()
    _, received = await asyncio.gather(
        asyncio.to_thread(pair.sender.send), pair.engine.receive(pair.version), return_exceptions=True
    )
    assert f"changes version {base} of trainer {fence}, but this worker holds version {version} of trainer 1" in str(received)
    assert (pair.engine.version, pair.engine.whole) == (version, pair.engine.world == 1)
    assert await pair.ask("digests") == before
    await pair.whole()
    await pair.assert_equal()


async def test_a_changed_model_stops_sampling_and_accepts_no_patch(pair: SparsePair) -> None:
    await pair.whole()
    name = "model.layers.1.mlp.gate_up_proj.weight"
    await pair.ask("rot", name)
    with pytest.raises(WeightsChanged) as raised:
        await pair.step(480)
    assert raised.value.tensor.startswith("model.layers.1.mlp.")
    with pytest.raises(TransferFailed, match="applied only in part"):
        await pair.engine.resume()
    await pair.whole()
    await pair.assert_equal()
    assert await pair.ask("takes_patches") == [False] * pair.engine.world
    assert not await pair.step(481)
    await pair.assert_equal()
    await pair.ask("trust")
